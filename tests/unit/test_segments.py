"""The segment tier beyond the contract: order of eviction, restarts, damage, faults, bounds."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
from pathlib import Path

import pytest

from segment_places import (
    KEYS,
    NAMESPACE,
    SLOT_BYTES,
    SetClock,
    an_engine,
    balanced,
    bound,
    engines,
    hanging,
    hits,
    make_tier,
    opened,
    put,
    segments_of,
)
from tiering.errors import ConfigError, TierError
from tiering.testing.examples import (
    CHUNK_BYTES,
    blank,
    example_namespace,
    payload_of,
    scanned,
    stored,
    views,
)
from tiering.testing.faults import FaultyIo
from tiering.tiers.base import Delete, Read, Write
from tiering.tiers.disk.iopool import IoPool
from tiering.tiers.segments import files as segment_files
from tiering.tiers.segments import opening as segment_open
from tiering.tiers.segments.table import record_at
from tiering.tiers.segments.tier import SegmentTier

pytestmark = pytest.mark.usefixtures("one_probe")


# Eviction and recency


async def test_a_full_tier_evicts_the_least_recently_used_the_tail_first(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=8) as tier:
        await stored(tier, KEYS[:8])
        assert await tier.contains(KEYS[:8]) == [Read.HIT] * 8
        await hits(tier, KEYS[4:8])
        await stored(tier, KEYS[20:26])
        assert await scanned(tier) == sorted(KEYS[4:6] + KEYS[20:26])
        stats = tier.stats()
    assert (stats["stored"], stats["evicted"], stats["now_chunks"]) == (14, 6, 8)
    assert stats["now_segments"] == 4
    assert stats["now_bytes"] == 8 * SLOT_BYTES


async def test_a_touch_saves_a_chunk_from_eviction(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=8) as tier:
        await stored(tier, KEYS[:8])
        await tier.touch([*KEYS[:2], KEYS[100]])
        await put(tier, KEYS[0:1])
        await stored(tier, KEYS[20:27])
        assert await scanned(tier) == sorted([KEYS[0], *KEYS[20:27]])


async def test_a_stream_many_times_its_size_stays_within_the_bound(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=16) as tier:
        for first in range(0, 200, 8):
            await stored(tier, KEYS[first : first + 8])
        assert await hits(tier) == KEYS[-16:]
        balanced(tier)
        files = list(segments_of(tmp_path).iterdir())
        assert sum(file.stat().st_blocks * 512 for file in files) <= bound(16)


async def test_a_batch_larger_than_the_tier_stores_its_head(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=4) as tier:
        assert await put(tier, KEYS[:6]) == [Write.STORED] * 4 + [Write.FULL] * 2
        assert tier.stats()["full"] == 2


async def test_watermarks_free_more_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=10, low_watermark=0.5, high_watermark=0.8) as tier:
        await stored(tier, KEYS[:8])
        await stored(tier, KEYS[8:9])
        assert await hits(tier) == [*KEYS[:4], KEYS[8]]


async def test_the_order_of_eviction_outlives_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=8) as tier:
        await stored(tier, KEYS[:8])
        await tier.touch(KEYS[5:6])
        await hits(tier, KEYS[7:8])
    async with opened(tmp_path, slots=8) as tier:
        await stored(tier, KEYS[20:26])
        assert await scanned(tier) == sorted([KEYS[5], KEYS[7], *KEYS[20:26]])


async def test_uses_are_on_the_disk_a_second_later_with_the_next_batch(tmp_path: Path) -> None:
    clock = SetClock()
    path = segments_of(tmp_path) / "ticks"
    async with opened(tmp_path, slots=8, clock=clock) as tier:
        await stored(tier, KEYS[:2])
        assert not any(path.read_bytes())
        clock.seconds += 1
        await tier.read([KEYS[5]], blank(1))
        assert not any(path.read_bytes()), "a miss is no batch"
        await hits(tier, KEYS[:1])
        written = path.read_bytes()
        assert int.from_bytes(written[:8], "big") // 1_000_000 == int(clock.seconds)
        await tier.touch(KEYS[1:2])
        assert path.read_bytes() == written
        clock.seconds -= 5
        await tier.touch(KEYS[1:2])
        assert path.read_bytes() != written


async def test_ticks_that_cannot_be_written_are_written_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SetClock()

    def failing(self: object, stretches: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with opened(tmp_path, clock=clock) as tier:
        await stored(tier, KEYS[:2])
        clock.seconds += 1
        with monkeypatch.context() as patch:
            patch.setattr(segment_files.SegmentFiles, "write_ticks", failing)
            assert await hits(tier, KEYS[:1]) == KEYS[:1]
        assert tier.stats()["table_errors"] == 1
        clock.seconds += 1
        await tier.touch([])
        assert any((segments_of(tmp_path) / "ticks").read_bytes())


# Opening


async def test_a_root_is_made_but_not_its_parents(tmp_path: Path) -> None:
    async with opened(tmp_path / "kv"):
        pass
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert segments_of(tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="create the parent directory"):
        await make_tier(tmp_path / "no" / "kv").open()


async def test_a_second_tier_is_told_and_leaves_the_first_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier, opened(tmp_path, rank=1):
        await stored(tier, KEYS[:2])
        second = make_tier(tmp_path)
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            await second.open()
        await second.close()
        assert await hits(tier, KEYS[:4]) == KEYS[:2]
    await second.open()
    assert await hits(second, KEYS[:4]) == KEYS[:2]
    await second.close()


async def test_another_run_under_the_same_name_is_refused(tmp_path: Path) -> None:
    config = tmp_path / NAMESPACE.directory / "config.json"
    config.parent.mkdir()
    config.write_bytes(b"{}")
    with pytest.raises(ConfigError, match="describes another run"):
        await make_tier(tmp_path).open()


async def test_an_error_that_the_user_did_not_make_is_the_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(segment_open.diskio, "probe", broken)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierError, match="cannot be opened"):
        await make_tier(tmp_path).open()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_opening_twice_is_a_mistake_that_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS[:2])
        with pytest.raises(RuntimeError, match="already open"):
            await tier.open()
        assert await hits(tier, KEYS[:4]) == KEYS[:2]


async def test_the_probe_decides_on_direct_io_and_may_be_overruled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as tier:
        assert tier.io_path == "buffered reads, direct writes"
    monkeypatch.undo()
    async with opened(tmp_path, read_path="buffered", write_path="buffered") as tier:
        assert tier.io_path == "buffered"
    async with opened(tmp_path) as tier:
        await put(tier, KEYS[:2])
        assert await hits(tier) == KEYS[:2]


async def test_a_probes_left_over_is_swept(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    left_over = segments_of(tmp_path) / "0123456789ab-1-2-3.tmp"
    left_over.touch()
    async with opened(tmp_path):
        assert not left_over.exists()


async def test_the_same_tier_may_be_opened_again(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    for _ in range(2):
        await tier.open()
        await put(tier, KEYS[:2])
        await tier.close()
    assert (tier.stats()["stored"], tier.stats()["already_there"]) == (0, 2)


async def test_a_lost_table_costs_the_recency_and_nothing_else(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=8) as tier:
        await stored(tier, KEYS[:6])
        await tier.delete(KEYS[2:3])
    (segments_of(tmp_path) / "table").unlink()
    (segments_of(tmp_path) / "ticks").unlink()
    async with opened(tmp_path, slots=8) as tier:
        # The table was the only one to know of the deletion.
        assert await hits(tier) == KEYS[:6]
    async with opened(tmp_path, slots=8) as tier:
        assert await hits(tier) == KEYS[:6]


async def test_wrong_records_are_dropped_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=8) as tier:
        await stored(tier, KEYS[:6])
    table = segments_of(tmp_path) / "table"
    content = bytearray(table.read_bytes())
    content[record_at(1) + 30] ^= 1
    content[record_at(3) : record_at(4)] = content[record_at(4) : record_at(5)]
    table.write_bytes(content)
    async with opened(tmp_path, slots=8) as tier:
        assert await hits(tier) == [KEYS[0], KEYS[2], *KEYS[4:6]]
        assert tier.stats()["dropped_records"] == 2
        await stored(tier, [KEYS[1], KEYS[3], *KEYS[20:22]])
        assert balanced(tier)["ready"] == 8


async def test_odd_sizes_are_buffered_and_come_back(tmp_path: Path) -> None:
    tier = SegmentTier(
        tmp_path,
        NAMESPACE,
        4095,
        max_bytes=1 << 20,
        io=an_engine("portable"),
        pool=IoPool("odd", 1, 1),
        clock=SetClock(),
    )
    await tier.open()
    assert tier.io_path == "buffered"
    payload = os.urandom(4095)
    await tier.write([KEYS[0]], views([payload]))
    (buffer,) = views([bytes(4095)])
    assert await tier.read([KEYS[0]], [buffer]) == [Read.HIT]
    assert buffer == payload
    await tier.close()


# Many at once


async def test_one_of_many_writers_of_a_key_writes_it(tmp_path: Path, faulty: FaultyIo) -> None:
    async with opened(tmp_path, io=faulty) as tier:
        outcomes = await asyncio.gather(*(put(tier, [KEYS[0], KEYS[0]]) for _ in range(5)))
        flat = [outcome for pair in outcomes for outcome in pair]
        assert flat.count(Write.STORED) == 1
        assert flat.count(Write.ALREADY_THERE) == 9
        assert faulty.items["write_slots"] == 1
        balanced(tier)


async def test_a_key_is_already_there_only_when_it_is(tmp_path: Path, faulty: FaultyIo) -> None:
    async with opened(tmp_path, io=faulty) as tier:
        faulty.fail("write_slots", errno.ENOSPC)
        first, second, gone = await asyncio.gather(
            put(tier, KEYS[:1]), put(tier, KEYS[:1]), tier.delete(KEYS[1:2])
        )
        assert (first, second, gone) == ([Write.FULL], [Write.STORED], [Delete.MISSING])


async def test_what_is_being_written_is_no_hit_and_is_deleted_afterwards(
    tmp_path: Path, faulty: FaultyIo
) -> None:
    async with opened(tmp_path, io=faulty) as tier:
        with hanging(faulty, "write_slots"):
            writing = asyncio.ensure_future(put(tier, KEYS[:1]))
            assert await asyncio.to_thread(faulty.wait_hung, 1)
            assert await tier.contains(KEYS[:1]) == [Read.MISS]
            assert await hits(tier, KEYS[:1]) == []
            deleting = asyncio.ensure_future(tier.delete(KEYS[:1]))
            await asyncio.sleep(0)
            assert not deleting.done()
        assert (await writing, await deleting) == ([Write.STORED], [Delete.DELETED])
        assert balanced(tier)["ready"] == 0


async def test_a_slot_that_is_read_is_neither_evicted_nor_reused(
    tmp_path: Path, faulty: FaultyIo
) -> None:
    async with opened(tmp_path, slots=2, io=faulty) as tier:
        await stored(tier, KEYS[:2])
        buffers = blank(2)
        with hanging(faulty, "read_slots"):
            reading = asyncio.ensure_future(tier.read(KEYS[:2], buffers))
            assert await asyncio.to_thread(faulty.wait_hung, 1)
            assert await tier.delete(KEYS[:1]) == [Delete.DELETED]
            assert await put(tier, KEYS[5:7]) == [Write.FULL] * 2
        assert await reading == [Read.HIT] * 2
        assert [bytes(buffer) for buffer in buffers] == [payload_of(key) for key in KEYS[:2]]
        await stored(tier, KEYS[5:7])


@pytest.mark.slow
@pytest.mark.parametrize("engine", engines())
async def test_calls_cancelled_anywhere_lose_no_slot(tmp_path: Path, engine: str) -> None:
    chance = random.Random(3)
    async with opened(tmp_path, slots=24, io=an_engine(engine)) as tier:
        for _ in range(60):
            keys = chance.sample(KEYS[:60], 20)
            calls = (
                lambda keys=keys: put(tier, keys),
                lambda keys=keys: tier.read(keys, blank(len(keys))),
                lambda keys=keys: tier.delete(keys[:5]),
                lambda keys=keys: tier.touch(keys),
            )
            tasks = [asyncio.ensure_future(chance.choice(calls)()) for _ in range(3)]
            for _ in range(chance.choice((0, 1, 2, 5))):
                await asyncio.sleep(0)
            await asyncio.sleep(chance.choice((0, 0, 0.0005, 0.002)))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            balanced(tier)
        found = await hits(tier, KEYS[:60])
        assert found
        assert sorted(found) == await scanned(tier)
    async with opened(tmp_path, slots=24) as tier:
        again = await hits(tier, KEYS[:60])
        assert set(found) <= set(again)
        stats = tier.stats()
        assert [stats[name] for name in ("stale", "damaged_checksum", "damaged_frame")] == [0] * 3


async def test_close_waits_for_a_write_that_has_to_grow_first(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    await tier.open()
    writing = asyncio.ensure_future(put(tier, KEYS[:8]))
    await asyncio.sleep(0)
    await asyncio.gather(tier.close(), tier.close())
    assert await writing == [Write.STORED] * 8


@pytest.mark.parametrize("engine", engines())
async def test_every_engine_reads_what_every_other_one_wrote(tmp_path: Path, engine: str) -> None:
    async with opened(tmp_path, slots=24, io=an_engine(engine)) as tier:
        await stored(tier, KEYS[:20])
    for other in engines():
        async with opened(tmp_path, slots=24, io=an_engine(other)) as tier:
            assert await hits(tier) == KEYS[:20]


async def test_wrong_arguments_are_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        make_tier(tmp_path, max_bytes=CHUNK_BYTES)
    async with opened(tmp_path) as tier:
        with pytest.raises(ValueError, match="1 keys with 2 buffers"):
            await tier.read(KEYS[:1], blank(2))
        with pytest.raises(ValueError, match="a buffer of 5 bytes"):
            await tier.write(KEYS[:1], views([b"12345"]))
    assert "not open" in repr(tier)
    assert tier.stats()["now_chunks"] == 0


async def test_what_others_left_under_the_root_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an upgrade: it is not in `max_bytes`, and nobody evicts it."""
    caplog.set_level("INFO", "tiering")
    async with opened(tmp_path, namespace=example_namespace(engine="vllm 0.1")) as older:
        await stored(older, KEYS[:4])
    assert not caplog.messages
    async with opened(tmp_path):
        pass
    (told,) = caplog.messages
    assert "bytes under it are other models' or versions'" in told
    assert "tiering gc" in told
