"""Time that jumps: coroutines on a loop whose waits take no time, and tiers that live there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from memory_store import Bucket, MemoryStore
from tiering.testing.examples import CHUNK_BYTES, example_namespace
from tiering.testing.simloop import SimClock, SimLoop, SimPool
from tiering.tiers.obj.parts import ObjLimits
from tiering.tiers.obj.tier import ObjTier

NAMESPACE = example_namespace()
OBJECT_BYTES = 4096 + CHUNK_BYTES
TODAY = 1_700_000_000.0


def simulated(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What `main()` returns, run on a SimLoop."""
    with asyncio.Runner(loop_factory=lambda: SimLoop(random.Random(0))) as runner:
        return runner.run(main())


def clock() -> SimClock:
    """The running SimLoop's."""
    return SimClock(asyncio.get_running_loop())


def today() -> SimClock:
    """Its time since 1970."""
    return SimClock(asyncio.get_running_loop(), TODAY)


def make_store(bucket: Bucket, seconds: float = 0.01) -> MemoryStore:
    """One whose requests take `seconds`."""
    store = MemoryStore(bucket)
    store.seconds = seconds
    store.today = today().now
    return store


@asynccontextmanager
async def opened(
    store: MemoryStore, limits: ObjLimits | None = None, **options: Any
) -> AsyncIterator[ObjTier]:
    tier = ObjTier(
        "obj:bucket/kv",
        store,
        "kv",
        NAMESPACE,
        CHUNK_BYTES,
        limits=limits or ObjLimits(requests_max=8),
        chance=random.Random(0),
        clock=clock(),
        today=today(),
        pool=SimPool("frames", 1, random.Random(0)),
        **options,
    )
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()
