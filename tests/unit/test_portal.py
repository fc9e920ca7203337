"""The two portals: steps in, outcomes out, whatever the loop behind them is doing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from tiering.engine import Engine
from tiering.errors import ClosedError, TierError
from tiering.events import NoEvents
from tiering.policy.lru import LruPolicy
from tiering.portal import LoopPortal, Portal, ThreadPortal
from tiering.residency.core import Residency
from tiering.residency.plan import Cascade, Contains, Drop, Outcome, Promote, Step, Verdict
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import CHUNK_BYTES, key_number, payload_of
from tiering.testing.memory import MemoryTier, checked
from tiering.tiers.base import ReadOutcome

A, B = key_number(1), key_number(2)
NEVER = 60.0
SLOTS = 4


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.001)


async def turns() -> None:
    """Let everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


class Rows:
    def __init__(self) -> None:
        self.memory = np.zeros((SLOTS, CHUNK_BYTES), np.uint8)

    def __call__(self, slot: int) -> memoryview:
        return memoryview(self.memory[slot])

    def fill(self, slot: int, key: bytes) -> None:
        self.memory[slot] = np.frombuffer(payload_of(key), np.uint8)


@contextmanager
def started(*tiers: MemoryTier) -> Iterator[tuple[ThreadPortal, Rows]]:
    rows = Rows()
    portal = ThreadPortal(tiers, rows)
    portal.start()
    try:
        yield portal, rows
    finally:
        portal.close(1.0)


def drained(portal: Portal, count: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    until(lambda: len(outcomes.__iadd__(portal.drain())) >= count)
    return outcomes


# A loop in a thread


def test_steps_go_in_and_outcomes_come_out() -> None:
    tier = MemoryTier()
    with started(tier) as (portal, rows):
        rows.fill(0, A)
        portal.submit([Cascade(1, 0, (A,), (0,))])
        assert drained(portal, 1) == [Outcome(1, (Verdict.STORED,))]
        portal.submit([Contains(2, 0, (A, B), NEVER), Promote(3, 0, (A,), (2,), NEVER)])
        outcomes = drained(portal, 2)
        assert {o.id for o in outcomes} == {2, 3}
        assert bytes(rows(2)) == payload_of(A)
        assert portal.drain() == []


def test_however_many_steps_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(MemoryTier()) as (portal, _):
        loop = portal._loop
        assert loop is not None
        wake, calls, may_go_on = loop.call_soon_threadsafe, [], threading.Event()
        wake(lambda: may_go_on.wait(60))  # Busy, so that nothing is taken meanwhile.
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda f: (calls.append(f), wake(f)))
        for number in range(50):
            portal.submit([Contains(2 * number, 0, (A,), NEVER), Drop(2 * number + 1, 0, (B,))])
        portal.submit([])
        assert len(calls) == 1
        may_go_on.set()
        assert len(drained(portal, 100)) == 100
        portal.submit([Drop(100, 0, (B,))])
        assert len(calls) == 2
        assert len(drained(portal, 1)) == 1


@pytest.mark.slow
def test_no_step_is_lost_while_the_loop_is_taking_others() -> None:
    with started(MemoryTier()) as (portal, _):
        outcomes: list[Outcome] = []
        for number in range(2000):
            portal.submit([Contains(number, 0, (A,), NEVER)])
            outcomes += portal.drain()
        outcomes += drained(portal, 2000 - len(outcomes))
    assert sorted(outcome.id for outcome in outcomes) == list(range(2000))


def test_start_raises_what_a_tier_raises_when_it_is_opened() -> None:
    good, bad = MemoryTier(name="good"), MemoryTier(name="bad")
    bad.errors["open"] = TierError("bad", None, "no such place")
    portal = ThreadPortal([good, bad], Rows())
    with pytest.raises(TierError, match="no such place"):
        portal.start()
    assert not good.is_open
    assert portal.close(1.0) is True
    with pytest.raises(ClosedError):
        portal.submit([Drop(1, 0, (A,))])


def test_close_lets_what_was_submitted_end() -> None:
    tier = MemoryTier()
    with started(tier) as (portal, rows):
        rows.fill(0, A)
        portal.submit([Cascade(1, 0, (A,), (0,))])
        assert portal.close(NEVER) is True
        assert portal.drain() == [Outcome(1, (Verdict.STORED,))]
        assert tier.chunks == {A: checked(payload_of(A))}
        assert not tier.is_open
        assert portal.close(NEVER) is True
        with pytest.raises(ClosedError, match="not running"):
            portal.submit([Drop(2, 0, (A,))])


def test_close_cuts_off_what_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    tier = MemoryTier()
    tier.hold("read")
    with started(tier) as (portal, _):
        portal.submit([Promote(1, 0, (A,), (0,), NEVER), Promote(2, 0, (B,), (1,), NEVER)])
        until(lambda: len(tier.calls) == 3)
        until(lambda: portal.close(0.01))  # which gives its thread a second to end
        outcomes = {outcome.id: outcome for outcome in portal.drain()}
        assert outcomes == {n: Outcome(n, (Verdict.FAILED,)) for n in (1, 2)}
    assert "2 transfers were cut off" in caplog.text


class HungTier(MemoryTier):
    """Holds up the whole loop, as a hung mount under a careless backend does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_hung = threading.Event()
        self.let = threading.Event()
        self.has_gone_on = False

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        self.is_hung.set()
        self.let.wait(60)
        self.has_gone_on = True
        return await super().contains(keys)


@pytest.mark.slow
def test_close_leaves_a_hung_loop_behind_within_its_bound() -> None:
    tier = HungTier()
    with started(tier) as (portal, _):
        portal.submit([Contains(1, 0, (A,), NEVER)])
        assert tier.is_hung.wait(60)
        assert portal.close(0.0) is False
        assert not tier.has_gone_on, "it was not waited for"
        tier.let.set()
        assert portal.close(NEVER) is True


def test_steps_handed_in_while_the_loop_was_ending_fail() -> None:
    with started(MemoryTier()) as (portal, _):
        assert portal.close(NEVER) is True
        portal._steps.append(Drop(1, 0, (A, B)))  # As if its thread had died a moment later.
        assert portal.drain() == [Outcome(1, (Verdict.FAILED, Verdict.FAILED))]
        assert portal.drain() == []


class BrokenTier(MemoryTier):
    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        raise KeyError("a bug")


def test_when_the_loop_dies_everything_fails_at_once_and_nothing_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = BrokenTier()
    with started(tier) as (portal, _):
        core = Residency(SLOTS, 1, LruPolicy(SLOTS), ManualClock(), 10.0)
        engine = Engine(core, portal, NoEvents())
        tier.hold("read")
        tier.hold("write")
        tier.chunks[B] = checked(payload_of(B))
        core.open("s")
        core.filled(core.reserve("s", [key_number(3)], 0).slots)
        core._known[0].add([B])
        assert core.hold("s", [B])
        engine.pump()
        until(lambda: len(tier.calls) == 3)
        portal.submit([Contains(1_000_000, 0, (A,), NEVER)])
        until(lambda: not portal._thread.is_alive())
        assert "secondary tiers are out of use" in caplog.text
        engine.pump()  # What was under way has failed, and nothing of it is pinned any more.
        assert core.held("s") == 0
        assert core.is_settled
        assert not core.index.slots.write_pins.any()
        core.open("r")
        core.ask("r", [A, B])
        engine.pump()
        assert not core.is_asking("r")
        assert core.match([A, B], "r").reach == 0
        reservation = core.reserve("r", [A], 0)
        core.filled(reservation.slots)
        engine.pump()
        core.drop([A])
        engine.pump()
        assert core.is_settled
        counters = core.counters.snapshot()
        assert (counters["cascades_failed"], counters["drops_failed"]) == (2, 1)
        assert portal.close(1.0) is True


# The caller's own loop


async def test_on_the_callers_loop_many_outcomes_are_one_arrival() -> None:
    tier, rows, arrivals = MemoryTier(), Rows(), []
    async with LoopPortal([tier], rows, lambda: arrivals.append(len(portal._news))) as portal:
        rows.fill(0, A)
        tier.hold("contains")
        portal.submit([Contains(number, 0, (A,), NEVER) for number in range(20)])
        await turns()
        assert len(tier.calls) == 21
        tier.let_go("contains")
        await turns()
        assert arrivals == [20]
        assert [o.id for o in portal.drain()] == list(range(20))
        portal.submit([Cascade(20, 0, (A,), (0,))])
        assert await portal.finish(NEVER) == 0
        assert portal.drain() == [Outcome(20, (Verdict.STORED,))]
    with pytest.raises(ClosedError):
        portal.submit([Drop(21, 0, (A,))])


async def test_on_the_callers_loop_what_does_not_end_is_cut_off() -> None:
    tier = MemoryTier()
    tier.hold("read")
    async with LoopPortal([tier], Rows(), lambda: None) as portal:
        portal.submit([Promote(1, 0, (A,), (0,), NEVER)])
        await asyncio.sleep(0)
        assert await portal.finish(0.01) == 1
    assert portal.drain() == [Outcome(1, (Verdict.FAILED,))]


# Only plain data crosses


class Wire:
    """Sends everything through bytes, as to another process."""

    restarts = 0

    def __init__(self, portal: Portal) -> None:
        self._portal = portal
        self._steps = msgspec.msgpack.Decoder(list[Step])
        self._outcomes = msgspec.msgpack.Decoder(list[Outcome])
        self.crossed: set[object] = set()

    def submit(self, steps: Sequence[Step]) -> None:
        sent = self._steps.decode(msgspec.msgpack.encode(list(steps)))
        assert sent == list(steps)
        self.crossed.update(map(type, sent))
        self._portal.submit(sent)

    def drain(self) -> list[Outcome]:
        outcomes = self._portal.drain()
        came = self._outcomes.decode(msgspec.msgpack.encode(outcomes))
        assert came == outcomes
        self.crossed.update(verdict for outcome in came for verdict in outcome.verdicts)
        self.crossed.update(outcome.final for outcome in came)
        return came


@pytest.mark.slow
def test_only_plain_data_crosses_the_portal() -> None:
    tier = MemoryTier()
    with started(tier) as (portal, rows):
        wire = Wire(portal)
        core = Residency(SLOTS, 1, LruPolicy(SLOTS), ManualClock(), load_deadline_seconds=1.0)
        engine = Engine(core, wire, NoEvents())

        def pump_until(condition: Callable[[], object]) -> None:
            until(lambda: (engine.pump(), condition())[1])

        core.open("save")
        reservation = core.reserve("save", [A, B], 0)
        for slot, key in zip(reservation.slots, [A, B], strict=True):
            rows.fill(slot, key)
        core.filled(reservation.slots)
        core.close("save")
        pump_until(lambda: core.is_settled)
        core.reset()
        rows.memory[:] = 0

        core.open("load")
        core.ask("load", [A, B])
        pump_until(lambda: not core.is_asking("load"))
        assert core.hold("load", [A, B])
        pump_until(lambda: core.held("load") is not None)
        slots = core.claim("load")
        assert [bytes(rows(slot)) for slot in slots] == [payload_of(A), payload_of(B)]
        core.close("load")
        core.reset()

        tier.hold("read")
        core.open("late")
        core.ask("late", [A])
        pump_until(lambda: not core.is_asking("late"))
        assert core.hold("late", [A])
        pump_until(lambda: core.held("late") == 0)
        tier.let_go("read")
        core.close("late")
        core.drop([A])
        pump_until(lambda: core.is_settled)
        assert set(tier.chunks) == {B}
    assert wire.crossed >= {Contains, Promote, Cascade, Drop, True, False}
    assert wire.crossed >= {Verdict.HIT, Verdict.STORED, Verdict.LATE, Verdict.DELETED}
