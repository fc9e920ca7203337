"""The index of a segment tier: who is where, who goes next, and that no slot is ever lost."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from segment_places import KEYS
from tiering.tiers.segments import index as segment_index
from tiering.tiers.segments.index import TICK_MAX, TICKS_PER_PAGE, SegmentIndex

NOW = 1_700_000_000_000_000


def index_of(slots: int, keys: Sequence[bytes] = (), **watermarks: float) -> SegmentIndex:
    index = SegmentIndex(slots, **watermarks)
    index.extend(slots)
    store(index, keys)
    return index


def store(index: SegmentIndex, keys: Sequence[bytes], now_tick: int = NOW) -> None:
    plan = index.begin_write(keys, now_tick)
    assert not plan.full
    for slot in plan.slots:
        index.commit(slot)


def held(index: SegmentIndex) -> set[bytes]:
    return set(index.keys())


def numbers(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(slots, np.int64)


def test_slots_are_given_in_order_and_neighbours_to_neighbours() -> None:
    index = index_of(8)
    assert index.begin_write(KEYS[:3], NOW).slots == [0, 1, 2]
    assert index.begin_write(KEYS[3:6], NOW).slots == [3, 4, 5]


def test_the_oldest_goes_first_and_the_tail_before_the_head() -> None:
    index = index_of(4, KEYS[:4])
    store(index, [KEYS[10]])
    assert held(index) == {*KEYS[:3], KEYS[10]}
    store(index, [KEYS[11]])
    assert held(index) == {*KEYS[:2], KEYS[10], KEYS[11]}
    assert index.n_evicted == 2


def test_a_touch_saves_what_it_touches_and_most_of_all_its_head() -> None:
    index = index_of(4, KEYS[:4])
    index.touch(KEYS[2:4], NOW)
    store(index, KEYS[10:13])
    assert held(index) == {KEYS[2], *KEYS[10:13]}


def test_a_touch_saves_what_was_to_go_next() -> None:
    index = index_of(4, KEYS[:4])
    store(index, [KEYS[10]])  # the others are queued as victims now
    index.touch([KEYS[2]], NOW)
    store(index, [KEYS[11]])
    assert held(index) == {KEYS[0], KEYS[2], KEYS[10], KEYS[11]}


def test_a_key_twice_in_a_touch_has_its_first_place() -> None:
    index = index_of(2, KEYS[:2])
    index.touch([KEYS[1], KEYS[0], KEYS[1]], NOW)
    store(index, [KEYS[5]])
    assert held(index) == {KEYS[1], KEYS[5]}


def test_ticks_grow_even_where_the_clock_stands_or_goes_back() -> None:
    index = index_of(3, [KEYS[0]])
    store(index, [KEYS[1]], NOW)
    store(index, [KEYS[2]], NOW - 10**9)
    store(index, [KEYS[3]], 0)
    assert held(index) == {KEYS[1], KEYS[2], KEYS[3]}


def test_what_is_read_or_written_is_not_evicted() -> None:
    index = index_of(3, KEYS[:1])
    (pinned,) = index.begin_read(KEYS[:1], NOW)
    writing = index.begin_write([KEYS[1]], NOW)
    store(index, [KEYS[2]])
    plan = index.begin_write(KEYS[3:5], NOW)
    assert (len(plan.slots), plan.full) == (1, [1])
    assert held(index) == {KEYS[0]}
    index.unpin(pinned)
    index.commit(writing.slots[0])
    index.release(plan.slots[0])
    store(index, KEYS[5:7])
    assert held(index) >= {KEYS[5], KEYS[6]}


def test_a_key_being_written_is_not_there_and_busy_for_others() -> None:
    index = index_of(4)
    plan = index.begin_write([KEYS[0], KEYS[1], KEYS[0]], NOW)
    assert (plan.positions, plan.busy) == ([0, 1], [2])
    assert KEYS[0] not in index
    assert index.begin_write([KEYS[1], KEYS[2]], NOW).busy == [0]
    index.commit(plan.slots[0])
    index.release(plan.slots[1])
    assert KEYS[0] in index
    assert KEYS[1] not in index
    assert index.begin_write([KEYS[0]], NOW).there == [0]


def test_a_doomed_slot_is_free_only_when_its_last_reader_is_done() -> None:
    index = index_of(1, KEYS[:1])
    (one,) = index.begin_read(KEYS[:1], NOW)
    index.begin_read(KEYS[:1], NOW)
    assert index.doom_pinned(KEYS[0]) == one
    assert KEYS[0] not in index
    assert index.begin_write([KEYS[1]], NOW).full == [0]
    index.unpin(one, cleared=True)
    index.unpin(one)
    assert index.tally()["doomed"] == 1
    index.unpin(one)
    plan = index.begin_write([KEYS[1]], NOW)
    assert (plan.slots, plan.uncleared) == ([one], frozenset())


def test_a_slot_is_not_free_while_its_record_is_being_cleared() -> None:
    index = index_of(1, KEYS[:1])
    slot = index.doom_pinned(KEYS[0])
    assert slot == 0
    assert len(index) == 0
    assert index.begin_write([KEYS[1]], NOW).full == [0]
    index.unpin(slot, cleared=True)
    assert index.begin_write([KEYS[1]], NOW).slots == [0]
    assert index.doom_pinned(KEYS[0]) is None


def test_only_the_slot_that_a_reader_saw_is_doomed() -> None:
    index = index_of(2, KEYS[:1])
    assert index.doom(KEYS[0], slot=1) is None
    assert index.doom(KEYS[0], slot=0) == 0
    assert index.doom(KEYS[0]) is None


def test_records_that_the_table_may_hold_are_cleared_before_their_slot_is_used() -> None:
    index = index_of(3, KEYS[:3])
    assert index.begin_write([KEYS[4]], NOW).uncleared == {2}
    fresh = index_of(3)
    plan = fresh.begin_write(KEYS[:3], NOW)
    assert plan.uncleared == frozenset()
    fresh.release(plan.slots[0])
    assert fresh.begin_write([KEYS[4]], NOW).uncleared == {plan.slots[0]}


def test_a_retired_slot_is_never_used_again() -> None:
    index = index_of(3)
    plan = index.begin_write(KEYS[:3], NOW)
    index.retire(plan.slots[1])
    index.commit(plan.slots[0])
    index.commit(plan.slots[2])
    for key in KEYS[3:9]:
        store(index, [key])
    assert len(index) == 2
    assert index.tally() == {"free": 0, "writing": 0, "ready": 2, "doomed": 0, "retired": 1}


def test_new_slots_come_before_eviction() -> None:
    index = SegmentIndex(4)
    assert index.lacks_slots(KEYS[:1])
    index.extend(2)
    assert not index.lacks_slots(KEYS[:2])
    assert index.lacks_slots(KEYS[:3])
    store(index, KEYS[:2])
    assert not index.lacks_slots(KEYS[:2]), "they are there"
    assert index.lacks_slots(KEYS[2:3])
    index.extend(4)
    store(index, KEYS[2:4])
    assert not index.lacks_slots(KEYS[4:6]), "there will be no more"
    with pytest.raises(ValueError, match="5 slots of 4"):
        index.extend(5)


def test_beyond_the_high_watermark_it_evicts_down_to_the_low_one() -> None:
    index = index_of(10, KEYS[:8], low=0.5, high=0.8)
    assert len(index) == 8
    store(index, [KEYS[20]])
    assert held(index) == {*KEYS[:4], KEYS[20]}


def test_a_batch_larger_than_the_tier_keeps_its_head() -> None:
    index = index_of(3, KEYS[:3])
    plan = index.begin_write(KEYS[10:15], NOW)
    assert (plan.positions, plan.full) == ([0, 1, 2], [3, 4])


def test_of_two_slots_with_one_key_the_later_used_is_restored() -> None:
    index = SegmentIndex(4)
    index.extend(4)
    twice = index.restore(
        numbers(0, 1, 3), [KEYS[0], KEYS[1], KEYS[0]], numbers(9, 5, 7), numbers(0, 1, 2, 3)
    )
    assert twice == 1
    assert index.begin_read(KEYS[:2], NOW) == [0, 1]
    assert index.begin_write(KEYS[5:7], NOW).uncleared == {2, 3}


def test_the_order_of_eviction_outlives_a_restart() -> None:
    index = SegmentIndex(3)
    index.extend(3)
    index.restore(numbers(0, 1, 2), KEYS[:3], numbers(30, 10, 20), numbers(0, 1, 2))
    store(index, [KEYS[5]], now_tick=0)
    assert held(index) == {KEYS[0], KEYS[2], KEYS[5]}
    store(index, [KEYS[6]], now_tick=0)
    assert held(index) == {KEYS[0], KEYS[5], KEYS[6]}


def test_dirty_ticks_are_taken_in_stretches_and_once() -> None:
    slots = 5 * TICKS_PER_PAGE
    keys = [b"key %d" % at for at in range(slots)]
    index = index_of(slots, keys)
    index.take_dirty()
    assert index.take_dirty() == []
    index.touch([keys[0], keys[TICKS_PER_PAGE], keys[-1]], NOW * 2)
    stretches = index.take_dirty()
    shape = [(first, len(ticks)) for first, ticks in stretches]
    assert shape == [(0, 2 * TICKS_PER_PAGE), (4 * TICKS_PER_PAGE, TICKS_PER_PAGE)]
    assert stretches[0][1][0] == NOW * 2
    assert index.take_dirty() == []
    index.mark_dirty(stretches)
    assert [first for first, _ in index.take_dirty()] == [0, 4 * TICKS_PER_PAGE]


def test_many_victims_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "VICTIMS_MIN", 8)
    keys = [b"key %d" % at for at in range(1000)]
    index = index_of(200)
    looks = 0
    find = index._find_victims

    def counted(count: int) -> bool:
        nonlocal looks
        looks += 1
        return find(count)

    monkeypatch.setattr(index, "_find_victims", counted)
    for key in keys:
        store(index, [key])
    assert held(index) == set(keys[-200:])
    assert looks <= 800 / 8, "one look for each victim would be 800"


@pytest.mark.parametrize("bad", [(0, 1.0, 1.0), (4, 0.9, 0.8), (4, 0.0, 1.0), (4, 0.5, 1.5)])
def test_impossible_bounds_are_refused(bad: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="watermarks"):
        SegmentIndex(*bad)


def test_a_slot_that_is_not_being_written_cannot_be_committed() -> None:
    index = index_of(2, KEYS[:1])
    with pytest.raises(ValueError, match="slot 0 is not being written"):
        index.commit(0)
    with pytest.raises(ValueError, match="slot 1 has no key"):
        index.release(1)


@pytest.mark.slow
def test_a_chunk_takes_less_than_200_bytes_of_memory() -> None:
    """In a process of its own, which grows to 200,000 chunks, or is restored with them. All that
    there is a chunk grows with the number of chunks, so that 1,000,000 take as much for each."""
    script = textwrap.dedent(
        """
        import os, sys
        import numpy as np
        from tiering.tiers.segments.index import SegmentIndex

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        count = int(sys.argv[1])
        index = SegmentIndex(count)
        before = resident()
        index.extend(count)
        for first in range(0, count, 256):
            numbers = range(first, min(first + 256, count))
            plan = index.begin_write([b"%032d0000" % number for number in numbers], 1)
            for slot in plan.slots:
                index.commit(slot)
        del plan
        index.touch([b"%032d0000" % number for number in range(256)], 1)
        print((resident() - before) / count)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "200000"], capture_output=True, text=True, check=True
    )
    assert 100 < float(done.stdout) < 200


class IndexMachine(RuleBasedStateMachine):
    """The index against a dict of ticks in plain Python."""

    keys = st.lists(st.sampled_from(KEYS[:12]), max_size=5, unique=True)
    SLOTS = 6

    def __init__(self) -> None:
        super().__init__()
        self.index = SegmentIndex(self.SLOTS)
        self.order: list[bytes] = []  # ready keys, the next victim first
        self.pinned: list[tuple[bytes, int]] = []
        self.writing: list[tuple[bytes, int]] = []

    def use(self, keys: Sequence[bytes]) -> None:
        used = [key for key in keys if key in self.order]
        self.order = [key for key in self.order if key not in used] + used[::-1]

    @rule()
    def extend(self) -> None:
        self.index.extend(min(self.SLOTS, self.index.n_slots + 2))

    @rule(keys=keys)
    def begin_write(self, keys: list[bytes]) -> None:
        ready, writing = set(self.order), {key for key, _ in self.writing}
        self.use(keys)
        free = self.index.n_free
        plan = self.index.begin_write(keys, 0)
        assert [keys[at] for at in plan.there] == [key for key in keys if key in ready]
        assert [keys[at] for at in plan.busy] == [key for key in keys if key in writing]
        new = [key for key in keys if key not in ready and key not in writing]
        assert [keys[at] for at in plan.positions] == new[: len(plan.slots)]
        assert [keys[at] for at in plan.full] == new[len(plan.slots) :]
        pinned = {key for key, _ in self.pinned}
        victims = [key for key in self.order if key not in pinned][: max(0, len(new) - free)]
        assert len(plan.slots) == min(len(new), free + len(victims))
        self.order = [key for key in self.order if key not in victims]
        self.writing += zip(new, plan.slots, strict=False)

    @rule(keys=keys)
    def touch(self, keys: list[bytes]) -> None:
        self.index.touch(keys, 0)
        self.use(keys)

    @rule(keys=keys)
    def begin_read(self, keys: list[bytes]) -> None:
        slots = self.index.begin_read(keys, 0)
        assert [slot >= 0 for slot in slots] == [key in self.order for key in keys]
        self.use(keys)
        self.pinned += [
            (key, slot) for key, slot in zip(keys, slots, strict=True) if key in self.order
        ]

    @rule(data=st.data(), how=st.sampled_from(["commit", "commit", "release"]))
    def end_write(self, data: st.DataObject, how: str) -> None:
        if not self.writing:
            return
        key, slot = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        getattr(self.index, how)(slot)
        if how == "commit":
            # As old as its reservation: by the ticks, not by when it was done.
            self.order.append(key)
            self.order.sort(key=lambda each: int(self.index._ticks[self.index._map.get(each)]))

    @rule(data=st.data(), cleared=st.booleans())
    def unpin(self, data: st.DataObject, cleared: bool) -> None:
        if self.pinned:
            _, slot = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
            self.index.unpin(slot, cleared=cleared)

    @rule(key=st.sampled_from(KEYS[:12]))
    def doom(self, key: bytes) -> None:
        slot = self.index.doom_pinned(key)
        assert (slot is not None) == (key in self.order)
        if slot is not None:
            self.order.remove(key)
            self.pinned = [(b"" if name == key else name, at) for name, at in self.pinned]
            self.pinned.append((b"", slot))

    @invariant()
    def nothing_is_lost(self) -> None:
        tally = self.index.tally()
        assert set(self.order) == held(self.index)
        assert tally["ready"] == len(self.order) == len(self.index)
        assert tally["writing"] == len(self.writing)
        assert tally["free"] == self.index.n_free
        assert sum(tally.values()) == self.index.n_slots
        slots = [self.index._map.get(key) for key in self.order]
        slots += [slot for _, slot in self.writing]
        assert len(set(slots)) == len(slots), "one slot for two"
        assert int(self.index._ticks.max(initial=0)) < TICK_MAX


TestIndexMachine = pytest.mark.slow(IndexMachine.TestCase)
TestIndexMachine.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, database=None
)
