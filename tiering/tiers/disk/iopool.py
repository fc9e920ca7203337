"""The threads of a disk tier: two queues of batches, each thread group preferring its own.

Owns the threads and what is queued. `run` is called from one event loop; work runs in the
threads and holds no lock while it does. A batch is cut into spans, each done by one thread, and
wakes the loop once, whatever its size. Queues are as long as what callers wait for. The threads
are daemons: a hung mount must not keep a process from exiting.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tiering.errors import ClosedError
from tiering.underway import to_the_end

SPAN_ITEMS_MAX = 16
"""Items that one thread does in one go: large batches then do not hold up small ones."""


class Lane(enum.Enum):
    """A queue, and the group of threads that prefers it."""

    READ = "read"
    WRITE = "write"


@dataclass(slots=True, eq=False)
class _Batch:
    """`work(span)` gives the results of a span. All but `results` is guarded by the pool's lock."""

    work: Callable[[range], Sequence[Any]] | None
    results: list[Any]
    spans_left: int
    withdrawn: bool = False
    error: BaseException | None = None
    done: Future[None] = field(default_factory=Future)


class IoPool:
    """`n_read + n_write` daemon threads between `start` and `close`."""

    def __init__(self, name: str, n_read: int, n_write: int) -> None:
        """`name` is how errors and thread names call it; both groups have at least one thread."""
        if n_read < 1 or n_write < 1:
            raise ValueError(f"each group needs a thread, not {n_read} readers, {n_write} writers")
        self._name = name
        self._sizes = {Lane.READ: n_read, Lane.WRITE: n_write}
        self._wake = threading.Condition()
        self._queues: dict[Lane, deque[tuple[_Batch, range]]] = {lane: deque() for lane in Lane}
        self._threads: list[threading.Thread] = []
        self._live = 0
        self._accepting = False
        self._stopped: Future[None] = Future()

    def __repr__(self) -> str:
        queued = ", ".join(f"{len(self._queues[lane])} {lane.value}" for lane in Lane)
        return f"<IoPool {self._name}: {self._live} threads, queued spans: {queued}>"

    def start(self) -> None:
        """Start the threads. REQUIRES: never started, or closed."""
        if self._live:
            raise RuntimeError(f"{self._name} is already open")
        self._stopped = Future()
        self._accepting = True
        for lane, size in self._sizes.items():
            for _ in range(size):
                name = f"tiering {self._name} {lane.value}"
                thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
                self._live += 1

    async def run(
        self, lane: Lane, work: Callable[[int], Any], count: int, *, spread: bool = True
    ) -> list[Any]:
        """`[work(0), ..., work(count - 1)]`, done in threads; in one of them without `spread`.

        Cancelled, it withdraws what no thread has begun, waits for what one has, and only then
        raises CancelledError. An exception of `work` is raised here, after the same wait.
        """

        spans = _spans(count, self._sizes[lane]) if spread else [range(count)]
        batch = _Batch(None, [None] * count, len(spans))
        batch.work = partial(_one_by_one, batch, work)
        del work  # whoever holds this frame, as a traceback does, must not hold the caller's memory
        return await self._results(lane, batch, spans)

    async def run_spans(
        self,
        lane: Lane,
        work: Callable[[range], Sequence[Any]],
        count: int,
        span_items_max: int = SPAN_ITEMS_MAX,
    ) -> list[Any]:
        """The results of `work` on the spans of `range(count)`, none longer than
        `span_items_max`, each done by one thread in one call. Else like `run`."""
        spans = [
            range(at, min(at + span_items_max, count)) for at in range(0, count, span_items_max)
        ]
        batch = _Batch(work, [None] * count, len(spans))
        del work
        return await self._results(lane, batch, spans)

    async def _results(self, lane: Lane, batch: _Batch, spans: Sequence[range]) -> list[Any]:
        if not self._accepting:
            raise ClosedError(f"{self._name} is not open")
        if not spans or not spans[0]:
            return []
        with self._wake:
            self._queues[lane].extend((batch, span) for span in spans)
            self._wake.notify(len(spans))
        await to_the_end(asyncio.wrap_future(batch.done), lambda: self._withdraw(batch))
        if batch.error is not None:
            raise batch.error
        return batch.results

    async def call(self, lane: Lane, function: Callable[[], Any]) -> Any:
        """`function()`, done in a thread; see `run`."""
        return (await self.run(lane, lambda _: function(), 1))[0]

    async def close(self) -> None:
        """Take nothing more, finish what is queued, end the threads. May be called twice."""
        with self._wake:
            self._accepting = False
            self._wake.notify_all()
        if self._threads:
            await asyncio.wait([asyncio.wrap_future(self._stopped)])
            for thread in self._threads:
                thread.join()  # each has left its last function: microseconds
            self._threads = []

    def _withdraw(self, batch: _Batch) -> None:
        """Take back the spans of `batch` that no thread has; those under way stop early."""
        with self._wake:
            batch.withdrawn = True
            removed = 0
            for lane, queue in self._queues.items():
                kept = deque(entry for entry in queue if entry[0] is not batch)
                removed += len(queue) - len(kept)
                self._queues[lane] = kept
            batch.spans_left -= removed
            finished = removed > 0 and batch.spans_left == 0
        if finished:
            self._finish(batch)

    def _serve(self, own: Lane) -> None:
        other = Lane.WRITE if own is Lane.READ else Lane.READ
        while (entry := self._next(own, other)) is not None:
            batch, span = entry
            del entry
            error = _work_through(batch, span)
            with self._wake:
                batch.error = batch.error or error
                batch.spans_left -= 1
                finished = batch.spans_left == 0
            if finished:
                self._finish(batch)
            del batch, error
        with self._wake:
            self._live -= 1
            last = self._live == 0
        if last:
            self._stopped.set_result(None)

    def _next(self, own: Lane, other: Lane) -> tuple[_Batch, range] | None:
        """The next span for a thread of `own`, waiting for one; None when there will be none."""
        with self._wake:
            while True:
                for lane in (own, other):
                    if self._queues[lane]:
                        return self._queues[lane].popleft()
                if not self._accepting:
                    return None
                self._wake.wait()

    @staticmethod
    def _finish(batch: _Batch) -> None:
        # The caller may free its buffers once it knows, so nothing here may still refer to them.
        batch.work = None
        batch.done.set_result(None)


def _one_by_one(batch: _Batch, work: Callable[[int], Any], span: range) -> list[Any]:
    results = []
    for i in span:
        if batch.withdrawn:
            break
        results.append(work(i))
    return results


def _work_through(batch: _Batch, span: range) -> BaseException | None:
    work = batch.work
    assert work is not None, "a batch is finished only after its last span"
    try:
        if not batch.withdrawn:
            results = work(span)
            batch.results[span.start : span.start + len(results)] = results
    except BaseException as error:
        return error
    return None


def _spans(count: int, threads: int) -> list[range]:
    """`range(count)` in even parts: one for each thread, more where they would be too long."""
    parts = max(min(count, threads), -(-count // SPAN_ITEMS_MAX))
    edges = [count * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]
