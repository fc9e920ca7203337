"""Two engines at one bucket that hangs, throttles, fails and is called off, from one integer.

Whatever happens, no call takes longer than it may, no wrong byte is read, and afterwards nothing is
under way, no room booked, and what is there is found.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from memory_store import Bucket, MemoryStore
from tiering.testing.examples import blank, key_number, payload_of, views
from tiering.tiers.base import Read
from tiering.tiers.obj.parts import ObjLimits
from tiering.tiers.obj.store import NotNowError, StoreError, ThrottledError
from tiering.tiers.obj.tier import ObjTier
from virtual import OBJECT_BYTES, clock, opened, simulated, today

KEYS = [key_number(at) for at in range(300)]
BOUND = 40
STORM_SECONDS = 300.0
# A walk of the engine that deletes, and then some.
CALM_SECONDS = 1500.0
AT_MOST = {"read": 5.0, "contains": 5.0, "write": 8.0, "delete": 5.0 + 8.0, "touch": 0.0}


class Wild(MemoryStore):
    """Each request takes its own time, some of them for ever."""

    def __init__(self, bucket: Bucket, chance: random.Random) -> None:
        super().__init__(bucket)
        self.chance = chance
        self.is_wild = False
        self.today = today().now
        self.script = self.fault

    def fault(self, verb: str, name: str) -> Exception | None:
        at = self.chance.random() if self.is_wild else 1.0
        if at < 0.05:
            return ThrottledError("503", self.chance.choice([None, 0.5, 3.0]))
        return NotNowError("500") if at < 0.08 else StoreError("403") if at < 0.09 else None

    async def _ask(self, verb: str, name: str) -> None:
        at = self.chance.random()
        wild = 1e6 if at < 0.01 else self.chance.uniform(0.0, 6.0 if at < 0.1 else 0.1)
        self.seconds = wild if self.is_wild else 0.01
        await super()._ask(verb, name)


async def call(tier: ObjTier, operation: str, keys: list[bytes]) -> float:
    """How long it took."""
    began = clock().now()
    if operation == "read":
        buffers = blank(len(keys))
        for key, outcome, buffer in zip(keys, await tier.read(keys, buffers), buffers, strict=True):
            assert outcome is not Read.HIT or bytes(buffer) == bytes(payload_of(key))
    elif operation == "write":
        await tier.write(keys, views([payload_of(key) for key in keys]))
    elif operation == "contains":
        await tier.contains(keys)
    elif operation == "delete":
        await tier.delete(keys[:3])
    else:
        await tier.touch(keys)
    return clock().now() - began


def nothing_is_left(tier: ObjTier) -> None:
    parts = tier._opened
    assert parts is not None
    assert not parts.lookup._asked
    assert parts.bound is None or parts.bound._booked == 0
    assert all(turn.done() for lane in parts.pacer._waiting.values() for turn in lane)


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [None, BOUND * OBJECT_BYTES])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_store_does_calls_end_in_time_and_leave_nothing(
    seed: int, max_bytes: int | None
) -> None:
    async def main() -> None:
        chance, bucket = random.Random(seed), Bucket()
        limits = ObjLimits(
            requests_max=chance.choice([1, 4, 16]),
            load_deadline_seconds=5.0,
            store_deadline_seconds=8.0,
            max_bytes=max_bytes,
        )
        longest: defaultdict[str, float] = defaultdict(float)

        async def one(tier: ObjTier) -> None:
            operation, at = chance.choice(list(AT_MOST)), chance.randrange(270)
            keys = KEYS[at : at + chance.randrange(1, 30)]
            calling = asyncio.ensure_future(call(tier, operation, keys))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * chance.choice([0.01, 1.0, 5.0]))
                calling.cancel()
            await asyncio.wait({calling})
            if not calling.cancelled():
                longest[operation] = max(longest[operation], calling.result())

        async def storm() -> None:
            while clock().now() < STORM_SECONDS:
                await one(chance.choice(tiers))
                await asyncio.sleep(chance.random())

        stores = [Wild(bucket, chance) for _ in range(2)]
        async with opened(stores[0], limits) as first, opened(stores[1], limits) as second:
            tiers = [first, second]
            for store in stores:
                store.is_wild = True
            await asyncio.gather(*(storm() for _ in range(6)))
            for store in stores:
                store.is_wild = False
            await asyncio.sleep(CALM_SECONDS)
            there = sum(name.endswith(".bin") for name in bucket.objects)
            assert max_bytes is None or there <= BOUND
            for tier in tiers:
                nothing_is_left(tier)
                outcomes = await tier.read(KEYS, blank(len(KEYS)))
                assert outcomes.count(Read.HIT) == there
        assert {name: most for name, most in longest.items() if most > AT_MOST[name] + 0.1} == {}

    simulated(main)
