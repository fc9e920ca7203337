"""A call that hangs takes its tier out of service, holds up nobody else, and is waited for."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tiering.testing.examples import blank, payload_of, stored
from tiering.testing.memory import MemoryTier, checked
from tiering.tiers.base import Failed, Read, Write
from tiering.tiers.wrappers.breaker import TRIALS_HUNG_MAX, State
from wrapped import KEY, KEYS, StubbornTier, began, failure, guarded, read, told, write


async def test_a_hung_call_takes_the_tier_out_and_enters_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = MemoryTier()
    async with guarded(inner) as (tier, clock):
        await stored(tier, [KEY])
        inner.hold("read")
        (buffer,) = blank(1)
        reading = await began(inner, tier.read([KEY], [buffer]), "read")
        clock.advance(9.9)
        assert await tier.contains([KEY]) == [Read.HIT]
        clock.advance(0.1)
        calls = len(inner.calls)
        assert await tier.contains(KEYS[:3]) == [Read.MISS] * 3
        assert await read(tier, KEY) == [Read.MISS]
        assert await write(tier, *KEYS[:2]) == [Write.REFUSED] * 2
        (deleted,) = await tier.delete([KEY])
        assert isinstance(deleted, Failed)
        assert "out of service" in str(deleted.error)
        assert (deleted.error.tier, deleted.error.key) == (tier.name, KEY)
        await tier.touch([KEY])
        assert len(inner.calls) == calls
        assert tier.state == (State.OPEN, State.OPEN)
        found = tier.stats()
        assert (found["stalls"], found["trips"]) == (1, 2)
        assert (found["refused_loads"], found["refused_stores"]) == (4, 2)
        assert (found["now_loads_out"], found["now_stores_paused"]) == (1, 1)
        assert not reading.done()
        inner.let_go("read")
        assert await reading == [Read.HIT]
        assert buffer == payload_of(KEY)
    warnings = told(caplog, logging.WARNING)
    assert [line.split(": out")[0] for line in warnings] == ["memory: loads", "memory: stores"]
    assert all("a read has been hanging for 10.0 s" in line for line in warnings)


async def test_when_what_hung_comes_back_a_trial_goes_in_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    inner = StubbornTier()
    async with guarded(inner, retry_seconds=(100.0, 100.0)) as (tier, clock):
        await stored(tier, [KEY])
        gates = [inner.hang(key) for key in KEYS[1:3]]
        reading = [await began(inner, read(tier, key), "read") for key in KEYS[1:3]]
        clock.advance(10)
        assert await tier.contains([KEY]) == [Read.MISS]
        for gate, task in zip(gates, reading, strict=True):
            assert tier.state == (State.OPEN, State.OPEN)
            gate.set()
            await task
        assert tier.state == (State.HALF_OPEN, State.HALF_OPEN)
        assert await read(tier, KEY) == [Read.HIT]
        assert tier.state == (State.CLOSED, State.HALF_OPEN)
        assert await write(tier, KEYS[3]) == [Write.STORED]
        assert tier.state == (State.CLOSED, State.CLOSED)
        assert tier.stats()["now_loads_out"] == tier.stats()["now_stores_paused"] == 0
    assert [line.split(" after")[0] for line in told(caplog)[2:]] == [
        "memory: loads: in service again",
        "memory: stores: in service again",
    ]


async def test_calls_without_buffers_come_back_at_the_stall_and_reads_stay() -> None:
    inner = MemoryTier()
    async with guarded(inner, stall_seconds=0.01) as (tier, clock):
        await stored(tier, [KEY])
        for operation in ("read", "contains", "touch", "delete"):
            inner.hold(operation)
        reading = await began(inner, read(tier, KEY), "read")
        asking = await began(inner, tier.contains([KEY]), "contains")
        touching = await began(inner, tier.touch([KEY]), "touch")
        deleting = await began(inner, tier.delete([KEY]), "delete")
        clock.advance(0.01)  # and the tier's own timer finds it
        async with asyncio.timeout(60):
            assert await asking == [Read.MISS]
            assert await touching is None
            assert isinstance((await deleting)[0], Failed)
        assert not reading.done()
        for operation in ("read", "contains", "touch"):
            inner.let_go(operation)
        assert await reading == [Read.HIT]
        inner.let_go("delete")


async def test_time_alone_trips_nothing_that_stands_still() -> None:
    """The timer goes by the clock that was handed in, which stands still here."""
    inner = MemoryTier()
    async with guarded(inner, stall_seconds=0.001) as (tier, _):
        inner.hold("read")
        reading = await began(inner, read(tier, KEY), "read")
        await asyncio.wait({reading}, timeout=0.02)
        assert tier.state == (State.CLOSED, State.CLOSED)
        inner.let_go("read")
        assert await reading == [Read.MISS]


async def test_a_slow_disk_is_no_hung_one() -> None:
    """A batch may wait for long behind others: as long as they come back, nothing hangs."""
    inner = StubbornTier()
    async with guarded(inner) as (tier, clock):
        gate = inner.hang(KEY)
        waiting = await began(inner, write(tier, KEY), "write")
        for key in KEYS[1:8]:
            clock.advance(9)
            await stored(tier, [key])
        assert tier.state.stores is State.CLOSED
        clock.advance(10)
        assert await tier.contains([KEY]) == [Read.MISS]
        assert tier.state.stores is State.OPEN
        gate.set()
        assert await waiting == [Write.STORED]


async def test_answers_of_another_kind_do_not_hide_a_hung_call() -> None:
    """An index in memory answers while the disk hangs."""
    inner = MemoryTier()
    async with guarded(inner) as (tier, clock):
        inner.hold("read")
        reading = await began(inner, read(tier, KEY), "read")
        for _ in range(2):
            clock.advance(5)
            await tier.contains([KEY])
        assert tier.state.loads is State.OPEN
        inner.let_go("read")
        await reading


async def test_while_a_call_hangs_trials_are_made_and_few_of_them_may_hang() -> None:
    inner = StubbornTier()
    async with guarded(inner) as (tier, clock):
        gate = inner.hang(KEY)
        hanging = [await began(inner, read(tier, KEY), "read")]
        clock.advance(10)
        await tier.contains([KEY])
        pauses = []
        for _ in range(TRIALS_HUNG_MAX):
            start = clock.now()
            while tier.state.loads is State.OPEN:
                clock.advance(0.5)
            pauses.append(clock.now() - start)
            hanging.append(await began(inner, read(tier, KEY), "read"))
            assert await read(tier, KEY) == [Read.MISS]  # one at a time
            clock.advance(10)
            assert await read(tier, KEY) == [Read.MISS]
        assert pauses == [1, 2, 4, 8]
        clock.advance(1000)
        assert tier.state.loads is State.HALF_OPEN
        calls = len(inner.calls)
        assert await read(tier, KEYS[1]) == [Read.MISS]
        assert len(inner.calls) == calls
        inner.chunks[KEY] = checked(payload_of(KEY))
        gate.set()
        assert await asyncio.gather(*hanging) == [[Read.HIT]] * len(hanging)
        assert tier.state.loads is State.CLOSED  # a trial proved it, late as it was
        inner.reads = {KEY: failure()}
        for _ in range(8):
            await read(tier, KEY)
        inner.reads = {}
        clock.advance(1)
        assert await read(tier, KEY) == [Read.HIT]  # those trials count no more


# Cancellation


async def test_a_cancelled_read_comes_back_only_when_the_inner_one_has() -> None:
    inner = StubbornTier()
    async with guarded(inner) as (tier, _):
        gate = inner.hang(KEY)
        for call, operation in ((read(tier, KEY), "read"), (write(tier, KEY), "write")):
            gate.clear()
            task = await began(inner, call, operation)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=0.01)
            assert not done
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await write(tier, KEY) == [Write.STORED]


async def test_a_cancelled_question_comes_back_at_once_and_is_awaited_at_close() -> None:
    inner = StubbornTier()
    gate = inner.hang(KEY)
    async with guarded(inner) as (tier, _):
        task = await began(inner, tier.contains([KEY]), "contains")
        task.cancel()
        await asyncio.wait({task}, timeout=60)
        assert task.cancelled()
        closing = await began(inner, tier.close(), "close")
        assert not closing.done()
        gate.set()
        await closing
        assert tier.stats()["abandoned_calls"] == 0


async def test_a_question_cancelled_early_leaves_nothing_behind() -> None:
    inner = MemoryTier()
    async with guarded(inner) as (tier, clock):
        for turns in range(3):
            task = asyncio.create_task(tier.contains([KEY]))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        clock.advance(100)
        await tier.contains([KEY])
        assert tier.state == (State.CLOSED, State.CLOSED)
        assert tier.stats()["stalls"] == 0
