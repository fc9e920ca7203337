"""A tier that fails or is full hurts nobody but itself, and comes back by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tiering.errors import ClosedError, ConfigError, DamagedChunk, TierError
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import blank, stored
from tiering.testing.memory import MemoryTier
from tiering.tiers.base import Failed, Read, Tier, Write
from tiering.tiers.wrappers.breaker import State
from tiering.tiers.wrappers.guarded import GuardedTier
from wrapped import KEY, KEYS, StubbornTier, began, failure, guarded, read, told, until, write

LATER = "in service again"


class SlowToOpen(MemoryTier):
    def __init__(self, *, heeds_cancel: bool = True) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self._heeds_cancel = heeds_cancel

    async def open(self) -> None:
        self.calls.append(("opening", ()))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            if self._heeds_cancel:
                raise
        await super().open()


async def test_each_method_of_a_tier_reaches_the_inner_one() -> None:
    inner = MemoryTier()
    uses: dict[str, Callable[[GuardedTier], Any]] = {
        "contains": lambda tier: tier.contains([KEY]),
        "read": lambda tier: read(tier, KEY),
        "write": lambda tier: write(tier, KEY),
        "delete": lambda tier: tier.delete([KEY]),
        "touch": lambda tier: tier.touch([KEY]),
    }
    async with guarded(inner) as (tier, _):
        for operation, use in uses.items():
            await use(tier)
            assert inner.calls[-1] == (operation, (KEY,))
        await stored(tier, [KEY])
        assert [batch async for batch in tier.scan()] == [[KEY]]
        assert tier.name == inner.name
        assert tier.stats()["now_chunks"] == 1
    assert [name for name, _ in inner.calls if name in ("open", "close")] == ["open", "close"]
    elsewhere = {"name", "stats", "scan", "open", "close", "watch"}
    assert Tier.__abstractmethods__ == set(uses) | elsewhere


# Errors


@pytest.mark.parametrize("reason", ["Input/output error", "Stale file handle", "EMFILE"])
async def test_errors_in_a_row_take_loads_out_and_leave_stores(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    inner = MemoryTier()
    async with guarded(inner) as (tier, _):
        inner.reads = dict.fromkeys(KEYS, failure(reason))
        assert await read(tier, *KEYS[:7]) == [inner.reads[KEY]] * 7
        assert tier.state.loads is State.CLOSED
        await read(tier, KEY)
        assert tier.state == (State.OPEN, State.CLOSED)
        assert await read(tier, KEY) == [Read.MISS]
        assert await write(tier, KEY) == [Write.STORED]
    (warning,) = told(caplog, logging.WARNING)
    assert "memory: loads: out of service" in warning
    assert reason in warning


async def test_errors_of_writes_and_deletes_take_stores_out_and_leave_loads() -> None:
    inner = MemoryTier()
    async with guarded(inner) as (tier, _):
        await stored(tier, [KEY])
        inner.writes = dict.fromkeys(KEYS[1:], failure())
        await write(tier, *KEYS[1:8])
        inner.errors["delete"] = TierError("memory", None, "gone")
        with pytest.raises(TierError, match="gone"):
            await tier.delete([KEY])
        assert tier.state == (State.CLOSED, State.OPEN)
        assert await read(tier, KEY) == [Read.HIT]
        assert await write(tier, *KEYS[:2]) == [Write.REFUSED] * 2
        assert isinstance((await tier.delete([KEY]))[0], Failed)


async def test_what_moves_payload_ends_a_row_of_errors_and_a_lookup_does_not() -> None:
    inner = MemoryTier()
    async with guarded(inner) as (tier, _):
        await stored(tier, KEYS[:1])
        inner.reads = dict.fromkeys(KEYS[1:], failure())
        for _ in range(3):
            await read(tier, *KEYS[1:7])
            await read(tier, KEY)
        assert tier.state.loads is State.CLOSED
        await read(tier, *KEYS[1:7])
        assert await tier.contains([KEY]) == [Read.HIT]
        await read(tier, *KEYS[1:3])
        assert tier.state.loads is State.OPEN


async def test_damaged_chunks_and_misses_are_no_errors() -> None:
    inner = MemoryTier()
    async with guarded(inner, errors_max=1) as (tier, _):
        inner.reads = dict.fromkeys(KEYS, Failed(DamagedChunk("memory", KEY, "bad checksum")))
        await read(tier, *KEYS)
        inner.reads = dict.fromkeys(KEYS, Read.BUSY)
        await read(tier, *KEYS)
        inner.reads = {}
        assert await read(tier, *KEYS) == [Read.MISS] * 24
        assert tier.state.loads is State.CLOSED


async def test_a_call_that_raises_is_one_error_and_raises_for_its_caller() -> None:
    inner = MemoryTier()
    async with guarded(inner, errors_max=3) as (tier, _):
        inner.errors["contains"] = inner.errors["read"] = TierError("memory", None, "ENOTCONN")
        for call in (tier.contains(KEYS), read(tier, *KEYS), tier.contains(KEYS)):
            assert tier.state.loads is State.CLOSED
            with pytest.raises(TierError, match="ENOTCONN"):
                await call
        assert tier.state == (State.OPEN, State.CLOSED)
        assert await tier.contains([KEY]) == [Read.MISS]


async def test_a_failed_trial_is_followed_by_a_longer_pause_up_to_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = MemoryTier()
    async with guarded(inner, errors_max=2, retry_seconds=(1.0, 5.0)) as (tier, clock):
        await stored(tier, KEYS[:2])
        inner.reads = dict.fromkeys(KEYS, failure())
        await read(tier, *KEYS[:2])
        for pause in (1.0, 2.0, 4.0, 5.0, 5.0):
            clock.advance(pause - 0.1)
            assert await read(tier, KEY) == [Read.MISS]
            clock.advance(0.1)
            assert isinstance((await read(tier, KEY))[0], Failed)
        inner.reads = {}
        clock.advance(5.0)
        assert await read(tier, KEY) == [Read.HIT]
        assert tier.state.loads is State.CLOSED
        inner.reads = dict.fromkeys(KEYS, failure())
        await read(tier, *KEYS[:2])
        clock.advance(1.0)
        assert tier.state.loads is State.HALF_OPEN  # the first pause again
    assert len(told(caplog, logging.WARNING)) == 2  # one for each trip


async def test_a_trial_is_one_call_and_only_payload_closes() -> None:
    inner = MemoryTier()
    async with guarded(inner, errors_max=1) as (tier, clock):
        await stored(tier, [KEY])
        inner.reads = {KEY: failure()}
        await read(tier, KEY)
        inner.reads = {}
        clock.advance(1)
        assert await tier.contains([KEY]) == [Read.HIT]  # so that a read follows
        await tier.touch([KEY])
        assert inner.calls[-1][0] == "contains"
        assert await read(tier, KEYS[1]) == [Read.MISS]
        assert tier.state.loads is State.HALF_OPEN
        inner.hold("read")
        trial = await began(inner, read(tier, KEY), "read")
        assert await read(tier, KEY) == [Read.MISS]
        inner.let_go("read")
        assert await trial == [Read.HIT]
        assert tier.state.loads is State.CLOSED


async def test_a_cancelled_trial_makes_room_for_another() -> None:
    inner = MemoryTier()
    async with guarded(inner, errors_max=1) as (tier, clock):
        await stored(tier, [KEY])
        inner.reads = {KEY: failure()}
        await read(tier, KEY)
        inner.reads = {}
        clock.advance(1)
        inner.hold("read")
        trial = await began(inner, read(tier, KEY), "read")
        trial.cancel()
        await asyncio.wait({trial})
        inner.let_go("read")
        assert tier.state.loads is State.HALF_OPEN
        assert await read(tier, KEY) == [Read.HIT]


async def test_what_entered_before_a_trip_changes_nothing_when_it_ends() -> None:
    inner = StubbornTier()
    async with guarded(inner, errors_max=1) as (tier, clock):
        await stored(tier, KEYS[:3])
        gate = inner.hang(KEY)
        old = await began(inner, read(tier, KEY), "read")
        inner.reads = {KEYS[1]: failure()}
        await read(tier, KEYS[1])
        gate.set()
        assert await old == [Read.HIT]
        assert tier.state.loads is State.OPEN
        clock.advance(1)
        assert await read(tier, KEYS[2]) == [Read.HIT]
        assert tier.state.loads is State.CLOSED


# No room


async def test_a_full_tier_pauses_stores_only_and_goes_on_when_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    inner = MemoryTier()
    async with guarded(inner) as (tier, clock):
        await stored(tier, KEYS[:2])
        inner.writes = {KEYS[3]: Write.FULL}
        assert await write(tier, *KEYS[2:4]) == [Write.STORED, Write.FULL]
        assert tier.state.stores is State.CLOSED  # it made room for one of them
        inner.writes = dict.fromkeys(KEYS, Write.FULL)
        assert await write(tier, *KEYS[4:7]) == [Write.FULL] * 3
        assert tier.state == (State.CLOSED, State.OPEN)
        assert tier.stats()["now_stores_paused"] == 1
        assert await write(tier, *KEYS[4:7]) == [Write.REFUSED] * 3
        assert await read(tier, KEY) == [Read.HIT]
        clock.advance(1)
        assert await write(tier, KEYS[5]) == [Write.FULL]
        clock.advance(1)
        assert await write(tier, KEYS[5]) == [Write.REFUSED]
        inner.writes = {}
        clock.advance(1)
        assert await write(tier, KEYS[5]) == [Write.STORED]
        assert tier.state.stores is State.CLOSED
        assert tier.stats()["trips"] == 1
    trip, back = told(caplog)
    assert "memory: stores: out of service: there is no room" in trip
    assert f"memory: stores: {LATER} after 3 s" in back


async def test_one_error_is_enough_for_a_trial_to_fail() -> None:
    inner = MemoryTier()
    async with guarded(inner) as (tier, clock):
        inner.writes = {KEY: Write.FULL}
        await write(tier, KEY)
        inner.writes = {KEY: failure()}
        clock.advance(1)
        assert await write(tier, KEY) == [inner.writes[KEY]]
        assert tier.state.stores is State.OPEN
        clock.advance(2)
        assert tier.state.stores is State.HALF_OPEN


# Open and close


async def test_errors_of_open_are_passed_on() -> None:
    inner = MemoryTier()
    tier = GuardedTier(inner, ManualClock())
    inner.errors["open"] = ConfigError("root_dir", "/mnt/kv", "Permission denied", "allow it")
    with pytest.raises(ConfigError, match="Permission denied"):
        await tier.open()
    with pytest.raises(ClosedError):
        await tier.contains([KEY])
    inner.errors = {}
    await tier.open()
    with pytest.raises(RuntimeError, match="already open"):
        await tier.open()
    await tier.close()


async def test_a_tier_that_does_not_open_in_time_is_an_error_and_is_closed_when_it_does() -> None:
    inner = SlowToOpen()
    tier = GuardedTier(inner, ManualClock(), open_seconds=0.01)
    async with asyncio.timeout(60):
        with pytest.raises(TierError, match=r"not open after 0\.01 s.*check its mount"):
            await tier.open()
    with pytest.raises(TierError, match="hangs since it was last used"):
        await tier.open()
    assert [name for name, _ in inner.calls] == ["opening"]
    inner.gate.set()
    await until(lambda: ("close", ()) in inner.calls and not inner.is_open)
    with pytest.raises(ClosedError):
        await tier.contains([KEY])
    await until(lambda: not tier._background)
    await tier.open()
    await stored(tier, [KEY])
    await tier.close()


@pytest.mark.parametrize("heeds_cancel", [True, False])
async def test_a_cancelled_open_leaves_nothing_open(heeds_cancel: bool) -> None:
    for turns in range(4):
        inner = SlowToOpen(heeds_cancel=heeds_cancel)
        tier = GuardedTier(inner, ManualClock())
        opening = await began(inner, tier.open(), "opening")
        if turns:
            inner.gate.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            await tier.close()
        await until(lambda inner=inner, tier=tier: not inner.is_open and not tier._background)


async def test_close_leaves_a_hung_call_behind_and_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = StubbornTier()
    gate = inner.hang(KEY)
    async with guarded(inner, stall_seconds=0.02) as (tier, clock):
        asking = await began(inner, tier.contains([KEY]), "contains")
        clock.advance(1)
        assert await asking == [Read.MISS]
        caplog.clear()
        async with asyncio.timeout(60):
            await tier.close()
        assert tier.stats()["abandoned_calls"] == 1
        (warning,) = told(caplog, logging.WARNING)
        assert "memory: hangs while it is closed; calls left behind in it: 1" in warning
        with pytest.raises(TierError, match="hangs since it was last used"):
            await tier.open()
        gate.set()
        await until(lambda: not tier._background)


@pytest.mark.slow
async def test_close_waits_for_slow_work_as_long_as_some_of_it_comes_back() -> None:
    inner = StubbornTier()
    gates = [inner.hang(key) for key in KEYS[:3]]
    async with guarded(inner, stall_seconds=2.0) as (tier, _):
        asking = [await began(inner, tier.contains([key]), "contains") for key in KEYS[:3]]
        loop = asyncio.get_running_loop()
        for i, gate in enumerate(gates):
            loop.call_later(0.8 * (i + 1), gate.set)
        await tier.close()
        assert tier.stats()["abandoned_calls"] == 0
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(end) for end in ends] == [ClosedError] * 3


async def test_an_error_of_close_is_passed_on() -> None:
    class Failing(MemoryTier):
        async def close(self) -> None:
            await super().close()
            raise TierError(self.name, None, "cannot sync")

    tier = GuardedTier(Failing(), ManualClock())
    await tier.open()
    with pytest.raises(TierError, match="cannot sync"):
        await tier.close()


async def test_an_empty_batch_is_no_trial_and_a_bug_is_no_error_of_the_tier() -> None:
    inner = MemoryTier()
    async with guarded(inner, errors_max=1) as (tier, _):
        assert await tier.contains([]) == await tier.read([], []) == await tier.write([], []) == []
        assert inner.calls == [("open", ())]
        with pytest.raises(ValueError, match="shorter"):
            await tier.read(KEYS[:2], blank(1))
        assert tier.state == (State.CLOSED, State.CLOSED)
    found = tier.stats()
    assert (found["trips"], found["refused_loads"], found["now_chunks"]) == (0, 0, 0)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"stall_seconds": 0}, {"errors_max": 0}, {"retry_seconds": (2, 1)}):
        with pytest.raises(ValueError, match="out of range"):
            GuardedTier(MemoryTier(), ManualClock(), **wrong)
