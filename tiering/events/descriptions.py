"""What a chunk is to a router: the blocks that it is made of, and what their hashes stand for.

Compact, since one is kept for every chunk in host memory, and written beside what a disk keeps: a
chunk's key says neither its tokens nor its blocks. Pure values.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(eq=False, slots=True)
class Run:
    """Chunks that follow one another, described in one piece; each one's Description is made only
    when it is asked for. `hashes` of each chunk's blocks, the `parent` of the first chunk, `tokens`
    of all of them and `extra_keys`, one item a block, are as in a Description. Nothing of it is
    changed. A collection of Described."""

    keys: tuple[bytes, ...]
    hashes: list[bytes]
    parent: bytes
    tokens: bytes
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    _places: dict[bytes, int] | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Described]:
        return zip(self.keys, self.descriptions(), strict=True)

    def place(self, key: bytes) -> int:
        """Where `key` is among the keys. KeyError where it is not."""
        if key == self.keys[0]:
            return 0
        if self._places is None:
            self._places = dict(zip(self.keys, range(len(self.keys)), strict=True))
        return self._places[key]

    def descriptions(self) -> list[Description]:
        """One for each chunk."""
        count, extra = len(self.keys), self.extra_keys
        return list(
            map(
                Description,
                self.hashes,
                self.parents(),
                _cut(self.tokens, len(self.tokens) // count),
                repeat(self.lora_name),
                repeat(None) if extra is None else _split(extra, len(extra) // count),
            )
        )

    def parents(self) -> list[bytes]:
        """What each chunk follows on from."""
        return [self.parent, *map(_last_bytes, self.hashes[:-1])]

    def part(self, start: int, stop: int) -> Run:
        """The chunks from the one at `start` to the one before `stop`, of which there is one."""
        count, extra = len(self.keys), self.extra_keys
        if stop - start == count:
            return self
        size = len(self.tokens) // count
        if extra is not None:
            blocks = len(extra) // count
            extra = extra[start * blocks : stop * blocks]
        return Run(
            self.keys[start:stop],
            self.hashes[start:stop],
            self.hashes[start - 1][-HASH_BYTES:] if start else self.parent,
            self.tokens[start * size : stop * size],
            self.lora_name,
            extra,
        )


def describe(
    shape: Shape,
    keys: Sequence[bytes],
    tokens: Sequence[int],
    hashes: Sequence[bytes],
    parent_hash: bytes | None = None,
    lora_name: str | None = None,
    extra_keys: ExtraKeys | None = None,
) -> Run:
    """Of the chunks `keys`, at least one, which follow one another, from the `tokens` and `hashes`,
    whole, of all of their blocks, and that of the block before them. `extra_keys` has an item for
    each block. OverflowError for a token that is no unsigned 32-bit integer, which routers cannot
    take; ValueError where there are not as many tokens or hashes as the chunks have."""
    per_chunk = shape.blocks_per_chunk
    blocks = len(keys) * per_chunk
    if not blocks or len(hashes) != blocks or len(tokens) != blocks * shape.block_tokens:
        raise ValueError(f"{len(tokens)} tokens and {len(hashes)} hashes for {len(keys)} chunks")
    packed = array(_UINT32, tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    short = list(map(_last_bytes, hashes))
    return Run(
        tuple(keys),
        short if per_chunk == 1 else list(_cut(b"".join(short), per_chunk * HASH_BYTES)),
        b"" if parent_hash is None else parent_hash[-HASH_BYTES:],
        packed.tobytes(),
        lora_name,
        None if extra_keys is None else list(extra_keys),
    )


def _split(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _cut(rows: bytes, size: int) -> Iterator[bytes]:
    """Pieces of `size` bytes each."""
    return chain.from_iterable(struct.iter_unpack(f"{size}s", rows))


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
