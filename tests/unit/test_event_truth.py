"""A hundred thousand operations on a real store, and what a router makes of its events, which reach
it through real sockets: at rest it knows what lies in host memory and on the disk, without one
difference and without one thing said twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from tiering import Broadcast, FsTierConfig, KVLayout, StoreConfig, TieredStore
from tiering.broadcast import LATER_SECONDS
from tiering.events.blocks import MEDIUM_CPU, MEDIUM_STORAGE
from tiering.events.mirror import EventMirror
from tiering.events.publisher import ZmqPublisher
from tiering.events.subscriber import EventSubscriber
from tiering.keys import token_keys

pytestmark = pytest.mark.slow

OPERATIONS = 50_000
"""For each layout, of chunks: stored, loaded or dropped."""
CHECKS = 5

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=16, blocks_per_chunk=2)
HOST_CHUNKS, DISK_CHUNKS = 48, 90
PROMPTS, PROMPT_CHUNKS = 40, 12


def settings(root: Path, layout: str) -> StoreConfig:
    tier = {
        "root_dir": str(root),
        "layout": layout,
        "max_bytes": DISK_CHUNKS * (4096 * 4),
        "enable_kv_events": True,
    }
    return StoreConfig(
        layout=LAYOUT,
        cpu_bytes_to_use=HOST_CHUNKS * 4096 + 65536,
        secondary_tiers=[FsTierConfig.model_validate(tier)],
    )


def prompts(chance: random.Random) -> list[list[int]]:
    """Some part ways with others, also within a chunk."""
    made: list[list[int]] = []
    for _ in range(PROMPTS):
        shared = chance.choice(made)[: chance.randrange(300)] if made else []
        count = PROMPT_CHUNKS * LAYOUT.chunk_tokens - len(shared)
        made.append(shared + [chance.randrange(1 << 31) for _ in range(count)])
    return made


def blocks_by_key(made: Iterable[list[int]]) -> dict[bytes, set[int]]:
    found: dict[bytes, set[int]] = {}
    for tokens in made:
        hashes = [int.from_bytes(k[-12:-4], "big") for k in token_keys(tokens, 16)]
        for at, key in enumerate(LAYOUT.keys(tokens)):
            found[key] = set(hashes[2 * at : 2 * at + 2])
    return found


async def catch_up(
    subscriber: EventSubscriber, publisher: ZmqPublisher, mirror: EventMirror, seen: int
) -> int:
    """Read until all that was published was seen; how many batches that are, of which `seen` were
    seen before."""
    async with asyncio.timeout(60):
        while (sent := publisher.stats()).queued or seen < sent.batches:
            for received in await subscriber.receive(1.0):
                assert not received.missed
                mirror.apply(received.batch.events)
                seen += 1
    assert not publisher.stats().dropped
    return seen


@pytest.mark.parametrize("layout", ["files", "segments"])
async def test_a_router_knows_what_is_there(layout: str, tmp_path: Path) -> None:
    chance = random.Random(layout)
    made = prompts(chance)
    blocks_of, mirror, seen, done = blocks_by_key(made), EventMirror(), 0, 0
    page = bytes(LAYOUT.chunk_bytes)
    config = settings(tmp_path, layout)
    with ZmqPublisher("tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0") as publisher:
        async with EventSubscriber(
            publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            replay_seconds_max=60.0,
        ) as subscriber:
            for life in range(CHECKS):
                async with (
                    Broadcast(config, publisher.publish) as events,
                    TieredStore(config, events=events) as store,
                ):
                    while done < OPERATIONS * (life + 1) // CHECKS:
                        tokens = chance.choice(made)
                        keys = LAYOUT.keys(tokens)[: chance.randint(1, PROMPT_CHUNKS)]
                        done += len(keys)
                        events.describe(tokens)
                        what = chance.random()
                        if what < 0.5:
                            await store.save(keys, [page] * len(keys))
                        elif what < 0.95:
                            async with store.load(keys):
                                pass
                        else:
                            await store.drop(keys[len(keys) // 2 :])
                    assert await store.flush()
                    async with asyncio.timeout(60):
                        while events.is_busy:  # noqa: ASYNC110 - nothing tells of its end
                            await asyncio.sleep(LATER_SECONDS)
                    seen = await catch_up(subscriber, publisher, mirror, seen)
                    opened = store._running()
                    on_disk = {key async for batch in store._tiers[0].scan() for key in batch}
                    # A machine too busy to write all descriptions down before the end of a life
                    # leaves chunks behind that nobody can tell of.
                    on_disk -= events._announcer._undescribed.keys()
                    truth = {
                        MEDIUM_CPU: set().union(*map(blocks_of.get, opened.core.index.keys())),
                        MEDIUM_STORAGE: set().union(*map(blocks_of.get, on_disk)),
                    }
                    assert len(on_disk) > DISK_CHUNKS // 2
                    assert all(map(len, truth.values()))
                    assert mirror.difference(truth) == {}, life
                    assert mirror.anomalies == 0
    assert mirror.counts[MEDIUM_STORAGE].removed > OPERATIONS // 20
