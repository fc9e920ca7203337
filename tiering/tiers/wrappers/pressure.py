"""`PressureTier`: a tier around a tier that is given less to write while its writes are slow.

Owns the measure: a moving average of the seconds that it takes to store a MiB, over calls that
stored something, which falls while nothing is written, so that a spared tier is tried again.
Refused chunks are not lost: the core offers them again when they are used next. Loads go through.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tiering.clock import Clock
from tiering.tiers.base import DeleteOutcome, Listener, ReadOutcome, Tier, Write, WriteOutcome

log = logging.getLogger("tiering")

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PressureLimits:
    """When a tier is under pressure, and what is refused then. Seconds are per stored MiB, but for
    `half_life_seconds`, of the average while nothing is written, and `cooldown_seconds`.

    `refuses_all`: every call under pressure; otherwise the more of them the further the average
    is above `high_seconds`, and all from three times that on. `warmup_calls` only start it.
    """

    high_seconds: float
    low_seconds: float
    weight: float = 0.15
    warmup_calls: int = 10
    half_life_seconds: float = 2.0
    cooldown_seconds: float = 1.0
    refuses_all: bool = False


class Pressure:
    """Whether a call may write. Sans-IO; asked and told with the time."""

    def __init__(self, limits: PressureLimits) -> None:
        self._limits = limits
        self._average = 0.0
        self._measured_at = 0.0
        self._calls = 0
        self._is_pressed = False
        self._cleared_at: float | None = None
        # What part of a call is due to be refused: a whole one is.
        self._owed = 0.0

    def seconds_per_mib(self, now: float) -> float:
        """The average, halved with every half-life since the last write under pressure."""
        if not self._is_pressed:
            return self._average
        idle = max(0.0, now - self._measured_at)
        return self._average * float(0.5 ** (idle / self._limits.half_life_seconds))

    def is_pressed(self, now: float) -> bool:
        if self._is_pressed and self.seconds_per_mib(now) < self._limits.low_seconds:
            self._average = self.seconds_per_mib(now)
            self._is_pressed = False
            self._cleared_at = now
        return self._is_pressed

    def stored(self, seconds: float, size: int, now: float) -> None:
        """A call that stored `size` bytes took `seconds`."""
        sample = seconds * _MIB / size
        average = self.seconds_per_mib(now)
        self._calls += 1
        self._measured_at = now
        if self._calls <= self._limits.warmup_calls:
            self._average += (sample - self._average) / self._calls
            return
        self._average = average + self._limits.weight * (sample - average)
        if self._average > self._limits.high_seconds:
            self._is_pressed = True
        else:
            self.is_pressed(now)

    def refuses(self, now: float) -> bool:
        """Whether the next call is refused; each is asked about once."""
        self._owed += self._share_refused(now)
        if self._owed < 1:
            return False
        self._owed -= 1
        return True

    def _share_refused(self, now: float) -> float:
        if self.is_pressed(now):
            if self._limits.refuses_all:
                return 1.0
            above = self.seconds_per_mib(now) / self._limits.high_seconds - 1
            return min(max(above / 2, 0.0), 1.0)
        if self._cleared_at is not None:
            if now - self._cleared_at < self._limits.cooldown_seconds:
                return 0.5
            self._cleared_at, self._owed = None, 0.0
        return 0.0


class PressureTier(Tier):
    """`inner`, spared while it is slow. Belongs inside a GuardedTier, which takes care of one that
    fails or hangs."""

    def __init__(self, inner: Tier, clock: Clock, limits: PressureLimits) -> None:
        self._inner = inner
        self._clock = clock
        self._limits = limits
        self._reset()

    def _reset(self) -> None:
        self._pressure = Pressure(self._limits)
        self._was_pressed = False
        self._refused_calls = self._refused_chunks = 0

    def __repr__(self) -> str:
        pressed = "under pressure" if self._was_pressed else "at ease"
        return f"<PressureTier {pressed}: {self._inner!r}>"

    @property
    def name(self) -> str:
        return self._inner.name

    def watch(self, removed: Listener) -> None:
        self._inner.watch(removed)

    async def open(self) -> None:
        await self._inner.open()
        self._reset()

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        return await self._inner.contains(keys)

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        return await self._inner.read(keys, buffers)

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        began = self._clock.now()
        is_refused = bool(keys) and self._pressure.refuses(began)
        self._tell(began)
        if is_refused:
            self._refused_calls += 1
            self._refused_chunks += len(keys)
            return [Write.REFUSED] * len(keys)
        outcomes = await self._inner.write(keys, buffers)
        stored = sum(
            buffer.nbytes
            for buffer, outcome in zip(buffers, outcomes, strict=True)
            if outcome is Write.STORED
        )
        if stored:
            now = self._clock.now()
            self._pressure.stored(now - began, stored, now)
            self._tell(now)
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        return await self._inner.delete(keys)

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self._inner.touch(keys)

    def stats(self) -> dict[str, int]:
        """The inner tier's, and: calls and chunks refused to spare it, whether it is spared now,
        and the average in microseconds per MiB."""
        now = self._clock.now()
        return self._inner.stats() | {
            "pressure_refused_calls": self._refused_calls,
            "pressure_refused_chunks": self._refused_chunks,
            "now_pressed": int(self._was_pressed),
            "now_store_us_per_mib": round(self._pressure.seconds_per_mib(now) * 1e6),
        }

    def scan(self) -> AsyncIterator[list[bytes]]:
        return self._inner.scan()

    async def close(self) -> None:
        await self._inner.close()

    def _tell(self, now: float) -> None:
        is_pressed = self._pressure.is_pressed(now)
        if is_pressed != self._was_pressed:
            self._was_pressed = is_pressed
            told = "is slow, and given less to write" if is_pressed else "is fast enough again"
            average = self._pressure.seconds_per_mib(now)
            log.info("%s: %s: %.4f seconds per MiB stored", self.name, told, average)
