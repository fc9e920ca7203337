"""The files layout keeps its bound, evicts what was used longest ago, and remembers that."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from fs_places import file_of, files, opened
from tiering.testing.examples import CHUNK_BYTES, blank, key_number, payload_of, stored, views
from tiering.testing.faults import FaultyIo
from tiering.tiers.base import Read, Write
from tiering.tiers.disk import diskio, mounts
from tiering.tiers.files import books as fs_books
from tiering.tiers.files.bookings import Booked, disk_bytes
from tiering.tiers.files.count import Shard
from tiering.tiers.files.limits import EMPTIED_MIN, Limits, max_bytes_for
from tiering.tiers.files.manifest import Manifest
from tiering.tiers.files.tier import FsTier
from tiering_kernels.portable import PortableIo

FRAME = CHUNK_BYTES + 4096
KEYS = [key_number(i) for i in range(400)]
CHUNKS = 40
LIMIT = max_bytes_for(CHUNKS, CHUNK_BYTES)
BOUND = Limits(max_bytes=LIMIT, min_free_bytes=0)


def disk_use(root: Path) -> int:
    """What the files take, as `du` counts; of the directories, one a chunk is booked, and the
    empty ones go soon."""
    total = 0
    for rank in root.glob("*_r0"):
        for directory, _, names in os.walk(rank):  # which is not put out by what vanishes
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(f"{directory}/{name}").st_blocks * 512
    return total


async def held(tier: FsTier, keys: list[bytes] = KEYS) -> list[bytes]:
    answers = await tier.contains(keys)
    return [key for key, answer in zip(keys, answers, strict=True) if answer is Read.HIT]


async def flushed(tier: FsTier) -> None:
    """Until what was used is written down: it is before anything is admitted."""
    await tier.write(KEYS[:1], views([payload_of(KEYS[0])]))


async def test_what_is_held_is_told_from_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        assert tier.stats()["now_chunks"] == 0
        await stored(tier, KEYS[:5])
        await tier.delete(KEYS[:2])
    async with opened(tmp_path) as again:
        told = again.stats()
        assert (told["now_chunks"], told["now_bytes"]) == (3, disk_bytes(3, 3 * FRAME))


async def test_never_more_than_the_bound_and_the_most_recent_are_kept(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=BOUND) as tier:
        for start in range(0, 400, 20):
            await stored(tier, KEYS[start : start + 20])
            assert disk_use(tmp_path) <= CHUNKS * FRAME
        assert await held(tier) == KEYS[-CHUNKS:]
        assert tier.stats()["evicted"] == 400 - CHUNKS
        assert tier.stats()["now_chunks"] <= CHUNKS
        buffers = blank(CHUNKS)
        assert await tier.read(KEYS[-CHUNKS:], buffers) == [Read.HIT] * CHUNKS
        assert [bytes(b) for b in buffers] == [payload_of(key) for key in KEYS[-CHUNKS:]]
    assert files(tmp_path, "*.tmp") == []


async def test_an_evicted_chunks_file_is_written_over(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[:CHUNKS])
        before = {path.stat().st_ino for path in files(tmp_path, "*_g0/*.bin")}
        await stored(tier, KEYS[CHUNKS : 2 * CHUNKS])
        after = {path.stat().st_ino for path in files(tmp_path, "*_g0/*.bin")}
    assert len(before) == CHUNKS
    assert after == before


async def test_what_was_used_stays_and_a_prefix_goes_from_its_end(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=BOUND) as tier:
        first, second = KEYS[:20], KEYS[20:40]
        await stored(tier, first)
        await stored(tier, second)
        await tier.touch(first)
        await stored(tier, KEYS[40:55])
        assert await held(tier) == [*first, *second[:5], *KEYS[40:55]]
        assert await tier.read(second[:5], blank(5)) == [Read.HIT] * 5
        await stored(tier, KEYS[55:60])
        assert await held(tier) == [*first[:15], *second[:5], *KEYS[40:60]]


async def test_a_batch_larger_than_the_tier_stores_its_head(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=BOUND) as tier:
        outcomes = await tier.write(KEYS[:100], views([payload_of(key) for key in KEYS[:100]]))
        assert outcomes == [Write.STORED] * CHUNKS + [Write.FULL] * 60
        assert disk_use(tmp_path) <= CHUNKS * FRAME


async def test_recency_survives_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[:20])
        await stored(tier, KEYS[20:40])
        await tier.read(KEYS[:10], blank(10))
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[40:70])
        assert await held(tier) == [*KEYS[:10], *KEYS[40:70]]


@pytest.mark.parametrize("how", ["removed", "garbage", "another's"])
async def test_a_lost_manifest_is_made_from_the_files(tmp_path: Path, how: str) -> None:
    path = tmp_path / ".manifest" / "manifest.sqlite3"
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[:CHUNKS])
    for at, key in enumerate(KEYS[:CHUNKS]):
        os.utime(file_of(tmp_path, key), (1_000_000 + at, 1_000_000 + at))
    if how == "garbage":
        path.write_bytes(os.urandom(50000))
    else:
        shutil.rmtree(path.parent)
    if how == "another's":
        path.parent.mkdir()
        other = Manifest(path, "other", 0.0)
        other.settle(other.admit("elsewhere", KEYS[:90], FRAME, 1 << 40, 1 << 40), {KEYS[3]: 5})
        other.close()
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[40:50])
        assert await held(tier) == KEYS[10:50], "the files' own times say which are oldest"
        assert disk_use(tmp_path) <= CHUNKS * FRAME
        assert await tier.read(KEYS[10:50], blank(40)) == [Read.HIT] * 40


@pytest.mark.slow
async def test_a_manifest_that_breaks_under_a_running_tier_costs_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_books, "LOOK_SECONDS", 0.0)
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[:CHUNKS])
        for path in (tmp_path / ".manifest").iterdir():
            path.unlink()
        assert await tier.read(KEYS[:CHUNKS], blank(CHUNKS)) == [Read.HIT] * CHUNKS
        for _ in range(1000):
            outcomes = await tier.write(KEYS[40:45], views([payload_of(k) for k in KEYS[40:45]]))
            stats = tier.stats()
            is_made = stats["manifest_remade"] and not stats["now_counting"]
            if is_made and Write.REFUSED not in outcomes:
                break
            await asyncio.sleep(0.01)
        await stored(tier, KEYS[45:50])
        assert len(await held(tier)) == CHUNKS
        assert disk_use(tmp_path) <= CHUNKS * FRAME


async def test_without_locks_to_trust_the_files_carry_the_recency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "is_local", lambda root: False)
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[:20])
        await asyncio.sleep(0.01)
        await stored(tier, KEYS[20:40])
        await asyncio.sleep(0.01)
        await tier.read(KEYS[:10], blank(10))
        await flushed(tier)
    assert not (tmp_path / ".manifest").exists()
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[40:60])
        kept = await held(tier)
        assert set(KEYS[:10]) <= set(kept)
        assert set(kept).isdisjoint(KEYS[10:20])
        assert disk_use(tmp_path) <= CHUNKS * FRAME


async def test_chunks_of_other_namespaces_count_and_go_first_when_nobody_uses_them(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, limits=BOUND, model="old/one") as old:
        await stored(old, KEYS[:30])
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[:30])
        assert await held(tier) == KEYS[:30]
        assert disk_use(tmp_path) <= CHUNKS * FRAME
    async with opened(tmp_path, limits=BOUND, model="old/one") as old:
        assert len(await held(old)) == 10


async def test_what_lies_there_counts_whatever_became_of_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not say what is there, and then does not take it, or not for sure."""
    io = FaultyIo(PortableIo())
    async with opened(tmp_path, limits=BOUND, io=io, durability="batch") as tier:
        await stored(tier, KEYS[:30])
        io.fail("sizes", errno.ESTALE, times=None)
        io.fail("write_files", errno.EIO, times=20)
        outcomes = await tier.write(KEYS[:20], views([payload_of(key) for key in KEYS[:20]]))
        with monkeypatch.context() as patch:
            patch.setattr(diskio, "sync_directories", unable)
            outcomes += await tier.write(KEYS[20:60], views([payload_of(k) for k in KEYS[20:60]]))
        assert not {Write.STORED, Write.ALREADY_THERE}.intersection(outcomes)
        io.mend()
        for start in range(60, 140, 20):
            await stored(tier, KEYS[start : start + 20])
            assert disk_use(tmp_path) <= CHUNKS * FRAME
        assert await held(tier) == KEYS[100:140]


def unable(what: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_what_cannot_be_seen_gives_no_room(tmp_path: Path) -> None:
    io = FaultyIo(PortableIo())
    async with opened(tmp_path, limits=BOUND, io=io) as tier:
        await stored(tier, KEYS[:30])
        io.fail("sizes", errno.EIO, times=None)
        keys = [*KEYS[30:60], *KEYS[:30]]
        outcomes = await tier.write(keys, views([payload_of(key) for key in keys]))
        assert outcomes == [Write.STORED] * 10 + [Write.FULL] * 50
        io.mend()
        assert await held(tier) == KEYS[:CHUNKS]


def test_counting_forgets_only_what_is_gone_for_sure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest(None, "me", 0.0)
    manifest.adopt([Booked("m_r0", KEYS[0], FRAME, 1)])
    shard = Shard(tmp_path, "m_r0", KEYS[0].hex()[:3])
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", unable)
        shard.reconcile(manifest)
    assert manifest.totals().chunks == 1
    shard.reconcile(manifest)
    assert manifest.totals().chunks == 0
    manifest.close()


async def test_what_holds_no_chunk_makes_way_for_one(tmp_path: Path) -> None:
    """As after a power cut; a batch of all that the tier holds spares none of it."""
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[:CHUNKS])
        for path in files(tmp_path, "*_g0/*.bin"):
            os.truncate(path, 100)
        await stored(tier, KEYS[:CHUNKS])
        assert await held(tier) == KEYS[:CHUNKS]


@pytest.mark.slow
async def test_empty_directories_do_not_pile_up(tmp_path: Path) -> None:
    small = Limits(max_bytes=max_bytes_for(4, CHUNK_BYTES), min_free_bytes=0)
    async with opened(tmp_path, limits=small) as tier:
        for start in range(0, 2400, 4):
            keys = [key_number(start + i) for i in range(4)]
            await stored(tier, keys)

        def found() -> int:
            return sum(len(names) for _, names, _ in os.walk(tmp_path))

        async with asyncio.timeout(60):  # the last of them are just being removed
            while found() >= 2 * (EMPTIED_MIN + 20):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_the_quarantine_is_within_the_bound(tmp_path: Path) -> None:
    chunks = 200
    limit = disk_bytes(chunks, chunks * FRAME)
    async with opened(tmp_path, limits=Limits(max_bytes=limit, min_free_bytes=0)) as tier:
        for start in range(0, 400, 50):
            await stored(tier, KEYS[start : start + 50])
        kept = await held(tier)
        for key in kept[:20]:
            with file_of(tmp_path, key).open("r+b") as file:
                file.seek(5000)
                file.write(b"damage")
        await tier.read(kept[:20], blank(20))
        await stored(tier, KEYS[:50])
        (quarantine,) = tmp_path.glob("*/quarantine_r0")
        aside = sum(path.stat().st_size for path in quarantine.iterdir())
        assert aside > 0
        kept_bytes = disk_use(tmp_path)
        assert disk_bytes(kept_bytes // FRAME, kept_bytes) + aside <= limit


@contextlib.contextmanager
def small_disk(where: Path, size: str) -> Iterator[Path]:
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield where
    finally:
        # Lazily: the kernel may still hold what io_uring has just closed.
        subprocess.run(["umount", "-l", str(where)], check=True)


async def test_some_of_the_disk_is_left_free(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        async with opened(disk / "kv", limits=Limits(min_free_bytes=1 << 20)) as tier:
            for start in range(0, 400, 20):
                await stored(tier, KEYS[start : start + 20])
                found = os.statvfs(disk)
                # The manifest grows a little, too.
                assert found.f_bavail * found.f_frsize >= (1 << 20) - (1 << 18)
            kept = await held(tier)
            assert len(kept) > 100
            # The last batches whole, and of the one before them the head.
            whole = len(kept) // 20 * 20
            rest = len(kept) - whole
            assert kept == [*KEYS[-whole - 20 :][:rest], *KEYS[-whole:]]


async def test_a_disk_that_others_fill_costs_chunks_and_no_store_for_long(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        async with opened(disk / "kv", limits=Limits(min_free_bytes=0)) as tier:
            await stored(tier, KEYS[:200])
            found = os.statvfs(disk)
            (disk / "other").write_bytes(b"x" * (found.f_bavail * found.f_frsize))
            for start in range(200, 260, 10):
                keys = KEYS[start : start + 10]
                await tier.write(keys, views([payload_of(key) for key in keys]))
            last = await tier.write(KEYS[300:302], views([payload_of(k) for k in KEYS[300:302]]))
            assert last == [Write.STORED] * 2
            kept = await held(tier, KEYS[:200])
            assert await tier.read(kept, blank(len(kept))) == [Read.HIT] * len(kept)
            (disk / "other").unlink()
            await stored(tier, KEYS[310:390])


@pytest.mark.parametrize("manifest", ["there", "lost"])
async def test_a_tier_that_starts_on_a_full_disk_serves_and_makes_room(
    tmp_path: Path, manifest: str
) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        async with opened(disk / "kv", limits=Limits(min_free_bytes=0)) as tier:
            await stored(tier, KEYS[:200])
        if manifest == "lost":
            shutil.rmtree(disk / "kv" / ".manifest")
        with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as other:
            while True:
                other.write(b"x" * 4096)
        assert os.statvfs(disk).f_bavail == 0
        async with opened(disk / "kv", limits=Limits(min_free_bytes=0)) as tier:
            assert await tier.read(KEYS[:200], blank(200)) == [Read.HIT] * 200
            for _ in range(3000):
                await asyncio.sleep(0.01 * tier.stats()["now_counting"])
            for _ in range(3):
                outcomes = await tier.write(
                    KEYS[300:302], views([payload_of(k) for k in KEYS[300:302]])
                )
            assert set(outcomes) <= {Write.STORED, Write.ALREADY_THERE}
            assert await tier.read(KEYS[300:302], blank(2)) == [Read.HIT] * 2


# Several engines, in processes of their own

ENGINE = textwrap.dedent(
    """
    import asyncio, sys
    sys.path.insert(0, sys.argv[1])
    from fs_places import Path, key_number, make_tier
    from tiering.testing.examples import payload_of, views
    from tiering.tiers.files import books
    from tiering.tiers.files.limits import EMPTIED_MIN, Limits, max_bytes_for

    books.COUNT_SECONDS_MAX = 60.0  # as in the tests' own process
    root, bound, start, stop, step, chunk_bytes = Path(sys.argv[2]), *map(int, sys.argv[3:])

    async def write():
        tier = make_tier(root, chunk_bytes, limits=Limits(bound, 0))
        await tier.open()
        payload = memoryview(bytearray(chunk_bytes))
        for first in range(start, stop, step):
            keys = [key_number(i) for i in range(first, min(first + step, stop))]
            outcomes = await tier.write(keys, [payload] * len(keys))
            print(*[outcome.name for outcome in outcomes], flush=True)
        await tier.close()

    asyncio.run(write())
    """
)


def engine(
    root: Path, bound: int, start: int, stop: int, step: int, chunk_bytes: int = CHUNK_BYTES
) -> subprocess.Popen[str]:
    numbers = map(str, (bound, start, stop, step, chunk_bytes))
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(Path(__file__).parent), str(root), *numbers],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def bytes_in_chunks(root: Path) -> int:
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            if name.endswith((".bin", ".tmp")):
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(directory, name)).st_size
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "written", "chunk_bytes", "step"),
    [
        pytest.param(8 << 20, 80 << 20, 64 << 10, 16, id="80 MiB through 8 MiB"),
        pytest.param(
            1 << 30, 10 << 30, 1 << 20, 16, id="10 GiB through 1 GiB", marks=pytest.mark.slow
        ),
    ],
)
async def test_two_engines_with_a_restart_between_stay_within_one_bound(
    tmp_path: Path, bound: int, written: int, chunk_bytes: int, step: int
) -> None:
    chunks = written // chunk_bytes
    quarter = chunks // 4
    in_flight = 2 * step * (chunk_bytes + 4096)
    most = 0
    for half in range(2):  # the second half by engines that were started anew
        starts = (half * 2 * quarter, half * 2 * quarter + quarter)
        engines = [engine(tmp_path, bound, at, at + quarter, step, chunk_bytes) for at in starts]
        while any(each.poll() is None for each in engines):
            most = max(most, bytes_in_chunks(tmp_path))
            await asyncio.sleep(0.02)
        for each in engines:
            output, _ = each.communicate()
            assert each.returncode == 0
            assert set(output.split()) == {"STORED"}
    assert most <= bound + in_flight
    assert bytes_in_chunks(tmp_path) <= bound
    async with opened(tmp_path, chunk_bytes=chunk_bytes, limits=Limits(bound, 0)) as tier:
        keys = [key_number(i) for i in range(4 * quarter)]
        kept = {keys.index(key) for key in await held(tier, keys)}
    assert len(kept) * (chunk_bytes + 12288) > 0.9 * bound
    # Of both engines of the second half, whose writes alternated, the last batches.
    assert min(kept) >= 2 * quarter
    for first in (2 * quarter, 3 * quarter):
        batches = {(number - first) // step for number in kept if 0 <= number - first < quarter}
        assert batches == set(range(min(batches, default=0), -(-quarter // step))) or not batches


@pytest.mark.slow
async def test_what_a_killed_engine_had_on_its_way_is_settled_by_the_next(tmp_path: Path) -> None:
    for _ in range(3):
        killed = engine(tmp_path, LIMIT, 0, 400, 20)
        assert killed.stdout is not None
        for _ in range(3):
            assert killed.stdout.readline()
        killed.kill()
        killed.communicate()
    async with opened(tmp_path, limits=BOUND) as tier:
        for start in range(0, 400, 20):
            await tier.write(KEYS[start : start + 20], views([payload_of(KEYS[0])] * 20))
            assert disk_use(tmp_path) <= CHUNKS * FRAME
        assert len(await held(tier)) == CHUNKS
    assert files(tmp_path, "*.tmp") == []
