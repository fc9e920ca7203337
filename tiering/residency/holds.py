"""What each request holds: a contiguous prefix of pinned slots, some of them still being filled.

Owns the requests, their load pins, and who waits for which slot. Invariants: every slot in a hold
carries one load pin of that hold; a slot is waited for only by holds that contain it; a hold only
ever gets shorter. Part of the core; same owner, same rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from tiering.clock import Clock
from tiering.residency.state import Slots, SlotState


@dataclass(slots=True)
class Request:
    """`access` is its number for the policy; `absent` holds by tier the keys that it may not ask
    for again; `chain` is the longest prefix it has used; `deadline` is set from its first question
    to its release."""

    access: int
    absent: defaultdict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    chain: Sequence[bytes] = ()
    asks_out: int = 0
    deadline: float | None = None
    is_holding: bool = False
    is_claimed: bool = False
    keys: list[bytes] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)


class Holds:
    """Requests by owner, any string."""

    def __init__(self, slots: Slots, clock: Clock, deadline_seconds: float) -> None:
        self._slots = slots
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._requests: dict[str, Request] = {}
        self._waiters: dict[int, list[str]] = {}
        self._accesses = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, owner: str) -> Request:
        return self._requests[owner]

    def get(self, owner: str | None) -> Request | None:
        return None if owner is None else self._requests.get(owner)

    def owners(self) -> list[str]:
        return list(self._requests)

    def open(self, owner: str) -> None:
        if owner not in self._requests:
            self._accesses += 1
            self._requests[owner] = Request(self._accesses)

    def close(self, owner: str) -> bool:
        """Whether that gave anything back."""
        if owner not in self._requests:
            return False
        gave = self.release(owner)
        del self._requests[owner]
        return gave

    def start_clock(self, request: Request) -> None:
        if request.deadline is None:
            request.deadline = self._clock.now() + self._deadline_seconds

    def seconds_left(self, request: Request) -> float:
        if request.deadline is None:
            return self._deadline_seconds
        return max(0.0, request.deadline - self._clock.now())

    def is_late(self, request: Request) -> bool:
        return request.deadline is not None and self._clock.now() >= request.deadline

    def pin(self, slots: Sequence[int]) -> None:
        """The load pins of a hold in the making."""
        self._slots.load_pins[np.asarray(slots, dtype=np.intp)] += 1

    def unpin(self, slots: Sequence[int]) -> None:
        self._slots.unpin(slots, self._slots.load_pins)

    def begin(self, owner: str, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """`owner` holds `slots`, pinned by the caller; it waits for those that are not READY."""
        request = self._requests[owner]
        request.is_holding = True
        request.keys, request.slots = list(keys), list(slots)
        is_unready = ~self._slots.are(SlotState.READY, slots)
        request.waiting = set(compress(slots, is_unready.tolist()))
        for slot in request.waiting:
            self._waiters.setdefault(slot, []).append(owner)

    def release(self, owner: str) -> bool:
        """Give the hold back, whole, and stop the clock; whether there was one."""
        request = self._requests[owner]
        held = request.is_holding
        if held:
            self.cut(owner, 0)
            request.is_holding = request.is_claimed = False
        request.deadline = None
        return held

    def cut(self, owner: str, end: int) -> None:
        """Give back all of the hold from chunk `end` on."""
        request = self._requests[owner]
        gone = request.slots[end:]
        self.unpin(gone)
        for slot in request.waiting.intersection(gone):
            self._waiters[slot].remove(owner)
            if not self._waiters[slot]:
                del self._waiters[slot]
        request.waiting.difference_update(gone)
        del request.slots[end:], request.keys[end:]

    def lose(self, slot: int, tier: int | None = None) -> None:
        """Whoever waits for `slot` waits in vain: cut there, and not again from `tier`."""
        for owner in list(self._waiters.get(slot, ())):
            request = self._requests[owner]
            end = request.slots.index(slot)
            if tier is not None:
                request.absent[tier].add(request.keys[end])
            self.cut(owner, end)

    def wake(self, slots: Iterable[int]) -> None:
        """`slots` are READY."""
        for slot in self._waiters.keys() & slots:
            for owner in self._waiters.pop(slot):
                self._requests[owner].waiting.discard(slot)

    @property
    def slots_waited_for(self) -> int:
        return len(self._waiters)
