"""The state table of a slot: what is listed happens, what is not changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from portable import KERNELS, use_kernel
from tiering.residency.state import (
    TRANSITIONS,
    IllegalTransition,
    PinKind,
    SlotEvent,
    Slots,
    SlotState,
)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_kernel(request.param, monkeypatch)
    return str(request.param)


EVERY_PAIR = list(itertools.product(SlotState, SlotEvent))


@pytest.mark.parametrize(("before", "event"), EVERY_PAIR)
def test_every_pair_of_state_and_event(before: SlotState, event: SlotEvent, kernel: str) -> None:
    slots = Slots(1)
    if before is not SlotState.FREE:
        slots.take([b"k"])
        slots.states[0] = before  # As nobody else may.
    after = TRANSITIONS.get((before, event))
    if after is None:
        with pytest.raises(IllegalTransition):
            slots.move([0], event)
        assert slots.states[0] == before
    else:
        slots.move([0], event)
        assert slots.states[0] == after
        assert (slots.keys[0] is None) == (after in (SlotState.FREE,) or before is SlotState.FREE)


def test_every_state_can_be_reached_and_left() -> None:
    assert {after for after in TRANSITIONS.values()} == set(SlotState)
    assert {before for before, _ in TRANSITIONS} == set(SlotState)


def test_a_batch_moves_whole_or_not_at_all(kernel: str) -> None:
    slots = Slots(2)
    (first,) = slots.take([b"a"])
    with pytest.raises(IllegalTransition, match="FILLING, FREE"):
        slots.move([first, 1 - first], SlotEvent.FILL)
    assert slots.states[first] == SlotState.FILLING


def test_a_pinned_slot_is_never_freed(kernel: str) -> None:
    slots = Slots(1)
    slots.move(slots.take([b"a"]), SlotEvent.FILL)
    slots.pin([0], PinKind.WRITE)
    with pytest.raises(IllegalTransition, match="pinned"):
        slots.move([0], SlotEvent.EVICT)
    slots.move([0], SlotEvent.FORSAKE)
    assert slots.free == 0
    slots.unpin([0], PinKind.WRITE)
    assert slots.free == 1
    assert slots.keys == [None]


def test_a_pin_cannot_be_given_back_twice(kernel: str) -> None:
    slots = Slots(1)
    slots.move(slots.take([b"a"]), SlotEvent.FILL)
    with pytest.raises(IllegalTransition, match="twice"):
        slots.unpin([0], PinKind.LOAD)
    assert np.count_nonzero(slots.load_pins) == 0


def test_what_is_counted_is_what_there_is(kernel: str) -> None:
    slots = Slots(5)
    slots.move(slots.take([b"a", b"b", b"c"]), SlotEvent.FILL)
    slots.pin([0, 1], PinKind.LOAD)
    slots.pin([0], PinKind.LOAD)
    slots.pin([1], PinKind.WRITE)
    assert (slots.held(PinKind.LOAD), slots.held(PinKind.WRITE), slots.evictable) == (2, 1, 1)
    slots.unpin([0, 1], PinKind.LOAD)
    assert (slots.held(PinKind.LOAD), slots.held(PinKind.WRITE), slots.evictable) == (1, 1, 1)
    slots.unpin([0], PinKind.LOAD)
    slots.move([2], SlotEvent.EVICT)
    assert (slots.held(PinKind.LOAD), slots.evictable, slots.free) == (0, 1, 3)
    assert slots.census()[SlotState.READY] == 2


def test_a_slot_that_is_not_there_is_refused(kernel: str) -> None:
    slots = Slots(2)
    for change in (
        lambda: slots.move([2], SlotEvent.RESERVE),
        lambda: slots.pin([2], PinKind.LOAD),
        lambda: slots.unpin([7], PinKind.LOAD),
    ):
        with pytest.raises((IndexError, IllegalTransition)):
            change()
    assert slots.census()[SlotState.FREE] == 2
