"""A mini vLLM under random requests, gates and failures, with tiny pools everywhere.

The mini vLLM checks bytes, pins and acknowledgements after every step; at the end all gates open,
every request must end, and nothing may be left of it. Models have all kinds of KV cache groups,
most often one.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gated import GATHER, SCATTER
from mini_groups import SETS, request_blocks
from mini_vllm import DEADLINE_SECONDS, MiniVllm
from tiering.residency.plan import Promote

pytestmark = pytest.mark.slow

# Three prefixes; the third parts from the first after a while.
PREFIXES = {
    "a": list(range(40)),
    "b": list(range(100, 140)),
    "c": list(range(14)) + list(range(200, 226)),
}

TOKENS_MAX = 50
FULL = ["full"] * 4

EXPECTED = [
    *("loads", "stores", "fences", "preemptions", "failed loads", "aborts while loading"),
    *("chunks_loaded", "chunks_stored", "stores_refused", "cascades_stored", "loads_cut"),
    *("promotions_succeeded", "promotions_missing", "promotions_failed", "promotions_late"),
]
DISTURBANCES = [
    *("forget", "late", "late", "wait", "deadline", "reset", "reset device", "evict"),
    *("vanish", "break reads", "break reads", "break copies", "break copies"),
]


def disturb(vllm: MiniVllm, what: str) -> None:
    if what == "late":
        for step in vllm.portal.steps:
            if isinstance(step, Promote):
                vllm.portal.late(step)
    elif what == "forget":
        vllm.forget_device()
    elif what == "vanish":
        for stored in vllm.portal.stored:
            for key in list(stored)[1::3]:
                del stored[key]
    elif what == "break reads":
        vllm.portal.reads_to_fail += 1
    elif what == "break copies":
        vllm.copiers[-1].to_fail.update([GATHER, SCATTER])
    elif what == "evict":
        for tier, stored in enumerate(vllm.portal.stored):
            vllm.portal.evict(tier, list(stored)[1::3])
    elif what == "reset device":
        if not any(vllm.pool.users):
            vllm.forget_device()
            vllm.listener.device_was_reset()
    elif what == "reset":
        vllm.reset()
    else:
        vllm.clock.advance(DEADLINE_SECONDS if what == "deadline" else 1.0)


def turn(vllm: MiniVllm, chance: random.Random, number: int) -> None:
    """Anything that may happen between two steps, the likely more often; then a step."""
    requests = vllm.running + vllm.waiting
    if chance.random() < 0.3 and len(requests) < 6:
        tokens = PREFIXES[chance.choice("abc")][: chance.randint(1, 40)]
        vllm.add(f"r{number}", tokens, chance.randint(1, 10))
    if chance.random() < 0.1:
        vllm.forget_device()
    if chance.random() < 0.04:
        disturb(vllm, chance.choice(DISTURBANCES))
    if requests and chance.random() < 0.05:
        vllm.abort(chance.choice(requests))
    for step in list(vllm.portal.steps):
        if chance.random() < 0.6:
            vllm.portal.finish(step)
    for copier in vllm.copiers:
        for direction in (GATHER, SCATTER):
            while copier.queues[direction] and chance.random() < 0.6:
                copier.run(direction)
    vllm.step()


def mini(name: str, room: float, token_budget: int, **shape: Any) -> MiniVllm:
    """A model of the groups `name`, and device blocks for `room` of the longest requests."""
    per_chunk = shape.pop("per_chunk")
    blocks = request_blocks(SETS[name], TOKENS_MAX, token_budget)
    return MiniVllm(
        groups=() if name == "full" else SETS[name],
        blocks_per_chunk=per_chunk,
        device_blocks=int(blocks * room),
        token_budget=token_budget,
        **shape,
    )


def test_long_runs_with_all_that_can_happen() -> None:
    seen: Counter[str] = Counter()
    for seed, name in enumerate([*FULL[:2], *SETS]):
        chance = random.Random(seed)
        vllm = mini(
            name,
            room=chance.choice([1, 1.4, 2.4]),
            token_budget=chance.choice([5, 16, 64]),
            per_chunk=chance.choice([1, 2, 3]),
            ranks=1 + seed % 2,
            replicas=1 + (seed % 4 == 3),
            slots=chance.choice([4, 9, 16, 24]),
            tiers=chance.choice([1, 2]),
        )
        for number in range(220):
            turn(vllm, chance, number)
        vllm.run()
        seen.update(vllm.core.counters.snapshot())
        seen.update(vllm.seen)
    rare = {what: seen[what] for what in EXPECTED if seen[what] < 3}
    assert not rare, f"hardly tried: {rare}"


class Engine(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from([*FULL * 2, *SETS]),
        room=st.sampled_from([1, 1.4, 2.4]),
        token_budget=st.sampled_from([5, 16, 64]),
        per_chunk=st.sampled_from([1, 1, 2, 3]),
        ranks=st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2)]),
        slots=st.sampled_from([2, 5, 9, 16]),
        tiers=st.sampled_from([0, 1, 1, 2]),
        prompt_only=st.sampled_from([False, False, True]),
    )
    def start(self, ranks: tuple[int, int], **shape: Any) -> None:
        self.vllm = mini(**shape, ranks=ranks[0], replicas=ranks[1])
        self.count = 0

    @rule(
        prefix=st.sampled_from(sorted(PREFIXES)),
        tokens=st.integers(1, 40) | st.integers(25, 40),
        outputs=st.integers(1, 10),
        is_forgotten=st.sampled_from([True, True, False]),
    )
    def add(self, prefix: str, tokens: int, outputs: int, is_forgotten: bool) -> None:
        if len(self.vllm.waiting) < 4:
            self.count += 1
            self.vllm.add(f"r{self.count}", PREFIXES[prefix][:tokens], outputs)
        if is_forgotten:
            self.vllm.forget_device()

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.vllm.step()

    @rule(count=st.integers(1, 6))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.vllm.release()
            self.vllm.step()

    @rule(ends=st.sampled_from([GATHER, SCATTER, "tiers"]))
    def go_on_in_part(self, ends: str) -> None:
        self.vllm.step()
        if ends == "tiers":
            self.vllm.portal.finish_all()
        else:
            self.vllm.copiers[-1].run_all(ends)
        self.vllm.step()

    @precondition(lambda self: self.vllm.running or self.vllm.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        requests = self.vllm.running + self.vllm.waiting
        self.vllm.abort(requests[data.draw(st.integers(0, len(requests) - 1))])

    @precondition(lambda self: self.vllm.portal.steps)
    @rule(data=st.data(), fails=st.sampled_from([0, 0, 1, 2]))
    def answer(self, data: st.DataObject, fails: int) -> None:
        steps = self.vllm.portal.steps
        step = steps[data.draw(st.integers(0, len(steps) - 1))]
        failing = set(data.draw(st.permutations(range(len(step.keys))))[:fails]) if fails else ()
        self.vllm.portal.finish(step, failing)

    @rule(
        rank=st.integers(0, 1),
        direction=st.sampled_from([GATHER, SCATTER]),
        fails=st.booleans(),
    )
    def copy(self, rank: int, direction: str, fails: bool) -> None:
        copier = self.vllm.copiers[rank % len(self.vllm.copiers)]
        if copier.queues[direction]:
            copier.to_fail[direction] = int(fails)
            copier.run(direction)

    @rule(what=st.sampled_from(DISTURBANCES))
    def disturb(self, what: str) -> None:
        disturb(self.vllm, what)

    def teardown(self) -> None:
        if hasattr(self, "vllm"):
            self.vllm.run()


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
