"""What the tests of tiers around tiers share: an inner tier that hangs, and the waiting for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tiering.errors import TierError
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import blank, key_number, payload_of, views
from tiering.testing.memory import MemoryTier
from tiering.tiers.base import Failed, ReadOutcome, Tier, WriteOutcome
from tiering.tiers.wrappers.guarded import GuardedTier

KEYS = [key_number(i) for i in range(24)]
KEY = KEYS[0]


class StubbornTier(MemoryTier):
    """As a tier with threads: what waits for the gate of its first key goes on when cancelled,
    and raises CancelledError only when it is let through."""

    def __init__(self, name: str = "memory") -> None:
        super().__init__(name=name)
        self.gates: dict[bytes, asyncio.Event] = {}

    def hang(self, key: bytes) -> asyncio.Event:
        return self.gates.setdefault(key, asyncio.Event())

    def let_all_go(self) -> None:
        super().let_all_go()
        for gate in self.gates.values():
            gate.set()

    async def _hang(self, operation: str, keys: Sequence[bytes]) -> None:
        self.calls.append((operation, tuple(keys)))
        cancelled = None
        gate = self.gates.get(keys[0])
        while gate is not None and not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        await self._hang("contains", keys)
        return await super().contains(keys)

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        await self._hang("read", keys)
        return await super().read(keys, buffers)

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        await self._hang("write", keys)
        return await super().write(keys, buffers)


@asynccontextmanager
async def guarded(
    inner: MemoryTier, **settings: Any
) -> AsyncIterator[tuple[GuardedTier, ManualClock]]:
    clock = ManualClock()
    tier = GuardedTier(inner, clock, **settings)
    await tier.open()
    # A test that fails must not hang.
    ending = asyncio.get_running_loop().call_later(60, inner.let_all_go)
    try:
        yield tier, clock
    finally:
        ending.cancel()
        inner.let_all_go()
        await tier.close()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until `condition` holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to hold")


async def began(inner: MemoryTier, call: Any, operation: str) -> asyncio.Task[Any]:
    """`call` as a task, once `operation` has begun in the inner tier."""
    before = len(inner.calls)
    task = asyncio.create_task(call)
    await until(lambda: any(name == operation for name, _ in inner.calls[before:]))
    return task


async def read(tier: Tier, *keys: bytes) -> list[ReadOutcome]:
    return await tier.read(keys, blank(len(keys)))


async def write(tier: Tier, *keys: bytes) -> list[WriteOutcome]:
    return await tier.write(keys, views([payload_of(key) for key in keys]))


def failure(reason: str = "Input/output error") -> Failed:
    return Failed(TierError("memory", KEY, reason))


def told(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]
