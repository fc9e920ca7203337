"""The core's front: what can be had, what to hold for a request, where to store, what comes next.

Sans-IO, one owner, no lock: every call answers from memory at once and puts what has to be done
into steps, taken with `take_steps` and carried out elsewhere; what became of them comes back
through `apply`. Invariants: a hold is a contiguous prefix of its keys, all pinned; a request that
saw a key fail never gets it again; each step is forgotten with its final outcome, whatever it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from tiering.clock import Clock
from tiering.events import ChunksRemoved, ChunksStored, Event
from tiering.metrics import Counters
from tiering.policy.base import EvictionPolicy
from tiering.residency.budget import LoadBudget
from tiering.residency.cascades import STORAGE_MEDIUM, CascadeBook
from tiering.residency.index import HostIndex
from tiering.residency.known import KnownKeys
from tiering.residency.plan import Cascade, Contains, Drop, Outcome, Promote, Step, Verdict

COUNTERS = (
    "chunks_matched_host",
    "chunks_matched_tiers",
    "chunks_missed",
    "chunks_stored",
    "stores_refused",
    "promotions_started",
    "promotions_succeeded",
    "promotions_missing",
    "promotions_damaged",
    "promotions_failed",
    "promotions_late",
    "lookups_failed",
    "loads_cut",
    "cascades_stored",
    "cascades_already_there",
    "cascades_full",
    "cascades_failed",
    "cascades_skipped",
    "drops_failed",
)

_PROMOTION_COUNTER = {
    Verdict.HIT: "promotions_succeeded",
    Verdict.MISS: "promotions_missing",
    Verdict.DAMAGED: "promotions_damaged",
    Verdict.LATE: "promotions_late",
}


@dataclass(frozen=True, slots=True)
class Match:
    """How long a prefix can be had: `host` leading chunks at once, `reach` with promotions (or
    with writers under way). `is_open`: some tier has not yet said whether it holds more."""

    host: int
    reach: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class Reservation:
    """`slots[i]` is to be filled with chunk `indices[i]`; chunks before `end` are cared for, by
    this reservation or an earlier one."""

    end: int
    indices: list[int]
    slots: list[int]


@dataclass(slots=True)
class _Request:
    """Everything the core knows of one request: its access, what it may not ask for again, and
    the prefix it holds."""

    access: int
    absent: set[tuple[int, bytes]] = field(default_factory=set)
    asks_out: int = 0
    deadline: float | None = None
    is_holding: bool = False
    is_claimed: bool = False
    keys: list[bytes] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)


class Residency:
    """One for each engine. `tiers` is how many secondary tiers there are, in order of preference.

    Requests are named by any string; `open` one before it matches with an owner, holds or
    reserves, and `close` it when it ends, in whatever state.
    """

    def __init__(
        self,
        slot_count: int,
        tiers: int,
        policy: EvictionPolicy,
        clock: Clock,
        load_deadline_seconds: float,
    ) -> None:
        self.index = HostIndex(slot_count, policy)
        self.budget = LoadBudget(self.index.slots)
        self.counters = Counters(COUNTERS)
        self._clock = clock
        self._deadline_seconds = load_deadline_seconds
        self._known = [KnownKeys() for _ in range(tiers)]
        self._cascades = CascadeBook(self.index, self._known, self.counters, self._step_id)
        self._requests: dict[str, _Request] = {}
        self._waiters: dict[int, list[str]] = {}
        self._out: dict[int, tuple[Step, str]] = {}
        self._steps: list[Step] = []
        self._events: list[Event] = []
        self._accesses = 0
        self._ids = 0

    # Requests

    def open(self, owner: str) -> None:
        """Begin a request; again for one that is open does nothing."""
        if owner not in self._requests:
            self._accesses += 1
            self._requests[owner] = _Request(self._accesses)

    def close(self, owner: str) -> None:
        """End a request: whatever it holds is given back. Unknown owners are ignored."""
        if owner in self._requests:
            self.release(owner)
            del self._requests[owner]

    def used(self, owner: str, keys: Sequence[bytes]) -> None:
        """The request uses this prefix, from wherever: keep it as recent as the request."""
        self.index.touch(keys, self._requests[owner].access)

    # Loads

    def match(self, keys: Sequence[bytes], owner: str | None = None) -> Match:
        """How much of the chain `keys` can be had, as far as is known. Changes nothing."""
        request = self._requests.get(owner) if owner is not None else None
        absent: AbstractSet[tuple[int, bytes]] = request.absent if request else frozenset()
        found = self.index.lookup(keys)
        resident = found.index(None) if None in found else len(found)
        host = self.index.ready_prefix(keys[:resident])
        reach = resident
        while reach < len(keys) and (
            found[reach] is not None or self._tier_of(keys[reach], absent) is not None
        ):
            reach += 1
        is_open = (
            reach < len(keys)
            and not (request and self._is_late(request))
            and any((tier, keys[reach]) not in absent for tier in range(len(self._known)))
        )
        return Match(host, reach, is_open)

    def ask(self, owner: str, keys: Sequence[bytes]) -> None:
        """Ask the tiers for what `match` could not answer. Nothing while answers are out."""
        request = self._requests[owner]
        self._start_clock(request)
        if request.asks_out:
            return
        rest = keys[self.match(keys, owner).reach :]
        for tier, known in enumerate(self._known):
            wanted = tuple(k for k in rest if k not in known and (tier, k) not in request.absent)
            if wanted:
                step = Contains(self._step_id(), tier, wanted, self._deadline_seconds)
                self._send(step, owner)
                request.asks_out += 1

    def is_asking(self, owner: str) -> bool:
        """Whether answers are out that are still worth waiting for."""
        request = self._requests[owner]
        return request.asks_out > 0 and not self._is_late(request)

    def hold(self, owner: str, keys: Sequence[bytes]) -> bool:
        """Pin what of the matched prefix is in the host tier and promote the rest, as one unit,
        cut to what the budget and the tier have room for. False: others hold the room for now,
        ask again; never after the request's deadline, when it is cut to what there is."""
        request = self._requests[owner]
        if request.is_holding:
            raise AssertionError(f"{owner} holds a prefix already")
        self._start_clock(request)
        found_so_far = self.match(keys, owner)
        is_late = self._is_late(request)
        wanted = keys[: found_so_far.host if is_late else found_so_far.reach]
        slots = self.index.slots
        found = self.index.lookup(wanted)
        costs = [slot is None or not slots.load_pins[slot] for slot in found]
        fit = int(np.searchsorted(np.cumsum(costs), self.budget.room, side="right"))
        if fit < found_so_far.reach:
            if self.budget.held and not is_late:
                return False
            self.counters.add("loads_cut")
        self._hold_prefix(owner, request, wanted[:fit], found[:fit])
        return True

    def is_holding(self, owner: str) -> bool:
        request = self._requests.get(owner)
        return request is not None and request.is_holding

    def held(self, owner: str) -> int | None:
        """How many leading chunks of the hold are ready, or None while it is worth waiting.
        What is not ready at the deadline, and all behind it, is given up."""
        request = self._requests[owner]
        if request.waiting:
            if not self._is_late(request):
                return None
            self.counters.add("promotions_late", len(request.waiting))
            self._cut(owner, request, min(map(request.slots.index, request.waiting)))
        return len(request.slots)

    def claim(self, owner: str) -> list[int]:
        """The slots of the hold, in prefix order, to be copied from: pinned, whatever happens,
        until `release`, which must not be called before the copies have ended."""
        request = self._requests[owner]
        if request.waiting or not request.is_holding:
            raise AssertionError(f"{owner} has nothing ready to claim")
        request.is_claimed = True
        return list(request.slots)

    def release(self, owner: str) -> None:
        """Give the hold back; promotions under way go on, for whoever comes next."""
        request = self._requests[owner]
        if request.is_holding:
            self._cut(owner, request, 0)
            request.is_holding = request.is_claimed = False
        request.deadline = None

    # Stores

    def reserve(self, owner: str, keys: Sequence[bytes], start: int) -> Reservation:
        """Slots for the chunks of the chain `keys` from `start` on that are not here yet, as far
        as there is room. Room is never made by giving up an ancestor that is nowhere else, nor
        the head of the chain: half of the host tier may hold it, the rest lets its tail through.
        """
        request = self._requests[owner]
        fresh = [start + i for i, s in enumerate(self.index.lookup(keys[start:])) if s is None]
        chain: frozenset[bytes] = frozenset()
        head: frozenset[bytes] = frozenset()
        if len(fresh) > self.index.slots.free:
            chain, head = frozenset(keys), frozenset(keys[: len(self.index.slots) // 2])
        slots = self.index.reserve(
            [keys[i] for i in fresh],
            request.access,
            lambda key: key in head or (key in chain and self._tier_of(key) is None),
        )
        end = fresh[len(slots)] if len(slots) < len(fresh) else len(keys)
        if end < len(keys):
            self.counters.add("stores_refused")
        return Reservation(end, fresh[: len(slots)], slots)

    def filled(self, slots: Sequence[int]) -> None:
        """The device copies into reserved `slots` are done: readable, and on to the tiers."""
        keys = self.index.fill(slots)
        self.counters.add("chunks_stored", len(keys))
        self._wake(slots)
        self._steps += self._cascades.want(keys)

    def unfilled(self, slots: Sequence[int]) -> None:
        """The device copies into reserved `slots` failed."""
        for slot in slots:
            self._lose(slot)
        self.index.fail(slots)

    # Removal

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove `keys` from every tier."""
        self._let_go_of(keys)
        self.index.drop(keys)
        for tier, known in enumerate(self._known):
            known.discard(keys)
            self._send(Drop(self._step_id(), tier, tuple(keys)), "")

    def reset(self) -> None:
        """Forget everything: the host tier is empty, nothing is known of the others, and what
        is under way will not surface. Holds are given back, but for those that were claimed."""
        for owner, request in self._requests.items():
            if not request.is_claimed:
                self.release(owner)
            request.absent.clear()
        self.index.clear()
        self._cascades.clear()
        for known in self._known:
            known.clear()

    # Steps and outcomes

    def take_steps(self) -> list[Step]:
        """What is to be done now; each is handed out once."""
        steps, self._steps = self._steps, []
        return steps

    def take_events(self) -> list[Event]:
        """What became readable or gone since the last call, in order, tier by tier."""
        events = self.index.take_events() + self._events
        self._events = []
        return events

    @property
    def steps_out(self) -> int:
        """Steps whose final outcome has not come back."""
        return len(self._out) + self._cascades.steps_out

    def apply(self, outcomes: Iterable[Outcome]) -> None:
        """Take in what became of steps. Outcomes of unknown steps are ignored."""
        for outcome in outcomes:
            if self._cascades.is_mine(outcome.id):
                stored, steps = self._cascades.settle(outcome)
                self._steps += steps
                if stored:
                    self._events.append(ChunksStored(STORAGE_MEDIUM, tuple(stored)))
            elif outcome.id in self._out:
                self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        step, owner = self._out[outcome.id]
        if outcome.final:
            del self._out[outcome.id]
        if isinstance(step, Contains):
            self._settle_contains(step, owner, outcome)
        elif isinstance(step, Promote):
            self._settle_promote(step, outcome)
        elif isinstance(step, Drop):
            failed = outcome.verdicts.count(Verdict.FAILED)
            self.counters.add("drops_failed", failed)
            gone = [
                k for k, v in zip(step.keys, outcome.verdicts, strict=True) if v is Verdict.DELETED
            ]
            if gone:
                self._events.append(ChunksRemoved(STORAGE_MEDIUM, tuple(gone)))

    def _settle_contains(self, step: Contains, owner: str, outcome: Outcome) -> None:
        pairs = list(zip(step.keys, outcome.verdicts, strict=True))
        self._known[step.tier].add(key for key, verdict in pairs if verdict is Verdict.HIT)
        odd = sum(verdict not in (Verdict.HIT, Verdict.MISS) for _, verdict in pairs)
        self.counters.add("lookups_failed", odd)
        request = self._requests.get(owner)
        if request is not None:
            request.absent.update((step.tier, k) for k, v in pairs if v is not Verdict.HIT)
            if outcome.final:
                request.asks_out -= 1

    def _settle_promote(self, step: Promote, outcome: Outcome) -> None:
        if not outcome.final:
            # The shell's own deadline: nobody should wait, but the slots stay with the reader.
            for slot in step.slots:
                self._lose(slot, step.tier)
            self.counters.add("promotions_late", len(step.slots))
            return
        good, bad = [], []
        for key, slot, verdict in zip(step.keys, step.slots, outcome.verdicts, strict=True):
            self.counters.add(_PROMOTION_COUNTER.get(verdict, "promotions_failed"))
            if verdict is Verdict.HIT:
                good.append(slot)
                continue
            bad.append(slot)
            self._lose(slot, step.tier)
            if verdict in (Verdict.MISS, Verdict.DAMAGED):
                self._known[step.tier].discard([key])
                self._events.append(ChunksRemoved(STORAGE_MEDIUM, (key,)))
        self.index.fill(good)
        self._wake(good)
        self.index.fail(bad)

    # Parts of the above

    def _tier_of(
        self, key: bytes, absent: AbstractSet[tuple[int, bytes]] = frozenset()
    ) -> int | None:
        for tier, known in enumerate(self._known):
            if key in known and (tier, key) not in absent:
                return tier
        return None

    def _hold_prefix(
        self, owner: str, request: _Request, keys: Sequence[bytes], found: list[int | None]
    ) -> None:
        """Pin the resident part first, so that making room cannot evict it."""
        slots = self.index.slots
        resident = [slot for slot in found if slot is not None]
        slots.load_pins[np.asarray(resident, dtype=np.intp)] += 1
        missing = [i for i, slot in enumerate(found) if slot is None]
        taken = self.index.reserve([keys[i] for i in missing], request.access, lambda _: False)
        slots.load_pins[np.asarray(taken, dtype=np.intp)] += 1
        placed = list(found)
        for i, slot in zip(missing, taken, strict=False):
            placed[i] = slot
        end = missing[len(taken)] if len(taken) < len(missing) else len(keys)
        slots.unpin([s for s in placed[end:] if s is not None], slots.load_pins)
        request.is_holding = True
        request.keys = list(keys[:end])
        request.slots = [slot for slot in placed[:end] if slot is not None]
        ready = slots.ready(request.slots).tolist() if request.slots else []
        request.waiting = {s for s, ok in zip(request.slots, ready, strict=True) if not ok}
        for slot in request.waiting:
            self._waiters.setdefault(slot, []).append(owner)
        self.index.touch(request.keys, request.access)
        self._promote(request, [(keys[i], slot) for i, slot in zip(missing, taken, strict=False)])

    def _promote(self, request: _Request, chunks: list[tuple[bytes, int]]) -> None:
        by_tier: dict[int, list[tuple[bytes, int]]] = {}
        for key, slot in chunks:
            tier = self._tier_of(key, request.absent)
            if tier is None:
                raise AssertionError(f"nothing to promote {key.hex()} from")
            by_tier.setdefault(tier, []).append((key, slot))
        for tier, pairs in by_tier.items():
            keys, slots = zip(*pairs, strict=True)
            left = (request.deadline or 0.0) - self._clock.now()
            step = Promote(self._step_id(), tier, keys, slots, max(0.0, left))
            self._send(step, "")
            self.counters.add("promotions_started", len(keys))

    def _cut(self, owner: str, request: _Request, end: int) -> None:
        """Give back all of the hold from chunk `end` on."""
        slots = self.index.slots
        gone = request.slots[end:]
        slots.unpin(gone, slots.load_pins)
        for slot in request.waiting.intersection(gone):
            self._waiters[slot].remove(owner)
            if not self._waiters[slot]:
                del self._waiters[slot]
        request.waiting.difference_update(gone)
        del request.slots[end:], request.keys[end:]

    def _lose(self, slot: int, tier: int | None = None) -> None:
        """Whoever waits for `slot` waits in vain: cut there, and not again from that tier."""
        for owner in list(self._waiters.get(slot, ())):
            request = self._requests[owner]
            end = request.slots.index(slot)
            if tier is not None:
                request.absent.add((tier, request.keys[end]))
            self._cut(owner, request, end)

    def _let_go_of(self, keys: Sequence[bytes]) -> None:
        for slot in self.index.lookup(keys):
            if slot is not None and slot in self._waiters:
                self._lose(slot)

    def _wake(self, slots: Iterable[int]) -> None:
        for slot in slots:
            for owner in self._waiters.pop(slot, ()):
                self._requests[owner].waiting.discard(slot)

    def _start_clock(self, request: _Request) -> None:
        if request.deadline is None:
            request.deadline = self._clock.now() + self._deadline_seconds

    def _is_late(self, request: _Request) -> bool:
        return request.deadline is not None and self._clock.now() >= request.deadline

    def _step_id(self) -> int:
        self._ids += 1
        return self._ids

    def _send(self, step: Step, owner: str) -> None:
        self._out[step.id] = (step, owner)
        self._steps.append(step)

    def __repr__(self) -> str:
        return (
            f"<Residency {self.index!r}, {self.budget!r}, {len(self._requests)} requests, "
            f"{self.steps_out} steps out>"
        )


__all__ = ["COUNTERS", "Cascade", "Match", "Reservation", "Residency"]
