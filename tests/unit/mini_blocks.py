"""Requests and device blocks of the mini vLLM: hashes, stamps, and the prefix cache."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK = 4


@functools.cache
def digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(parent + repr(tokens).encode(), digest_size=16).digest()


@dataclass(eq=False)
class Request:
    """What the scheduler half reads of a vLLM request, and what the mini scheduler keeps."""

    request_id: str
    tokens: list[int]
    outputs: int
    hash_tokens: int
    num_computed_tokens: int = 0
    status: str = "WAITING"
    is_resumed: bool = False
    skip_reading_prefix_cache: bool = False
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self._stamps: dict[int, list[int]] = {}
        self.hash_more()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def hash_more(self) -> None:
        size = self.hash_tokens
        for at in range(len(self.block_hashes) * size, len(self.tokens) - size + 1, size):
            parent = self.block_hashes[-1] if self.block_hashes else b"root"
            self.block_hashes.append(digest(parent, tuple(self.tokens[at : at + size])))

    def block_hash(self, block: int) -> bytes:
        return self.block_hashes[(block + 1) * BLOCK // self.hash_tokens - 1]

    def stamps(self, start: int, end: int, epoch: int) -> list[int]:
        """One for each token from `start` to before `end`."""
        known = self._stamps.setdefault(epoch, [])
        for at in range(len(known), end):
            hashed = at // self.hash_tokens
            parent = self.block_hashes[hashed - 1] if hashed else b"root"
            last = tuple(self.tokens[hashed * self.hash_tokens : at + 1])
            stamp = digest(parent + b"epoch %d" % epoch, last)
            known.append(int.from_bytes(stamp[:7], "big") << 8)
        return known[start:end]


class BlockPool:
    """Blocks in the order of their reuse, and what the prefix cache knows of them."""

    def __init__(self, count: int) -> None:
        self.free = dict.fromkeys(range(count))
        self.users = [0] * count
        self.cached: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def take(self, count: int) -> list[int]:
        taken = list(self.free)[:count]
        for block in taken:
            del self.free[block]
            self.users[block] = 1
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self.cached[block_hash]
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None

    def cache(self, block: int, block_hash: bytes) -> None:
        if block_hash not in self.cached and block not in self._hash_of:
            self.cached[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self) -> None:
        self.cached.clear()
        self._hash_of.clear()
