"""Tables of keys: what is put is got, by either kind, however keys collide, grow and go."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portable import KERNELS, use_kernel
from tiering_kernels.keytable import (
    ABSENT,
    KEY_BYTES_MAX,
    DictTable,
    KeyBatch,
    KeyTable,
    NativeTable,
    open_table,
    select,
)


@pytest.fixture(params=KERNELS)
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KeyTable:
    use_kernel(request.param, monkeypatch)
    opened = open_table()
    assert isinstance(opened, NativeTable if request.param == "native" else DictTable)
    return opened


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [i.to_bytes(36, "big") for i in range(start, start + count)]


def test_many_keys_come_and_go(table: KeyTable) -> None:
    keys = numbered(20_000)
    table.put(keys, np.arange(20_000))
    assert len(table) == 20_000
    assert table.get(keys).tolist() == list(range(20_000))
    assert table.pop(keys[::2]).tolist() == list(range(0, 20_000, 2))
    assert table.pop(keys[::2]).tolist() == [ABSENT] * 10_000
    assert sorted(table.keys()) == keys[1::2]
    assert table.get(keys[1::2]).tolist() == list(range(1, 20_000, 2))
    assert [table.value_of(key) for key in keys[:4]] == [ABSENT, 1, ABSENT, 3]
    assert table.value_of(b"x" * 1000) == ABSENT
    table.put(keys, 7)
    assert table.get(keys).tolist() == [7] * 20_000


@pytest.mark.slow
def test_keys_whose_hashes_are_equal_are_told_apart(table: KeyTable) -> None:
    """Among so many there are a few with the same 32 bits."""
    keys = numbered(300_000)
    table.put(keys, np.arange(len(keys)))
    assert (table.get(keys) == np.arange(len(keys))).all()


def test_what_stays_is_found_while_others_take_turns(table: KeyTable) -> None:
    stays = numbered(500)
    table.put(stays, 1)
    for turn in range(1, 60):
        keys = numbered(300, start=1000 * turn)
        table.put(keys, turn)
        assert set(table.get(stays).tolist()) == {1}
        assert set(table.pop(keys).tolist()) == {turn}
    assert len(table) == 500


def test_keys_of_every_length_are_told_apart(table: KeyTable) -> None:
    keys = [b"x" * length for length in range(KEY_BYTES_MAX + 1)]
    random.Random(1).shuffle(keys)
    for at, key in enumerate(keys):
        table.put([key], at)
    assert table.get(keys).tolist() == list(range(len(keys)))
    assert table.get([b"x" * 10 + b"\0", b"\0"]).tolist() == [ABSENT, ABSENT]
    assert sorted(table.keys()) == sorted(keys)


def test_marks_are_raised_and_never_lowered(table: KeyTable) -> None:
    keys = numbered(4)
    table.put(keys[:2], 0)
    marks = bytearray([0, 4, 0, 4])
    table.mark(keys, marks, found=2, missing=1)
    assert list(marks) == [2, 4, 1, 4]


def test_no_keys_at_all(table: KeyTable) -> None:
    table.put([], 1)
    table.mark([], bytearray(), 1, 0)
    assert (table.get([]).tolist(), table.pop([]).tolist(), table.keys(), len(table)) == (
        *([], []),
        *([], 0),
    )


def test_an_answer_is_the_callers_to_keep(table: KeyTable) -> None:
    keys = numbered(3)
    table.put(keys, 1)
    first = table.get(keys)
    table.put(keys, 2)
    table.get(keys)
    assert first.tolist() == [1, 1, 1]


def test_a_copy_has_a_life_of_its_own(table: KeyTable) -> None:
    keys = numbered(3)
    table.put(keys, 1)
    twin = copy.deepcopy(table)
    table.pop(keys)
    assert twin.get(keys).tolist() == [1, 1, 1]


def test_a_key_that_is_too_long_for_native_code_is_refused() -> None:
    table = open_table()
    with pytest.raises(ValueError, match="a key of 256 bytes, more than 255"):
        table.put([b"x" * 256], 1)


def test_a_batch_is_its_keys_and_packed_once() -> None:
    batch = KeyBatch([b"a", b"bc"])
    assert batch.packed == (b"abc", b"\1\2")
    assert batch.packed is batch.packed
    assert KeyBatch.of(batch) is batch
    assert select(batch, np.array([True, True])) is batch
    assert select(batch, np.array([False, True])) == (b"bc",)


KEYS = st.lists(st.binary(max_size=3), unique=True, max_size=8)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "get", "pop", "mark"]), KEYS, st.integers(0, 9)))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_both_kinds_do_the_same(steps: Sequence[tuple[str, list[bytes], int]]) -> None:
    native, portable = open_table(), DictTable()
    assert isinstance(native, NativeTable)
    for operation, keys, value in steps:
        if operation == "put":
            native.put(keys, value)
            portable.put(keys, value)
        elif operation == "mark":
            marks = [bytearray(value for _ in keys) for _ in range(2)]
            native.mark(keys, marks[0], 5, 3)
            portable.mark(keys, marks[1], 5, 3)
            assert marks[0] == marks[1]
        else:
            found = getattr(native, operation)(keys).tolist()
            assert found == getattr(portable, operation)(keys).tolist()
        assert sorted(native.keys()) == sorted(portable.keys())
