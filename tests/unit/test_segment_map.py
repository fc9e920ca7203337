"""The map from keys to slots answers as a dict does, full or not, whatever is removed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segment_places import KEYS
from tiering.tiers.segments.slotmap import SlotMap

pytestmark = pytest.mark.slow


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15)), max_size=80), st.integers(0, 9))
def test_it_answers_as_a_dict_does(steps: list[tuple[bool, int]], seed: int) -> None:
    slots_max = 8
    # Other keys are other hashes, and so other ways to run into one another.
    names = random.Random(seed).sample(KEYS, 16)
    keys: list[bytes | None] = [None] * slots_max
    slots, model = SlotMap(keys, slots_max), dict[bytes, int]()
    for is_put, number in steps:
        key = names[number]
        free = [slot for slot in range(slots_max) if keys[slot] is None]
        if not is_put:
            assert slots.remove(key) == model.pop(key, -1)
            keys = _without(keys, key)
        elif key in model or free:
            assert slots.put(key, free[0] if free else 0) == (key not in model)
            if key not in model:
                keys[free[0]] = key
                model[key] = free[0]
        assert [slots.get(name) for name in names] == [model.get(name, -1) for name in names]
        assert len(slots) == len(model)


def _without(keys: list[bytes | None], key: bytes) -> list[bytes | None]:
    if key in keys:
        keys[keys.index(key)] = None
    return keys


def test_keys_that_meet_in_one_place_are_found_after_one_of_them_is_gone() -> None:
    slots_max = 3
    meeting: dict[int, list[bytes]] = {}
    for key in KEYS:
        meeting.setdefault(hash(key) % (2 * slots_max + 1), []).append(key)
    for group in meeting.values():
        keys: list[bytes | None] = list(group[:3])
        slots = SlotMap(keys, slots_max)
        for slot, key in enumerate(group[:3]):
            assert slots.put(key, slot)
        assert slots.remove(group[0]) == 0
        assert [slots.get(key) for key in group[:3]] == [-1, 1, 2]
