"""The core under random requests, answers in random order and random failure, in a tiny tier.

After each step: slots add up, pins are what the holds and writes under way say, a hold is whole.
At the end everything is answered and closed, and nothing is left pinned or filling.
"""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiering.policy.lru import LruPolicy
from tiering.residency.core import Residency
from tiering.residency.plan import Cascade, Contains, Drop, Outcome, Promote, Step, Touch, Verdict
from tiering.residency.state import SlotState
from tiering.testing.clocks import ManualClock

pytestmark = pytest.mark.slow

SLOTS, TIERS, OWNERS = 5, 2, 4
CHAINS = [[f"{name}{i}".encode() for i in range(6)] for name in "ab"]
# Two chains that part after two chunks.
CHAINS.append(CHAINS[0][:2] + [f"c{i}".encode() for i in range(4)])

owners = st.integers(0, OWNERS - 1).map(str)
chains = st.sampled_from(CHAINS)
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
        self.core = Residency(SLOTS, TIERS, LruPolicy(), self.clock, load_deadline_seconds=10.0)
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
        assert {slots.keys[s] for s in indexed} == set(index._slot_of)
        assert set(index._policy.order()) == set(index._slot_of)

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
            if event.medium == "CPU":
                is_stored = type(event).__name__ == "ChunksStored"
                assert self.mirror.isdisjoint(event.keys) == is_stored
                (self.mirror.update if is_stored else self.mirror.difference_update)(event.keys)
        assert self.mirror == set(self.core.index.ready(self.core.index._slot_of))

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
TestCore.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
