"""What each request is told of where its chunks are, one key at a time, as vLLM asks for them.

vLLM scans a request's keys afresh in every step in which it may start, and starts it only once
none of them is pending. So the core is asked once for all of a request's keys at the first
question of a step, and what the scan has found wanting is set going, as one batch, when the step
ends. Within a step nothing is evicted between a HIT and the load that it leads to: room is only
made where the step ends and where stores are prepared, and vLLM does both after its loads.

Whatever a request waits for, it stops waiting at its deadline: from then on, everything that is
not in the host tier is a miss for it. So is, for good, what its promotions failed to bring or had
no room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiering.clock import Clock
from tiering.keys import split_key
from tiering.residency.answers import Place
from tiering.residency.core import Residency
from tiering_connectors.vllm.roles import NO_ROLES, Roles


@dataclass(slots=True)
class Request:
    """`step`: the one that `places` and `scanned` are of. `waits_since`: when it was first told to
    wait. `denied`: keys that it is not promoted; `promoted`: those that it was. `held`: the keys of
    its hold. `deferred_at`: the core's count of changes when there was no room to hold. `chain`:
    what it has stored, head first. `is_cut`: there was no room for all of it, so nothing more."""

    owner: str
    roles: Roles = NO_ROLES
    keys: dict[bytes, None] = field(default_factory=dict)
    step: int = -1
    places: dict[bytes, int] = field(default_factory=dict)
    scanned: dict[bytes, None] = field(default_factory=dict)
    waits_since: float | None = None
    denied: set[bytes] = field(default_factory=set)
    promoted: set[bytes] = field(default_factory=set)
    held: list[bytes] = field(default_factory=list)
    deferred_at: int = -1
    chain: list[bytes] = field(default_factory=list)
    is_cut: bool = False

    def forget(self) -> None:
        """Nothing that it was told before is true any more."""
        for book in (self.keys, self.places, self.scanned, self.denied, self.promoted):
            book.clear()
        self.held, self.chain, self.is_cut = [], [], False


class Lookups:
    """One for each manager. `step` names the current step: it changes whenever places may have."""

    def __init__(self, core: Residency, tiers: int, clock: Clock, deadline_seconds: float) -> None:
        self._core = core
        self._has_tiers = tiers > 0
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._waiting: dict[str, Request] = {}
        self._holding: dict[str, Request] = {}
        self.step = 0

    def look_up(self, request: Request, key: bytes) -> Place:
        """Where `key` is for this request, or that it is not to be had: READY it can be loaded now,
        ABSENT it cannot, and otherwise vLLM is to ask again."""
        if request.step != self.step:
            self._look_again(request)
        request.scanned[key] = None
        place = request.places.get(key)
        if place is None:
            place = request.places[key] = self._first_place(request, key)
        if place == Place.READY:
            return Place.READY
        if place == Place.ABSENT or self._is_late(request):
            return Place.ABSENT
        if place == Place.KNOWN and key in request.denied:
            return Place.ABSENT
        if request.waits_since is None:
            request.waits_since = self._clock.now()
        self._waiting[request.owner] = request
        return Place(place)

    def next_step(self) -> None:
        """Places may have changed: they are asked for again."""
        self.step += 1

    def end_step(self) -> None:
        """Set going what the requests that were told to wait need; give back what is held by those
        that waited too long to start."""
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self._go_on(request)
        for request in list(self._holding.values()):
            if self._is_late(request):
                self.let_go(request)
        self.next_step()

    def let_go(self, request: Request) -> None:
        """The request holds nothing any more."""
        if self._holding.pop(request.owner, None) is not None:
            self._core.release(request.owner)
            request.held = []

    def start(self, request: Request, loaded: Sequence[bytes] = ()) -> None:
        """The request stops waiting: it loads, is computed, or is over."""
        if request.keys:
            fetched = len(request.promoted.intersection(loaded))
            missed = max(0, len(request.keys) - len(loaded))
            self._core.count_lookup(request.owner, len(loaded) - fetched, fetched, missed)
        self.let_go(request)
        self._waiting.pop(request.owner, None)
        request.waits_since = None
        request.keys.clear()

    def clear(self) -> None:
        """The core has forgotten everything, and let go of what was held."""
        self._waiting.clear()
        self._holding.clear()
        self.next_step()

    def _look_again(self, request: Request) -> None:
        request.step = self.step
        request.scanned.clear()
        keys = list(request.keys)
        request.places = dict(zip(keys, self._core.places(keys, request.owner), strict=True))

    def _first_place(self, request: Request, key: bytes) -> int:
        """Of a key that this request asks for the first time: if it is not in the host tier, the
        core is asked with the others of the scan, when the step ends."""
        request.keys[key] = None
        place = self._core.index.place(key)
        return Place.UNKNOWN if place == Place.ABSENT and self._has_tiers else place

    def _is_late(self, request: Request) -> bool:
        since = request.waits_since
        return since is not None and self._clock.now() >= since + self._deadline_seconds

    def _go_on(self, request: Request) -> None:
        if self._is_late(request):
            return
        core, owner = self._core, request.owner
        keys = list(request.scanned)
        places = core.places(keys, owner)
        if Place.UNKNOWN in places:
            core.ask(owner, keys)
            return
        known = {key for key, place in zip(keys, places, strict=True) if place == Place.KNOWN}
        known -= request.denied
        if not known:
            return
        can_have = [
            key
            for key, place in zip(keys, places, strict=True)
            if place > Place.KNOWN or key in known
        ]
        wanted = _cut_to(can_have, core.room_limit)
        fetched = known.intersection(wanted)
        request.denied |= known - fetched
        if fetched:
            self._hold(request, wanted, fetched)

    def _hold(self, request: Request, wanted: list[bytes], fetched: set[bytes]) -> None:
        """Hold `wanted`, in place of what is held now; `fetched` of it must be promoted."""
        core, owner, before = self._core, request.owner, request.held
        if not before and request.deferred_at == core.changes:
            return
        self.let_go(request)
        if core.hold(owner, wanted):
            request.held = wanted
            told = list(fetched)
            places = core.places(told, owner)
            short = {k for k, place in zip(told, places, strict=True) if place == Place.KNOWN}
        elif before:
            # What it had was there a moment ago; others have the room for more.
            core.hold(owner, before)
            request.held, short = before, fetched
        else:
            request.deferred_at = core.changes
            return
        request.denied |= short
        request.promoted |= fetched - short
        self._holding[owner] = request

    def __repr__(self) -> str:
        return f"<Lookups {len(self._waiting)} wait, {len(self._holding)} hold>"


def _cut_to(keys: list[bytes], room: int) -> list[bytes]:
    """As many of `keys`, those that one scan went through, as there can ever be room for.

    Of several groups the longest is the one whose prefix says how far the hit goes; the others'
    chunks are those of a window at its end. A shorter prefix needs other windows, as large: room
    is left for them, and the next scan asks for them.
    """
    if len(keys) <= room:
        return keys
    groups: dict[int, list[bytes]] = {}
    for key in keys:
        groups.setdefault(split_key(key)[1], []).append(key)
    longest = max(groups.values(), key=len)
    return longest[: max(0, room - (len(keys) - len(longest)))]
