"""The host tier's region, over real files, locks and processes, SIGKILL included."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.errors import ClosedError, ConfigError, RegionError
from tiering.layout import RowLayout
from tiering.tiers import hostfile
from tiering.tiers.host import SHARED_MEMORY, Geometry, Region, region_name, sweep

PAGE = 4096
LAYOUT = RowLayout(share_bytes=1000, ranks=4)  # rows of one page
CAPACITY = 4 * PAGE  # the header and three rows
NAME = region_name("test")
SECONDS = 60.0  # far above what any wait here takes

# Opens the region as one rank, says so, and obeys what it is told on standard input. With `at`,
# the `call`-th call of a function first (or afterwards) kills the process, or holds it.
CHILD = """
import importlib, json, logging, os, signal, sys
from pathlib import Path
from tiering.layout import RowLayout
from tiering.tiers import host, hostfile

args = json.loads(sys.argv[1])
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
hostfile._BUILD_STEP_BYTES = 4096

def say(word):
    print(word, flush=True)

def stop():
    if args["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    say("held")
    sys.stdin.readline()

if args["at"]:
    owner = Path if args["at"][0] == "Path" else importlib.import_module(args["at"][0])
    _, function, call, when = args["at"]
    real, calls = getattr(owner, function), 0
    def patched(*given, **named):
        global calls
        calls += 1
        if calls == call and when == "before":
            stop()
        result = real(*given, **named)
        if calls == call and when == "after":
            stop()
        return result
    setattr(owner, function, patched)

layout = RowLayout(args["share_bytes"], args["ranks"])
region = host.Region.open(args["name"], layout, args["capacity"], Path(args["directory"]))
if args["rank"] is not None:
    region.share(args["rank"])[:] = args["rank"] + 1
    region.announce(args["rank"], bytes([args["rank"]]) * 32)
say("open")
for line in sys.stdin:
    getattr(region, line.strip())()
    say("done")
"""


class Child:
    def __init__(self, directory: Path, **changed: Any) -> None:
        args = {
            "name": NAME,
            "directory": str(directory),
            "capacity": CAPACITY,
            "share_bytes": LAYOUT.share_bytes,
            "ranks": LAYOUT.ranks,
            "rank": None,
            "at": None,
            "kill": False,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(args | changed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        assert said == word, self.finish()

    def tell(self, method: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(method + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.finish()

    def finish(self) -> str:
        """Ends it by the end of its input; gives what it logged."""
        return self.process.communicate(timeout=SECONDS)[1]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    with ExitStack() as stack:

        def start(directory: Path = tmp_path, **changed: Any) -> Child:
            child = Child(directory, **changed)
            stack.enter_context(child.process)
            stack.callback(child.process.kill)
            return child

        yield start


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with room for 1.3 regions."""
    directory = tmp_path / "small"
    directory.mkdir()
    size = f"size={CAPACITY * 13 // 10 // PAGE * PAGE}"
    command = ["mount", "-t", "tmpfs", "-o", size, "none", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def open_here(directory: Path, name: str = NAME, **changed: Any) -> Region:
    arguments: dict[str, Any] = {"layout": LAYOUT, "capacity_bytes": CAPACITY} | changed
    return Region.open(name, directory=directory, **arguments)


def free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


# What is in it


@given(
    share_bytes=st.integers(1, 1 << 20),
    ranks=st.integers(1, 200),
    capacity_bytes=st.integers(0, 1 << 28),
)
def test_never_more_bytes_than_asked_for(share_bytes: int, ranks: int, capacity_bytes: int) -> None:
    layout = RowLayout(share_bytes, ranks)
    try:
        geometry = Geometry.within(capacity_bytes, layout)
    except ConfigError as error:
        need = int(re.findall(r"takes (\d+) bytes", str(error))[0])
        assert capacity_bytes < need == Geometry.within(need, layout).total_bytes
    else:
        assert geometry.total_bytes <= capacity_bytes < geometry.total_bytes + layout.row_bytes
        assert geometry.record_offset(ranks - 1) + 64 <= geometry.header_bytes
        assert geometry.header_bytes % PAGE == geometry.row_bytes % PAGE == 0


def test_the_file_takes_what_it_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with open_here(tmp_path, capacity_bytes=CAPACITY + 100) as region:
        status = region.path.stat()
        assert status.st_size == region.geometry.total_bytes == CAPACITY
        assert status.st_blocks * 512 == CAPACITY
        assert status.st_mode & 0o777 == 0o600
        open_here(tmp_path, capacity_bytes=CAPACITY + 100).close()
    assert [record.getMessage() for record in caplog.records] == [
        "host tier: 3000 bytes per rank, 16384 in total, 3 rows of 4096 bytes, "
        "100 bytes unused of 16484"
    ]


def test_too_small_for_one_chunk_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_here(tmp_path, capacity_bytes=2 * PAGE - 1)
    assert str(caught.value) == (
        "cpu_bytes_to_use = 8191: one chunk of all 4 ranks together takes 8192 bytes; "
        "give the host tier 8192 bytes or more"
    )
    assert list(tmp_path.iterdir()) == []


def test_rows_and_shares_are_the_same_bytes(tmp_path: Path) -> None:
    with open_here(tmp_path) as region:
        assert not region.rows_view().any()
        for rank in range(4):
            region.share(rank)[2] = rank + 1
        row = region.row(2)
        assert not row.readonly
        assert row.tobytes() == b"".join(bytes([n]) * 1000 for n in (1, 2, 3, 4)) + bytes(96)
        row[:2] = b"ab"
        assert region.share(0)[2, :3].tobytes() == b"ab\x01"
        assert region.share(1).shape == (3, 1000)
        assert region.rows_view().shape == (3, PAGE)
        assert region.rows_view().ctypes.data % PAGE == 0
        assert not region.rows_view()[:2].any()
        on_disk = np.fromfile(region.path, np.uint8)[PAGE:]
        np.testing.assert_array_equal(on_disk, region.rows_view().ravel())


@pytest.mark.parametrize("index", [-1, 4])
def test_out_of_bounds(tmp_path: Path, index: int) -> None:
    with open_here(tmp_path, capacity_bytes=CAPACITY + PAGE) as region:
        assert region.geometry.rows == region.geometry.ranks == 4
        with pytest.raises(IndexError):
            region.row(index)
        with pytest.raises(IndexError):
            region.share(index)
        with pytest.raises(IndexError):
            region.announce(index, bytes(32))


def test_announcing(tmp_path: Path) -> None:
    with open_here(tmp_path) as region:
        region.announce(2, b"2" * 32)
        assert region.announced() == [None, None, b"2" * 32, None]
        with pytest.raises(RegionError, match=r"rank 2 of .* is announced twice"):
            region.announce(2, b"2" * 32)
        with pytest.raises(ValueError, match="32 bytes, not 31"):
            region.announce(1, b"1" * 31)
        with pytest.raises(RegionError, match="no worker of rank 0, 1, 3 attached to"):
            region.wait_announced(0.02)
        # A record of which not all has arrived yet is none.
        region.announce(0, b"0" * 32)
        memory = region._mapped()
        memory[region.geometry.record_offset(0) + 39] ^= 1
        assert region.announced()[0] is None


def test_many_ranks_take_more_header_pages(tmp_path: Path) -> None:
    layout = RowLayout(share_bytes=10, ranks=200)
    with open_here(tmp_path, layout=layout, capacity_bytes=6 * PAGE) as region:
        for rank in range(200):
            region.announce(rank, bytes([rank]) * 32)
        assert not region.rows_view().any()
        assert region.wait_announced(0) == [bytes([rank]) * 32 for rank in range(200)]


# Its life in one process


def test_closing(tmp_path: Path) -> None:
    region = open_here(tmp_path)
    assert repr(region) == f"<Region {region.path}: 3 rows of 4096 bytes, 0/4 ranks>"
    region.unlink()
    region.unlink()
    assert list(tmp_path.iterdir()) == []
    assert repr(region).endswith("0/4 ranks, unlinked>")
    region.row(0)[:] = b"x" * PAGE
    region.close()
    region.close()
    assert repr(region) == f"<Region {region.path} closed>"
    for use in (region.rows_view, region.announced, lambda: region.row(0), lambda: region.share(0)):
        with pytest.raises(ClosedError):
            use()


def test_a_view_outlives_close_and_keeps_the_region_alive(tmp_path: Path) -> None:
    region = open_here(tmp_path)
    view = region.row(1)
    region.close()
    assert sweep(tmp_path) == []
    view[:] = b"y" * PAGE
    assert view.tobytes() == b"y" * PAGE
    del view
    assert sweep(tmp_path) == [NAME]


def test_unlink_removes_no_other_region_of_that_name(tmp_path: Path) -> None:
    with open_here(tmp_path) as region:
        region.unlink()
        with open_here(tmp_path) as other:
            region.unlink()
            assert other.path.exists()


def test_in_shared_memory() -> None:
    name = region_name(f"test_in_shared_memory {uuid.uuid4()}")
    try:
        with Region.open(name, LAYOUT, CAPACITY) as region:
            assert region.path == SHARED_MEMORY / name
            region.unlink()
            assert not region.path.exists()
            region.row(2)[:] = b"z" * PAGE
            assert region.share(3)[2].tobytes() == b"z" * 1000
    finally:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_names() -> None:
    assert re.fullmatch(rf"kvtier-{os.geteuid()}-[0-9a-f]{{16}}\.region", region_name("a/../*"))
    assert region_name("a") != region_name("b")
    with pytest.raises(ValueError, match="not a name made by region_name"):
        Region.open("anything", LAYOUT, CAPACITY)


# What cannot be used


def test_too_little_space_is_said_before_any_is_taken(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_bytes(small)
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(RegionError) as caught:
        open_here(small, capacity_bytes=1 << 20)
    assert str(caught.value) == (
        f"the host tier needs {1 << 20} bytes in {small}, which has {free} free: lower "
        f"cpu_bytes_to_use, or enlarge {small} (in a container: docker's --shm-size, or "
        f"--ipc=host)"
    )
    assert list(small.iterdir()) == []
    assert free_bytes(small) == free


def test_space_that_vanishes_meanwhile(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's ENOSPC, where the space looked enough at first."""
    free, elsewhere = free_bytes(small), os.statvfs("/")
    real, answers = os.statvfs, [elsewhere]
    monkeypatch.setattr(os, "statvfs", lambda path: answers.pop() if answers else real(path))
    monkeypatch.setattr(hostfile, "_BUILD_STEP_BYTES", PAGE)
    with pytest.raises(RegionError, match=f"needs 1048576 bytes in .*, which has {free} free"):
        open_here(small, capacity_bytes=1 << 20)
    assert answers == []
    assert list(small.iterdir()) == []
    assert free_bytes(small) == free


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RegionError, match=r"No such file or directory.*needs a directory"):
        open_here(tmp_path / "nowhere")


def test_a_trap_laid_by_another_is_not_stepped_into(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / NAME).symlink_to(target)
    with pytest.raises(RegionError, match="cannot be used"):
        open_here(tmp_path)
    assert target.read_bytes() == b"precious"
    assert (tmp_path / NAME).is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    os.chown(tmp_path / NAME, os.geteuid() + 1, -1)
    assert sweep(tmp_path) == []
    with pytest.raises(RegionError, match="not this user's file"):
        open_here(tmp_path)
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"layout": RowLayout(share_bytes=1001, ranks=4)},
        {"layout": RowLayout(share_bytes=2000, ranks=2)},
        {"layout": RowLayout(share_bytes=2000, ranks=4), "capacity_bytes": 7 * PAGE},
        {"capacity_bytes": CAPACITY + PAGE},
    ],
)
def test_another_geometry_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    with open_here(tmp_path) as region:
        with pytest.raises(RegionError, match=r"was made with .* 4, 4096, 3, 1000\), this"):
            open_here(tmp_path, **changed)
        assert sweep(tmp_path) == []
        assert not region.rows_view().any()


def test_another_version_or_size_is_refused(tmp_path: Path) -> None:
    with open_here(tmp_path) as region:
        region._mapped()[8] += 1
        with pytest.raises(RegionError, match=r"\(2, 4, 4096, 3, 1000\), this process needs \(1,"):
            open_here(tmp_path)
        region._mapped()[8] -= 1
        os.truncate(region.path, 2 * PAGE)
        with pytest.raises(RegionError, match="has 8192 bytes instead of 16384"):
            open_here(tmp_path)


# Several processes


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


@pytest.mark.parametrize("content", [b"", bytes(PAGE), Geometry(PAGE, 3, 4, 1000).packed()])
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
        geometry = Geometry(PAGE, 3, 4, 1000)
        claimed = hostfile._claim(file.fileno(), path, geometry, CAPACITY)
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
