"""The fs tier's threads: who takes what, how often the loop is woken, what cancelling means."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tiering.errors import ClosedError
from tiering.tiers.disk.iopool import SPAN_ITEMS_MAX, IoPool, Lane

PATIENCE_SECONDS = 60


@asynccontextmanager
async def started(n_read: int = 1, n_write: int = 1) -> AsyncIterator[IoPool]:
    pool = IoPool("pool under test", n_read, n_write)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


class Gate:
    """Work that says it has begun, then waits until it is let go."""

    def __init__(self, parties: int = 1) -> None:
        self.began = [threading.Event() for _ in range(parties)]
        self.opened = threading.Event()
        self.thread = ""

    def __call__(self, i: int) -> int:
        self.thread = threading.current_thread().name
        self.began[i].set()
        assert self.opened.wait(PATIENCE_SECONDS)
        return i

    async def all_began(self) -> None:
        for event in self.began:
            assert await asyncio.to_thread(event.wait, PATIENCE_SECONDS)


@pytest.mark.parametrize("lane", list(Lane))
async def test_each_group_drains_the_others_queue(lane: Lane) -> None:
    async with started() as pool:
        gate = Gate(parties=2)
        running = [asyncio.create_task(pool.run(lane, lambda i, k=k: gate(k), 1)) for k in (0, 1)]
        await gate.all_began()
        gate.opened.set()
        assert await asyncio.gather(*running) == [[0], [1]]


async def test_each_group_prefers_its_own_queue() -> None:
    async with started() as pool:
        gates, done = {lane: Gate() for lane in Lane}, list[Lane]()
        busy = [asyncio.create_task(pool.run(lane, gates[lane], 1)) for lane in Lane]
        for gate in gates.values():
            await gate.all_began()
        # The busy threads may have swapped lanes; whoever is freed first must be its own group's.
        writer, reader = gates[Lane.WRITE], gates[Lane.READ]
        freed = reader if reader.thread.endswith("read") else writer
        queued = [
            asyncio.create_task(pool.call(lane, lambda lane=lane: done.append(lane)))
            for lane in (Lane.WRITE, Lane.READ)
        ]
        await asyncio.sleep(0)
        freed.opened.set()
        await asyncio.gather(*queued)
        assert done == [Lane.READ, Lane.WRITE]
        reader.opened.set()
        writer.opened.set()
        await asyncio.gather(*busy)


@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 64, 333])
@pytest.mark.parametrize("spread", [True, False])
async def test_results_keep_their_order_and_wake_the_loop_once(
    monkeypatch: pytest.MonkeyPatch, count: int, spread: bool
) -> None:
    async with started(3, 2) as pool:
        loop, wakes = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *a, **k: (wakes.append(a), wake(*a, **k))[1]
        )
        results = await pool.run(Lane.READ, lambda i: i * i, count, spread=spread)
        assert results == [i * i for i in range(count)]
        assert len(wakes) == 1


async def test_a_batch_is_spread_over_the_group() -> None:
    async with started(4, 1) as pool:
        gate = Gate(parties=4)
        running = asyncio.create_task(pool.run(Lane.READ, gate, 4))
        await gate.all_began()
        gate.opened.set()
        assert await running == [0, 1, 2, 3]


async def test_a_large_batch_is_cut_into_short_spans() -> None:
    async with started() as pool:
        gate = Gate(parties=2)
        busy = [asyncio.create_task(pool.run(Lane.READ, lambda i, k=k: gate(k), 1)) for k in (0, 1)]
        await gate.all_began()
        many = asyncio.create_task(pool.run(Lane.WRITE, lambda i: i, 10 * SPAN_ITEMS_MAX))
        await asyncio.sleep(0)
        assert repr(pool).endswith("queued spans: 0 read, 10 write>")
        gate.opened.set()
        assert await many == list(range(10 * SPAN_ITEMS_MAX))
        await asyncio.gather(*busy)


async def test_an_error_is_raised_after_all_spans_have_ended() -> None:
    async with started(2, 2) as pool:
        gate = Gate(parties=2)

        def work(i: int) -> int:
            if i == 0:
                gate.began[0].set()
                raise ZeroDivisionError
            return gate(i)

        running = asyncio.create_task(pool.run(Lane.READ, work, 2))
        await gate.all_began()
        await asyncio.sleep(0.01)
        assert not running.done()
        gate.opened.set()
        with pytest.raises(ZeroDivisionError):
            await running
        assert await pool.run(Lane.READ, lambda i: i, 2) == [0, 1]


async def test_a_cancelled_batch_that_nobody_began_is_withdrawn_at_once() -> None:
    async with started() as pool:
        gate, touched = Gate(parties=2), list[int]()
        busy = [asyncio.create_task(pool.run(Lane.READ, lambda i, k=k: gate(k), 1)) for k in (0, 1)]
        await gate.all_began()
        waiting = asyncio.create_task(pool.run(Lane.WRITE, touched.append, 100))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        assert repr(pool).endswith("queued spans: 0 read, 0 write>")
        gate.opened.set()
        await asyncio.gather(*busy)
    assert touched == []


async def test_a_cancelled_batch_waits_for_what_has_begun_and_begins_no_more() -> None:
    async with started() as pool:
        gate, finished = Gate(parties=2), list[int]()

        def work(i: int) -> None:
            finished.append(gate(i))

        running = asyncio.create_task(pool.run(Lane.READ, work, 2, spread=False))
        assert await asyncio.to_thread(gate.began[0].wait, PATIENCE_SECONDS)
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0.005)
            assert not running.done()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert finished == [0]


async def test_close_ends_the_threads_after_what_is_queued() -> None:
    pool = IoPool("pool under test", 2, 2)
    pool.start()
    gate, done = Gate(parties=1), list[Any]()
    busy = [
        asyncio.create_task(pool.call(Lane.READ, lambda: done.append(gate(0)))) for _ in range(9)
    ]
    await gate.all_began()
    closing = [asyncio.create_task(pool.close()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await pool.run(Lane.READ, done.append, 1)
    gate.opened.set()
    await asyncio.gather(*closing)
    await asyncio.gather(*busy)
    assert done == [0] * 9
    assert not [t for t in threading.enumerate() if t.name.startswith("pool under test")]


def test_a_group_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="0 readers, 4 writers"):
        IoPool("pool under test", 0, 4)
