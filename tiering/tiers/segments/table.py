"""The bytes of a slot table: what each slot of a segment tier holds, as restarts read it.

Functions over bytes and descriptors that keep nothing. A table is a header page and one record a
slot, all zero where the slot holds nothing; integers are big-endian:

    header: 0 8 magic  8 4 version  12 4 record bytes  16 8 payload bytes  24 8 slot bytes
            32 8 slots per segment  40 32 digest of namespace and rank  72 8 check of 0..71
    record: 0 8 check of 8..159  8 8 tick  16 4 slot  20 4 key length  24 128 key  152 8 zeros

A check is XXH3-64, a record's seeded with its header's, so that no other table's record passes.
Check and tick share 32 aligned bytes: no torn write parts a new tick from its check.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from tiering.keys import GROUP_BYTES, KEY_BYTES_MAX
from tiering.layout import ALIGNMENT, aligned
from tiering.tiers.segments.index import TICK_MAX
from tiering_kernels.chunkio import HEADER_BYTES as FRAME_HEADER_BYTES

HEADER_BYTES = ALIGNMENT
RECORD_BYTES = 160
TICK_BYTES = 8
VERSION = 1

_RECORDS_AT_ONCE = 8192
_MAGIC = b"KVTSLOTS"
_HEADER = struct.Struct(">8sIIQQQ32s")
_RECORD = struct.Struct(f">qII{KEY_BYTES_MAX}s8x")
_COLUMNS = np.dtype(
    [
        ("check", ">u8"),
        ("tick", ">i8"),
        ("slot", ">u4"),
        ("key_length", ">u4"),
        ("key", f"V{KEY_BYTES_MAX}"),
        ("zeros", "V8"),
    ]
)

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """What must be equal for a table to be read: whose chunks, and how they lie in segments."""

    digest: bytes
    payload_bytes: int
    slots_per_segment: int

    @cached_property
    def frame_bytes(self) -> int:
        return FRAME_HEADER_BYTES + self.payload_bytes

    @cached_property
    def slot_bytes(self) -> int:
        return aligned(self.frame_bytes)

    @cached_property
    def header(self) -> bytes:
        fields = _HEADER.pack(
            _MAGIC,
            VERSION,
            RECORD_BYTES,
            self.payload_bytes,
            self.slot_bytes,
            self.slots_per_segment,
            self.digest,
        )
        return (fields + xxhash.xxh3_64_digest(fields)).ljust(HEADER_BYTES, b"\0")

    @cached_property
    def seed(self) -> int:
        return xxhash.xxh3_64_intdigest(self.header)

    def place(self, slot: int) -> tuple[int, int]:
        """The segment that `slot` is in, and its offset there in bytes."""
        segment, at = divmod(slot, self.slots_per_segment)
        return segment, at * self.slot_bytes


def geometry_in(header: bytes) -> Geometry | None:
    """What a table's first page says; None where it is none of this version."""
    if len(header) < HEADER_BYTES:
        return None
    fields = _HEADER.unpack_from(header)
    found = Geometry(digest=fields[6], payload_bytes=fields[3], slots_per_segment=fields[5])
    if not (found.payload_bytes and found.slots_per_segment):
        return None
    return found if found.header == header[:HEADER_BYTES] else None


def record_at(slot: int) -> int:
    """Where the record of `slot` begins in the table."""
    return HEADER_BYTES + slot * RECORD_BYTES


def pack(geometry: Geometry, slot: int, key: bytes, tick: int) -> bytes:
    fields = _RECORD.pack(tick, slot, len(key), key)
    return xxhash.xxh3_64_digest(fields, geometry.seed) + fields


@dataclass(frozen=True, slots=True)
class Records:
    """What a stretch of a table says: keys and ticks of `slots`. `recorded` are all slots whose
    record is not blank, whether or not it can be believed."""

    slots: Slots
    keys: list[bytes]
    ticks: Slots
    recorded: Slots

    @property
    def n_dropped(self) -> int:
        return len(self.recorded) - len(self.slots)


def unpack(geometry: Geometry, block: bytes, first_slot: int) -> Records:
    """What the whole records in `block` say, the first that of `first_slot`."""
    count = len(block) // RECORD_BYTES
    columns = np.frombuffer(block, _COLUMNS, count)
    words = np.frombuffer(block, np.uint64, count * RECORD_BYTES // 8)
    recorded = words.reshape(count, RECORD_BYTES // 8).any(axis=1)
    lengths, ticks = columns["key_length"], columns["tick"]
    likely = recorded & (columns["slot"] == np.arange(first_slot, first_slot + count))
    likely &= (lengths > GROUP_BYTES) & (lengths <= KEY_BYTES_MAX)
    likely &= (ticks > 0) & (ticks <= TICK_MAX)
    seed, digest, view = geometry.seed, xxhash.xxh3_64_digest, memoryview(block)
    good, keys = [], []
    for at, length in zip(np.flatnonzero(likely).tolist(), lengths[likely].tolist(), strict=True):
        start = at * RECORD_BYTES
        if digest(view[start + 8 : start + RECORD_BYTES], seed) == view[start : start + 8]:
            good.append(at)
            keys.append(block[start + 24 : start + 24 + length])
    slots = np.array(good, np.int64)
    return Records(
        slots=slots + first_slot,
        keys=keys,
        ticks=ticks[slots].astype(np.int64),
        recorded=np.flatnonzero(recorded) + first_slot,
    )


def stretches(table: int, geometry: Geometry, n_slots: int) -> Iterator[Records]:
    """The records of the first `n_slots` slots in the file `table`, many at once; it may be
    shorter. Raises OSError."""
    for first in range(0, n_slots, _RECORDS_AT_ONCE):
        count = min(_RECORDS_AT_ONCE, n_slots - first)
        block = os.pread(table, count * RECORD_BYTES, record_at(first))
        yield unpack(geometry, block, first)


def read(table: int, geometry: Geometry, n_slots: int) -> Records:
    """`stretches` in one piece."""
    parts, none = list(stretches(table, geometry, n_slots)), np.empty(0, np.int64)
    return Records(
        slots=np.concatenate([none, *(part.slots for part in parts)]),
        keys=[key for part in parts for key in part.keys],
        ticks=np.concatenate([none, *(part.ticks for part in parts)]),
        recorded=np.concatenate([none, *(part.recorded for part in parts)]),
    )


def read_ticks(descriptor: int, n_slots: int) -> Slots:
    """The last use of each of `n_slots` slots, 0 where the file does not tell."""
    data = os.pread(descriptor, n_slots * TICK_BYTES, 0)
    ticks = np.zeros(n_slots, np.int64)
    found = np.frombuffer(data, ">i8", len(data) // TICK_BYTES)
    ticks[: len(found)] = np.where((found > 0) & (found <= TICK_MAX), found, 0)
    return ticks


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """`slots`, ascending, as stretches of neighbours: the place in `slots` and the length."""
    starts = [at for at in range(len(slots)) if at == 0 or slots[at] != slots[at - 1] + 1]
    edges = pairwise([*starts, len(slots)])
    return [(start, end - start) for start, end in edges]
