"""The host tier's region between processes: who builds, who waits, who sweeps, SIGKILL included."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from regions import CAPACITY, NAME, PAGE, SECONDS, Child, free_bytes, open_here
from tiering.errors import RegionError
from tiering.tiers import hostfile
from tiering.tiers.host import Geometry, Region, region_name, sweep


@pytest.mark.slow
def test_ranks_open_in_any_order(tmp_path: Path, child: Callable[..., Child]) -> None:
    """Four workers at once, and the scheduler among them."""
    children = [child(rank=rank) for rank in (2, 0, 3, 1)]
    with open_here(tmp_path) as region:
        assert region.wait_announced(SECONDS) == [bytes([rank]) * 32 for rank in range(4)]
        region.unlink()
        for rank in range(4):
            assert (region.share(rank) == rank + 1).all()
    logged = "".join(worker.finish() for worker in children)
    assert all(worker.process.returncode == 0 for worker in children), logged
    assert logged.count("host tier:") <= 1


@pytest.mark.slow
def test_threads_racing_with_sweeps_build_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A live region is never swept, nor is one built twice, whoever comes when."""
    caplog.set_level(logging.INFO)
    rounds, openers = 30, 4
    stop = threading.Event()

    def sweep_on() -> None:
        while not stop.is_set():
            sweep(tmp_path)

    def open_it(name: str, opened: list[Region]) -> None:
        opened.append(open_here(tmp_path, name))

    sweepers = [threading.Thread(target=sweep_on) for _ in range(2)]
    for thread in sweepers:
        thread.start()
    for turn in range(rounds):
        name, opened = region_name(str(turn)), list[Region]()
        threads = [threading.Thread(target=open_it, args=(name, opened)) for _ in range(openers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(opened) == openers
        assert len({region.path.stat().st_ino for region in opened}) == 1
        opened[0].row(0)[:1] = b"!"
        assert all(region.row(0)[0] == ord("!") for region in opened)
        assert not any("unlinked" in repr(region) for region in opened)
        for region in opened:
            region.close()
    stop.set()
    for thread in sweepers:
        thread.join()


def test_a_live_region_is_not_swept_a_dead_one_is(
    tmp_path: Path, child: Callable[..., Child]
) -> None:
    owner = child()
    owner.expect("open")
    other = region_name("another engine")
    with open_here(tmp_path, other):
        assert {path.name for path in tmp_path.iterdir()} == {NAME, other}
        assert sweep(tmp_path) == []
    owner.kill()
    assert set(sweep(tmp_path)) == {NAME, other}
    assert list(tmp_path.iterdir()) == []


def test_one_survivor_keeps_it(tmp_path: Path, child: Callable[..., Child]) -> None:
    builder = child(rank=0)
    builder.expect("open")
    with open_here(tmp_path) as region:
        builder.kill()
        assert sweep(tmp_path) == []
        assert (region.share(0) == 1).all()


def test_a_region_being_built_is_not_swept(tmp_path: Path, child: Callable[..., Child]) -> None:
    builder = child(at=("os", "posix_fallocate", 2, "before"))
    builder.expect("held")
    assert sweep(tmp_path) == []
    builder.tell("")
    builder.expect("open")
    with open_here(tmp_path) as region:
        assert region.announced() == [None] * 4


@pytest.mark.slow
def test_who_waits_for_a_builder_that_dies_builds(
    tmp_path: Path, child: Callable[..., Child]
) -> None:
    builder = child(at=("os", "posix_fallocate", 2, "after"))
    builder.expect("held")
    waiter = child(rank=1)
    builder.kill()
    waiter.expect("open")
    with open_here(tmp_path) as region:
        assert (region.share(1) == 2).all()
        assert region.announced()[1] == bytes([1]) * 32


def test_waiting_for_a_builder_is_bounded(tmp_path: Path, child: Callable[..., Child]) -> None:
    builder = child(at=("os", "posix_fallocate", 2, "before"))
    builder.expect("held")
    with pytest.raises(RegionError, match=r"without progress for 0\.05 seconds: look for its"):
        open_here(tmp_path, deadline_seconds=0.05)


class SteppedClock:
    """Stands still but for `advance`, which returns when the time has been looked at since."""

    def __init__(self) -> None:
        self.time, self.looks = 0.0, 0
        self.looked = threading.Condition()

    def now(self) -> float:
        with self.looked:
            self.looks += 1
            self.looked.notify_all()
            return self.time

    def advance(self, seconds: float) -> None:
        with self.looked:
            self.time += seconds
            seen = self.looks
            assert self.looked.wait_for(lambda: self.looks >= seen + 4, SECONDS)


def test_a_builder_that_gets_on_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much longer than the deadline it takes in all."""
    clock, opened = SteppedClock(), list[Region]()
    waiter = threading.Thread(
        target=lambda: opened.append(open_here(tmp_path, deadline_seconds=1.0))
    )
    reserve = os.posix_fallocate

    def slowly(fd: int, start: int, size: int) -> None:
        if not start:
            waiter.start()
        reserve(fd, start, size)
        clock.advance(0.9)

    monkeypatch.setattr(hostfile, "_clock", clock)
    monkeypatch.setattr(hostfile, "_BUILD_STEP_BYTES", PAGE)
    monkeypatch.setattr(os, "posix_fallocate", slowly)
    with open_here(tmp_path):
        waiter.join(SECONDS)
        assert clock.time == pytest.approx(3.6)
        assert len(opened) == 1
        opened[0].close()


def test_a_file_swept_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between exclusive and shared the lock is open for an instant: a sweep comes just then."""
    real, taken = hostfile._try_lock, list[Path]()

    def swept_first(fd: int, kind: int) -> bool:
        if kind == fcntl.LOCK_SH and not taken:
            taken.append(tmp_path / NAME)
            taken[0].unlink()
        return real(fd, kind)

    monkeypatch.setattr(hostfile, "_try_lock", swept_first)
    with open_here(tmp_path) as region:
        assert taken == [region.path]
        assert "unlinked" not in repr(region)


def test_a_name_that_passed_on_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep opened a dead file; before it has the lock, a live one has the name."""
    real, dead, replaced = hostfile._try_lock, tmp_path / NAME, list[Path]()
    dead.touch()

    def replaced_first(fd: int, kind: int) -> bool:
        if not replaced:
            replaced.append(dead)
            dead.unlink()
            dead.write_bytes(b"live")
        return real(fd, kind)

    monkeypatch.setattr(hostfile, "_try_lock", replaced_first)
    assert sweep(tmp_path) == []
    assert dead.read_bytes() == b"live"


@pytest.mark.parametrize("content", [b"", bytes(PAGE), Geometry(PAGE, 3, 4, 1000, 4).packed()])
@pytest.mark.parametrize("lock_is_free", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_only_an_empty_file_is_built_and_only_a_finished_one_joined(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    lock_is_free: bool,
    named: bool,
) -> None:
    """Whatever the file is at the moment of the two locks, between a sweep and the next."""
    path, real = tmp_path / NAME, hostfile._try_lock
    path.write_bytes(content)
    with path.open("r+b") as file:
        if not named:
            path.unlink()
        monkeypatch.setattr(
            hostfile,
            "_try_lock",
            lambda fd, kind: (lock_is_free or kind == fcntl.LOCK_SH) and real(fd, kind),
        )
        geometry = Geometry(PAGE, 3, 4, 1000, 4)
        claimed = hostfile._claim(file.fileno(), path, geometry, CAPACITY, ())
        size = os.fstat(file.fileno()).st_size

    builds = lock_is_free and named and not content
    joins = not lock_is_free and named and content.startswith(b"KVTIER")
    assert claimed == (builds or joins)
    assert size == (CAPACITY if builds else len(content))


# SIGKILL

KILLED_AT = [
    ("os", "posix_fallocate", 1, "before"),  # an empty file
    ("os", "posix_fallocate", 3, "after"),  # half its size
    ("os", "pwrite", 5, "before"),  # its size, but no header
    ("os", "pwrite", 5, "after"),  # a header, but still the exclusive lock
    ("mmap", "mmap", 1, "before"),
    ("mmap", "mmap", 1, "after"),
    ("Path", "unlink", 1, "before"),  # sweeping what the one before left
    ("Path", "unlink", 2, "before"),  # in its own `unlink`
    ("Path", "unlink", 2, "after"),
]


@pytest.mark.slow
def test_the_next_start_finds_room_wherever_the_last_was_killed(
    small: Path, child: Callable[..., Child]
) -> None:
    """L01: ten engines in a row, each killed elsewhere, in memory that holds only one."""
    free = free_bytes(small)
    for turn, point in enumerate(KILLED_AT):
        victim = child(small, name=region_name(f"victim {turn}"), at=point, kill=True)
        if point[1:3] == ("unlink", 2):
            victim.expect("open")
            victim.tell("unlink")
        assert victim.process.wait(SECONDS) == -signal.SIGKILL, victim.finish()
    serving = child(small, rank=0)
    serving.expect("open")
    serving.kill()
    assert [path.name for path in small.iterdir()] == [NAME]

    with open_here(small, region_name("the last")) as region:
        assert list(small.iterdir()) == [region.path]
        assert region.announced() == [None] * 4
        assert not region.rows_view().any()
        region.unlink()
    assert free_bytes(small) == free
