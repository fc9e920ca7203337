"""Engines on one directory, and what another process does between two steps of one of them: each
race is held open at its worst moment."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fs_places import KEYS, NAMESPACE, opened
from segment_places import make_files, segments_of
from segment_places import opened as opened_segments
from tiering.testing.examples import blank, stored
from tiering.tiers.base import Read
from tiering.tiers.disk import beginning, configfile, temps

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
def test_who_has_the_lock_for_a_moment_is_waited_for(tmp_path: Path, is_moved: bool) -> None:
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


def test_a_sweep_of_a_directory_that_vanishes_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(*args: Any) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", str(tmp_path))

    monkeypatch.setattr(os, "listdir", vanished)
    monkeypatch.setattr(os, "scandir", vanished)
    assert temps.sweep([tmp_path], 0.0) == 0
