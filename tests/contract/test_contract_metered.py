"""`MeteredTier` keeps the contract of what it stands around, and its outcomes add up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_contract_memory import TestMemoryTier as _MemoryContract

from tiering.errors import DamagedChunk, TierError
from tiering.testing.clocks import ManualClock
from tiering.testing.memory import MemoryTier
from tiering.tiers.base import Failed, Read, Tier, Write
from tiering.tiers.wrappers.metered import OUTCOMES, MeteredTier

CHUNK = 64
COUNTED = ("lookups", "read", "writ")
KEYS = [bytes([i]) * 36 for i in range(5)]


def buffers(count: int = len(KEYS)) -> list[memoryview]:
    return [memoryview(bytearray([i]) * CHUNK) for i in range(count)]


@pytest.mark.slow
class TestMeteredMemoryTier(_MemoryContract):
    def make_tier(self, where: Path) -> Tier:
        return MeteredTier(super().make_tier(where), CHUNK, ManualClock())


def assert_adds_up(stats: dict[str, int]) -> None:
    for operation, outcomes in OUTCOMES.items():
        assert stats[operation] == sum(stats[f"{operation}_{outcome}"] for outcome in outcomes)


async def test_every_outcome_is_counted_under_its_name() -> None:
    inner = MemoryTier()
    tier = MeteredTier(inner, CHUNK, ManualClock())
    await tier.open()
    broken = Failed(TierError("memory", KEYS[0], "broken"))
    inner.writes = {KEYS[2]: Write.FULL, KEYS[3]: Write.REFUSED, KEYS[4]: broken}
    await tier.write(KEYS, buffers())
    await tier.write(KEYS[:1], buffers(1))
    damaged = Failed(DamagedChunk("memory", KEYS[1], "checksum"))
    inner.reads = {KEYS[1]: damaged, KEYS[2]: Read.BUSY, KEYS[3]: broken}
    await tier.read(KEYS, buffers())
    await tier.contains(KEYS)
    stats = tier.stats()
    assert_adds_up(stats)
    told = {name: stats[name] for name in stats if name.startswith(COUNTED) and stats[name]}
    assert told == {
        "writes": 6,
        "writes_stored": 2,
        "writes_already_there": 1,
        "writes_full": 1,
        "writes_refused": 1,
        "writes_failed": 1,
        "written_bytes": 2 * CHUNK,
        "reads": 5,
        "reads_hit": 1,
        "reads_miss": 1,
        "reads_damaged": 1,
        "reads_busy": 1,
        "reads_failed": 1,
        "read_bytes": CHUNK,
        "lookups": 5,
        "lookups_hit": 2,
        "lookups_miss": 3,
    }
    await tier.close()


async def test_what_raises_is_counted_as_failed_and_what_is_under_way_as_such() -> None:
    inner, clock = MemoryTier(), ManualClock()
    tier = MeteredTier(inner, CHUNK, clock)
    await tier.open()
    inner.hold("read")
    reading = asyncio.create_task(tier.read(KEYS, buffers()))
    await asyncio.sleep(0)
    stats = tier.stats()
    assert (stats["now_reads"], stats["now_reads_calls"], stats["reads"]) == (5, 1, 5)
    clock.advance(0.25)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    inner.errors["write"] = TierError("memory", None, "gone")
    with pytest.raises(TierError, match="gone"):
        await tier.write(KEYS, buffers())
    stats = tier.stats()
    assert_adds_up(stats)
    assert (stats["now_reads"], stats["now_reads_calls"]) == (0, 0)
    assert (stats["reads_failed"], stats["writes_failed"]) == (5, 5)
    assert (stats["reads_microseconds"], stats["writes_microseconds"]) == (250_000, 0)
    inner.let_all_go()
    await tier.close()
