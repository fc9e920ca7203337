"""Engines that have chunks of one another, and die, stop and come back at every step of that.

`run(seed, operations)` or `python -m tiering.testing.peersimulation --seed N`. Loop, time, network
and processes are simulated; cores, shells, tiers of peers and sessions are the real ones. Whatever
happens: a byte that was loaded is its key's, each step has its outcome in time, and a stranger gets
nothing. After it: nothing is pinned, held, kept, open or remembered for who is gone, what peers are
shown is what is there, and engines that live load from one another again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from tiering.errors import ClosedError, PeerError
from tiering.peers.addresses import Address
from tiering.residency.plan import Keep
from tiering.testing.peerfaults import PeerFaults, repeating
from tiering.testing.peerrest import left_over
from tiering.testing.peerworld import (
    LIMITS,
    LOAD_DEADLINE_SECONDS,
    LOAD_SECONDS_MAX,
    PATIENCE,
    PeerEngine,
    Terms,
    key_of,
)
from tiering.testing.simnet import SimNet
from tiering.testing.simprocess import ProcessLoop
from tiering.testing.simrows import SimRows
from tiering.testing.simworld import expect
from tiering.tiers.peers.source import PeerSource

OPERATIONS = 32
CHAINS = 6
CHAIN_CHUNKS_MAX = 6
REQUESTS_MAX = 12
CALM_SECONDS_MAX = LOAD_SECONDS_MAX + 2 * (PATIENCE.pin_seconds_max + LIMITS.unbound_store_seconds)
AGAIN_SECONDS_MAX = 200.0
"""Longer than who refused us is left alone for."""
RUN_SECONDS_MAX = 10_000.0
"""Of the loop's time, for a whole run: one that hangs is a failure."""
TRACE_LINES_KEPT = 60
Work = Callable[[], Coroutine[Any, Any, object]]
PLACES = [Address("10.0.0.1", 5700), Address("10.0.0.2", 5700), Address("10.0.0.2", 5701)]


class Failure(AssertionError):
    """What the simulation found; the message tells how to see it again."""


@dataclass(frozen=True, slots=True)
class Report:
    """`digest` covers everything that happened, in order, with its time; `strikes` are the faults,
    each with the step of the protocol that it struck at."""

    seed: int
    digest: str
    seconds: float
    counts: dict[str, int]
    strikes: Counter[tuple[str, str]]


def run(seed: int, operations: int = OPERATIONS) -> Report:
    """Failure, with the seed and the last events, where something is found."""
    loop = ProcessLoop(random.Random(f"{seed} loop"))
    simulation = PeerSimulation(seed, operations, loop)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(simulation.main())
    except (Exception, asyncio.CancelledError) as error:
        raise Failure(simulation.told(error)) from error
    return simulation.report(loop.time())


class PeerSimulation:
    """One run."""

    def __init__(self, seed: int, operations: int, loop: ProcessLoop) -> None:
        self._seed = seed
        self._operations = operations
        self._loop = loop
        self._chance = random.Random(seed)
        self._net = SimNet(loop, random.Random(f"{seed} net"))
        self._rows = SimRows(self._net)
        self._faults = PeerFaults(self._net, self._rows, self._tell)
        self._terms = self._drawn_terms()
        self._engines: dict[Address, PeerEngine] = {}
        self._dead: list[PeerEngine] = []
        self._requests: dict[asyncio.Task[None], PeerEngine] = {}
        self._failures: list[BaseException] = []
        self._numbers = 0
        self._digest = hashlib.sha256()
        self._last: deque[str] = deque(maxlen=TRACE_LINES_KEPT)
        self._counts: Counter[str] = Counter()

    # What came of it

    def report(self, seconds: float) -> Report:
        digest = self._digest.hexdigest()
        return Report(self._seed, digest, seconds, dict(self._counts), self._faults.strikes)

    def told(self, error: BaseException) -> str:
        lines = "\n  ".join(self._last)
        return f"seed {self._seed}: {error!r}; the last of it:\n  {lines}"

    def _tell(self, what: str, *details: object) -> None:
        self._counts[what] += 1
        line = f"{self._loop.time():.6f} {what} {' '.join(map(str, details))}"
        self._digest.update(line.encode())
        self._last.append(line)

    # The run

    async def main(self) -> None:
        self._loop.set_exception_handler(lambda _, told: self._failures.append(_error_of(told)))
        try:
            with self._net.installed(), repeating(self._faults):
                async with asyncio.timeout(RUN_SECONDS_MAX):
                    await self._main()
        finally:
            # What is stopped would hold up the end of the loop, and hide why it ended.
            for engine in [*self._engines.values(), *self._dead]:
                engine.process.let_go()

    async def _main(self) -> None:
        for terms in self._terms.values():
            await self._begin(terms)
        for _ in range(self._operations):
            await self._act()
            await asyncio.sleep(self._chance.choice((0, 0.01, 0.05, 0.2, 1.0, 3.0)))
            self._check()
        await self._calm()
        await self._works_again()
        await self._end()

    def _drawn_terms(self) -> dict[Address, Terms]:
        chance = self._chance
        is_mapped = chance.random() < 0.4
        places = PLACES[: chance.choice((2, 3, 3))]
        terms = {}
        for at in places:
            few = chance.random() < 0.2
            limits = replace(LIMITS, peers_max=1, guests_max=1) if few else LIMITS
            terms[at] = Terms(at, chance.randint(4, 14), is_mapped, limits)
        if len(places) > 2 and chance.random() < 0.5:
            at = chance.choice(places)
            terms[at] = terms[at].odd(chance)
        return terms

    async def _begin(self, terms: Terms) -> None:
        self._numbers += 1
        name = f"{terms.at} #{self._numbers}"
        chance = random.Random(f"{self._seed} engine {self._numbers}")
        engine = PeerEngine(terms, name, self._net, self._rows, chance)
        self._engines[terms.at] = engine
        with suppress(_Died):
            await _unless_dead(engine, engine.begin())
        self._tell("begin", name)

    async def _act(self) -> None:
        acts: dict[Callable[[], Coroutine[Any, Any, None]], int] = {
            self._store: 20,
            self._load: 24,
            self._prefill_and_decode: 24,
            self._drop: 2,
            self._reset: 1,
            self._arm: 22,
            self._strike: 2,
            self._begin_again: 6,
            self._restart: 2,
            self._wait: 4,
        }
        (act,) = self._chance.choices(list(acts), list(acts.values()))
        await act()
        self._count_dead()

    def _count_dead(self) -> None:
        for engine in list(self._engines.values()):
            if engine.process.is_dead:
                self._tell("dead", engine.process.name)
                self._take_out(engine)
                self._dead.append(engine)

    def _take_out(self, engine: PeerEngine) -> None:
        """Its requests go with it."""
        del self._engines[engine.terms.at]
        self._requests = {t: whose for t, whose in self._requests.items() if whose is not engine}

    # Requests

    def _engine(self) -> PeerEngine | None:
        running = [each for each in self._engines.values() if not each.process.is_stopped]
        return self._chance.choice(running) if running else None

    def _chain(self, at: Address) -> list[bytes]:
        """For the most part of those that the engine at `at` computes."""
        if self._chance.random() < 0.1:
            at = self._chance.choice(list(self._terms))
        number = 1000 * (1 + PLACES.index(at)) + self._chance.randrange(CHAINS) * CHAIN_CHUNKS_MAX
        return self._prefix(number)

    def _prefix(self, number: int) -> list[bytes]:
        return [key_of(number + at) for at in range(self._chance.randint(1, CHAIN_CHUNKS_MAX))]

    def _whom(self, is_prefiller: bool = False) -> PeerSource:
        at = self._chance.choice(list(self._terms))
        self._numbers += 1
        return PeerSource(at.host, at.port, f"r{self._numbers}", is_prefiller)

    def _request(self, engine: PeerEngine, what: str, work: Work) -> None:
        if len(self._requests) < REQUESTS_MAX:
            self._tell("ask", engine.process.name, what)
            self._requests[engine.process.start(self._carry_out(engine, what, work))] = engine

    async def _carry_out(self, engine: PeerEngine, what: str, work: Work) -> None:
        task = asyncio.current_task()
        try:
            self._tell("done", engine.process.name, what, await work())
        except (ClosedError, asyncio.CancelledError):
            self._tell("cut off", engine.process.name, what)
        except Exception as error:
            self._failures.append(error)
        finally:
            if task is not None:
                self._requests.pop(task, None)

    async def _store(self) -> None:
        if engine := self._engine():
            self._request(engine, "store", partial(engine.store, self._chain(engine.terms.at)))

    async def _load(self) -> None:
        """A few requests at a time, as there are in a batch."""
        engine = self._engine()
        for _ in range(self._chance.choice((1, 1, 2, 4))):
            whom = self._whom()
            if engine and whom.address != engine.terms.at:
                give_up = self._chance.choice((0.1, 1.0, LOAD_SECONDS_MAX, LOAD_SECONDS_MAX))
                work = partial(engine.load, self._chain(whom.address), whom, give_up)
                self._request(engine, f"load from {whom.address}", work)

    async def _prefill_and_decode(self) -> None:
        """One computes, perhaps, and keeps it for others, perhaps."""
        decoder, first = self._engine(), self._whom(is_prefiller=True)
        prefiller = self._engines.get(first.address)
        if decoder is None or decoder is prefiller:
            return
        for _ in range(self._chance.choice((1, 2, 3, 4))):
            self._numbers += 1
            whom = msgspec.structs.replace(first, kv_request_id=f"r{self._numbers}")
            keys = self._prefix(10_000 + 10 * self._numbers)
            give_up = self._chance.choice((1.0, LOAD_SECONDS_MAX, LOAD_SECONDS_MAX))
            work = partial(decoder.load, keys, whom, give_up)
            self._request(decoder, f"decode {whom.kv_request_id}", work)
            if prefiller is not None and self._chance.random() < 0.8:
                kept_for = whom.kv_request_id if self._chance.random() < 0.8 else ""
                queued = self._chance.choice((0.0, 0.0, 0.5, 1.0))
                work = partial(prefiller.store, keys, kept_for, queued)
                self._request(prefiller, f"prefill {kept_for}", work)

    async def _drop(self) -> None:
        if engine := self._engine():
            keys = self._chain(engine.terms.at)
            self._request(engine, "drop", partial(engine.drop, keys))

    async def _reset(self) -> None:
        if engine := self._engine():
            self._request(engine, "reset", engine.reset)

    async def _wait(self) -> None:
        await asyncio.sleep(self._chance.choice((1.0, 5.0, 20.0)))

    # Faults

    async def _arm(self) -> None:
        """The next times that something is said, something goes wrong."""
        for _ in range(self._chance.choice((1, 2, 3, 4))):
            self._tell("arm", self._faults.arm())

    async def _strike(self) -> None:
        engines = list(self._engines.values())
        if len(engines) > 1:
            one, other = self._chance.sample(engines, 2)
            self._faults.strike_now(one.node, other.node)

    # Ends and beginnings

    async def _begin_again(self) -> None:
        """Another engine at the address of one that is dead."""
        gone = [at for at in self._terms if at not in self._engines]
        if gone:
            at = self._chance.choice(gone)
            for dead in self._dead:
                if dead.terms.at == at:
                    self._net.forget(dead.node)
            await self._begin(self._terms[at])

    async def _restart(self) -> None:
        engine = self._engine()
        if engine is not None:
            self._tell("restart", engine.process.name)
            await self._close(engine)
            await self._begin(engine.terms)

    async def _close(self, engine: PeerEngine) -> None:
        """Its requests are cut off; it tells its peers. It may die meanwhile."""
        for task in [task for task, whose in self._requests.items() if whose is engine]:
            task.cancel()
        with suppress(_Died):
            await _unless_dead(engine, engine.end())
        if engine.process.is_dead:
            self._dead.append(engine)
        self._take_out(engine)

    async def _end(self) -> None:
        for engine in list(self._engines.values()):
            await self._close(engine)
        for engine in self._dead:
            await engine.process.bury()
        self._check()

    # What must hold

    def _check(self) -> None:
        for engine in self._engines.values():
            engine.check()
        if self._failures:
            raise self._failures[0]

    async def _calm(self) -> None:
        """The faults are over, the dead stay dead or have come back: what is left over goes."""
        self._faults.mend()
        self._count_dead()
        self._tell("calm")
        while any(at not in self._engines for at in self._terms) and self._chance.random() < 0.6:
            await self._begin_again()
        give_up = self._loop.time() + CALM_SECONDS_MAX
        while self._requests or (left := left_over(self._engines.values())):
            self._check()
            if self._loop.time() >= give_up:
                requests = [f"a request of {each}" for each in self._requests.values()]
                expect(False, "left over: " + "; ".join(requests or left))
            await asyncio.sleep(0.5)

    async def _works_again(self) -> None:
        """Whoever lives has chunks of whoever else lives; a stranger is told why not."""
        for at, engine in self._engines.items():
            for other in self._engines.values():
                if engine is not other:
                    self._numbers += 1
                    whom = PeerSource(at.host, at.port, f"r{self._numbers}")
                    work = partial(self._loads_again, engine, other, whom)
                    self._request(other, f"again from {at}", work)
                    while self._requests:
                        await asyncio.sleep(0.5)
                        self._check()

    async def _loads_again(self, has: PeerEngine, wants: PeerEngine, whom: PeerSource) -> int:
        give_up = self._loop.time() + AGAIN_SECONDS_MAX
        refusal = has.terms.refusal or wants.terms.refusal
        told = ""
        while self._loop.time() < give_up:
            if refusal:
                with suppress(PeerError):
                    await wants.tier._running().peer(whom.address)
                    raise AssertionError("a stranger was let in")
                told = (
                    wants.tier._running()._directory.why_not(whom.address, self._loop.time()) or ""
                )
                if refusal in told:
                    return 0
            else:
                self._numbers += 1
                keys = [key_of(100_000 + 2 * self._numbers + at) for at in range(2)]
                await has.process.start(has.store(keys, whom.kv_request_id))
                if await wants.load(keys, whom, LOAD_SECONDS_MAX) == len(keys):
                    await asyncio.sleep(1.0)
                    kept = [step for step, _ in has.log.out.values() if isinstance(step, Keep)]
                    expect(not kept, f"kept though it was fetched: {kept}")
                    return len(keys)
            await asyncio.sleep(LOAD_DEADLINE_SECONDS)
        raise AssertionError(f"it does not work again: {has} {wants} {told}")


class _Died(Exception):
    """The engine that was waited for is dead."""


async def _unless_dead(engine: PeerEngine, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    while not task.done():
        if engine.process.is_dead:
            task.cancel()
            await asyncio.wait([task])
            raise _Died
        await asyncio.sleep(0.05)
    task.result()


def _error_of(told: dict[str, Any]) -> BaseException:
    error = told.get("exception")
    return error if isinstance(error, BaseException) else AssertionError(told.get("message"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 where nothing was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--seeds", type=int, default=1, help="so many, from that one on")
    parser.add_argument("--operations", type=int, default=OPERATIONS)
    options = parser.parse_args(arguments)
    strikes: Counter[tuple[str, str]] = Counter()
    for seed in range(options.seed, options.seed + options.seeds):
        report = run(seed, options.operations)
        strikes.update(report.strikes)
        sys.stdout.write(f"seed {seed}: {report.digest[:16]}, {report.seconds:.0f} seconds\n")
    for (fault, step), times in sorted(strikes.items()):
        sys.stdout.write(f"{fault:>14} at {step:<14} {times}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
