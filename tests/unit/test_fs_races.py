"""Engines on one directory, and what another process does between two steps of one of them: each
race is held open at its worst moment."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fs_places import KEYS, NAMESPACE, file_of, files, make_tier, opened, write_when_counted
from segment_places import make_files, segments_of
from segment_places import opened as opened_segments
from tiering.testing.examples import CHUNK_BYTES, blank, key_number, stored
from tiering.tiers.base import Failed, Read, Write, WriteOutcome
from tiering.tiers.disk import beginning, configfile, temps
from tiering.tiers.files import books as fs_books
from tiering.tiers.files import count as fs_count
from tiering.tiers.files.bookings import Booked, ManifestBroken, ManifestBusy
from tiering.tiers.files.count import Shard
from tiering.tiers.files.limits import Limits, max_bytes_for
from tiering.tiers.files.manifest import Manifest
from tiering.tiers.segments import files as segment_files

CHUNKS = 10
FRAME = CHUNK_BYTES + 4096
BOUND = Limits(max_bytes=max_bytes_for(CHUNKS, CHUNK_BYTES), min_free_bytes=0)
MORE = [key_number(i) for i in range(100, 160)]


def manifest_of(root: Path) -> Path:
    return root / ".manifest" / "manifest.sqlite3"


def booked(root: Path) -> set[bytes]:
    with contextlib.closing(Manifest(manifest_of(root), "test", 0.0)) as manifest:
        keys = {each.key for each in manifest.oldest(10_000)}
        manifest.leave()
        return keys


def chunk_files(root: Path) -> list[Path]:
    return files(root, "*_g0/*.bin")


async def store_without_manifest(root: Path) -> None:
    """CHUNKS chunks under `root`, for whoever opens it to count."""
    async with opened(root, limits=BOUND) as tier:
        await stored(tier, KEYS[:CHUNKS])
    shutil.rmtree(manifest_of(root).parent)


# The manifest, lost or held under engines that use it


@pytest.mark.parametrize("how", ["removed", "broken"])
async def test_engines_that_lose_the_manifest_keep_one_bound_together(
    tmp_path: Path, how: str
) -> None:
    """Whoever finds it lost first makes another one, and the others take that."""
    async with opened(tmp_path, limits=BOUND) as one, opened(tmp_path, limits=BOUND) as other:
        await stored(one, KEYS[:CHUNKS])
        if how == "removed":
            shutil.rmtree(manifest_of(tmp_path).parent)
        else:
            with contextlib.closing(sqlite3.connect(manifest_of(tmp_path))) as database:
                database.execute("DROP TABLE total")
        for start in range(0, len(MORE), 5):
            tier = (one, other)[start // 5 % 2]
            await write_when_counted(tier, MORE[start : start + 5])
            assert len(chunk_files(tmp_path)) <= CHUNKS
        assert one.stats()["manifest_remade"] == other.stats()["manifest_remade"] == 1
        assert {file_of(tmp_path, key) for key in booked(tmp_path)} == set(chunk_files(tmp_path))


async def test_a_manifest_that_is_lost_while_an_engine_closes_is_none_of_its_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(manifest: Manifest) -> None:
        raise ManifestBroken("somebody removed it")

    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[:2])
        monkeypatch.setattr(Manifest, "leave", leave)
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []


async def test_a_shard_that_could_not_be_counted_is_counted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its chunks would never be evicted, and take room beside the bound."""
    await store_without_manifest(tmp_path)
    monkeypatch.setattr(fs_count, "AGAIN_SECONDS", 0.01)
    reconcile, refusals = Shard.reconcile, [1, 2, 3]

    def held(shard: Shard, manifest: Manifest) -> None:
        if refusals:
            refusals.pop()
            raise ManifestBusy("database is locked")
        reconcile(shard, manifest)

    monkeypatch.setattr(Shard, "reconcile", held)
    async with opened(tmp_path, limits=BOUND) as tier:
        assert set(await write_when_counted(tier, MORE[:5])) == {Write.STORED}
        assert len(chunk_files(tmp_path)) == CHUNKS
        assert tier.stats()["now_chunks"] == CHUNKS


async def test_a_manifest_made_anew_is_not_counted_by_what_was_counted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_without_manifest(tmp_path)
    reconcile, begun = Shard.reconcile, list[Shard]()

    def lost_in_the_middle(shard: Shard, manifest: Manifest) -> None:
        reconcile(shard, manifest)
        begun.append(shard)
        if len(begun) == CHUNKS // 2:
            raise ManifestBroken("somebody removed it")

    monkeypatch.setattr(Shard, "reconcile", lost_in_the_middle)
    async with opened(tmp_path, limits=BOUND) as tier:
        assert set(await write_when_counted(tier, MORE[:5])) == {Write.STORED}
        assert len(chunk_files(tmp_path)) == CHUNKS
        assert {file_of(tmp_path, key) for key in booked(tmp_path)} == set(chunk_files(tmp_path))


async def test_without_a_manifest_for_a_moment_writes_are_refused_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped while it has the table, and goes on again."""
    monkeypatch.setattr(fs_books, "OPEN_TRIES_MAX", 1)
    monkeypatch.setattr(fs_books, "MAKE_AGAIN_SECONDS", 0.01)
    is_held = [True] * 3

    def held(books: fs_books.Books, now: float) -> Manifest:
        if is_held:
            is_held.pop()
            raise ManifestBusy("database is locked")
        return open_manifest(books, now)

    open_manifest = fs_books.Books._opened
    monkeypatch.setattr(fs_books.Books, "_opened", held)
    async with opened(tmp_path, limits=BOUND) as tier:
        assert set(await write_when_counted(tier, KEYS[:2])) == {Write.STORED}
        assert is_held == []


async def test_a_write_ends_where_the_root_goes_away_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books are told later, or by nobody; neither the write nor the end waits for that."""
    monkeypatch.setattr(fs_books, "FLUSH_SECONDS", 0.01)
    root = tmp_path / "kv"
    tier = make_tier(root, limits=BOUND)
    await tier.open()
    assert tier._open_parts is not None
    ours, _ = tier._open_parts
    write = ours.write

    def unmounted(*arguments: Any) -> list[WriteOutcome]:
        root.rename(tmp_path / "away")
        return write(*arguments)

    ours.write = unmounted  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        outcomes = await tier.write(KEYS[:2], blank(2))
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        await tier.close()


async def test_a_flight_that_cannot_be_settled_now_is_settled_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_books, "FLUSH_SECONDS", 0.01)
    settle, refusals = Manifest.settle, [1, 2, 3]

    def held(manifest: Manifest, *arguments: Any) -> bool:
        if refusals:
            refusals.pop()
            raise ManifestBusy("database is locked")
        return settle(manifest, *arguments)

    async with opened(tmp_path, limits=BOUND) as tier:
        monkeypatch.setattr(Manifest, "settle", held)
        await stored(tier, KEYS[:2])
        async with asyncio.timeout(60):
            while booked(tmp_path) != set(KEYS[:2]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert refusals == []


async def test_what_goes_to_make_room_for_the_manifest_stays_booked_if_it_comes_again(
    tmp_path: Path,
) -> None:
    """Another process stores a chunk between its removal and the books' word of that."""
    async with opened(tmp_path, limits=BOUND) as tier:
        await stored(tier, KEYS[:2])
        assert tier._open_parts is not None
        ours, books = tier._open_parts

        def remove(victims: list[Booked]) -> list[Booked]:
            return []  # and there they are again

        ours.remove = remove  # type: ignore[assignment]
        await books._ask(books._unlink_oldest)
        assert booked(tmp_path) == set(KEYS[:2])


# Beginning, while a cleaner takes what is begun with


class TakesAway:
    """`tiering gc` comes by in the moment after config.json was agreed on: all of the namespace is
    moved away, `times` times."""

    def __init__(self, root: Path, times: int) -> None:
        self._root = root
        self._times = times

    async def __call__(self, path: Path, description: dict[str, object]) -> None:
        await AGREE(path, description)
        if self._times:
            self._times -= 1
            aside = self._root / f".removed-{self._times}"
            aside.mkdir()
            for each in self._root.glob(f"{NAMESPACE.directory}*"):
                each.rename(aside / each.name)


AGREE = configfile.agree


async def test_an_engine_that_opens_while_its_namespace_is_taken_away_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configfile, "agree", TakesAway(tmp_path, 3))
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS)
        assert await tier.read(KEYS, blank(20)) == [Read.HIT] * 20
    assert (tmp_path / NAMESPACE.directory / "config.json").exists()


async def test_so_does_one_with_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configfile, "agree", TakesAway(tmp_path, 3))
    async with opened_segments(tmp_path) as tier:
        await stored(tier, KEYS[:4])
        assert await tier.read(KEYS[:4], blank(4)) == [Read.HIT] * 4
    assert (tmp_path / NAMESPACE.directory / "config.json").exists()
    assert (segments_of(tmp_path) / "table").exists()


async def test_beginning_again_comes_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configfile, "agree", TakesAway(tmp_path, 1000))
    with pytest.raises(Exception, match="No such file or directory"):
        async with opened(tmp_path):
            pass
    assert len(list(tmp_path.glob(".removed-*"))) == beginning.TRIES_MAX


def hold_lock(directory: Path, moved_to: Path | None) -> threading.Timer:
    """As `tiering gc`, for a moment; it moves the directory away meanwhile, if `moved_to`."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def let_go() -> None:
        if moved_to is not None:
            directory.rename(moved_to)
        os.close(descriptor)

    timer = threading.Timer(0.05, let_go)
    timer.start()
    return timer


@pytest.mark.parametrize("is_moved", [False, True])
def test_who_has_the_lock_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_moved: bool
) -> None:
    monkeypatch.setattr(segment_files, "LOCK_SECONDS_MAX", 60.0)
    directory = tmp_path / "some_r0.segments"
    files = make_files(directory)
    timer = hold_lock(directory, tmp_path / "away" if is_moved else None)
    try:
        if is_moved:
            with pytest.raises(FileNotFoundError):
                files.take_lock()
        else:
            files.take_lock()
    finally:
        timer.join()
        files.close()


# Processes that end


def ends_in_parts(seconds: float) -> subprocess.Popen[bytes]:
    """A process whose first thread has ended, and another one has not."""
    script = (
        "import ctypes, threading, time\n"
        f"threading.Thread(target=time.sleep, args=({seconds},)).start()\n"
        "print(flush=True)\n"
        f"ctypes.CDLL(None).syscall({EXIT_THREAD}, 0)\n"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


EXIT_THREAD = {"x86_64": 60, "aarch64": 93}.get(os.uname().machine, 0)


@pytest.mark.skipif(not EXIT_THREAD, reason="the call that ends one thread has another number")
def test_a_process_is_gone_when_its_last_thread_is() -> None:
    """The first one to end after a kill may be the first thread, and others still be writing."""
    with ends_in_parts(600.0) as dying:
        try:
            assert dying.stdout is not None
            dying.stdout.readline()
            stat = Path(f"/proc/{dying.pid}/stat")
            give_up = time.monotonic() + 60
            while b") Z " not in stat.read_bytes() and time.monotonic() < give_up:
                time.sleep(0.01)
            start = stat.read_bytes().rpartition(b")")[2].split()[19]
            space = temps.owner_name().split("-")[0]
            owner = f"{space}-{dying.pid}-{int(start)}-0"
            assert not temps.is_gone(owner, 0.0)
        finally:
            dying.kill()
    assert temps.is_gone(owner, 0.0)


def dead_owner() -> str:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return f"{temps.owner_name().split('-')[0]}-{process.pid}-1-0"


async def test_what_a_dead_engine_was_writing_is_swept_by_whoever_settles_it(
    tmp_path: Path,
) -> None:
    """So that no byte is left beside the bound until an engine of that rank starts again."""
    owner = dead_owner()
    async with opened(tmp_path, limits=BOUND, rank=1):
        pass
    with contextlib.closing(Manifest(manifest_of(tmp_path), owner, 0.0)) as dead:
        dead.admit(f"{NAMESPACE.directory}_r1", KEYS[:3], FRAME, 1 << 40, 1 << 40)
    half = tmp_path / NAMESPACE.directory / "tmp_r1" / f"{owner}.tmp"
    half.write_bytes(b"half of a chunk")
    async with opened(tmp_path, limits=BOUND) as tier:
        await write_when_counted(tier, KEYS[:1])
        for _ in range(1000):
            if not half.exists():
                break
            await asyncio.sleep(0.01)
        assert not half.exists()
        assert tier.stats()["now_chunks"] == 1


def test_a_sweep_of_a_directory_that_vanishes_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(*args: Any) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", str(tmp_path))

    monkeypatch.setattr(os, "listdir", vanished)
    monkeypatch.setattr(os, "scandir", vanished)
    assert temps.sweep([tmp_path], 0.0) == 0
