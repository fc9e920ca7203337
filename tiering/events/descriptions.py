"""What a chunk is to a router: the blocks that it is made of, and what their hashes stand for.

Compact, since one is kept for every chunk in host memory, and written beside what a disk keeps: a
chunk's key says neither its tokens nor its blocks. Pure values.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import msgspec

from tiering.events.blocks import HASH_BYTES, ExtraKeys
from tiering.keys import GROUP_BYTES

TOKEN_BYTES = 4
_UINT32 = "I" if array("I").itemsize == TOKEN_BYTES else "L"
_last_bytes = itemgetter(slice(-HASH_BYTES, None))


@dataclass(frozen=True, slots=True)
class Shape:
    """What all chunks that are told of have in common: those of the KV cache group `group`, each of
    `blocks_per_chunk` blocks of `block_tokens` tokens. `kind` and `sliding_window` are vLLM's
    words for what the group keeps."""

    group: int
    block_tokens: int
    blocks_per_chunk: int
    kind: str | None = None
    sliding_window: int | None = None

    @property
    def suffix(self) -> bytes:
        """What the keys of the group end with."""
        return self.group.to_bytes(GROUP_BYTES, "big")


class Description(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of one chunk: `hashes` of its blocks, HASH_BYTES each, big-endian; the `parent` block's hash,
    b"" at the beginning of a prompt; `tokens`, TOKEN_BYTES each, little-endian; the LoRA's name,
    and what else each block's hash was made of."""

    hashes: bytes
    parent: bytes
    tokens: bytes
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


Described = tuple[bytes, Description]
"""A chunk's key, and what it is."""


@dataclass(frozen=True, slots=True)
class Told:
    """`described` of the keys that a catalogue was asked for, `missing` the others."""

    described: list[Described]
    missing: list[bytes]


@dataclass(frozen=True, slots=True)
class Suspects:
    """Chunks that are described in a catalogue; are they there at all?"""

    keys: list[bytes]


Answer = Told | Suspects

CATALOGUE_COUNTERS = ("catalogue_kept", "catalogue_skipped", "catalogue_errors")

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Description).decode


def describe(
    shape: Shape,
    tokens: Sequence[int],
    hashes: Sequence[bytes],
    parent_hash: bytes | None = None,
    lora_name: str | None = None,
    extra_keys: ExtraKeys | None = None,
) -> list[Description]:
    """Of chunks that follow one another, from the `tokens` and `hashes`, whole, of all of their
    blocks, and that of the block before them. `extra_keys` has an item for each block.
    OverflowError for a token that is no unsigned 32-bit integer, which routers cannot take."""
    per_chunk = shape.blocks_per_chunk
    packed = array(_UINT32, tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    short = list(map(_last_bytes, hashes))
    parent = b"" if parent_hash is None else parent_hash[-HASH_BYTES:]
    return list(
        map(
            Description,
            short if per_chunk == 1 else _cut(b"".join(short), per_chunk * HASH_BYTES),
            [parent, *short[per_chunk - 1 :: per_chunk]],
            _cut(packed.tobytes(), shape.block_tokens * per_chunk * TOKEN_BYTES),
            repeat(lora_name),
            repeat(None) if extra_keys is None else _split(list(extra_keys), per_chunk),
        )
    )


def _split(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _cut(rows: bytes, size: int) -> Iterator[bytes]:
    """The whole ones of `size` bytes each."""
    whole = memoryview(rows)[: len(rows) - len(rows) % size]
    return chain.from_iterable(struct.iter_unpack(f"{size}s", whole))


def integers(hashes: bytes) -> list[int]:
    """The hashes one by one."""
    return list(struct.unpack(f">{len(hashes) // HASH_BYTES}Q", hashes))


def token_ids(tokens: bytes) -> list[int]:
    """The tokens one by one."""
    found = array(_UINT32)
    found.frombytes(tokens)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()
