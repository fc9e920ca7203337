"""A program's store, and a router that hears of it: it knows what lies in memory and on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from routers import CPU, DISK, Router
from tiering import FsTierConfig, KVLayout, StoreConfig, TieredStore
from tiering.broadcast import Broadcast
from tiering.events.blocks import AllBlocksCleared, BlockEvent
from tiering.keys import token_keys

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=64, block_tokens=16, blocks_per_chunk=2)
CHUNK = LAYOUT.chunk_bytes
TOKENS = list(range(1000, 1000 + 32 * 6))


def config(root: Path, chunks: int = 64, **tier: object) -> StoreConfig:
    fs = FsTierConfig.model_validate({"root_dir": str(root), "enable_kv_events": True, **tier})
    return StoreConfig(layout=LAYOUT, cpu_bytes_to_use=chunks * CHUNK * 2, secondary_tiers=[fs])


def blocks(tokens: list[int], count: int) -> set[int]:
    """The integers that a router has for the first `count` chunks."""
    hashes = token_keys(tokens[: count * 32], 16)
    return {int.from_bytes(key[-12:-4], "big") for key in hashes}


@asynccontextmanager
async def opened(
    settings: StoreConfig, publish: Callable[[list[BlockEvent]], None]
) -> AsyncIterator[tuple[Broadcast, TieredStore]]:
    async with (
        Broadcast(settings, publish) as events,
        TieredStore(settings, events=events) as store,
    ):
        yield events, store


async def test_a_router_hears_what_is_stored_dropped_and_found_after_a_restart(
    tmp_path: Path,
) -> None:
    router, told, turns = Router(), list[BlockEvent](), asyncio.Event()

    def publish(events: list[BlockEvent]) -> None:
        told.extend(events)
        router.take(events)
        turns.set()

    settings, keys = config(tmp_path), LAYOUT.keys(TOKENS)
    async with opened(settings, publish) as (events, store):
        assert told == [AllBlocksCleared()]
        events.describe(TOKENS)
        assert await store.save(keys, [bytes([at]) * CHUNK for at in range(6)]) == 6
        assert router.held(CPU) == blocks(TOKENS, 6)
        assert await store.flush()
        assert router.held(DISK) == blocks(TOKENS, 6)
        await store.drop(keys[4:])
        assert await store.flush()
        assert router.held(CPU) == router.held(DISK) == blocks(TOKENS, 4)
        assert events.stats()["events_undescribed"] == 0

    known = router.blocks[DISK]
    async with opened(settings, publish) as (events, store):
        async with asyncio.timeout(60):
            while router.held(DISK) != blocks(TOKENS, 4):
                turns.clear()
                await turns.wait()
        assert router.blocks[DISK] == known, "with tokens and parents"
        assert not router.held(CPU)
        events.describe(TOKENS)
        async with store.load(keys) as chunks:
            assert chunks.found == 4
            assert router.held(CPU) == blocks(TOKENS, 4)


async def test_what_the_host_tier_has_no_room_for_is_withdrawn(tmp_path: Path) -> None:
    router = Router()
    async with opened(config(tmp_path, chunks=4), router.take) as (events, store):
        for seed in range(5):
            tokens = [seed * 1000 + at for at in range(96)]
            events.describe(tokens, salt=b"mine")
            await store.save(LAYOUT.keys(tokens, b"mine"), [bytes(CHUNK)] * 3)
            assert await store.flush()
        slots = store.stats().slots_ready
        assert len(router.held(CPU)) == 2 * slots < 30
        assert len(router.held(DISK)) == 30


async def test_tiers_that_are_not_announced_stay_unknown(tmp_path: Path) -> None:
    router = Router()
    settings = config(tmp_path, enable_kv_events=False)
    async with opened(settings, router.take) as (events, store):
        events.describe(TOKENS)
        await store.save(LAYOUT.keys(TOKENS), [bytes(CHUNK)] * 6)
        assert await store.flush()
        assert router.held(CPU)
        assert not router.held(DISK)


async def test_tokens_have_to_fit_the_keys(tmp_path: Path) -> None:
    async with Broadcast(config(tmp_path), Router().take) as events:
        with pytest.raises(ValueError, match="tokens for 6 chunks"):
            events.describe(TOKENS[:-1], LAYOUT.keys(TOKENS))
        with pytest.raises(OverflowError):
            events.describe([-1] * 32)
