"""The core's front: what can be had, what to hold for a request, where to store, what comes next.

Sans-IO, one owner, no lock: every call answers from memory at once and puts what has to be done
into steps, taken with `take_steps` and carried out elsewhere; what became of them comes back
through `apply`. Invariants: a hold is a contiguous prefix of its keys, all pinned; a request that
saw a key fail never gets it again; each step is forgotten with its final outcome, whatever it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from tiering.clock import Clock
from tiering.events import ChunksCleared, ChunksRemoved, ChunksStored, Event
from tiering.metrics import Counters
from tiering.policy.admission import AdmissionPolicy, AdmitAll
from tiering.policy.base import EvictionPolicy
from tiering.residency import cascades, promotions
from tiering.residency.answers import Match, Reservation
from tiering.residency.budget import LoadBudget
from tiering.residency.cascades import CascadeBook
from tiering.residency.drops import DropBook
from tiering.residency.finder import Finder
from tiering.residency.holds import Holds, Request
from tiering.residency.index import HostIndex
from tiering.residency.known import KnownKeys
from tiering.residency.peers import PeerBook
from tiering.residency.plan import Found, News, Outcome, Step
from tiering.residency.promotions import PromotionBook
from tiering.residency.questions import QuestionBook
from tiering.residency.state import NOWHERE, Generations, SlotArray
from tiering.residency.surveys import SurveyBook, began
from tiering.residency.touches import TouchBook
from tiering_kernels.keytable import KeyBatch, select

COUNTERS = (
    "chunks_asked",
    "chunks_hit_host",
    "chunks_hit_tier",
    "chunks_missed",
    "chunks_loaded",
    "chunks_stored",
    "stores_refused",
    "stores_skipped",
    "lookups_failed",
    "loads_cut",
    "drops_failed",
    *promotions.COUNTERS,
    *cascades.COUNTERS,
)


class Residency:
    """One for each engine. `tiers` is how many secondary tiers there are, in order of preference.

    Requests are named by any string; `open` one before it matches with an owner, holds or
    reserves, and `close` it when it ends, in whatever state. What the tiers in `surveyed` hold is
    told of in events from the start on; of the others, what comes and goes. Those in `peers` hold
    nothing by themselves: a request may have chunks from the one that it names there.
    """

    def __init__(
        self,
        slot_count: int,
        tiers: int,
        policy: EvictionPolicy,
        clock: Clock,
        load_deadline_seconds: float,
        admission: AdmissionPolicy | None = None,
        surveyed: Collection[int] = (),
        peers: Collection[int] = (),
        generations: Generations | None = None,
    ) -> None:
        self._events: list[Event] = []
        self.index = HostIndex(slot_count, policy, self._events, generations)
        self.budget = LoadBudget(self.index.slots)
        self.counters = Counters(COUNTERS)
        self._holds = Holds(self.index.slots, clock, load_deadline_seconds)
        self._admission = admission or AdmitAll()
        self._known = {tier: KnownKeys() for tier in range(tiers) if tier not in peers}
        self._finder = Finder(self.index, tiers, self._known, self._holds)
        self._questions = QuestionBook(self._finder, self._holds, self.counters, self._step_id)
        self._promotions = PromotionBook(
            self.index, self._holds, self._known, self.counters, self._step_id
        )
        self._cascades = CascadeBook(
            self.index,
            self._known,
            self.counters,
            self._step_id,
            self.budget.limit,
            clock,
            load_deadline_seconds,
        )
        self._touches = TouchBook(self._known, self._cascades, self._step_id)
        self._surveys = SurveyBook(surveyed, self._step_id, clock)
        self._drops = DropBook(self._known, self.counters, self._step_id)
        self.peers = PeerBook(peers, self.index, self._holds, self.budget, self._step_id)
        self._steps: list[Step] = []
        self._ids = 0
        # Grows whenever room may have come: before that, what was refused need not be tried again.
        self.changes = 0

    # Requests

    def open(self, owner: str) -> None:
        """Begin a request; again for one that is open does nothing."""
        self._holds.open(owner)

    def close(self, owner: str) -> None:
        """End a request: whatever it holds is given back. Unknown owners are ignored."""
        if (request := self._holds.get(owner)) is None:
            return
        self._touches.end(request)
        self.peers.release(owner)
        for chain in request.chains.values():
            self._steps += self._cascades.want_again(chain)
        self.changes += self._holds.close(owner)

    def used(self, owner: str, keys: Sequence[bytes]) -> None:
        """The request uses this prefix, from wherever: keep it as recent as the request."""
        request = self._holds[owner]
        keys = KeyBatch.of(keys)
        self._touches.note(request, keys)
        self.index.touch(keys, self.index.lookup(keys), request.access)

    def restrict(self, owner: str, tiers: frozenset[int]) -> None:
        """From now on the request may have chunks from these secondary tiers only, or from none."""
        self._holds[owner].tiers = tiers

    # Loads

    def match(self, keys: Sequence[bytes], owner: str | None = None) -> Match:
        """How much of the chain `keys` can be had, as far as is known. Moves nothing."""
        request = self._holds.get(owner)
        self._report(request, keys)
        return self._finder.match(KeyBatch.of(keys), request)

    def places(self, keys: Sequence[bytes], owner: str | None = None) -> bytes:
        """Where each of `keys`, in any order, is: one byte each, a `Place`. Moves nothing."""
        request = self._holds.get(owner)
        self._report(request, keys)
        return bytes(self._finder.find(KeyBatch.of(keys), request).places)

    def ask(self, owner: str, keys: Sequence[bytes]) -> None:
        """Ask the tiers for those of `keys` whose place is UNKNOWN. Nothing while answers are
        out."""
        self._steps += self._questions.ask(owner, KeyBatch.of(keys))

    def is_asking(self, owner: str) -> bool:
        """Whether answers are out that are still worth waiting for."""
        request = self._holds[owner]
        return request.asks_out > 0 and not self._holds.is_late(request)

    @property
    def room_limit(self) -> int:
        """The most chunks that holds can ever pin."""
        return self.budget.limit

    def room_for(self, keys: Sequence[bytes], owner: str) -> int:
        """How many leading `keys` a `hold` could pin right now."""
        _, slots = self._within_reach(owner, KeyBatch.of(keys))
        return self.budget.fitting(slots)

    def hold(self, owner: str, keys: Sequence[bytes]) -> bool:
        """Pin what of `keys` is in the host tier and promote the rest, as one unit, up to the first
        that cannot be had, cut to what the budget and the tier have room for. False: others hold
        the room for now, ask again; never after the request's deadline, when it is cut to what
        there is. The order of `keys` is the caller's: what is lost later cuts it there."""
        request = self._holds[owner]
        if request.is_holding:
            raise AssertionError(f"{owner} holds a prefix already")
        self._holds.start_clock(request)
        keys = KeyBatch.of(keys)
        reach, slots = self._within_reach(owner, keys)
        fit = self.budget.fitting(slots)
        if fit < reach:
            best = min(reach, self.budget.limit)
            if fit < best and not self._holds.is_late(request) and self.may_make_room:
                return False
            self.counters.add("loads_cut")
        held = keys if fit == len(keys) else KeyBatch(keys[:fit])
        self._hold_prefix(owner, request, held, slots[:fit])
        return True

    def hold_ready(self, owner: str, keys: Sequence[bytes]) -> int:
        """Pin the leading `keys` that are in the host tier, for a copy that starts now: how many.
        Such holds are short, so the budget does not bound them."""
        keys = KeyBatch.of(keys)
        request, found = self._holds[owner], self._finder.in_host(keys)
        end, slots = found.host, found.slots
        self._holds.pin(slots[:end])
        self._holds.begin(owner, keys if end == len(keys) else keys[:end], slots[:end])
        self._touches.note_all(request, keys)
        self.index.touch(keys, slots, request.access)
        return end

    def is_holding(self, owner: str) -> bool:
        request = self._holds.get(owner)
        return request is not None and request.is_holding

    def held(self, owner: str) -> int | None:
        """How many leading chunks of the hold are ready, or None while it is worth waiting.
        What is not ready at the deadline, and all behind it, is given up."""
        request = self._holds[owner]
        if self._holds.is_waiting(owner):
            if not self._holds.is_late(request):
                return None
            waited_for = self._holds.waited_for(owner)
            self._promotions.give_up(request.slots[waited_for].tolist())
            self._holds.cut(owner, int(waited_for.argmax()))
        return len(request.slots)

    def claim(self, owner: str) -> list[int]:
        """The slots of the hold, in prefix order, to be copied from: pinned, whatever happens,
        until `release`, which must not be called before the copies have ended."""
        request = self._holds[owner]
        if not request.is_holding or self._holds.is_waiting(owner):
            raise AssertionError(f"{owner} has nothing ready to claim")
        request.is_claimed = True
        self.counters.add("chunks_loaded", len(request.slots))
        slots: list[int] = request.slots.tolist()
        return slots

    def count_lookup(self, owner: str, in_host: int, in_tiers: int, missed: int) -> None:
        """Count what a request that asked for so many chunks found; only the first time."""
        request = self._holds[owner]
        if request.is_counted:
            return
        request.is_counted = True
        self.counters.add("chunks_asked", in_host + in_tiers + missed)
        self.counters.add("chunks_hit_host", in_host)
        self.counters.add("chunks_hit_tier", in_tiers)
        self.counters.add("chunks_missed", missed)

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
        `keep_unwritten`: nor by giving up what waits to be written to a tier. What the admission
        policy does not want is skipped, unless a peer will come for it."""
        request, keys = self._holds[owner], KeyBatch.of(keys)
        self._report(request, keys)
        self._touches.note(request, keys)
        rest = KeyBatch(keys[start:]) if start else keys
        found = self.index.lookup(rest)
        is_fresh = found == NOWHERE
        if not start and not is_fresh.all():
            # The request uses all of its chain: no child may be kept longer than its parent.
            self.index.touch(keys, found, request.access)
        wanted = len(rest) if request.is_promised else self._admission.admits(rest)
        if wanted < len(rest):
            self.counters.add("stores_skipped", int(is_fresh[wanted:].sum()))
            is_fresh[wanted:] = False
        fresh = select(rest, is_fresh)
        spared: Sequence[bytes] = ()
        if len(fresh) > self.index.slots.free:
            # All of it: what is not here yet cannot be evicted.
            chain = keys if start or len(fresh) < len(keys) else ()
            spared = self._spared(chain, keep_unwritten)
        slots = self.index.reserve(fresh, request.access, spared)
        indices: list[int] = (np.flatnonzero(is_fresh) + start).tolist()
        end = indices[len(slots)] if len(slots) < len(indices) else len(keys)
        if end < len(keys):
            self.counters.add("stores_refused")
        return Reservation(end, indices[: len(slots)], slots.tolist())

    def _spared(self, keys: Sequence[bytes], keep_unwritten: bool) -> Sequence[bytes]:
        """What a store of the chain `keys` does not give up to make room."""
        half = len(self.index.slots) // 2
        spared = keys
        if half < len(keys):
            spared = [*keys[:half], *self._cascades.nowhere_else(KeyBatch(keys[half:]))]
        if keep_unwritten and (unwritten := self._cascades.unwritten()):
            spared = [*dict.fromkeys([*spared, *unwritten])]
        return spared

    def filled(self, slots: Sequence[int]) -> None:
        """The device copies into reserved `slots` are done: readable, and on to the tiers."""
        keys, where = self.index.fill(slots)
        self.counters.add("chunks_stored", len(keys))
        self.changes += 1
        if keys:
            self._steps += self._cascades.want(keys, where)

    def unfilled(self, slots: Sequence[int]) -> None:
        """The device copies into reserved `slots` failed."""
        self._holds.lose(slots)
        self.index.fail(slots)
        self.changes += 1

    # Removal

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove `keys` from every tier."""
        slots = self.index.lookup(keys)
        self._holds.lose(slots[slots != NOWHERE])
        self.index.drop(keys)
        self.changes += 1
        self._steps += self._drops.drop(keys)

    def reset(self) -> None:
        """Forget everything: the host tier is empty, nothing is known of the others, and what
        is under way will not surface. Holds are given back, but for those that were claimed."""
        self._holds.forget()
        self.changes += 1
        self.index.clear()
        self._events.append(ChunksCleared())
        self._cascades.clear()
        self._touches.clear()
        for known in self._known.values():
            known.clear()

    # Steps and outcomes

    def take_steps(self) -> list[Step]:
        """What is to be done now; each is handed out once."""
        steps, self._steps = self._steps, []
        if surveys := self._surveys.due():
            self._events += began(surveys)
            steps += surveys
        return steps + self._touches.due() if self._touches else steps

    def take_events(self) -> list[Event]:
        """What became readable or gone since the last call, in the order in which it did."""
        events = self._events[:]
        self._events.clear()
        return events

    @property
    def steps_out(self) -> int:
        """Steps that move or remove chunks, or that a request waits for, whose final outcome has
        not come back."""
        books = (self._questions, self._promotions, self._cascades, self._drops)
        return sum(book.steps_out for book in books)

    @property
    def writes_under_way(self) -> int:
        """Chunks offered to tiers that wait or are being written, counted once for each tier."""
        return self._cascades.under_way

    @property
    def is_settled(self) -> bool:
        """Nothing is under way to or from the tiers, and nothing waits to be written."""
        return not self.steps_out and not self._cascades.waiting

    @property
    def needs_turns(self) -> bool:
        """Whether chunks wait for room among the writes, and `apply` will soon let them go."""
        return self._cascades.needs_turns

    @property
    def writes_end(self) -> bool:
        """Whether chunks are under way to the tiers, and `apply` will soon hear of them."""
        return self._cascades.writes_end

    @property
    def may_make_room(self) -> bool:
        """Whether a slot that cannot be evicted now will be, without a new request's doing."""
        slots = self.index.slots
        is_busy = slots.free + slots.evictable < len(slots)
        return is_busy or not self.is_settled

    def seconds_left(self, owner: str) -> float:
        """Until what the request waits for is given up."""
        return self._holds.seconds_left(self._holds[owner])

    def apply(self, news: Iterable[News]) -> None:
        """Take in what became of steps, and what else the tiers say. Outcomes of unknown steps are
        ignored."""
        for each in news:
            if isinstance(each, Outcome):
                self._settle(each)
            elif isinstance(each, Found):
                self._known[each.tier].add(each.keys)
                self._events.append(ChunksStored(each.tier, each.keys))
            else:
                self._known[each.tier].discard(each.keys)
                self._events.append(ChunksRemoved(each.tier, each.keys))
            self.changes += 1

    def _settle(self, outcome: Outcome) -> None:
        if self._cascades.is_mine(outcome.id):
            stored, steps = self._cascades.settle(outcome)
            self._steps += steps
            if stored is not None:
                self._events.append(stored)
        elif self._promotions.is_mine(outcome.id):
            self._events += self._promotions.settle(outcome)
        elif self._questions.is_mine(outcome.id):
            self._questions.settle(outcome)
        elif self._surveys.is_mine(outcome.id):
            self._events.append(self._surveys.settle(outcome))
        elif self.peers.is_mine(outcome.id):
            self.peers.settle(outcome)
        elif self._drops.is_mine(outcome.id):
            self._events += self._drops.settle(outcome)

    def _report(self, request: Request | None, keys: Sequence[bytes]) -> None:
        """Tell the admission policy of what the request has not asked for before."""
        if request is not None and not isinstance(self._admission, AdmitAll):
            fresh = [key for key in keys if key not in request.reported]
            request.reported.update(fresh)
            self._admission.seen(fresh)

    def _within_reach(self, owner: str, keys: KeyBatch) -> tuple[int, SlotArray]:
        """How many leading `keys` can be had, and of those that there is still time for, the slots
        that they are in."""
        request = self._holds[owner]
        found = self._finder.find(keys, request)
        end = found.host if self._holds.is_late(request) else found.reach
        return found.reach, found.slots[:end]

    def _hold_prefix(self, owner: str, request: Request, keys: KeyBatch, slots: SlotArray) -> None:
        """Pin the resident part first, so that making room cannot evict it, and touch it first,
        so that what is promoted, its tail for the most part, goes before it."""
        is_here = slots != NOWHERE
        self._holds.pin(slots[is_here])
        self.index.touch(keys, slots, request.access)
        missing = select(keys, ~is_here)
        taken = self.index.reserve(missing, request.access)
        self._holds.pin(taken)
        slots[~is_here] = taken
        self._holds.begin(owner, keys, slots)
        self._touches.note_all(request, keys)
        left = self._holds.seconds_left(request)
        for tier, wanted, into in self._finder.sources(missing, taken, request):
            peer = request.peer_at(tier)
            self._steps.append(self._promotions.start(tier, wanted, into, left, peer))

    def _step_id(self) -> int:
        self._ids += 1
        return self._ids

    def __repr__(self) -> str:
        return (
            f"<Residency {self.index!r}, {self.budget!r}, {len(self._holds)} requests, "
            f"{self.steps_out} steps out>"
        )
