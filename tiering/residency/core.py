"""The core's front: what can be had, what to hold for a request, where to store, what comes next.

Sans-IO, one owner, no lock: every call answers from memory at once and puts what has to be done
into steps, taken with `take_steps` and carried out elsewhere; what became of them comes back
through `apply`. Invariants: a hold is a contiguous prefix of its keys, all pinned; a request that
saw a key fail never gets it again; each step is forgotten with its final outcome, whatever it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

from tiering.clock import Clock
from tiering.events import ChunksRemoved, ChunksStored, Event
from tiering.metrics import Counters
from tiering.policy.base import EvictionPolicy
from tiering.residency.answers import Match, Reservation
from tiering.residency.budget import LoadBudget
from tiering.residency.cascades import STORAGE_MEDIUM, CascadeBook
from tiering.residency.holds import Holds, Request
from tiering.residency.index import HostIndex
from tiering.residency.known import KnownKeys
from tiering.residency.plan import Contains, Drop, Outcome, Promote, Step, Verdict, keys_with
from tiering.residency.state import SlotState
from tiering.residency.touches import TouchBook

COUNTERS = (
    "chunks_loaded",
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
    "cascades_refused",
    "cascades_failed",
    "cascades_skipped",
    "drops_failed",
)

# By tier, the keys that a request may not be given from it.
Absent = Mapping[int, AbstractSet[bytes]]

_PROMOTION_COUNTER = {
    Verdict.HIT: "promotions_succeeded",
    Verdict.MISS: "promotions_missing",
    Verdict.DAMAGED: "promotions_damaged",
    Verdict.LATE: "promotions_late",
}


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
        self._holds = Holds(self.index.slots, clock, load_deadline_seconds)
        self._known = [KnownKeys() for _ in range(tiers)]
        self._cascades = CascadeBook(
            self.index,
            self._known,
            self.counters,
            self._step_id,
            self.budget.limit,
            clock,
            load_deadline_seconds,
        )
        self._touches = TouchBook(self._known, self._cascades.is_under_way, self._step_id)
        self._out: dict[int, tuple[Step, str]] = {}
        self._steps: list[Step] = []
        self._events: list[Event] = []
        self._ids = 0
        # Grows whenever room may have come: before that, what was refused need not be tried again.
        self.changes = 0

    # Requests

    def open(self, owner: str) -> None:
        """Begin a request; again for one that is open does nothing."""
        self._holds.open(owner)

    def close(self, owner: str) -> None:
        """End a request: whatever it holds is given back. Unknown owners are ignored."""
        request = self._holds.get(owner)
        self._touches.end(request)
        if request is not None and request.chain:
            self._steps += self._cascades.want_again(request.chain)
        self.changes += self._holds.close(owner)

    def used(self, owner: str, keys: Sequence[bytes]) -> None:
        """The request uses this prefix, from wherever: keep it as recent as the request."""
        request = self._holds[owner]
        self._touches.note(request, keys)
        self.index.touch(keys, request.access)

    # Loads

    def match(self, keys: Sequence[bytes], owner: str | None = None) -> Match:
        """How much of the chain `keys` can be had, as far as is known. Changes nothing."""
        request = self._holds.get(owner)
        absent = request.absent if request else {}
        resident = self.index.resident_prefix(keys)
        reach = self._reach(keys, len(resident), absent)
        is_open = (
            reach < len(keys)
            and not (request and self._holds.is_late(request))
            and any(keys[reach] not in absent.get(tier, ()) for tier in range(len(self._known)))
        )
        return Match(self.index.slots.ready_prefix(resident), reach, is_open)

    def _reach(self, keys: Sequence[bytes], start: int, absent: Absent) -> int:
        """Up to which chunk the chain goes on from `start`, in whatever place each one is."""
        reach, before = start, -1
        while before < reach < len(keys):
            before = reach
            for tier, known in enumerate(self._known):
                reach += known.prefix(islice(keys, reach, None), absent.get(tier, ()))
            if reach > before:
                reach += len(self.index.resident_prefix(islice(keys, reach, None)))
        return reach

    def ask(self, owner: str, keys: Sequence[bytes]) -> None:
        """Ask the tiers for what `match` could not answer. Nothing while answers are out."""
        request = self._holds[owner]
        self._holds.start_clock(request)
        if request.asks_out:
            return
        rest = keys[self.match(keys, owner).reach :]
        for tier, known in enumerate(self._known):
            wanted = known.unknown(rest, request.absent[tier])
            if wanted:
                left = self._holds.seconds_left(request)
                step = Contains(self._step_id(), tier, tuple(wanted), left)
                self._send(step, owner)
                request.asks_out += 1

    def is_asking(self, owner: str) -> bool:
        """Whether answers are out that are still worth waiting for."""
        request = self._holds[owner]
        return request.asks_out > 0 and not self._holds.is_late(request)

    def hold(self, owner: str, keys: Sequence[bytes]) -> bool:
        """Pin what of the matched prefix is in the host tier and promote the rest, as one unit,
        cut to what the budget and the tier have room for. False: others hold the room for now,
        ask again; never after the request's deadline, when it is cut to what there is."""
        request = self._holds[owner]
        if request.is_holding:
            raise AssertionError(f"{owner} holds a prefix already")
        self._holds.start_clock(request)
        match, is_late = self.match(keys, owner), self._holds.is_late(request)
        wanted = keys[: match.host if is_late else match.reach]
        found = self.index.lookup(wanted)
        fit = self.budget.fitting(found)
        if fit < match.reach:
            best = min(match.reach, self.budget.limit)
            if fit < best and not is_late and self.may_make_room:
                return False
            self.counters.add("loads_cut")
        self._hold_prefix(owner, request, wanted[:fit], found[:fit])
        return True

    def hold_ready(self, owner: str, keys: Sequence[bytes]) -> int:
        """Pin the leading `keys` that are in the host tier, for a copy that starts now: how many.
        Such holds are short, so the budget does not bound them."""
        slots = self.index.resident_prefix(keys)
        del slots[self.index.slots.ready_prefix(slots) :]
        self._holds.pin(slots)
        self._holds.begin(owner, keys[: len(slots)], slots)
        self.used(owner, keys)
        return len(slots)

    def is_holding(self, owner: str) -> bool:
        request = self._holds.get(owner)
        return request is not None and request.is_holding

    def held(self, owner: str) -> int | None:
        """How many leading chunks of the hold are ready, or None while it is worth waiting.
        What is not ready at the deadline, and all behind it, is given up."""
        request = self._holds[owner]
        if request.waiting:
            if not self._holds.is_late(request):
                return None
            self.counters.add("promotions_late", len(request.waiting))
            self._holds.cut(owner, min(map(request.slots.index, request.waiting)))
        return len(request.slots)

    def claim(self, owner: str) -> list[int]:
        """The slots of the hold, in prefix order, to be copied from: pinned, whatever happens,
        until `release`, which must not be called before the copies have ended."""
        request = self._holds[owner]
        if request.waiting or not request.is_holding:
            raise AssertionError(f"{owner} has nothing ready to claim")
        request.is_claimed = True
        self.counters.add("chunks_loaded", len(request.slots))
        return list(request.slots)

    def release(self, owner: str) -> None:
        """Give the hold back; promotions under way go on, for whoever comes next."""
        self.changes += self._holds.release(owner)

    # Stores

    def reserve(
        self, owner: str, keys: Sequence[bytes], start: int, keep_unwritten: bool = False
    ) -> Reservation:
        """Slots for the chunks of the chain `keys` from `start` on that are not here yet, as far
        as there is room. Room is never made by giving up an ancestor that is nowhere else, nor
        the head of the chain: half of the host tier may hold it, the rest lets its tail through.
        `keep_unwritten`: nor by giving up what waits to be written to a tier.
        """
        request = self._holds[owner]
        self._touches.note(request, keys)
        fresh = [start + i for i, s in enumerate(self.index.lookup(keys[start:])) if s is None]
        if not start:
            # The request uses all of its chain: no child may be kept longer than its parent.
            self.index.touch(keys, request.access)
        spared: list[bytes] = []
        if len(fresh) > self.index.slots.free:
            half = len(self.index.slots) // 2
            nowhere_else = list(keys[half:])
            for known in self._known:
                nowhere_else = known.unknown(nowhere_else)
            spared = [*keys[:half], *nowhere_else]
            if keep_unwritten:
                spared += self._cascades.unwritten()
        slots = self.index.reserve([keys[i] for i in fresh], request.access, spared)
        end = fresh[len(slots)] if len(slots) < len(fresh) else len(keys)
        if end < len(keys):
            self.counters.add("stores_refused")
        return Reservation(end, fresh[: len(slots)], slots)

    def filled(self, slots: Sequence[int]) -> None:
        """The device copies into reserved `slots` are done: readable, and on to the tiers."""
        keys = self.index.fill(slots)
        self.counters.add("chunks_stored", len(keys))
        self.changes += 1
        self._holds.wake(slots)
        self._steps += self._cascades.want(keys)

    def unfilled(self, slots: Sequence[int]) -> None:
        """The device copies into reserved `slots` failed."""
        for slot in slots:
            self._holds.lose(slot)
        self.index.fail(slots)
        self.changes += 1

    # Removal

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove `keys` from every tier."""
        for slot in self.index.lookup(keys):
            if slot is not None:
                self._holds.lose(slot)
        self.index.drop(keys)
        self.changes += 1
        for tier, known in enumerate(self._known):
            known.discard(keys)
            self._send(Drop(self._step_id(), tier, tuple(keys)), "")

    def reset(self) -> None:
        """Forget everything: the host tier is empty, nothing is known of the others, and what
        is under way will not surface. Holds are given back, but for those that were claimed."""
        for owner in self._holds.owners():
            if not self._holds[owner].is_claimed:
                self._holds.release(owner)
            self._holds[owner].absent.clear()
        self.changes += 1
        self.index.clear()
        self._cascades.clear()
        self._touches.clear()
        for known in self._known:
            known.clear()

    # Steps and outcomes

    def take_steps(self) -> list[Step]:
        """What is to be done now; each is handed out once."""
        steps, self._steps = self._steps + list(self._touches.due()), []
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

    @property
    def is_settled(self) -> bool:
        """Nothing is under way to or from the tiers, and nothing waits to be written."""
        return not self.steps_out and not self._cascades.waiting

    @property
    def needs_turns(self) -> bool:
        """Whether chunks wait for room among the writes, and `apply` will soon let them go."""
        return self._cascades.needs_turns

    @property
    def may_make_room(self) -> bool:
        """Whether a slot that cannot be evicted now will be, without a new request's doing."""
        slots = self.index.slots
        busy = slots.census()
        return (
            not self.is_settled
            or bool(slots.load_pins.any())
            or busy[SlotState.FILLING] + busy[SlotState.ABANDONED] + busy[SlotState.DOOMED] > 0
        )

    def seconds_left(self, owner: str) -> float:
        """Until what the request waits for is given up."""
        return self._holds.seconds_left(self._holds[owner])

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
            self.changes += 1

    def _settle(self, outcome: Outcome) -> None:
        step, owner = self._out[outcome.id]
        if outcome.final:
            del self._out[outcome.id]
        if isinstance(step, Contains):
            self._settle_contains(step, owner, outcome)
        elif isinstance(step, Promote):
            self._settle_promote(step, outcome)
        elif isinstance(step, Drop):
            self.counters.add("drops_failed", outcome.verdicts.count(Verdict.FAILED))
            if gone := keys_with(step, outcome, Verdict.DELETED):
                self._events.append(ChunksRemoved(STORAGE_MEDIUM, tuple(gone)))

    def _settle_contains(self, step: Contains, owner: str, outcome: Outcome) -> None:
        hits = keys_with(step, outcome, Verdict.HIT)
        self._known[step.tier].add(hits)
        misses = outcome.verdicts.count(Verdict.MISS)
        self.counters.add("lookups_failed", len(step.keys) - len(hits) - misses)
        request = self._holds.get(owner)
        if request is not None:
            request.absent[step.tier].update(set(step.keys).difference(hits))
            if outcome.final:
                request.asks_out -= 1

    def _settle_promote(self, step: Promote, outcome: Outcome) -> None:
        if not outcome.final:
            # The shell's own deadline: nobody should wait, but the slots stay with the reader.
            for slot in step.slots:
                self._holds.lose(slot, step.tier)
            self.counters.add("promotions_late", len(step.slots))
            return
        self.counters.tally(outcome.verdicts, _PROMOTION_COUNTER, "promotions_failed")
        hit = Verdict.HIT
        good, bad = [], []
        for key, slot, verdict in zip(step.keys, step.slots, outcome.verdicts, strict=True):
            if verdict is hit:
                good.append(slot)
                continue
            bad.append(slot)
            self._holds.lose(slot, step.tier)
            if verdict in (Verdict.MISS, Verdict.DAMAGED):
                self._known[step.tier].discard([key])
                self._events.append(ChunksRemoved(STORAGE_MEDIUM, (key,)))
        self.index.fill(good)
        self._holds.wake(good)
        self.index.fail(bad)

    # Parts of the above

    def _hold_prefix(
        self, owner: str, request: Request, keys: Sequence[bytes], found: list[int | None]
    ) -> None:
        """Pin the resident part first, so that making room cannot evict it."""
        self._holds.pin([slot for slot in found if slot is not None])
        missing = [key for key, slot in zip(keys, found, strict=True) if slot is None]
        taken = self.index.reserve(missing, request.access)
        self._holds.pin(taken)
        fresh = iter(taken)
        slots = [next(fresh) if slot is None else slot for slot in found]
        self._holds.begin(owner, keys, slots)
        self._touches.note(request, keys)
        self.index.touch(keys, request.access)
        self._promote(request, dict(zip(missing, taken, strict=True)))

    def _promote(self, request: Request, chunks: dict[bytes, int]) -> None:
        """Fill `chunks`, keys and their slots, from the first tier that is known to hold each."""
        for tier, known in enumerate(self._known):
            keys = known.among(chunks, request.absent[tier])
            if keys:
                slots = tuple(map(chunks.pop, keys))
                left = self._holds.seconds_left(request)
                self._send(Promote(self._step_id(), tier, tuple(keys), slots, left), "")
                self.counters.add("promotions_started", len(keys))
        if chunks:
            raise AssertionError(f"nothing to promote {next(iter(chunks)).hex()} from")

    def _step_id(self) -> int:
        self._ids += 1
        return self._ids

    def _send(self, step: Step, owner: str) -> None:
        self._out[step.id] = (step, owner)
        self._steps.append(step)

    def __repr__(self) -> str:
        return (
            f"<Residency {self.index!r}, {self.budget!r}, {len(self._holds)} requests, "
            f"{self.steps_out} steps out>"
        )
