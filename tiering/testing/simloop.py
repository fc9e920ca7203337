"""An event loop without a real clock or threads, and a pool of I/O threads that are none.

For the simulation. Time is a number that jumps to the next timer whenever nothing is ready, so a
run takes no longer than its work, and one seed gives one order of events. What asyncio would do
in a thread happens on the loop, at a random moment. Used from one thread.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiering.errors import ClosedError
from tiering.tiers.disk.iopool import SPAN_ITEMS_MAX, IoPool, Lane

WORK_SECONDS_MAX = 0.02
TURNS_AT_ONE_TIME_MAX = 20_000


class Deadlock(AssertionError):
    """Nothing is ready and no timer runs: whoever waits would wait for ever."""


class Livelock(AssertionError):
    """Something is always ready, and time stands still."""


class _NextTimer:
    """In the place of a selector: waiting is adding to the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._turns = 0

    def select(self, timeout_seconds: float | None) -> list[Any]:
        if timeout_seconds is None:
            raise Deadlock("nothing is ready, and no timer runs")
        self._turns = 0 if timeout_seconds else self._turns + 1
        if self._turns > TURNS_AT_ONE_TIME_MAX:
            raise Livelock(f"{self._turns} turns of the loop at one time, {self.now}")
        self.now += timeout_seconds
        return []


class SimLoop(asyncio.BaseEventLoop):
    """Ready callbacks in asyncio's own order; `time` begins at 0."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self._selector = _NextTimer()

    def time(self) -> float:
        return self._selector.now

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """`func(*args)`, on the loop, in a moment; once begun it cannot be called off, as in a
        thread."""
        del executor
        done = self.create_future()

        def work() -> None:
            if done.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self.call_later(self._chance.random() * WORK_SECONDS_MAX, work)
        return done

    def _process_events(self, events: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who would have to be woken."""


class SimClock:
    """The loop's time as a `Clock`, from `start_seconds` on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start_seconds: float = 0.0) -> None:
        self.loop = loop
        self._start_seconds = start_seconds

    def now(self) -> float:
        return self._start_seconds + self.loop.time()


@dataclass(slots=True, eq=False)
class _Batch:
    work: Callable[[range], Sequence[Any]]
    results: list[Any]
    spans_left: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None


class SimPool(IoPool):
    """An `IoPool` whose threads are `n` turns that spans wait for, begin in random order and keep
    for a random time. The work itself is done at the beginning or at the end of that."""

    def __init__(self, name: str, n_threads: int, chance: random.Random) -> None:
        super().__init__(name, 1, 1)
        self._chance = chance
        self._n_threads = n_threads
        self._queue: list[tuple[_Batch, range]] = []
        self._busy = 0
        self._turns: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._idle = asyncio.Event()
        self._passage = asyncio.Event()
        self._passage.set()

    def start(self) -> None:
        if self._is_open:
            raise RuntimeError(f"{self._name} is already open")
        self._is_open = True

    def hang(self) -> None:
        """From now on no span ends, nor does any begin once all turns are taken."""
        self._passage.clear()

    def let_go(self) -> None:
        self._passage.set()

    async def run(
        self, lane: Lane, work: Callable[[int], Any], count: int, *, spread: bool = True
    ) -> list[Any]:
        size = 1 if spread else max(1, count)
        return await self.run_spans(lane, lambda span: [work(i) for i in span], count, size)

    async def run_spans(
        self,
        lane: Lane,
        work: Callable[[range], Sequence[Any]],
        count: int,
        span_items_max: int = SPAN_ITEMS_MAX,
    ) -> list[Any]:
        del lane
        if not self._is_open:
            raise ClosedError(f"{self._name} is not open")
        spans = [
            range(at, min(at + span_items_max, count)) for at in range(0, count, span_items_max)
        ]
        if not spans:
            return []
        batch = _Batch(work, [None] * count, len(spans))
        self._queue += [(batch, span) for span in spans]
        self._begin()
        await self._ended(batch)
        if batch.error is not None:
            raise batch.error
        return batch.results

    async def close(self) -> None:
        self._is_open = False
        while self._busy or self._queue:
            self._idle.clear()
            await self._idle.wait()

    async def _ended(self, batch: _Batch) -> None:
        cancelled: asyncio.CancelledError | None = None
        while not batch.done.is_set():
            try:
                await batch.done.wait()
            except asyncio.CancelledError as error:
                cancelled = error
                self._take_back(batch)
        if cancelled is not None:
            raise cancelled

    def _take_back(self, batch: _Batch) -> None:
        kept = [entry for entry in self._queue if entry[0] is not batch]
        gone, self._queue = len(self._queue) - len(kept), kept
        for _ in range(gone):
            self._count_off(batch)

    def _begin(self) -> None:
        while self._queue and self._busy < self._n_threads:
            batch, span = self._queue.pop(self._chance.randrange(len(self._queue)))
            self._busy += 1
            turn = asyncio.get_running_loop().create_task(self._turn(batch, span))
            self._turns.add(turn)
            turn.add_done_callback(self._turns.discard)

    async def _turn(self, batch: _Batch, span: range) -> None:
        at_once = self._chance.random() < 0.5
        seconds = self._chance.random() * WORK_SECONDS_MAX
        if at_once:
            self._work(batch, span)
        await asyncio.sleep(seconds)
        await self._passage.wait()
        if not at_once:
            self._work(batch, span)
        self._busy -= 1
        self._count_off(batch)
        self._begin()
        self._idle.set()

    @staticmethod
    def _work(batch: _Batch, span: range) -> None:
        try:
            results = batch.work(span)
        except BaseException as error:
            batch.error = batch.error or error
        else:
            batch.results[span.start : span.start + len(results)] = results

    @staticmethod
    def _count_off(batch: _Batch) -> None:
        batch.spans_left -= 1
        if batch.spans_left == 0:
            batch.done.set()

    def __repr__(self) -> str:
        return f"<SimPool {self._name}: {self._busy} busy, {len(self._queue)} spans queued>"
