"""The segment tier where bytes are wrong, the disk fails or is full, or power may be cut."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from segment_places import (
    KEYS,
    SLOT_BYTES,
    SetClock,
    balanced,
    hits,
    make_tier,
    opened,
    overwrite,
    put,
    quarantined,
    segments_of,
)
from tiering.errors import DamagedChunk
from tiering.testing.examples import blank, payload_of, scanned, stored
from tiering.testing.faults import FaultyIo
from tiering.tiers.base import Delete, Failed, Read, Write
from tiering.tiers.disk import diskio
from tiering.tiers.segments import files as segment_files

pytestmark = pytest.mark.usefixtures("one_probe")


# Damage


async def test_damage_is_kept_for_a_look_and_told_with_its_cause(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=8) as tier:
        await stored(tier, KEYS[:6])
        overwrite(tmp_path, 0, b"\0" if payload_of(KEYS[0])[9:10] != b"\0" else b"\1", at=4096 + 9)
        overwrite(tmp_path, 1, b"X")
        overwrite(tmp_path, 2, b"X", at=30)
        os.truncate(segments_of(tmp_path) / "segment-00002.kv", SLOT_BYTES + 5000)
        outcomes = await tier.read(KEYS[:6], blank(6))
        causes = [o.error.reason if isinstance(o, Failed) else o for o in outcomes]
        assert [type(getattr(o, "error", None)) for o in outcomes[:3]] == [DamagedChunk] * 3
        assert causes[0].startswith("bad checksum")
        assert causes[1].startswith("bad magic")
        assert causes[2].startswith("written in another namespace")
        assert causes[3:5] == [Read.HIT] * 2
        assert causes[5].startswith("slot of 5000 bytes, not 12288")
        stats = tier.stats()
        assert (stats["damaged_checksum"], stats["damaged_frame"], stats["stale"]) == (1, 3, 0)
        assert await tier.contains(KEYS[:6]) == [Read.MISS] * 3 + [Read.HIT] * 2 + [Read.MISS]
        assert balanced(tier)["ready"] == 2
    assert [file.stat().st_size for file in quarantined(tmp_path)].count(SLOT_BYTES) == 3
    assert {file.stat().st_mode & 0o777 for file in quarantined(tmp_path)} == {0o600}
    async with opened(tmp_path, slots=8) as tier:
        assert await hits(tier) == KEYS[3:5]


async def test_a_quarantine_does_not_grow_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.tiers.segments.slots.QUARANTINED_FILES_MAX", 3)
    async with opened(tmp_path, slots=16) as tier:
        await stored(tier, KEYS[:16])
        for slot in range(16):
            overwrite(tmp_path, slot, b"X", per_segment=4)
        await tier.read(KEYS[:4], blank(4))  # in one thread
        assert len(quarantined(tmp_path)) == 3
        await tier.read(KEYS[4:16], blank(12))  # in many
        assert tier.stats()["damaged_frame"] == 16
    assert len(quarantined(tmp_path)) == 3


async def test_a_record_whose_slot_has_moved_on_is_a_miss_not_damage(tmp_path: Path) -> None:
    async with opened(tmp_path, slots=8) as tier:
        await stored(tier, KEYS[:4])
    table = segments_of(tmp_path) / "table"
    old = table.read_bytes()
    async with opened(tmp_path, slots=8) as tier:
        await tier.delete(KEYS[:2])
        await stored(tier, KEYS[10:11])
    overwrite(tmp_path, 1, bytes(SLOT_BYTES))
    table.write_bytes(old)
    async with opened(tmp_path, slots=8) as tier:
        outcomes = await tier.read(KEYS[:4], blank(4))
        assert outcomes == [Read.MISS] * 2 + [Read.HIT] * 2
        stats = tier.stats()
        assert (stats["stale"], stats["damaged_frame"], stats["damaged_checksum"]) == (2, 0, 0)
        assert balanced(tier)["free"] == 2
    assert quarantined(tmp_path) == []
    async with opened(tmp_path, slots=8) as tier:
        assert await scanned(tier) == sorted(KEYS[2:4])


async def test_damage_seen_by_many_at_once_is_counted_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS[:1])
        overwrite(tmp_path, 0, b"X")
        found = await asyncio.gather(*(tier.read(KEYS[:1], blank(1)) for _ in range(5)))
        assert all(isinstance(outcome, Failed) for (outcome,) in found)
        assert tier.stats()["damaged_frame"] == 1
        assert balanced(tier)["ready"] == 0
        await stored(tier, KEYS[:1])


# Faults


async def test_a_read_error_is_no_damage_and_keeps_the_chunk(
    tmp_path: Path, faulty: FaultyIo
) -> None:
    async with opened(tmp_path, io=faulty) as tier:
        await stored(tier, KEYS[:4])
        faulty.fail("read_slots", errno.EIO, after=1)
        outcomes = await tier.read(KEYS[:4], blank(4))
        assert [type(o) for o in outcomes] == [Read, Failed, Read, Read]
        assert not isinstance(getattr(outcomes[1], "error", None), DamagedChunk)
        assert await hits(tier) == KEYS[:4]
        assert tier.stats()["read_errors"] == 1


async def test_a_slot_that_cannot_be_written_is_not_used_again_before_a_restart(
    tmp_path: Path, faulty: FaultyIo
) -> None:
    async with opened(tmp_path, slots=4, io=faulty) as tier:
        faulty.fail("write_slots", errno.EIO, after=1)
        outcomes = await put(tier, KEYS[:4])
        assert [type(o) for o in outcomes] == [Write, Failed, Write, Write]
        for first in range(10, 40, 3):
            await stored(tier, KEYS[first : first + 3])
        assert balanced(tier) == {"free": 0, "writing": 0, "ready": 3, "doomed": 0, "retired": 1}
        assert (tier.stats()["retired_slots"], tier.stats()["write_errors"]) == (1, 1)
    async with opened(tmp_path, slots=4) as tier:
        await stored(tier, KEYS[50:54])


@pytest.mark.parametrize(
    ("number", "expected", "counter"),
    [(errno.ENOSPC, Write.FULL, "full"), (errno.EROFS, None, "write_errors")],
)
async def test_other_write_errors_cost_the_chunk_and_not_the_slot(
    tmp_path: Path, faulty: FaultyIo, number: int, expected: Write | None, counter: str
) -> None:
    async with opened(tmp_path, slots=4, io=faulty) as tier:
        faulty.fail("write_slots", number)
        outcomes = await put(tier, KEYS[:4])
        assert outcomes[1:] == [Write.STORED] * 3
        assert outcomes[0] == expected or isinstance(outcomes[0], Failed)
        assert tier.stats()[counter] == 1
        assert balanced(tier)["free"] == 1
        await stored(tier, KEYS[:1])
        assert await hits(tier) == KEYS[:4]


async def test_half_a_frame_of_a_lost_write_is_never_read(tmp_path: Path, faulty: FaultyIo) -> None:
    async with opened(tmp_path, slots=4, io=faulty) as tier:
        await stored(tier, KEYS[:4])
        faulty.short_write("write_slots", errno.ENOSPC, times=None)
        assert await put(tier, KEYS[10:12]) == [Write.FULL] * 2
        assert await hits(tier) == KEYS[:2]
    async with opened(tmp_path, slots=4) as tier:
        assert await hits(tier) == KEYS[:2]
        stats = tier.stats()
        assert [stats[name] for name in ("stale", "damaged_checksum", "damaged_frame")] == [0] * 3


async def test_a_table_that_cannot_be_written_stores_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with opened(tmp_path, slots=4) as tier:
        await stored(tier, KEYS[:4])
        for method in ("clear_records", "set_records"):
            with monkeypatch.context() as patch:
                patch.setattr(segment_files.SegmentFiles, method, failing)
                (outcome,) = await put(tier, KEYS[10:11])
                assert isinstance(outcome, Failed)
                if method == "clear_records":
                    (gone,) = await tier.delete(KEYS[:1])
                    assert isinstance(gone, Failed)
                    assert "until a restart" in gone.error.reason
        assert balanced(tier)["retired"] == 0
        assert await tier.contains(KEYS[:1]) == [Read.MISS]
        await stored(tier, KEYS[10:14])
        assert await hits(tier) == KEYS[10:14]


async def test_where_the_disk_has_no_room_it_is_full_and_then_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SetClock()
    async with opened(tmp_path, slots=8, clock=clock) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(diskio, "free_bytes", lambda root: (0, 1 << 40))
            assert await put(tier, KEYS[:2]) == [Write.FULL] * 2
            patch.setattr(diskio, "free_bytes", lambda root: (3 * SLOT_BYTES, 1 << 40))
            assert await put(tier, KEYS[:2]) == [Write.FULL] * 2, "it does not ask every time"
            clock.seconds += 10
            await stored(tier, KEYS[:2])
            patch.setattr(diskio, "free_bytes", lambda root: (0, 1 << 40))
            await stored(tier, KEYS[2:4])
            assert await hits(tier) == KEYS[2:4], "evicts where it cannot grow"
        clock.seconds += 10
        await stored(tier, KEYS[4:10])
        assert await hits(tier) == KEYS[2:10]
        assert tier.stats()["growth_refused"] == 2


async def test_a_root_that_is_gone_is_read_from_but_not_written_to(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    async with opened(root, slots=8) as tier:
        await stored(tier, KEYS[:4])
        root.rename(tmp_path / "away")
        for _ in range(5):
            (outcome,) = await put(tier, KEYS[5:6])
            assert isinstance(outcome, Failed)
            # The first of them had made room for itself; the others find that room.
            assert await hits(tier) == KEYS[:3]
            segments_of(root).mkdir(parents=True, exist_ok=True)
        assert list(segments_of(root).iterdir()) == []
        assert tier.stats()["write_errors"] == 5
        balanced(tier)


async def test_what_cannot_be_a_key_is_refused_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        outcomes = await tier.write([b"abc", KEYS[0], bytes(129)], blank(3))
        assert [type(outcome) for outcome in outcomes] == [Failed, Write, Failed]
        assert await tier.read([b"abc", bytes(129)], blank(2)) == [Read.MISS] * 2
        assert await tier.contains([b"abc"]) == [Read.MISS]
        assert await tier.delete([b"abc"]) == [Delete.MISSING]


# Durability


@pytest.mark.parametrize(
    ("durability", "after_batch", "after_close"),
    [("none", [], []), ("close", [], ["segment", "table"]), ("batch", ["segment", "table"], None)],
)
async def test_what_is_synced_and_when(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    durability: str,
    after_batch: list[str],
    after_close: list[str] | None,
) -> None:
    synced: list[tuple[str, bytes]] = []
    table = segments_of(tmp_path) / "table"
    sync = os.fdatasync

    def noted(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0]
        synced.append((name, table.read_bytes()[4096:]))
        sync(descriptor)

    tier = make_tier(tmp_path, durability=durability)
    await tier.open()
    monkeypatch.setattr(os, "fdatasync", noted)
    await stored(tier, KEYS[:2])
    assert [name for name, _ in synced] == after_batch
    if durability == "batch":
        assert not any(synced[0][1]), "no record before its frame is on the disk"
        assert any(synced[1][1])
    synced.clear()
    await tier.close()
    names = [name for name, _ in synced if name != "ticks"]
    assert names == (["segment", "table"] if after_close is None else after_close)


async def test_frames_that_cannot_be_synced_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with opened(tmp_path, durability="batch") as tier:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing)
            outcomes = await put(tier, KEYS[:2])
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        assert balanced(tier)["ready"] == 0
        assert await hits(tier) == []
        await stored(tier, KEYS[:2])
