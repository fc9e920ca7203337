"""What is in the host tier: key -> slot, who may be evicted, and the events of coming and going.

Owns the slots, the policy and the list of events not yet taken. A key is in the index from the
moment its slot is reserved until it is evicted, dropped or its writer fails; whether it can be
read is the slot's state. One owner, no lock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import numpy as np

from tiering.events import ChunksRemoved, ChunksStored, Event
from tiering.policy.base import EvictionPolicy
from tiering.residency.state import SlotArray, SlotEvent, Slots, SlotState

HOST_MEDIUM = "CPU"


class HostIndex:
    """All batches are of distinct keys, in prefix order."""

    def __init__(self, slot_count: int, policy: EvictionPolicy) -> None:
        self.slots = Slots(slot_count)
        self._policy = policy
        self._slot_of: dict[bytes, int] = {}
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def lookup(self, keys: Iterable[bytes]) -> list[int | None]:
        """The slot of each key, FILLING ones included, or None."""
        return list(map(self._slot_of.get, keys))

    def resident_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """The slots of the leading keys that are here, FILLING ones included."""
        # In C, and no further than the first None.
        return list(iter(map(self._slot_of.get, keys).__next__, None))

    def ready(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Those of `keys` that can be read now, and their slots."""
        slot_of = self._slot_of.get
        here = {key: slot for key in keys if (slot := slot_of(key)) is not None}
        can_read = self.slots.are(SlotState.READY, list(here.values()))
        return here if can_read.all() else dict(compress(here.items(), can_read.tolist()))

    def touch(self, keys: Sequence[bytes], access: int) -> None:
        """Those of `keys` that are here were used by `access`."""
        self._policy.touch([key for key in keys if key in self._slot_of], access)

    def reserve(
        self, keys: Sequence[bytes], access: int, spared: Iterable[bytes] = ()
    ) -> list[int]:
        """FILLING slots for as many leading `keys`, none of them here yet, as room can be made
        for without evicting what is pinned, being filled, or among `spared`."""
        short = len(keys) - self.slots.free
        if short > 0:
            may_go = self.slots.evictable()
            staying = [slot for slot in self.lookup(spared) if slot is not None]
            may_go[np.array(staying, dtype=np.intp)] = False
            # As bytes, because asking an array for single elements takes ten times as long.
            may_go_at, slot_of = may_go.tobytes(), self._slot_of
            count = min(short, may_go_at.count(1))
            self._evict(self._policy.pick(count, lambda key: may_go_at[slot_of[key]] == 1))
        fitting = keys[: self.slots.free]
        taken = self.slots.take(fitting)
        self._slot_of.update(zip(fitting, taken, strict=True))
        self._policy.add(fitting, access)
        return taken

    def fill(self, slots: Sequence[int]) -> list[bytes]:
        """The writer of `slots` is done: the keys that became readable. Those forsaken in the
        meantime are freed instead."""
        keys = self._wanted(slots)
        self.slots.move(slots, SlotEvent.FILL)
        if keys:
            self._events.append(ChunksStored(HOST_MEDIUM, tuple(keys)))
        return keys

    def fail(self, slots: Sequence[int]) -> None:
        """The writer of `slots` gave up: nobody will ever see them."""
        keys = self._wanted(slots)
        self.slots.move(slots, SlotEvent.FAIL)
        self._forget(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Take `keys` out at once; pinned and filling slots are freed by whoever is at them."""
        here = [key for key in keys if key in self._slot_of]
        slots = self._forget(here)
        ready = self.slots.are(SlotState.READY, slots)
        if ready.any():
            gone = tuple(compress(here, ready.tolist()))
            self._events.append(ChunksRemoved(HOST_MEDIUM, gone))
        idle = self.slots.evictable()[slots]
        self.slots.move(slots[idle], SlotEvent.EVICT)
        self.slots.move(slots[~idle], SlotEvent.FORSAKE)

    def clear(self) -> None:
        self.drop(list(self._slot_of))

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _evict(self, keys: Sequence[bytes]) -> None:
        if keys:
            self.slots.move(self._forget(keys), SlotEvent.EVICT)
            self._events.append(ChunksRemoved(HOST_MEDIUM, tuple(keys)))

    def _forget(self, keys: Sequence[bytes]) -> SlotArray:
        """Take `keys` out of the index: the slots that they had."""
        self._policy.remove(keys)
        return np.array(list(map(self._slot_of.pop, keys)), dtype=np.intp)

    def _wanted(self, slots: Sequence[int]) -> list[bytes]:
        """The keys of those of `slots` that are being filled and were not forsaken."""
        keys = self.slots.keys
        wanted = compress(slots, self.slots.are(SlotState.FILLING, slots).tolist())
        return [key for slot in wanted if (key := keys[slot]) is not None]

    def __repr__(self) -> str:
        told = ", ".join(f"{n} {s.name}" for s, n in self.slots.census().items() if n)
        return f"<HostIndex {told}>"
