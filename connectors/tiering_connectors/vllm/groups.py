"""KV cache groups as chunks see them: what each keeps, and what of it a request needs to go on.

Pure values and arithmetic over tokens. A *boundary* is a number of tokens from which a request can
be computed on; a group says which chunks it takes to stand there. Chunks of every group are one
row of the host tier, whatever their size in tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """`FULL`: every token before. `WINDOW`: the last `span` - 1 tokens. `LOCAL`: those since the
    last multiple of `span`. `STATE`: the recurrent state at the boundary, one block."""

    FULL = "full attention"
    WINDOW = "sliding window"
    LOCAL = "chunked local attention"
    STATE = "recurrent state"


@dataclass(frozen=True, slots=True)
class Group:
    """`index` is vLLM's and part of every key. `is_draft`: it has layers of a draft model, whose
    last block before a boundary cannot be trusted. `description` goes into the namespace."""

    index: int
    kind: Kind
    tokens_per_block: int
    blocks_per_chunk: int
    span: int = 0
    is_draft: bool = False
    description: str = ""

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk

    def start_of(self, boundary: int) -> int:
        """The first token whose cache a request at `boundary` still reads."""
        match self.kind:
            case Kind.FULL:
                return 0
            case Kind.WINDOW:
                return max(0, boundary - self.span + 1)
            case Kind.LOCAL:
                return boundary // self.span * self.span
            case Kind.STATE:
                return max(0, boundary - self.tokens_per_block)

    def chunks(self, local: int, boundary: int) -> range:
        """The chunks to be loaded to go on at `boundary`, where the device has what it takes to
        go on at `local`."""
        start, size = max(local, self.start_of(boundary)), self.tokens_per_chunk
        return range(start // size, -(-boundary // size)) if start < boundary else range(0)

    @property
    def spare(self) -> int:
        """Tokens beyond a boundary whose cache must be known, though it is not loaded: a draft's
        last token is right only if the next one is the same, which the block after it shows. No
        draft has recurrent layers."""
        return self.tokens_per_block if self.is_draft and self.kind is not Kind.STATE else 0

    def evidence(self, local: int, boundary: int) -> range:
        """The chunks that show that a request can go on at `boundary`: those to be loaded, and of
        a draft's the next."""
        chunks, size = self.chunks(local, boundary), self.tokens_per_chunk
        if not self.spare:
            return chunks
        start = chunks.start if chunks else boundary // size
        return range(start, -(-(boundary + self.spare) // size))


def blocks_per_chunk_for(kind: Kind, tokens_per_block: int, span: int, wanted: int) -> int:
    """As many blocks as divide `wanted` and still lie together on the device when a chunk of them
    becomes full: those of a group that forgets may be gone before a larger one does."""
    if kind is Kind.FULL:
        return wanted
    fitting = (n for n in range(wanted, 1, -1) if wanted % n == 0)
    if kind is Kind.WINDOW:
        return next((n for n in fitting if n * tokens_per_block < span), 1)
    if kind is Kind.LOCAL:
        return next((n for n in fitting if span % (n * tokens_per_block) == 0), 1)
    return 1
