"""Tiers tell of what they evict, all of it and nothing else, through whatever is around them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import fs_places
import segment_places
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import CHUNK_BYTES, blank, key_number, payload_of, views
from tiering.testing.memory import MemoryTier
from tiering.tiers.base import Read, Tier, Write
from tiering.tiers.files.limits import Limits
from tiering.tiers.wrappers.guarded import GuardedTier
from tiering.tiers.wrappers.metered import MeteredTier
from tiering.tiers.wrappers.pressure import PressureLimits, PressureTier
from tiering.tiers.wrappers.striped import StripedTier

KEYS = [key_number(i) for i in range(60)]
FILE_BYTES = CHUNK_BYTES + 4096 + 2 * 4096
"""A small chunk's file, and the directories that it may need."""


def files(root: Path) -> Tier:
    return fs_places.make_tier(root, limits=Limits(max_bytes=12 * FILE_BYTES))


def segments(root: Path) -> Tier:
    return segment_places.make_tier(root, slots=12)


BOUNDED: dict[str, Callable[[Path], Tier]] = {"files": files, "segments": segments}
AROUND: dict[str, Callable[[Tier], Tier]] = {
    "guarded": lambda inner: GuardedTier(inner, ManualClock()),
    "metered": lambda inner: MeteredTier(inner, CHUNK_BYTES, ManualClock()),
    "pressure": lambda inner: PressureTier(
        inner, ManualClock(), PressureLimits(high_seconds=1.0, low_seconds=0.5)
    ),
    "striped": lambda inner: StripedTier([MemoryTier(name="other"), inner], ManualClock()),
}


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("seed", range(3))
async def test_a_listener_knows_what_is_there(kind: str, seed: int, tmp_path: Path) -> None:
    chance, tier = random.Random(seed), BOUNDED[kind](tmp_path)
    there: set[bytes] = set()
    told: list[bytes] = []

    def removed(keys: object) -> None:
        assert isinstance(keys, list | tuple)
        told.extend(keys)
        there.difference_update(keys)

    tier.watch(removed)
    await tier.open()
    try:
        for _ in range(40):
            some = chance.sample(KEYS, chance.randint(1, 6))
            what = chance.random()
            if what < 0.7:
                outcomes = await tier.write(some, views([payload_of(key) for key in some]))
                stored = (Write.STORED, Write.ALREADY_THERE)
                there |= {k for k, o in zip(some, outcomes, strict=True) if o in stored}
            elif what < 0.9:
                found = await tier.read(some, views(blank(len(some))))
                for key, outcome in zip(some, found, strict=True):
                    assert (outcome is Read.HIT) == (key in there)
            else:
                await tier.delete(some)
                there.difference_update(some)
            hits = await tier.contains(KEYS)
            assert {k for k, o in zip(KEYS, hits, strict=True) if o is Read.HIT} == there
    finally:
        await tier.close()
    assert len(told) > 20


@pytest.mark.parametrize("kind", AROUND)
async def test_wrappers_pass_it_on(kind: str) -> None:
    inner = MemoryTier()
    tier = AROUND[kind](inner)
    told: list[bytes] = []
    tier.watch(told.extend)
    await tier.open()
    inner.chunks[KEYS[0]] = inner.chunks[KEYS[1]] = (b"", 0)
    inner.evict(KEYS[1:3])
    await tier.close()
    assert told == [KEYS[1]]


async def test_nobody_has_to_listen(tmp_path: Path) -> None:
    for at, make in enumerate(BOUNDED.values()):
        (root := tmp_path / str(at)).mkdir()
        tier = make(root)
        await tier.open()
        for key in KEYS:
            await tier.write([key], views([payload_of(key)]))
        assert 0 < tier.stats()["now_chunks"] <= 12
        await tier.close()
