"""The simulation: its seeds find nothing, planted bugs are found, and one seed is one run.

A seed that fails is in the message: `python -m tiering.testing.simulation --seed N ...` replays it.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tiering.errors import ClosedError
from tiering.residency.plan import Outcome, Verdict
from tiering.residency.promotions import PromotionBook
from tiering.residency.state import PinKind, Slots, SlotState
from tiering.testing import memory, simulation
from tiering.testing.simloop import Deadlock, Livelock, SimClock, SimLoop, SimPool
from tiering.testing.simulation import Failure, run
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.tiers.files.bookings import Flight
from tiering.tiers.files.manifest import Manifest

STEPS = 60
SEEDS = {"memory": range(20), "files": range(10), "segments": range(12)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [(kind, s) for kind in SEEDS for s in SEEDS[kind]])
def test_a_seed_finds_nothing(kind: str, seed: int) -> None:
    report = run(seed, STEPS, kind)
    assert report.counts["calm"] >= 3
    assert report.counts["ask"] > 10


@pytest.mark.slow
def test_a_fresh_seed_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.SystemRandom()
    kind, seed = chance.choice(list(SEEDS)), chance.randrange(1 << 32)
    with capsys.disabled():
        print(f"\nsimulation: --kind {kind} --seed {seed} --steps {3 * STEPS}")
    run(seed, 3 * STEPS, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(SEEDS))
def test_one_seed_is_one_run(kind: str) -> None:
    first, again, other = run(7, STEPS, kind), run(7, STEPS, kind), run(8, STEPS, kind)
    assert first == again
    assert first.digest != other.digest


@pytest.mark.slow
def test_the_command_tells_the_seed_and_the_digest(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seed", "3", "--steps", "20", "--kind", "memory"]
    assert simulation.main(arguments) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"seed 3, 20 steps: {run(3, 20, 'memory').digest}\n")


# Planted bugs


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "checked", lambda payload: (payload, 0))


def writes_stay_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    unpin = Slots.unpin

    def forgetful(self: Slots, slots: Sequence[int], kind: PinKind) -> None:
        if kind is not PinKind.WRITE:
            unpin(self, slots, kind)

    monkeypatch.setattr(Slots, "unpin", forgetful)


def failures_count_as_success(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = PromotionBook.settle

    def trusting(self: PromotionBook, outcome: Outcome) -> Any:
        hits = (Verdict.HIT,) * len(outcome.verdicts)
        return settle(self, Outcome(outcome.id, hits, outcome.final))

    monkeypatch.setattr(PromotionBook, "settle", trusting)


def the_last_of_a_flight_is_not_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Manifest.settle

    def forgetful(self: Manifest, flight: Flight, arrived: dict[bytes, int], kept: Any) -> bool:
        return settle(self, flight, dict(list(arrived.items())[:-1]), kept)

    monkeypatch.setattr(Manifest, "settle", forgetful)


def pins_do_not_protect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "may_go", lambda self, slots: self.are(SlotState.READY, slots))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "kind", "says"),
    [
        (unchecked, "memory", "wrong bytes"),
        (writes_stay_pinned, "memory", "pinned by writes|come to rest"),
        (failures_count_as_success, "memory", "wrong bytes"),
        (pins_do_not_protect, "memory", "EVICT would free"),
        (the_last_of_a_flight_is_not_booked, "files", "not in the books"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    says: str,
) -> None:
    bug(monkeypatch)
    with pytest.raises(Failure, match=says) as found:
        run_seeds(20, kind)
    assert "seed " in str(found.value)


def run_seeds(count: int, kind: str) -> None:
    for seed in range(count):
        run(seed, STEPS, kind)


# Its parts


def in_simulation(main: Callable[[], Any], seed: int = 0) -> Any:
    with asyncio.Runner(loop_factory=lambda: SimLoop(random.Random(seed))) as runner:
        return runner.run(main())


def test_time_passes_without_waiting() -> None:
    async def main() -> float:
        clock = SimClock(asyncio.get_running_loop(), 100.0)
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(86400))
        return clock.now()

    assert in_simulation(main) == pytest.approx(86500.0)


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        in_simulation(main)


def test_turning_without_end_is_a_livelock() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await asyncio.Event().wait()

    with pytest.raises(Livelock):
        in_simulation(main)


def test_the_pool_has_every_method_of_the_real_one() -> None:
    public = {name for name in vars(IoPool) if not name.startswith("_")}
    # `call` is made of `run`.
    assert public - set(vars(SimPool)) == {"call"}
    for name in public:
        real, simulated = (inspect.signature(getattr(c, name)) for c in (IoPool, SimPool))
        assert real.parameters == simulated.parameters, name


async def opened_pool(n_threads: int = 2) -> SimPool:
    pool = SimPool("pool", n_threads, random.Random(1))
    pool.start()
    return pool


def test_the_pool_gives_results_in_order_whatever_the_order_of_work() -> None:
    done: list[int] = []

    async def main() -> list[int]:
        pool = await opened_pool()
        results: list[int] = await pool.run(Lane.READ, lambda i: done.append(i) or i, 20)
        assert await pool.run(Lane.READ, lambda i: i, 0) == []
        assert await pool.call(Lane.WRITE, lambda: "called") == "called"
        await pool.close()
        with pytest.raises(ClosedError):
            await pool.call(Lane.READ, lambda: None)
        return results

    assert in_simulation(main) == list(range(20))
    assert sorted(done) == list(range(20)) != done


def test_the_pool_withdraws_what_has_not_begun_and_waits_for_what_has() -> None:
    done: list[int] = []

    async def main() -> None:
        pool = await opened_pool()
        pool.hang()
        work = asyncio.create_task(pool.run(Lane.READ, done.append, 10))
        await asyncio.sleep(1)
        work.cancel()
        await asyncio.sleep(1)
        work.cancel()
        await asyncio.sleep(1)
        assert not work.done()
        pool.let_go()
        await asyncio.wait({work})
        assert work.cancelled()
        assert len(done) == 2
        await pool.close()

    in_simulation(main)


def test_an_error_in_the_pool_is_raised_after_the_rest_of_its_batch() -> None:
    done: list[int] = []

    def work(i: int) -> None:
        if i == 3:
            raise OSError("no")
        done.append(i)

    async def main() -> None:
        pool = await opened_pool()
        with pytest.raises(OSError, match="no"):
            await pool.run(Lane.READ, work, 8)
        await pool.close()

    in_simulation(main)
    assert len(done) == 7
