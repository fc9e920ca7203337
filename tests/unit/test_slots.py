"""The state table of a slot: what is listed happens, what is not changes nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tiering.residency.state import (
    TRANSITIONS,
    IllegalTransition,
    SlotEvent,
    Slots,
    SlotState,
)

EVERY_PAIR = list(itertools.product(SlotState, SlotEvent))


@pytest.mark.parametrize(("before", "event"), EVERY_PAIR)
def test_every_pair_of_state_and_event(before: SlotState, event: SlotEvent) -> None:
    slots = Slots(1)
    if before is not SlotState.FREE:
        slots.take([b"k"])
        slots.states[0] = before
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


def test_a_batch_moves_whole_or_not_at_all() -> None:
    slots = Slots(2)
    (first,) = slots.take([b"a"])
    with pytest.raises(IllegalTransition, match="FILLING, FREE"):
        slots.move([first, 1 - first], SlotEvent.FILL)
    assert slots.states[first] == SlotState.FILLING


def test_a_pinned_slot_is_never_freed() -> None:
    slots = Slots(1)
    slots.move(slots.take([b"a"]), SlotEvent.FILL)
    slots.write_pins[0] += 1
    with pytest.raises(IllegalTransition, match="pinned"):
        slots.move([0], SlotEvent.EVICT)
    slots.move([0], SlotEvent.FORSAKE)
    assert slots.free == 0
    slots.unpin([0], slots.write_pins)
    assert slots.free == 1
    assert slots.keys == [None]


def test_a_pin_cannot_be_given_back_twice() -> None:
    slots = Slots(1)
    slots.move(slots.take([b"a"]), SlotEvent.FILL)
    with pytest.raises(IllegalTransition, match="twice"):
        slots.unpin([0], slots.load_pins)
    assert np.count_nonzero(slots.load_pins) == 0
