"""A whole store under random requests, faults, crashes and power cuts, replayed from one number.

`run(seed, steps, ...)` or `python -m tiering.testing.simulation --seed N --steps M`. The loop and
its time are simulated, files and shared memory are real and small. Whatever the faults: a byte
that was loaded is its key's; each step has one final outcome; the tier keeps within its bound.
After them: everything can be saved and loaded again, and nothing is left pinned.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering.errors import ClosedError
from tiering.testing.faults import FaultyIo
from tiering.testing.simfaults import Faults
from tiering.testing.simkinds import KINDS
from tiering.testing.simloop import SimClock, SimLoop
from tiering.testing.simworld import (
    LAYOUT,
    ROW_BYTES,
    Kind,
    Life,
    Place,
    SimEngine,
    Terms,
    expect,
    name_of,
    page_of,
    row_of,
    syncs_seen,
)
from tiering.tiers.base import Read, Write
from tiering.tiers.host import SHARED_MEMORY
from tiering_kernels.portable import PortableIo

REQUESTS_MAX = 10
CHAINS = 8
CHAIN_CHUNKS_MAX = 8
CALM_SECONDS_MAX = 300.0
TRACE_LINES_KEPT = 60


class Failure(AssertionError):
    """What the simulation found; the message tells how to see it again."""


@dataclass(frozen=True, slots=True)
class Report:
    """`digest` covers everything that happened, in order, with its time."""

    seed: int
    steps: int
    digest: str
    seconds: float
    counts: dict[str, int]


def run(seed: int, steps: int, kind: str = "files") -> Report:
    """Failure, with the seed and the last events, where something is found."""
    with tempfile.TemporaryDirectory(prefix="tiering-simulation-", dir=SHARED_MEMORY) as where:
        simulation = Simulation(seed, steps, KINDS[kind], Path(where))
        loop = SimLoop(random.Random(f"{seed} loop"))
        try:
            with (
                asyncio.Runner(loop_factory=lambda: loop) as runner,
                syncs_seen(simulation.synced),
            ):
                runner.run(simulation.main())
        except (Exception, asyncio.CancelledError) as error:
            raise Failure(simulation.told(error)) from error
        return simulation.report(loop.time())


class Simulation:
    """One run."""

    def __init__(self, seed: int, steps: int, kind: Kind, where: Path) -> None:
        self._seed = seed
        self._steps = steps
        self._kind = kind
        self._where = where
        self._chance = random.Random(seed)
        self._tier_chunks = chunks = self._chance.randint(12, 24)
        self._terms = Terms(
            engines=self._chance.choice((1, 1, 2)) if kind.is_shared else 1,
            slots=self._chance.randint(4, 16),
            max_bytes=kind.max_bytes(chunks),
            is_synced=self._chance.random() < 0.5,
            is_guarded=self._chance.random() < 0.5,
        )
        self._chains = self._make_chains()
        self._lives = 0
        self._life = Life(self._terms, kind, self._new_place())
        self._requests: dict[asyncio.Task[None], str] = {}
        self._failures: list[BaseException] = []
        self._faults = Faults(kind.operations, self._chance)
        self._dropped: set[bytes] = set()
        self._saving = 0
        self._digest = hashlib.sha256()
        self._last: deque[str] = deque(maxlen=TRACE_LINES_KEPT)
        self._counts: Counter[str] = Counter()
        self._actions = self._weighted_actions()

    # What came of it

    def report(self, seconds: float) -> Report:
        digest = self._digest.hexdigest()
        return Report(self._seed, self._steps, digest, seconds, dict(self._counts))

    def told(self, error: BaseException) -> str:
        lines = "\n  ".join(self._last)
        return f"seed {self._seed}, {self._steps} steps: {error!r}; the last of it:\n  {lines}"

    def synced(self, path: str) -> None:
        self._life.place.io.synced(path)

    def _tell(self, what: str, *details: object) -> None:
        self._counts[what] += 1
        line = f"{self._now:.6f} {what} {' '.join(map(str, details))}"
        self._digest.update(line.encode())
        self._last.append(line)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # The run

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._failures.append(_error_of(context)))
        try:
            await self._main()
        finally:
            # What hangs would hold up the end of the loop, and hide why it ended.
            self._faults.mend()

    async def _main(self) -> None:
        self._tell("terms", self._terms)
        await self._begin(self._life)
        for _ in range(self._steps):
            (act,) = self._chance.choices(*self._actions)
            await act()
            await asyncio.sleep(self._chance.choice((0, 0, 0.001, 0.01, 0.05, 0.5)))
            self._check()
        await self._calm()
        if self._kind.operations:
            await self._has_room()
        await self._works_again()
        await self._life.close()

    def _weighted_actions(
        self,
    ) -> tuple[list[Callable[[], Coroutine[Any, Any, None]]], list[int]]:
        weights: dict[Callable[[], Coroutine[Any, Any, None]], int] = {
            self._request_save: 30,
            self._request_load: 30,
            self._request_match: 8,
            self._drop: 3,
            self._cancel: 8,
            self._fault: 8,
            self._hang: 4,
            self._clean: 2,
            self._wait: 4,
            self._calm: 1,
            self._restart: 1,
            self._crash: 1,
            self._cut_power: 1,
        }
        return list(weights), list(weights.values())

    def _make_chains(self) -> list[list[bytes]]:
        """Prefixes of one another's, as prompts are."""
        chains = []
        for number in range(CHAINS):
            shared = self._chance.randrange(CHAIN_CHUNKS_MAX)
            tokens = [0] * shared * LAYOUT.chunk_tokens
            own = CHAIN_CHUNKS_MAX - shared
            chains.append(LAYOUT.keys(tokens + [number + 1] * own * LAYOUT.chunk_tokens))
        return chains

    def _new_place(self) -> Place:
        root = self._where / "0"
        root.mkdir(mode=0o700)
        place = Place(root, FaultyIo(PortableIo(), random.Random(f"{self._seed} io")))
        place.io.lose_writes()
        return place

    async def _begin(self, life: Life) -> None:
        self._life = life
        self._lives += 1
        self._dropped.clear()
        chance = random.Random(f"{self._seed} pool {self._lives}")
        await life.open(SimClock(asyncio.get_running_loop()), chance)

    # Requests

    def _engine(self) -> SimEngine:
        return self._chance.choice(self._life.engines)

    def _prefix(self) -> list[bytes]:
        chain = self._chance.choice(self._chains)
        return chain[: self._chance.randint(1, len(chain))]

    def _request(self, what: str, work: Coroutine[Any, Any, object]) -> None:
        self._tell("ask", what)
        task = asyncio.get_running_loop().create_task(self._carry_out(what, work))
        self._requests[task] = what

    async def _carry_out(self, what: str, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.current_task()
        try:
            result = await work
        except ClosedError:
            self._tell("closed", what)
        except asyncio.CancelledError:
            self._tell("cancelled", what)
        except Exception as error:
            self._failures.append(error)
        else:
            self._tell("done", what, result)
        finally:
            if task is not None:
                del self._requests[task]

    async def _request_save(self) -> None:
        if len(self._requests) < REQUESTS_MAX:
            keys = self._prefix()
            self._request(f"save {name_of(keys)}", self._save(self._engine(), keys))

    async def _save(self, engine: SimEngine, keys: Sequence[bytes]) -> int:
        self._dropped.difference_update(keys)
        self._saving += 1
        try:
            end = await engine.store.save(keys, [page_of(key) for key in keys])
        finally:
            self._saving -= 1
        expect(0 <= end <= len(keys), f"{end} of {len(keys)} chunks saved")
        return end

    async def _request_load(self) -> None:
        if len(self._requests) < REQUESTS_MAX:
            keys, seconds = self._prefix(), self._chance.choice((0, 0, 0.01, 1.0))
            self._request(f"load {name_of(keys)}", self._load(self._engine(), keys, seconds))

    async def _load(self, engine: SimEngine, keys: Sequence[bytes], seconds: float) -> int:
        """How many chunks were found; their bytes are right, and stay right while they are held."""
        async with engine.store.load(keys) as loaded:
            pages = [bytearray(LAYOUT.chunk_bytes) for _ in range(loaded.found)]
            await loaded.copy_to(pages)
            await asyncio.sleep(seconds)
            for i, (key, page) in enumerate(zip(keys, pages, strict=False)):
                expect(page == page_of(key), f"wrong bytes copied for {name_of([key])}")
                expect(loaded.view(i) == page_of(key), f"wrong bytes held for {name_of([key])}")
            return loaded.found

    async def _request_match(self) -> None:
        if len(self._requests) < REQUESTS_MAX:
            keys = self._prefix()
            self._request(f"match {name_of(keys)}", self._engine().store.match(keys))

    async def _drop(self) -> None:
        keys = self._prefix()
        keys = keys[self._chance.randrange(len(keys)) :]
        self._tell("drop", name_of(keys))
        await self._engine().store.drop(keys)
        is_sure = not (self._saving or self._faults.may_fail(self._now))
        if self._terms.engines == 1 and is_sure:
            self._dropped.update(keys)

    async def _cancel(self) -> None:
        if self._requests:
            task = self._chance.choice(list(self._requests))
            self._tell("cancel", self._requests[task])
            task.cancel()

    async def _wait(self) -> None:
        await asyncio.sleep(self._chance.choice((1.0, 5.0, 20.0)))

    # Faults

    async def _fault(self) -> None:
        self._dropped.clear()  # A delete may fail now.
        for _ in range(self._chance.choice((1, 1, 2, 4))):  # they seldom come alone
            self._tell("fault", self._faults.begin(self._now, self._life.place, self._engine()))

    async def _hang(self) -> None:
        self._tell("hang", self._faults.hang(self._now, self._engine()))

    async def _clean(self) -> None:
        self._tell("clean", self._faults.clean(self._life.place))

    # Ends and beginnings

    async def _restart(self) -> None:
        self._tell("restart")
        await self._end_faults()
        await self._life.close()
        await self._begin(Life(self._terms, self._kind, self._life.place))

    async def _crash(self, power_cut: bool = False) -> None:
        old = self._life
        root = self._where / str(self._lives)
        chance = random.Random(f"{self._seed} crash {self._lives}")
        side_files = "" if self._terms.is_synced else self._kind.side_files
        place = old.place.image(root, self._kind, chance, power_cut, side_files)
        self._tell("power cut" if power_cut else "crash")
        for task in list(self._requests):
            task.cancel()
        await self._end_faults()
        await old.close()
        await self._begin(Life(self._terms, self._kind, place))

    async def _cut_power(self) -> None:
        await self._crash(power_cut=True)

    async def _end_faults(self) -> None:
        """No more faults, and no more requests."""
        self._faults.mend()
        while self._requests:
            await asyncio.wait(list(self._requests))

    # What must hold

    def _check(self) -> None:
        self._faults.mend(self._now)
        if self._failures:
            raise self._failures[0]
        used, bound = self._kind.used_bytes(self._life.place.root), self._terms.max_bytes
        expect(used <= bound, f"{used} bytes in a tier of {bound}")
        for engine in self._life.engines:
            slots = engine.core.index.slots
            told = engine.store.stats()
            expect(sum(slots.census().values()) == told.slots, "slots do not add up")
            expect(told.slots_held <= told.slots, "more slots held than there are")
            expect(engine.core.steps_out == len(engine.ledger.out), "steps do not add up")

    async def _calm(self) -> None:
        """The faults are over: everything comes to rest, and nothing is left over."""
        await self._end_faults()
        self._tell("calm")
        for engine in self._life.engines:
            expect(await engine.store.flush(CALM_SECONDS_MAX), "it does not come to rest")
            slots, told = engine.core.index.slots, engine.store.stats()
            expect(not engine.ledger.out, f"no final outcome of steps {engine.ledger.out}")
            expect(not slots.load_pins.any(), f"pinned by loads: {slots.load_pins.tolist()}")
            expect(not slots.write_pins.any(), f"pinned by writes: {slots.write_pins.tolist()}")
            expect(told.slots_free + told.slots_ready == told.slots, f"{slots.census()}")
            dropped = sorted(self._dropped)
            there = await engine.tier.contains(dropped)
            expect(Read.HIT not in there, "what was dropped is in the tier")
            expect(not engine.core.index.ready(dropped), "what was dropped is in host memory")
        place = self._life.place
        strays = {str(path) for path in place.root.rglob("*.tmp")} - place.io.left
        expect(not strays, f"left behind: {strays}")
        await self._is_booked(place)
        self._check()

    async def _is_booked(self, place: Place) -> None:
        """Every chunk in the tier counts for its bound, at the latest when the books' last entry,
        which nobody waits for, is made."""
        give_up = self._now + CALM_SECONDS_MAX
        while unbooked := self._kind.unbooked(place.root):
            expect(self._now < give_up, f"not in the books: {sorted(unbooked)}")
            await asyncio.sleep(1.0)

    async def _has_room(self) -> None:
        """Without a restart, the tier takes as many new chunks as it has room for: no room is
        lost to what went wrong before."""
        # Hints of what was used may still be on their way, and nobody waits for them.
        await asyncio.sleep(1.0)
        tier = self._engine().tier
        room = self._tier_chunks - tier.stats().get("retired_slots", 0)
        keys = LAYOUT.keys([len(self._chains) + 1] * room * LAYOUT.chunk_tokens)
        rows = [row_of(key) for key in keys]
        give_up, at = self._now + CALM_SECONDS_MAX, 0
        while at < room:
            outcomes = await tier.write(keys[at : at + 4], rows[at : at + 4])
            if all(outcome in (Write.STORED, Write.ALREADY_THERE) for outcome in outcomes):
                at += 4
                continue
            expect(self._now < give_up, f"no room for chunk {at} of {room}: {outcomes}")
            await asyncio.sleep(1.0)
        # A breaker may let loads through later than stores.
        while (hits := (await tier.read(keys, rows)).count(Read.HIT)) < room:
            expect(self._now < give_up, f"{hits} of {room} chunks fit")
            await asyncio.sleep(1.0)
        self._tell("room", room)

    async def _works_again(self) -> None:
        """What is saved now is there, also after the process was killed."""
        for chain in self._chains[:2]:
            give_up = self._now + CALM_SECONDS_MAX
            while (stored := await self._stored(chain)) < len(chain):
                expect(self._now < give_up, f"{stored} of {len(chain)} chunks reach the tier")
                await asyncio.sleep(1.0)
            await self._loads(chain)
            await self._crash(power_cut=self._terms.is_synced)
            await self._loads(chain)
            await self._calm()

    async def _stored(self, chain: Sequence[bytes]) -> int:
        """How many of `chain` can be read from the tier itself, after they were saved by a new
        process: one that has them already, or believes the tier to, does not write them."""
        await self._restart()
        engine = self._engine()
        await self._save(engine, chain)
        expect(await engine.store.flush(CALM_SECONDS_MAX), "it cannot be flushed")
        buffers = [memoryview(bytearray(ROW_BYTES)) for _ in chain]
        answers = await engine.tier.read(chain, buffers)
        return sum(answer is Read.HIT for answer in answers)

    async def _loads(self, chain: Sequence[bytes]) -> None:
        engine = self._engine()
        want = min(len(chain), engine.core.budget.limit)
        got = await self._load(engine, chain, 0.0)
        self._tell("loads", name_of(chain), got)
        expect(got >= want, f"{got} of {want} chunks load")


def _error_of(context: dict[str, Any]) -> BaseException:
    error = context.get("exception")
    return error if isinstance(error, BaseException) else AssertionError(context["message"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tiering.testing.simulation")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kind", choices=sorted(KINDS), default="files")
    given = parser.parse_args(arguments)
    report = run(given.seed, given.steps, given.kind)
    sys.stdout.write(f"seed {report.seed}, {report.steps} steps: {report.digest}\n")
    for name, count in sorted(report.counts.items()):
        sys.stdout.write(f"  {count:6} {name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
