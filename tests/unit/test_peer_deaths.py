"""Peers in processes of their own that are killed and stopped at any moment, and come back: the
engine that lives loses no byte, waits for nobody for long, and has nothing left of them."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import pytest

from peer_half import CHAINS, Half, OtherHalf, chain, half
from tiering.testing.ports import free_port
from tiering.testing.transports import descriptors, own_threads
from tiering.tiers.peers.source import PeerSource

pytestmark = pytest.mark.slow

HANG_SECONDS = 60.0
MEANWHILE_SECONDS = (0.0, 0.02, 0.1, 0.3, 0.8)
STOPPED_SECONDS = (0.2, 0.8, 2.5)


async def _ask(me: Half, port: int, chance: random.Random, found: Counter[int]) -> None:
    """Requests one after the other, for ever: each ends, whatever becomes of the peer."""
    while True:
        is_prefiller = chance.random() < 0.5
        whom = PeerSource("127.0.0.1", port, f"r{chance.randrange(4)}", is_prefiller)
        async with asyncio.timeout(HANG_SECONDS):
            count = await me.load(chain(1, chance.randrange(CHAINS)), whom)
        found[count] += 1
        if chance.random() < 0.3:
            keys = chain(0, chance.randrange(CHAINS))
            await me.store(keys, f"q{chance.randrange(100)}" if chance.random() < 0.3 else "")


async def _until_something_comes(child: OtherHalf, found: Counter[int]) -> None:
    before = found.total() - found[0]
    async with asyncio.timeout(HANG_SECONDS):
        while found.total() - found[0] < before + 3:
            assert child.process.poll() is None, "it has failed by itself"
            await asyncio.sleep(0.01)


async def _strike(child: OtherHalf, chance: random.Random) -> bool:
    """Whether it lives on."""
    await asyncio.sleep(chance.choice(MEANWHILE_SECONDS) * chance.random())
    assert child.process.poll() is None, "it has failed by itself"
    if chance.random() < 0.5:
        child.kill()
        return False
    child.stop()
    await asyncio.sleep(chance.choice(STOPPED_SECONDS))
    if chance.random() < 0.3:
        child.kill()
        return False
    child.go_on()
    return True


async def _until_nothing_is_left(me: Half, files: Counter[str]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while me.left_over or descriptors() != files:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", range(20))
async def test_a_peer_may_die_or_stop_at_any_moment(seed: int) -> None:
    chance, transport = random.Random(seed), ("tcp", "shm")[seed % 2]
    threads = own_threads()
    async with half(transport, 0) as me:
        await asyncio.sleep(0.05)
        gc.collect()
        files = descriptors()
        found: Counter[int] = Counter()
        loop, other = asyncio.get_running_loop(), me.tier.address.port
        port = free_port()
        child = await asyncio.to_thread(OtherHalf, transport, other, port)
        asking = [loop.create_task(_ask(me, port, chance, found)) for _ in range(4)]
        try:
            for _ in range(2):
                await _until_something_comes(child, found)
                if not await _strike(child, chance):
                    child.__exit__()
                    child = await asyncio.to_thread(OtherHalf, transport, other, port)
        finally:
            child.__exit__()
            for task in asking:
                task.cancel()
            results = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in results), results
        try:
            await _until_nothing_is_left(me, files)
        except TimeoutError:
            now = descriptors()
            raise AssertionError(f"{me.left_over}, {now - files} {files - now}") from None
        # Those that move rows are as many as may be, whoever is there.
        assert {name for name in own_threads() if not name.startswith("tiering-peers")} == threads
    assert own_threads() == threads
