"""A slow tier is given less to write, and more again once it is not slow any more."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

import pytest

from tiering.config import EngineConfig, FsTierConfig, PressureConfig
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import (
    CHUNK_BYTES,
    blank,
    example_namespace,
    key_number,
    payload_of,
    views,
)
from tiering.testing.memory import MemoryTier
from tiering.tiers.base import Read, Tier, Write, WriteOutcome
from tiering.tiers.wrappers.guarded import GuardedTier
from tiering.tiers.wrappers.pressure import Pressure, PressureLimits, PressureTier
from tiering.tiers.wrappers.striped import StripedTier
from tiering.wiring import build_tiers

Wrapped = TypeVar("Wrapped", bound=Tier)

MIB = 1 << 20
LIMITS = PressureLimits(high_seconds=0.1, low_seconds=0.02, warmup_calls=3)
ALL = PressureLimits(high_seconds=0.1, low_seconds=0.02, warmup_calls=0, weight=1, refuses_all=True)


def refused(pressure: Pressure, calls: int, now: float) -> int:
    return sum(pressure.refuses(now) for _ in range(calls))


def test_a_fast_tier_is_never_refused_anything() -> None:
    pressure = Pressure(LIMITS)
    for now in range(100):
        pressure.stored(0.09, MIB, float(now))
        assert not pressure.refuses(now)


def test_the_first_writes_only_start_the_average() -> None:
    pressure = Pressure(LIMITS)
    for seconds in (9.0, 1.0, 2.0):
        pressure.stored(seconds, MIB, 0)
        assert not pressure.is_pressed(0)
    assert pressure.seconds_per_mib(0) == pytest.approx(4.0)
    pressure.stored(4.0, MIB, 0)
    assert pressure.is_pressed(0)


def test_the_size_of_a_write_does_not_matter() -> None:
    for size in (MIB // 64, 64 * MIB):
        pressure = Pressure(ALL)
        pressure.stored(0.11 * size / MIB, size, 0)
        assert pressure.is_pressed(0)
        assert pressure.seconds_per_mib(0) == pytest.approx(0.11)


def test_one_slow_write_among_many_is_not_pressure() -> None:
    pressure = Pressure(LIMITS)
    for _ in range(10):
        pressure.stored(0.01, MIB, 0)
    pressure.stored(0.5, MIB, 0)
    assert pressure.seconds_per_mib(0) == pytest.approx(0.15 * 0.5 + 0.85 * 0.01)
    assert not pressure.is_pressed(0)


def test_between_the_watermarks_it_stays_as_it_was() -> None:
    pressure = Pressure(ALL)
    pressure.stored(0.05, MIB, 0)
    assert not pressure.is_pressed(0)
    pressure.stored(0.2, MIB, 0)
    pressure.stored(0.05, MIB, 0)
    assert pressure.is_pressed(0)
    pressure.stored(0.01, MIB, 0)
    assert not pressure.is_pressed(0)


def test_the_slower_the_more_is_refused() -> None:
    shares = []
    for seconds in (0.1, 0.15, 0.2, 0.25, 0.3, 5.0):
        limits = PressureLimits(high_seconds=0.1, low_seconds=0.02, warmup_calls=0, weight=1)
        pressure = Pressure(limits)
        pressure.stored(0.11, MIB, 0)
        pressure.stored(seconds, MIB, 0)
        shares.append(refused(pressure, 100, 0))
    assert shares == pytest.approx([0, 25, 50, 75, 100, 100], abs=1)


def test_a_tier_that_is_left_alone_is_tried_again_gently() -> None:
    pressure = Pressure(ALL)
    pressure.stored(0.16, MIB, 0)
    assert refused(pressure, 10, 0) == 10
    # Two seconds halve it: 0.16, 0.08, 0.04, 0.02, and below the low mark after that.
    assert pressure.seconds_per_mib(4) == pytest.approx(0.04)
    assert refused(pressure, 10, 5.9) == 10
    assert refused(pressure, 10, 6.1) == 5
    assert refused(pressure, 10, 7.2) == 0
    assert not pressure.is_pressed(7.2)


class SlowTier(MemoryTier):
    """Takes a time for each chunk that it is given."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock, self.seconds = clock, 0.0

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        outcomes = await super().write(keys, buffers)
        self.clock.advance(self.seconds * len(keys))
        return outcomes


async def write(tier: PressureTier | GuardedTier, *numbers: int) -> list[WriteOutcome]:
    keys = [key_number(number) for number in numbers]
    return await tier.write(keys, views([payload_of(key) for key in keys]))


async def test_a_slow_tier_is_spared_and_reads_go_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    inner = SlowTier(clock)
    tier = PressureTier(inner, clock, ALL)
    await tier.open()
    inner.seconds = 0.2 * CHUNK_BYTES / MIB
    assert await write(tier, 1, 2) == [Write.STORED] * 2
    assert await write(tier, 3, 4, 5) == [Write.REFUSED] * 3
    assert await tier.contains([key_number(1), key_number(3)]) == [Read.HIT, Read.MISS]
    assert await tier.read([key_number(2)], blank(1)) == [Read.HIT]
    stats = tier.stats()
    assert stats["pressure_refused_calls"] == 1
    assert stats["pressure_refused_chunks"] == 3
    assert stats["now_pressed"] == 1
    assert stats["now_store_us_per_mib"] == 200_000
    assert stats["now_chunks"] == 2
    clock.advance(60)
    inner.seconds = 0.0
    assert [await write(tier, number) for number in (6, 7, 8)].count([Write.STORED]) == 2
    clock.advance(60)
    assert await write(tier, 3, 9) == [Write.STORED] * 2
    assert tier.stats()["now_pressed"] == 0
    told = [record.getMessage() for record in caplog.records]
    assert [message.split(": ")[1] for message in told] == [
        "is slow, and given less to write",
        "is fast enough again",
    ]
    await tier.close()


async def test_what_is_not_stored_is_not_measured() -> None:
    clock = ManualClock()
    inner = SlowTier(clock)
    tier = PressureTier(inner, clock, ALL)
    await tier.open()
    await write(tier, 1)
    inner.writes[key_number(2)] = Write.FULL
    for numbers in ((), (1,), (2,), (1, 2)):
        inner.seconds = 9.0
        await write(tier, *numbers)
    assert tier.stats()["now_store_us_per_mib"] == 0
    await write(tier, 1, 2, 3)
    assert tier.stats()["now_store_us_per_mib"] == 27 * 128 * 1_000_000, "one was stored"
    await tier.close()


async def test_a_spared_tier_is_not_taken_for_a_sick_one() -> None:
    clock = ManualClock()
    inner = SlowTier(clock)
    tier = GuardedTier(PressureTier(inner, clock, ALL), clock)
    await tier.open()
    inner.seconds = 1.0
    await write(tier, 0)
    for number in range(1, 50):
        assert await write(tier, number) == [Write.REFUSED]
    assert tier.stats()["trips"] == 0
    assert tier.stats()["pressure_refused_chunks"] == 49
    await tier.close()


def inside(tier: object, kind: type[Wrapped]) -> Wrapped:
    """The wrapper of that kind, however deep it is."""
    while not isinstance(tier, kind):
        tier = tier._inner  # type: ignore[attr-defined]
    return tier


def test_each_root_is_spared_by_itself_as_the_settings_say() -> None:
    tiers = (
        FsTierConfig(
            root_dir=["/mnt/a", "/mnt/b"],  # type: ignore[arg-type]
            locality="REMOTE",
            backpressure=PressureConfig(policy_cls="DropStorePolicy", alpha=0.5),
        ),
        FsTierConfig(root_dir="/mnt/c"),
    )
    config = EngineConfig(cpu_bytes_to_use=1, secondary_tiers=tiers)
    striped, plain = build_tiers(config, example_namespace(), CHUNK_BYTES)
    limits = PressureLimits(high_seconds=0.05, low_seconds=0.01, weight=0.5, refuses_all=True)
    roots = inside(striped, StripedTier)._roots
    assert [inside(inside(root, GuardedTier), PressureTier)._limits for root in roots] == [
        limits,
        limits,
    ]
    assert not isinstance(inside(plain, GuardedTier)._inner, PressureTier)
