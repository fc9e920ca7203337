"""What each request holds: a contiguous prefix of pinned slots, some of them still being filled.

Owns the requests and their load pins. Invariants: every slot in a hold carries one load pin of
that hold; a hold only ever gets shorter. A hold waits for those of its slots that are being filled;
it is not told when they are, so whoever waits looks. Part of the core; same owner, same rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tiering.clock import Clock
from tiering.residency.known import Holdings
from tiering.residency.state import PinKind, SlotArray, Slots, SlotState


@dataclass(slots=True)
class Peer:
    """Whom a request may have chunks from, and what of them it knows him to hold. `keeps`: he has
    pinned chunks for it, and waits to hear that it needs no more of them."""

    name: bytes
    known: Holdings
    keeps: bool = False


@dataclass(slots=True)
class Request:
    """`access` is its number for the policy; `absent` holds by tier the keys that it may not ask
    for again; `tiers` are the secondary tiers that it may load from, or None for all of them;
    `peers` has by tier whom it named; `is_promised`: a peer will come for its chunks; `reported`
    are the keys that the admission policy was told of; `chains` has the longest prefix that it has
    used, by KV cache group; `deadline` is set from its first question to its release."""

    access: int
    absent: defaultdict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    tiers: frozenset[int] | None = None
    peers: dict[int, Peer] = field(default_factory=dict)
    is_promised: bool = False
    reported: set[bytes] = field(default_factory=set)
    chains: dict[bytes, Sequence[bytes]] = field(default_factory=dict)
    asks_out: int = 0
    deadline: float | None = None
    is_holding: bool = False
    is_claimed: bool = False
    is_counted: bool = False
    keys: Sequence[bytes] = ()
    slots: SlotArray = field(default_factory=lambda: np.empty(0, np.int64))

    def peer_at(self, tier: int) -> bytes:
        """Whom the request named for `tier`: empty where the tier is no peers'."""
        return self.peers[tier].name if tier in self.peers else b""


class Holds:
    """Requests by owner, any string."""

    def __init__(self, slots: Slots, clock: Clock, deadline_seconds: float) -> None:
        self._slots = slots
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._requests: dict[str, Request] = {}
        self._accesses = 0
        # Those whose holds may have slots that are still being filled.
        self._waiting: set[str] = set()

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

    def pin(self, slots: SlotArray) -> None:
        """The load pins of a hold in the making."""
        self._slots.pin(slots, PinKind.LOAD)

    def begin(self, owner: str, keys: Sequence[bytes], slots: SlotArray) -> None:
        """`owner` holds `slots`, pinned by the caller; it waits for those that are not READY."""
        request = self._requests[owner]
        request.is_holding = True
        request.keys, request.slots = keys, slots
        self._waiting.add(owner)

    def is_waiting(self, owner: str) -> bool:
        """Whether a slot of the hold is still being filled."""
        return owner in self._waiting and bool(self.waited_for(owner).any())

    def waited_for(self, owner: str) -> npt.NDArray[np.bool_]:
        """Of each slot of the hold, whether it is still being filled."""
        are = self._slots.are(SlotState.FILLING, self._requests[owner].slots)
        if not are.any():
            self._waiting.discard(owner)
        return are

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
        request.keys, request.slots = request.keys[:end], request.slots[:end]
        if not end:
            self._waiting.discard(owner)
        self._slots.unpin(gone, PinKind.LOAD)

    def forget(self) -> None:
        """Give back every hold that is not claimed, and what requests have learned of tiers."""
        for owner, request in self._requests.items():
            if not request.is_claimed:
                self.release(owner)
            request.absent.clear()
            request.peers.clear()

    @property
    def slots_waited_for(self) -> int:
        """How many there are, over all holds."""
        return sum(int(self.waited_for(owner).sum()) for owner in list(self._waiting))

    def lose(self, slots: Sequence[int] | SlotArray, tier: int | None = None) -> None:
        """Whoever waits for one of `slots` waits in vain: cut there, and not again from `tier`."""
        for owner in list(self._waiting) if len(slots) else ():
            request = self._requests[owner]
            lost = np.flatnonzero(np.isin(request.slots, slots) & self.waited_for(owner)).tolist()
            if lost:
                if tier is not None:
                    request.absent[tier].update(request.keys[i] for i in lost)
                self.cut(owner, lost[0])
