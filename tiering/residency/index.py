"""What is in the host tier: key -> slot, who may be evicted, and the events of coming and going.

Owns the slots, the policy and the list of events not yet taken. A key is in the index from the
moment its slot is reserved until it is evicted, dropped or its writer fails; whether it can be
read is the slot's state. One owner, no lock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

from tiering.events import ChunksRemoved, ChunksStored, Event
from tiering.policy.base import EvictionPolicy
from tiering.residency.state import SlotEvent, Slots, SlotState

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

    def lookup(self, keys: Sequence[bytes]) -> list[int | None]:
        """The slot of each key, FILLING ones included, or None."""
        return list(map(self._slot_of.get, keys))

    def ready_prefix(self, keys: Sequence[bytes]) -> int:
        """How many leading keys can be read now."""
        found = self.lookup(keys)
        resident = found.index(None) if None in found else len(found)
        if not resident:
            return 0
        ready = self.slots.ready([slot for slot in found[:resident] if slot is not None])
        return resident if ready.all() else int(ready.argmin())

    def is_ready(self, key: bytes) -> bool:
        slot = self._slot_of.get(key)
        return slot is not None and self.slots.states[slot] == SlotState.READY

    def touch(self, keys: Sequence[bytes], access: int) -> None:
        """Those of `keys` that are here were used by `access`."""
        self._policy.touch([key for key in keys if key in self._slot_of], access)

    def reserve(
        self, keys: Sequence[bytes], access: int, spare: Callable[[bytes], bool]
    ) -> list[int]:
        """FILLING slots for as many leading `keys`, none of them here yet, as room can be made
        for without evicting what is pinned, being filled, or `spare`d."""
        short = len(keys) - self.slots.free
        if short > 0:
            slot_of, is_evictable = self._slot_of, self.slots.is_evictable
            self._evict(
                self._policy.pick(short, lambda key: is_evictable(slot_of[key]) and not spare(key))
            )
        fitting = keys[: self.slots.free]
        taken = self.slots.take(fitting)
        self._slot_of.update(zip(fitting, taken, strict=True))
        self._policy.add(fitting, access)
        return taken

    def fill(self, slots: Sequence[int]) -> list[bytes]:
        """The writer of `slots` is done: the keys that became readable. Those forsaken in the
        meantime are freed instead."""
        wanted = self._wanted(slots)
        keys = self._keys_of(wanted)
        self.slots.move(slots, SlotEvent.FILL)
        if keys:
            self._events.append(ChunksStored(HOST_MEDIUM, tuple(keys)))
        return keys

    def fail(self, slots: Sequence[int]) -> None:
        """The writer of `slots` gave up: nobody will ever see them."""
        keys = self._keys_of(self._wanted(slots))
        self.slots.move(slots, SlotEvent.FAIL)
        self._forget(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Take `keys` out at once; pinned and filling slots are freed by whoever is at them."""
        here = [key for key in keys if key in self._slot_of]
        slots = [self._slot_of[key] for key in here]
        ready = self.slots.ready(slots).tolist() if slots else []
        if any(ready):
            self._events.append(ChunksRemoved(HOST_MEDIUM, tuple(compress(here, ready))))
        idle = [self.slots.is_evictable(slot) for slot in slots]
        self._forget(here)
        self.slots.move(list(compress(slots, idle)), SlotEvent.EVICT)
        busy = [slot for slot, is_idle in zip(slots, idle, strict=True) if not is_idle]
        self.slots.move(busy, SlotEvent.FORSAKE)

    def clear(self) -> None:
        self.drop(list(self._slot_of))

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _evict(self, keys: Sequence[bytes]) -> None:
        if keys:
            slots = [self._slot_of[key] for key in keys]
            self.slots.move(slots, SlotEvent.EVICT)
            self._forget(keys)
            self._events.append(ChunksRemoved(HOST_MEDIUM, tuple(keys)))

    def _forget(self, keys: Sequence[bytes]) -> None:
        self._policy.remove(keys)
        for key in keys:
            del self._slot_of[key]

    def _wanted(self, slots: Sequence[int]) -> list[int]:
        return [slot for slot in slots if self.slots.states[slot] == SlotState.FILLING]

    def _keys_of(self, slots: Sequence[int]) -> list[bytes]:
        keys = self.slots.keys
        return [key for slot in slots if (key := keys[slot]) is not None]

    def __repr__(self) -> str:
        told = ", ".join(f"{n} {s.name}" for s, n in self.slots.census().items() if n)
        return f"<HostIndex {told}>"
