"""The core under random requests, answers in random order and random failure, in a tiny tier.

After each step: slots add up, pins are what the holds and writes under way say, a hold is whole,
what is counted as it changes is what counting anew finds. At the end everything is answered and
closed, nothing is left pinned or filling, and what became of chunks adds up to what was begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from portable import without_native
from tiering.events import HOST, ChunksRemoved, ChunksStored
from tiering.keys import chunk_key
from tiering.policy.lru import LruPolicy
from tiering.residency.answers import Place
from tiering.residency.core import Residency
from tiering.residency.plan import Cascade, Contains, Drop, Outcome, Promote, Step, Touch, Verdict
from tiering.residency.state import PinKind, SlotState
from tiering.testing.clocks import ManualClock

pytestmark = pytest.mark.slow

SLOTS, TIERS, OWNERS = 5, 3, 4
PEERS = 1
"""The tier that is of peers, between two that hold chunks by themselves."""


def chain_of(name: str, count: int, group: int = 0) -> list[bytes]:
    return [chunk_key(f"{name}{i}".encode(), group) for i in range(count)]


# Two chains that part after two chunks, and one of another KV cache group.
CHAINS = [chain_of("a", 6), chain_of("a", 2) + chain_of("c", 4), chain_of("b", 6, group=1)]

owners = st.integers(0, OWNERS - 1).map(str)
chains = st.sampled_from(CHAINS)


@st.composite
def mixtures(draw: st.DrawFn) -> list[bytes]:
    """A prefix in each of two groups, one after the other or in turns."""
    parts = [draw(st.sampled_from(CHAINS[:2])), CHAINS[2]]
    parts = [part[: draw(st.integers(0, len(part)))] for part in parts]
    if draw(st.booleans()):
        return [key for pair in zip_longest(*parts) for key in pair if key is not None]
    return parts[0] + parts[1]


VERDICTS: dict[type[Step], list[Verdict]] = {
    Contains: [Verdict.HIT, Verdict.HIT, Verdict.MISS, Verdict.FAILED, Verdict.LATE],
    Promote: [Verdict.HIT, Verdict.HIT, Verdict.MISS, Verdict.DAMAGED, Verdict.FAILED],
    Cascade: [Verdict.STORED, Verdict.STORED, Verdict.ALREADY_THERE, Verdict.FULL, Verdict.FAILED],
    Drop: [Verdict.DELETED, Verdict.MISS, Verdict.FAILED],
}


def is_part_in_order(keys: Sequence[bytes], chain: Sequence[bytes]) -> bool:
    rest = iter(chain)
    return all(key in rest for key in keys)


class Core(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.core = Residency(SLOTS, TIERS, LruPolicy(SLOTS), self.clock, 10.0, peers=[PEERS])
        self.open: set[str] = set()
        self.holds: dict[str, list[bytes]] = {}
        self.claims: dict[str, list[tuple[int, bytes]]] = {}
        self.stores: list[list[int]] = []
        self.steps: list[Step] = []
        self.beyond_budget: set[str] = set()

    def collect(self) -> None:
        for step in self.core.take_steps():
            if isinstance(step, Touch):
                # A prefix as some request used it, in its order, and nothing of it on its way.
                assert any(is_part_in_order(step.keys, chain) for chain in CHAINS)
                writing = {key for s in self.steps if isinstance(s, Cascade) for key in s.keys}
                assert not writing.intersection(step.keys)
            else:
                assert step.tier != PEERS or (isinstance(step, Contains | Promote) and step.peer)
                self.steps.append(step)

    def begin(self, owner: str) -> None:
        self.core.open(owner)
        self.open.add(owner)

    @rule(owner=owners, keys=chains, start=st.integers(0, 5))
    def store(self, owner: str, keys: list[bytes], start: int) -> None:
        self.begin(owner)
        reservation = self.core.reserve(owner, keys, start)
        assert start <= reservation.end <= len(keys)
        assert len(reservation.slots) == len(reservation.indices)
        self.stores.append(reservation.slots)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), ok=st.booleans())
    def copied(self, data: st.DataObject, ok: bool) -> None:
        slots = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        (self.core.filled if ok else self.core.unfilled)(slots)
        self.collect()

    @rule(owner=owners, keys=chains)
    def look(self, owner: str, keys: list[bytes]) -> None:
        self.begin(owner)
        if self.core.is_holding(owner):
            return
        match = self.core.match(keys, owner)
        assert 0 <= match.host <= match.reach <= len(keys)
        if match.is_open:
            self.core.ask(owner, keys)
        elif match.reach and self.core.hold(owner, keys):
            self.holds[owner] = keys
        self.collect()

    @rule(owner=owners, keys=mixtures())
    def hold_some(self, owner: str, keys: list[bytes]) -> None:
        """Keys of several chains, as several KV cache groups have."""
        self.begin(owner)
        if self.core.is_holding(owner):
            return
        places = self.core.places(keys, owner)
        assert list(places) == [self.place_of(owner, key) for key in keys]
        self.core.ask(owner, keys)
        reachable = [key for key, place in zip(keys, places, strict=True) if place >= Place.KNOWN]
        room = self.core.room_for(reachable, owner)
        assert room <= self.core.room_limit
        if self.core.hold(owner, reachable):
            self.holds[owner] = reachable
            assert len(self.core._holds[owner].slots) == room
        self.collect()

    def place_of(self, owner: str, key: bytes) -> Place:
        """The long way round."""
        index, request = self.core.index, self.core._holds[owner]
        if key in set(index.keys()):
            state = index.slots.states[index.lookup([key])[0]]
            return Place.READY if state == SlotState.READY else Place.FILLING
        place = Place.ABSENT
        for tier in range(TIERS):
            known = self.core._finder.known(tier, request)
            if known is None:
                assert tier == PEERS
                assert not request.peers
                continue
            if request.tiers is not None and tier not in request.tiers:
                continue
            if key not in request.absent[tier]:
                if known.holds([key])[0]:
                    return Place.KNOWN
                if not self.core._holds.is_late(request):
                    place = Place.UNKNOWN
        return place

    @rule(owner=owners, tiers=st.frozensets(st.integers(0, TIERS - 1)))
    def restrict(self, owner: str, tiers: frozenset[int]) -> None:
        self.begin(owner)
        self.core.restrict(owner, tiers)

    @rule(owner=owners, peer=st.sampled_from([b"p", b"q"]), has_all=st.booleans())
    def name_peer(self, owner: str, peer: bytes, has_all: bool) -> None:
        self.begin(owner)
        self.core.peers.name(owner, PEERS, peer, has_all=has_all)

    @rule(owner=owners, keys=chains)
    def copy_at_once(self, owner: str, keys: list[bytes]) -> None:
        self.begin(owner)
        if not self.core.is_holding(owner):
            ready = self.core.match(keys, owner).host
            assert self.core.hold_ready(owner, keys) == ready
            self.beyond_budget.add(owner)
            slots = self.core.claim(owner)
            self.claims[owner] = list(zip(slots, keys[:ready], strict=True))

    @rule(owner=owners)
    def claim(self, owner: str) -> None:
        if not self.core.is_holding(owner) or owner in self.claims:
            return
        ready = self.core.held(owner)
        if ready is not None:
            slots = self.core.claim(owner)
            assert len(slots) == ready
            keys = self.holds[owner][:ready]
            self.claims[owner] = list(zip(slots, keys, strict=True))

    @rule(owner=owners)
    def close(self, owner: str) -> None:
        self.core.close(owner)
        self.open.discard(owner)
        self.claims.pop(owner, None)
        self.beyond_budget.discard(owner)
        self.collect()

    @rule(keys=chains, count=st.integers(1, 3))
    def drop(self, keys: list[bytes], count: int) -> None:
        self.core.drop(keys[:count])
        self.collect()

    @rule()
    def reset(self) -> None:
        self.core.reset()

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        step = self.steps.pop(data.draw(st.integers(0, len(self.steps) - 1)))
        if isinstance(step, Promote) and data.draw(st.booleans()):
            self.core.apply([Outcome(step.id, (Verdict.LATE,) * len(step.keys), final=False)])
        verdicts = tuple(data.draw(st.sampled_from(VERDICTS[type(step)])) for _ in step.keys)
        self.core.apply([Outcome(step.id, verdicts)])
        self.core.apply([Outcome(step.id, verdicts)])  # A second one is ignored.
        self.collect()

    @invariant()
    def slots_add_up(self) -> None:
        slots, index = self.core.index.slots, self.core.index
        census = slots.census()
        assert sum(census.values()) == SLOTS
        assert census[SlotState.FREE] == slots.free
        keyed = [s for s in range(SLOTS) if slots.keys[s] is not None]
        assert len(keyed) == SLOTS - slots.free
        indexed = [s for s in keyed if slots.states[s] in (SlotState.FILLING, SlotState.READY)]
        assert len(index) == len(indexed)
        assert {slots.keys[s] for s in indexed} == set(index.keys())
        assert set(index._policy.order()) == set(index.keys())
        states = slots.states.tolist()
        assert census == {state: states.count(state) for state in SlotState}
        assert slots.evictable == np.count_nonzero(slots.may_go(np.arange(SLOTS)))

    @invariant()
    def pins_are_what_is_held_and_written(self) -> None:
        slots = self.core.index.slots
        loads = np.zeros(SLOTS, dtype=int)
        for request in map(self.core._holds.get, self.core._holds.owners()):
            for slot in request.slots:
                loads[slot] += 1
        writes = np.zeros(SLOTS, dtype=int)
        for step in self.steps:
            if isinstance(step, Cascade):
                for slot in step.slots:
                    writes[slot] += 1
        assert loads.tolist() == slots.load_pins.tolist()
        assert writes.tolist() == slots.write_pins.tolist()
        assert (slots.load_pins[slots.states == SlotState.FREE] == 0).all()
        assert slots.held(PinKind.LOAD) == np.count_nonzero(loads)
        assert slots.held(PinKind.WRITE) == np.count_nonzero(writes)
        assert np.count_nonzero(writes) <= self.core.budget.limit

    @invariant()
    def claimed_slots_keep_their_bytes(self) -> None:
        slots = self.core.index.slots
        for pairs in self.claims.values():
            for slot, key in pairs:
                assert slots.keys[slot] == key
                assert slots.states[slot] in (SlotState.READY, SlotState.DOOMED)

    @invariant()
    def loads_leave_the_reserve(self) -> None:
        budgeted = {
            slot
            for owner in self.open - self.beyond_budget
            for slot in self.core._holds[owner].slots
        }
        assert len(budgeted) <= self.core.budget.limit

    @invariant()
    def events_mirror_the_truth(self) -> None:
        self.mirror = getattr(self, "mirror", set())
        for event in self.core.take_events():
            if isinstance(event, ChunksStored | ChunksRemoved) and event.tier == HOST:
                is_stored = isinstance(event, ChunksStored)
                assert self.mirror.isdisjoint(event.keys) == is_stored
                (self.mirror.update if is_stored else self.mirror.difference_update)(event.keys)
        assert self.mirror == set(self.core.index.ready(self.core.index.keys()))

    @invariant()
    def outcomes_add_up(self) -> None:
        told = self.core.counters
        promoting = {s for step in self.steps if isinstance(step, Promote) for s in step.slots}
        ends = ("succeeded", "missing", "damaged", "failed", "late")
        ended = sum(told[f"promotions_{end}"] for end in ends)
        late = self.core._promotions._late
        assert told["promotions_started"] == ended + len(promoting - late)
        ends = ("stored", "already_there", "full", "refused", "failed", "skipped")
        ended = sum(told[f"cascades_{end}"] for end in ends)
        assert told["cascades_offered"] == ended + self.core.writes_under_way

    def teardown(self) -> None:
        for slots in self.stores:
            self.core.filled(slots)
        for owner in list(self.open):
            self.core.close(owner)
        self.collect()
        while self.steps:
            step = self.steps.pop()
            self.core.apply([Outcome(step.id, (VERDICTS[type(step)][0],) * len(step.keys))])
            self.collect()
        slots = self.core.index.slots
        assert not slots.load_pins.any()
        assert not slots.write_pins.any()
        assert {SlotState(s) for s in slots.states.tolist()} <= {SlotState.FREE, SlotState.READY}
        assert self.core.steps_out == 0
        assert not self.core._holds.slots_waited_for


TestCore = Core.TestCase


class TestPortableCore(Core.TestCase):  # type: ignore[misc,name-defined]
    """The same without native code."""

    def setUp(self) -> None:
        self.patch = pytest.MonkeyPatch()
        without_native(self.patch)
        super().setUp()

    def tearDown(self) -> None:
        super().tearDown()
        self.patch.undo()


TestCore.settings = TestPortableCore.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None
)
