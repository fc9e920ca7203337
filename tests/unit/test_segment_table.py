"""A slot table says what was written into it, and a record that was not is never believed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segment_places import DIGEST, KEYS, geometry
from tiering.testing.examples import CHUNK_BYTES
from tiering.tiers import frame
from tiering.tiers.segments import table as segment_table
from tiering.tiers.segments.index import TICK_MAX
from tiering.tiers.segments.table import HEADER_BYTES, RECORD_BYTES, geometry_in, pack, unpack

GEOMETRY = geometry()


def block(*records: bytes) -> bytes:
    return b"".join(records)


@pytest.mark.slow
@given(st.binary(min_size=5, max_size=128), st.integers(1, TICK_MAX), st.integers(0, 1 << 31))
def test_a_record_says_what_was_packed(key: bytes, tick: int, slot: int) -> None:
    record = pack(GEOMETRY, slot, key, tick)
    assert len(record) == RECORD_BYTES
    found = unpack(GEOMETRY, record, slot)
    assert (found.slots.tolist(), found.keys, found.ticks.tolist()) == ([slot], [key], [tick])
    assert found.n_dropped == 0


@pytest.mark.slow
@given(st.integers(0, RECORD_BYTES * 8 - 1))
def test_a_record_with_any_bit_flipped_is_dropped(bit: int) -> None:
    record = bytearray(pack(GEOMETRY, 1, KEYS[1], 5))
    record[bit // 8] ^= 1 << bit % 8
    good = [pack(GEOMETRY, slot, KEYS[slot], 5) for slot in (0, 2)]
    found = unpack(GEOMETRY, block(good[0], bytes(record), good[1]), 0)
    assert (found.slots.tolist(), found.keys) == ([0, 2], [KEYS[0], KEYS[2]])
    assert (found.recorded.tolist(), found.n_dropped) == ([0, 1, 2], 1)


def test_blank_records_are_no_records() -> None:
    found = unpack(GEOMETRY, block(bytes(160), pack(GEOMETRY, 8, KEYS[0], 5), bytes(160)), 7)
    assert (found.slots.tolist(), found.recorded.tolist(), found.n_dropped) == ([8], [8], 0)


def test_half_a_record_at_the_end_is_none() -> None:
    found = unpack(GEOMETRY, pack(GEOMETRY, 0, KEYS[0], 5)[:-1], 0)
    assert (found.keys, found.n_dropped) == ([], 0)


def test_a_record_in_another_place_is_dropped() -> None:
    assert unpack(GEOMETRY, pack(GEOMETRY, 3, KEYS[0], 5), 4).n_dropped == 1


@pytest.mark.parametrize("tick", [0, -1, TICK_MAX + 1])
def test_a_tick_that_cannot_be_is_dropped(tick: int) -> None:
    assert unpack(GEOMETRY, pack(GEOMETRY, 3, KEYS[0], tick), 3).n_dropped == 1


@pytest.mark.parametrize("length", [4, 129])
def test_a_key_of_an_impossible_length_is_dropped(length: int) -> None:
    assert unpack(GEOMETRY, pack(GEOMETRY, 3, bytes(length), 5), 3).n_dropped == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(GEOMETRY, digest=DIGEST[::-1]),
        replace(GEOMETRY, payload_bytes=4096),
        replace(GEOMETRY, slots_per_segment=3),
    ],
)
def test_the_record_of_another_table_is_dropped(other: segment_table.Geometry) -> None:
    assert unpack(GEOMETRY, pack(other, 3, KEYS[0], 5), 3).n_dropped == 1


def test_a_header_says_what_the_slots_are() -> None:
    assert len(GEOMETRY.header) == HEADER_BYTES
    assert geometry_in(GEOMETRY.header + b"records") == GEOMETRY
    assert GEOMETRY.slot_bytes == 4096 + CHUNK_BYTES
    assert replace(GEOMETRY, payload_bytes=CHUNK_BYTES + 1).slot_bytes == 8192 + CHUNK_BYTES


@given(st.integers(0, 80 * 8 - 1))
def test_a_header_with_any_bit_flipped_is_none(bit: int) -> None:
    header = bytearray(GEOMETRY.header)
    header[bit // 8] ^= 1 << bit % 8
    assert geometry_in(bytes(header)) is None


@pytest.mark.parametrize("header", [b"", bytes(HEADER_BYTES), GEOMETRY.header[:-1], b"x" * 4096])
def test_what_is_no_header_is_none(header: bytes) -> None:
    assert geometry_in(header) is None


def test_places_go_on_from_segment_to_segment() -> None:
    slot_bytes = GEOMETRY.slot_bytes
    assert [GEOMETRY.place(slot) for slot in range(4)] == [
        (0, 0),
        (0, slot_bytes),
        (1, 0),
        (1, slot_bytes),
    ]


def test_neighbours_are_found() -> None:
    assert segment_table.runs([]) == []
    assert segment_table.runs([3]) == [(0, 1)]
    assert segment_table.runs([1, 2, 5, 7, 8, 9]) == [(0, 2), (2, 1), (3, 3)]


def test_a_table_is_read_in_stretches_as_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_table, "_RECORDS_AT_ONCE", 3)
    records = [pack(GEOMETRY, slot, KEYS[slot], slot + 1) for slot in range(10)]
    (tmp_path / "table").write_bytes(GEOMETRY.header + block(*records))
    descriptor = os.open(tmp_path / "table", os.O_RDONLY)
    found = segment_table.read(descriptor, GEOMETRY, 12)
    os.close(descriptor)
    assert (found.slots.tolist(), found.keys) == (list(range(10)), KEYS[:10])


def test_ticks_that_are_missing_or_cannot_be_are_zero(tmp_path: Path) -> None:
    ticks = [5, -1, TICK_MAX, TICK_MAX + 1, 7]
    data = b"".join(tick.to_bytes(8, "big", signed=True) for tick in ticks)
    (tmp_path / "ticks").write_bytes(data + b"\1\2\3")
    descriptor = os.open(tmp_path / "ticks", os.O_RDONLY)
    found = segment_table.read_ticks(descriptor, 7)
    os.close(descriptor)
    assert found.tolist() == [5, 0, TICK_MAX, 0, 7, 0, 0]


@pytest.mark.parametrize("length", [0, 4, 5, 128, 129, 1 << 31])
def test_a_header_page_names_a_key_only_of_a_possible_length(length: int) -> None:
    header = memoryview(bytearray(4096))
    frame.pack_fields(header, bytes(128), DIGEST, CHUNK_BYTES)
    header[12:16] = length.to_bytes(4, "big")
    expected = bytes(length) if 5 <= length <= 128 else None
    assert frame.key_in(header, DIGEST, CHUNK_BYTES) == expected
    assert frame.key_in(header, DIGEST[::-1], CHUNK_BYTES) is None
