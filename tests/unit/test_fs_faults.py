"""The fs tier on a disk that fails: what is a miss for now, what is kept, and what is given up.

Faults come from `tiering.testing.faults`, below the tier; what it finds afterwards is real.
"""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fs_places import KEYS, NAMESPACE, file_of, files, quarantined
from tiering import KVLayout, StoreConfig, TieredStore
from tiering.errors import DamagedChunk
from tiering.testing.examples import (
    CHUNK_BYTES,
    blank,
    example_namespace,
    key_number,
    payload_of,
    stored,
    views,
)
from tiering.testing.faults import FaultyIo
from tiering.tiers.base import Failed, Read, Write
from tiering.tiers.files.limits import Limits, max_bytes_for
from tiering.tiers.files.tier import FsTier
from tiering_kernels.portable import PortableIo

FRAME = 4096 + CHUNK_BYTES
# Without trying which way the disk is faster.
QUICK: dict[str, Any] = {
    "read_path": "buffered",
    "write_path": "buffered",
    "n_read_threads": 2,
    "n_write_threads": 2,
}


def bound(chunks: int) -> Limits:
    return Limits(max_bytes=max_bytes_for(chunks, FRAME - 4096), min_free_bytes=0)


@asynccontextmanager
async def faulty(root: Path, seed: int = 0, **more: Any) -> AsyncIterator[tuple[FsTier, FaultyIo]]:
    io = FaultyIo(PortableIo(), random.Random(seed))
    tier = FsTier(root, example_namespace(), CHUNK_BYTES, io=io, **QUICK, **more)
    await tier.open()
    try:
        yield tier, io
    finally:
        io.let_go()
        await tier.close()


def payloads(keys: list[bytes]) -> list[memoryview]:
    return views([payload_of(key) for key in keys])


def temps(root: Path) -> list[Path]:
    return files(root, "tmp_r*/*")


async def exact(tier: FsTier, keys: list[bytes]) -> list[object]:
    """What reading `keys` gives; every HIT has its own bytes."""
    buffers = blank(len(keys))
    outcomes = await tier.read(keys, buffers)
    for key, outcome, buffer in zip(keys, outcomes, buffers, strict=True):
        assert outcome is not Read.HIT or buffer == payload_of(key)
    return list(outcomes)


# Reading


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOTCONN, errno.EACCES])
async def test_a_read_that_fails_is_a_miss_now_and_the_file_is_kept(
    tmp_path: Path, number: int
) -> None:
    async with faulty(tmp_path) as (tier, io):
        await stored(tier, KEYS)
        io.fail("read_files", number, after=3)
        outcomes = await tier.read(KEYS, blank(20))
        (failure,) = [outcome for outcome in outcomes if outcome is not Read.HIT]
        assert isinstance(failure, Failed)
        assert not isinstance(failure.error, DamagedChunk)
        assert outcomes.count(Read.HIT) == 19
        assert len(files(tmp_path, "*.bin")) == 20
        assert await exact(tier, KEYS) == [Read.HIT] * 20
        assert tier.stats()["read_errors"] == 1


async def test_a_stale_handle_is_a_miss_and_the_chunk_stays_booked(tmp_path: Path) -> None:
    async with faulty(tmp_path, limits=bound(10)) as (tier, io):
        await stored(tier, KEYS[:10])
        io.fail("read_files", errno.ESTALE, times=None)
        assert await tier.read(KEYS[:5], blank(5)) == [Read.MISS] * 5
        io.mend()
        assert await exact(tier, KEYS[:5]) == [Read.HIT] * 5
        await stored(tier, KEYS[10:15])
        assert len(files(tmp_path, "*.bin")) == 10


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
async def test_a_question_that_fails_says_so_and_keeps_the_file(
    tmp_path: Path, number: int
) -> None:
    async with faulty(tmp_path) as (tier, io):
        await stored(tier, KEYS[:3])
        io.fail("sizes", number, after=1)
        first, second, third = await tier.contains(KEYS[:3])
        assert (first, third) == (Read.HIT, Read.HIT)
        assert isinstance(second, Failed)
        assert await tier.contains(KEYS[:3]) == [Read.HIT] * 3


@pytest.mark.parametrize("fault", ["flip", "short_read"])
async def test_what_is_read_wrong_is_damage_and_written_anew(tmp_path: Path, fault: str) -> None:
    async with faulty(tmp_path) as (tier, io):
        await stored(tier, KEYS)
        getattr(io, fault)("read_files", after=7, times=1)
        outcomes = await exact(tier, KEYS)
        (failure,) = [outcome for outcome in outcomes if outcome is not Read.HIT]
        assert isinstance(failure, Failed)
        assert isinstance(failure.error, DamagedChunk)
        assert len(quarantined(tmp_path)) == 1
        assert sum(n for name, n in tier.stats().items() if name.startswith("damaged_")) == 1
        again = await tier.write(KEYS, payloads(KEYS))
        assert (again.count(Write.STORED), again.count(Write.ALREADY_THERE)) == (1, 19)
        assert await exact(tier, KEYS) == [Read.HIT] * 20


async def test_a_bit_that_rots_on_the_disk_never_reaches_a_reader(tmp_path: Path) -> None:
    for seed in range(4):
        async with faulty(tmp_path / str(seed), seed) as (tier, io):
            io.flip("write_files", times=3, after=seed)
            await stored(tier, KEYS)
            outcomes = await exact(tier, KEYS)
        assert [isinstance(outcome, Failed) for outcome in outcomes].count(True) == 3


# Writing


async def test_a_store_that_fails_halfway_is_not_found_and_the_others_are(tmp_path: Path) -> None:
    async with faulty(tmp_path) as (tier, io):
        path = str(file_of(tmp_path, KEYS[11]))
        io.short_write("write_files", errno.EIO, where=path.__eq__)
        outcomes = await tier.write(KEYS, payloads(KEYS))
        assert isinstance(outcomes[11], Failed)
        assert outcomes[:11] + outcomes[12:] == [Write.STORED] * 19
        expected = [Read.HIT] * 11 + [Read.MISS] + [Read.HIT] * 8
        assert await tier.contains(KEYS) == expected
        assert await exact(tier, KEYS) == expected
        assert not file_of(tmp_path, KEYS[11]).exists()
        assert tier.stats()["write_errors"] == 1
        assert sorted([key async for batch in tier.scan() for key in batch]) == sorted(
            KEYS[:11] + KEYS[12:]
        )
        await stored(tier, KEYS[11:12])
        assert await exact(tier, KEYS) == [Read.HIT] * 20


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_costs_the_least_recently_used_and_one_retry(
    tmp_path: Path, number: int
) -> None:
    async with faulty(tmp_path) as (tier, io):
        await stored(tier, KEYS[:10])
        assert await exact(tier, KEYS[:9]) == [Read.HIT] * 9
        io.fail("write_files", number, after=2)
        assert await tier.write(KEYS[10:15], payloads(KEYS[10:15])) == [Write.STORED] * 5
        assert temps(tmp_path) == []
        # The tail of the prefix that was not read goes first.
        assert await tier.contains([KEYS[9]]) == [Read.MISS]
        assert await exact(tier, KEYS[:9]) == [Read.HIT] * 9
        assert await exact(tier, KEYS[10:15]) == [Read.HIT] * 5
        assert tier.stats()["evicted"] >= 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_disk_that_stays_full_says_so_for_those_it_has_no_room_for(
    tmp_path: Path, number: int
) -> None:
    async with faulty(tmp_path) as (tier, io):
        await stored(tier, KEYS[:10])
        path = str(file_of(tmp_path, KEYS[12]))
        rule = io.fail("write_files", number, times=None, where=path.__eq__)
        outcomes = await tier.write(KEYS[10:15], payloads(KEYS[10:15]))
        assert outcomes == [Write.STORED] * 2 + [Write.FULL] + [Write.STORED] * 2
        assert rule.hits == 2, "one retry, after making room"
        assert temps(tmp_path) == []
        assert await tier.contains(KEYS[12:13]) == [Read.MISS]
        assert [*await exact(tier, KEYS[10:12]), *await exact(tier, KEYS[13:15])] == [Read.HIT] * 4
        io.mend()
        await stored(tier, KEYS[12:13])
        assert await exact(tier, KEYS[10:15]) == [Read.HIT] * 5


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE])
async def test_a_disk_that_takes_no_writes_goes_on_to_be_read(tmp_path: Path, number: int) -> None:
    async with faulty(tmp_path, limits=bound(12)) as (tier, io):
        await stored(tier, KEYS[:10])
        io.fail("write_files", number, times=None)
        outcomes = await tier.write(KEYS[10:12], payloads(KEYS[10:12]))
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        assert tier.stats()["write_errors"] == 2
        assert await exact(tier, KEYS[:10]) == [Read.HIT] * 10
        assert len(files(tmp_path, "*.bin")) == 10
        assert temps(tmp_path) == []
        io.mend()
        await stored(tier, KEYS[10:12])
        assert await exact(tier, KEYS[:12]) == [Read.HIT] * 12


async def test_failed_writes_into_a_full_tier_cost_no_room_for_ever(tmp_path: Path) -> None:
    async with faulty(tmp_path, limits=bound(8)) as (tier, io):
        for turn in range(4):
            io.fail("write_files", errno.EIO, times=3)
            keys = [key_number(100 * turn + i) for i in range(6)]
            await tier.write(keys, payloads(keys))
            io.mend()
        await tier.write(KEYS[:8], payloads(KEYS[:8]))
        assert await exact(tier, KEYS[:8]) == [Read.HIT] * 8
        assert len(files(tmp_path, "*.bin")) == 8


# Hanging


async def test_a_hang_blocks_only_the_workers_concerned(tmp_path: Path) -> None:
    async with faulty(tmp_path) as (tier, io):
        await stored(tier, KEYS[:4])
        io.hang("read_files")
        reading = asyncio.create_task(exact(tier, KEYS[:1]))
        assert await asyncio.to_thread(io.wait_hung, 1)
        await stored(tier, KEYS[4:8])
        assert await tier.contains(KEYS[:8]) == [Read.HIT] * 8
        assert not reading.done()
        io.let_go()
        assert await reading == [Read.HIT]


async def test_a_cancelled_read_comes_back_only_when_the_disk_does(tmp_path: Path) -> None:
    async with faulty(tmp_path) as (tier, io):
        await stored(tier, KEYS)
        io.hang("read_files")
        memory = [bytearray(CHUNK_BYTES) for _ in KEYS]
        buffers = list(map(memoryview, memory))
        reading = asyncio.create_task(tier.read(KEYS, buffers))
        # All of the threads: those for writes help while they have nothing else to do.
        assert await asyncio.to_thread(io.wait_hung, 4)
        begun = io.calls["read_files"]
        for _ in range(3):
            reading.cancel()
            await asyncio.sleep(0)
        assert not reading.done()
        io.let_go()
        await asyncio.wait({reading})
        assert reading.cancelled()
        assert io.calls["read_files"] == begun, "what nobody had begun is not begun any more"
        for buffer in buffers:
            buffer.release()
        for each in memory:
            each.append(0)  # BufferError while anyone still has a view
        assert await exact(tier, KEYS) == [Read.HIT] * 20


async def test_a_cancelled_write_that_hung_leaves_the_books_right(tmp_path: Path) -> None:
    async with faulty(tmp_path, limits=bound(10)) as (tier, io):
        await stored(tier, KEYS[:10])
        io.hang("write_files")
        writing = asyncio.create_task(tier.write(KEYS[10:], payloads(KEYS[10:])))
        assert await asyncio.to_thread(io.wait_hung, 1)
        writing.cancel()
        io.let_go()
        await asyncio.wait({writing})
        assert writing.cancelled()
        there = [key for key in KEYS if file_of(tmp_path, key).exists()]
        assert await exact(tier, there) == [Read.HIT] * len(there)
        await tier.write(KEYS[:10], payloads(KEYS[:10]))
        assert await exact(tier, KEYS[:10]) == [Read.HIT] * 10
        assert len(files(tmp_path, "*.bin")) <= 10
        assert temps(tmp_path) == []


# Power cuts


@pytest.mark.parametrize("seed", range(6))
async def test_a_write_lost_in_a_power_cut_is_a_miss_or_damage(tmp_path: Path, seed: int) -> None:
    image = tmp_path / "image"
    async with faulty(tmp_path / "kv", seed, limits=bound(12)) as (tier, io):
        await stored(tier, KEYS[:12])
        io.lose_writes()
        await tier.write(KEYS[12:], payloads(KEYS[12:]))
        shutil.copytree(tmp_path / "kv", image)
        fates = io.crash(lambda path: str(image / Path(path).relative_to(tmp_path / "kv")))
    assert len(fates) == 8
    async with faulty(image, limits=bound(12)) as (tier, _):
        outcomes = await exact(tier, KEYS)
        assert not [each for each in outcomes if isinstance(each, Write)]
        # Those that took an evicted chunk's blocks may hold that chunk, whole.
        kept = {path for path, fate in fates.items() if fate == "kept"}
        assert outcomes.count(Read.HIT) >= len(kept)
        await tier.write(KEYS[:12], payloads(KEYS[:12]))
        assert await exact(tier, KEYS[:12]) == [Read.HIT] * 12


async def test_what_was_synced_outlives_a_power_cut(tmp_path: Path) -> None:
    image = tmp_path / "image"
    async with faulty(tmp_path / "kv", durability="batch", limits=bound(12)) as (tier, io):
        io.lose_writes()
        await stored(tier, KEYS[:12])
        await stored(tier, KEYS[12:])
        shutil.copytree(tmp_path / "kv", image)
        assert io.crash(lambda path: str(image / Path(path).relative_to(tmp_path / "kv"))) == {}
    async with faulty(image, limits=bound(12)) as (tier, _):
        assert await exact(tier, KEYS[12:]) == [Read.HIT] * 8


# Others in the directory


async def test_a_cleaner_that_takes_half_the_files_costs_only_those(tmp_path: Path) -> None:
    async with faulty(tmp_path, limits=bound(20)) as (tier, _):
        await stored(tier, KEYS)
        for key in KEYS[::2]:
            file_of(tmp_path, key).unlink()
        assert await tier.contains(KEYS) == [Read.MISS, Read.HIT] * 10
        assert await exact(tier, KEYS) == [Read.MISS, Read.HIT] * 10
        # The books find out, so that their room is not lost and nobody is evicted for it.
        await stored(tier, KEYS[::2])
        assert await exact(tier, KEYS) == [Read.HIT] * 20
        assert tier.stats()["evicted"] == 0


async def test_a_cleaner_that_takes_the_directories_too_finds_them_made_again(
    tmp_path: Path,
) -> None:
    async with faulty(tmp_path) as (tier, io):
        await stored(tier, KEYS[:10])
        for key in KEYS[:2]:
            path = str(file_of(tmp_path, key))
            io.flip("read_files", where=path.__eq__)
            assert isinstance((await exact(tier, [key]))[0], Failed)
            if key is KEYS[0]:
                shutil.rmtree(quarantined(tmp_path)[0].parent)
        assert len(quarantined(tmp_path)) == 1
        shutil.rmtree(tmp_path / f"{NAMESPACE.directory}_r0")
        shutil.rmtree(tmp_path / NAMESPACE.directory)
        assert await exact(tier, KEYS) == [Read.MISS] * 20
        await stored(tier, KEYS)
        assert await exact(tier, KEYS) == [Read.HIT] * 20


# Seen from above

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=32, block_tokens=64)


@pytest.mark.parametrize("fault", ["cut", "gone", "EIO"])
async def test_a_chunk_that_cannot_be_read_is_not_asked_for_over_and_over(
    tmp_path: Path, fault: str
) -> None:
    keys = LAYOUT.keys(list(range(3 * LAYOUT.chunk_tokens)))
    pages = [bytes([i]) * LAYOUT.chunk_bytes for i in range(3)]
    config = StoreConfig(layout=LAYOUT, cpu_bytes_to_use=8 << 16, load_deadline_seconds=5.0)

    def tier(io: FaultyIo) -> FsTier:
        return FsTier(tmp_path / "kv", example_namespace(), LAYOUT.chunk_bytes, io=io, **QUICK)

    async with TieredStore(config, tiers=[tier(FaultyIo(PortableIo()))]) as store:
        assert await store.save(keys, pages) == 3
        assert await store.flush()
    bad = file_of_any(tmp_path, keys[1])
    io = FaultyIo(PortableIo())
    if fault == "cut":
        bad.write_bytes(bad.read_bytes()[:5000])
    elif fault == "EIO":
        io.fail("read_files", errno.EIO, times=None, where=str(bad).__eq__)
    async with TieredStore(config, tiers=[tier(io)]) as store:
        for turn in range(30):
            if fault == "gone" and not turn:
                assert await store.match(keys) == 3
                bad.unlink()
            async with store.load(keys) as loaded:
                assert loaded.found == 1
                assert loaded.view(0) == pages[0]
        counters = store.stats().counters
        failures = sum(counters[f"promotions_{n}"] for n in ("missing", "damaged", "failed"))
        # A chunk that may be back by the next request is tried once for each, never twice.
        assert failures <= (30 if fault == "EIO" else 1)
        assert io.items["read_files"] <= 30 + 3
        assert bad.exists() == (fault != "gone")


def file_of_any(root: Path, key: bytes) -> Path:
    (path,) = files(root, f"{key[:-4].hex()}.bin")
    return path
