"""Shapes and sizes: of a block's pages, of a rank's share of a chunk, of a host tier row.

Pure arithmetic. A *page* is the bytes that one block has in one layer; a *share* is what one
rank keeps of one chunk, layer by layer; a *row* is the shares of all ranks, in rank order, padded
to `ALIGNMENT` so that rows can be read and written with direct I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiering.keys import token_keys

ALIGNMENT = 4096

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}


def aligned(size: int) -> int:
    """`size` in bytes, rounded up to the alignment of rows and frames."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class ShareLayout:
    """One rank's share of a chunk: for each layer, the pages of its `blocks_per_chunk` blocks.
    A rank may have no layer of a group.

    Byte order within a share: layer 0's pages in block order, then layer 1's, and so on.
    """

    page_bytes: tuple[int, ...]
    blocks_per_chunk: int

    def __post_init__(self) -> None:
        if any(page < 1 for page in self.page_bytes):
            raise ValueError(f"page_bytes must be positive, one for each layer: {self.page_bytes}")
        if self.blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk must be at least 1, not {self.blocks_per_chunk}")

    @property
    def share_bytes(self) -> int:
        return sum(self.page_bytes) * self.blocks_per_chunk

    @property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each layer's pages begin within a share, in bytes."""
        offsets, at = [], 0
        for page in self.page_bytes:
            offsets.append(at)
            at += page * self.blocks_per_chunk
        return tuple(offsets)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A row of the host tier: `ranks` shares of `share_bytes` each."""

    share_bytes: int
    ranks: int = 1

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row that mean something: what a secondary tier stores, plus padding to
        `row_bytes` that is always zero."""
        return self.share_bytes * self.ranks

    @property
    def row_bytes(self) -> int:
        return aligned(self.payload_bytes)

    def rows_in(self, capacity_bytes: int) -> int:
        """How many whole rows fit in `capacity_bytes`."""
        return capacity_bytes // self.row_bytes


@dataclass(frozen=True)
class KVLayout:
    """The KV cache of a model as a program describes it, for `TieredStore`.

    One chunk is `block_tokens * blocks_per_chunk` tokens of every layer, K and V.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str = "bfloat16"
    blocks_per_chunk: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "blocks_per_chunk"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number, at least 1, not {value!r}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer, K and V together."""
        values = 2 * self.kv_heads * self.head_dim * self.block_tokens
        return values * DTYPE_BYTES[self.dtype]

    @property
    def share(self) -> ShareLayout:
        return ShareLayout((self.page_bytes,) * self.layers, self.blocks_per_chunk)

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk

    @property
    def chunk_bytes(self) -> int:
        return self.share.share_bytes

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """One key for each full chunk of `tokens`, each chained to its parent."""
        return token_keys(tokens, self.chunk_tokens, salt)
