"""What is in the host tier: key -> slot, who may be evicted, and the events of coming and going.

Owns the slots and the policy. A key is in the index from the moment its slot is reserved until it
is evicted, dropped or its writer fails; whether it can be read is the slot's state. One owner, no
lock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from tiering.events import HOST, ChunksRemoved, ChunksStored, Event
from tiering.policy.base import EvictionPolicy
from tiering.residency.answers import Place
from tiering.residency.state import NOWHERE, Generations, SlotArray, SlotEvent, Slots, SlotState
from tiering_kernels.keytable import KeyBatch, open_table, select

# By the state of a slot that is in the index, and of NOWHERE.
_PLACE_OF = bytes(
    {SlotState.FILLING: Place.FILLING, SlotState.READY: Place.READY}.get(state, Place.ABSENT)
    for state in SlotState
).ljust(256)


class HostIndex:
    """All batches are of distinct keys, in prefix order."""

    def __init__(
        self,
        slot_count: int,
        policy: EvictionPolicy,
        events: list[Event],
        generations: Generations | None = None,
    ) -> None:
        """What comes and goes is appended to `events`, which the caller empties."""
        self.slots = Slots(slot_count, generations)
        self._policy = policy
        self._slot_of = open_table()
        self._events = events
        # By slot; set only while victims are looked for.
        self._is_spared = np.zeros(slot_count, np.bool_)

    def __len__(self) -> int:
        return len(self._slot_of)

    def keys(self) -> list[bytes]:
        """All that are here, in no particular order."""
        return self._slot_of.keys()

    def lookup(self, keys: Sequence[bytes]) -> SlotArray:
        """The slot of each key, FILLING ones included, or NOWHERE."""
        return self._slot_of.get(keys)

    def place(self, key: bytes) -> int:
        """As `places`, for who has only one key: a Place."""
        return _PLACE_OF[self.slots.state_of(self._slot_of.value_of(key))]

    def places(self, slots: SlotArray) -> bytearray:
        """READY or FILLING for each slot that was looked up, ABSENT for NOWHERE: a Place each."""
        return bytearray(self.slots.states_of(slots).tobytes().translate(_PLACE_OF))

    def ready(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Those of `keys` that can be read now, and their slots."""
        slots = self.lookup(keys)
        can_read = self.slots.are(SlotState.READY, slots)
        return dict(zip(select(keys, can_read), slots[can_read].tolist(), strict=True))

    def touch(self, keys: Sequence[bytes], slots: SlotArray, access: int) -> None:
        """Those of `keys` that are here, in `slots`, were used by `access`."""
        if len(here := select(keys, slots != NOWHERE)):
            self._policy.touch(here, access)

    def reserve(
        self, keys: Sequence[bytes], access: int, spared: Sequence[bytes] = ()
    ) -> SlotArray:
        """FILLING slots for as many leading `keys`, none of them here yet, as room can be made
        for without evicting what is pinned, being filled, or among `spared`."""
        short = len(keys) - self.slots.free
        if short > 0:
            self._make_room(short, spared)
        fitting = keys if len(keys) <= self.slots.free else KeyBatch(keys[: self.slots.free])
        taken = self.slots.take(fitting)
        if len(taken):
            self._slot_of.put(fitting, taken)
            self._policy.add(fitting, access)
        return taken

    def fill(self, slots: Sequence[int] | SlotArray) -> tuple[Sequence[bytes], SlotArray]:
        """The writer of `slots` is done: the keys that became readable, and where. Those forsaken
        in the meantime are freed instead."""
        keys, where = self._wanted(slots)
        self.slots.move(slots, SlotEvent.FILL)
        if keys:
            self._events.append(ChunksStored(HOST, tuple(keys)))
        return keys, where

    def fail(self, slots: Sequence[int] | SlotArray) -> None:
        """The writer of `slots` gave up: nobody will ever see them."""
        keys, _ = self._wanted(slots)
        self.slots.move(slots, SlotEvent.FAIL)
        self._forget(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Take `keys` out at once; pinned and filling slots are freed by whoever is at them."""
        here = select(keys, self.lookup(keys) != NOWHERE)
        slots = self._forget(here)
        ready = self.slots.are(SlotState.READY, slots)
        if ready.any():
            gone = tuple(compress(here, ready.tolist()))
            self._events.append(ChunksRemoved(HOST, gone))
        idle = self.slots.may_go(slots)
        self.slots.move(slots[idle], SlotEvent.EVICT)
        self.slots.move(slots[~idle], SlotEvent.FORSAKE)

    def clear(self) -> None:
        self.drop(self.keys())

    def _make_room(self, count: int, spared: Sequence[bytes]) -> None:
        """Evict up to `count` chunks, none of `spared`."""
        slots, is_spared = self.slots, self._is_spared
        staying = self.lookup(spared)
        if spared:
            staying = staying[slots.may_go(staying)]
        count = min(count, slots.evictable - len(staying))
        if count < 1:
            return

        def evictable(keys: Sequence[bytes]) -> list[bool]:
            where = self.lookup(keys)
            may_go = slots.may_go(where)
            may: list[bool] = (may_go & ~is_spared[where] if spared else may_go).tolist()
            return may

        is_spared[staying] = True
        victims = KeyBatch(self._policy.pick(count, evictable))
        is_spared[staying] = False
        slots.move(self._forget(victims), SlotEvent.EVICT)
        self._events.append(ChunksRemoved(HOST, tuple(victims)))

    def _forget(self, keys: Sequence[bytes]) -> SlotArray:
        """Take `keys` out of the index: the slots that they had."""
        if keys:
            self._policy.remove(keys)
        return self._slot_of.pop(keys)

    def _wanted(self, slots: Sequence[int] | SlotArray) -> tuple[Sequence[bytes], SlotArray]:
        """Those of `slots` that are being filled and were not forsaken, and their keys."""
        where = np.asarray(slots, np.int64)
        where = where[self.slots.are(SlotState.FILLING, where)]
        return self.slots.keys_of(where), where

    def __repr__(self) -> str:
        told = ", ".join(f"{n} {s.name}" for s, n in self.slots.census().items() if n)
        return f"<HostIndex {told}>"
