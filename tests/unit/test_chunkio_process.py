"""The batch I/O engines and what they share with their process: descriptors, threads, the
interpreter lock, forks, and what a kernel or a C library may do to them."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from frame_batches import (
    FRAME_BYTES,
    PAYLOAD_BYTES,
    Frames,
    contents,
    names,
    read_back,
    segment,
    write,
)
from tiering_kernels.chunkio import BAD_CHECKSUM, UNNAMED, ChunkIo

COUNT = 40  # more than any engine has under way at once


def in_a_new_thread(work: Callable[[], list[int]]) -> list[int]:
    """What `work` gives in a thread that has no ring yet."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """A limit that leaves room for `count` more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        # The limit is on numbers, so those below it that are free are taken first.
        top = max(map(int, descriptors())) + 1
        while (number := os.open(os.devnull, os.O_RDONLY)) < top:
            taken.append(number)
        os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (number + count, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


def run_python(script: str, *arguments: str, **environment: str) -> str:
    """What a fresh process prints; fails if that fails."""
    modules = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": modules, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


# Descriptors


def test_with_few_free_descriptors_a_batch_takes_longer_and_nothing_fails(
    io: ChunkIo, tmp_path: Path
) -> None:
    frames = Frames(COUNT, PAYLOAD_BYTES).filled()
    into = frames.like()
    with free_descriptors(3):
        results = in_a_new_thread(
            lambda: write(io, tmp_path, frames) + read_back(io, tmp_path, into)
        )
    assert results == [FRAME_BYTES] * 2 * COUNT
    assert into.whole() == frames.whole()


def test_without_a_free_descriptor_files_fail_alone_and_slots_still_go(
    io: ChunkIo, tmp_path: Path
) -> None:
    frames = Frames(COUNT, PAYLOAD_BYTES).filled()
    write(io, tmp_path, frames)
    into = frames.like()
    offsets = [i * FRAME_BYTES for i in range(COUNT)]
    with segment(tmp_path / "segment") as descriptor, free_descriptors(0):
        slots = [descriptor] * COUNT, offsets

        def work() -> list[int]:
            return [
                *read_back(io, tmp_path, into),
                *io.write_slots(*slots, frames.headers, frames.payloads),
                *io.read_slots(*slots, into.headers, into.payloads),
            ]

        results = in_a_new_thread(work)
        of_writes = in_a_new_thread(lambda: write(io, tmp_path, frames.like().filled(1)))
    assert results == [-errno.EMFILE] * COUNT + [FRAME_BYTES] * 2 * COUNT
    assert of_writes == [-errno.EMFILE] * COUNT
    assert into.whole() == frames.whole()
    assert contents(names(tmp_path, "final", COUNT)) == frames.whole()


def test_no_descriptor_is_left_open_whatever_happens(io: ChunkIo, tmp_path: Path) -> None:
    gc.collect()
    before = descriptors()
    frames = Frames(5, PAYLOAD_BYTES).filled()
    temps, finals = names(tmp_path, "temp", 5), names(tmp_path, "final", 5)
    os.mkdir(finals[1])
    finals[2] = str(tmp_path / "gone" / "final")
    os.mkfifo(temps[3])
    Path(temps[4]).touch()
    reuse = [False, False, False, True, False]
    held: list[set[str]] = []

    def work() -> list[int]:
        results = io.write_files(temps, finals, frames.headers, frames.payloads, reuse, True, False)
        Path(finals[3]).write_bytes(bytes(FRAME_BYTES))
        os.mkfifo(finals[4])
        results += io.read_files(finals, frames.headers, frames.payloads, True)
        held.append(descriptors())
        return results

    assert in_a_new_thread(work) == [
        *(FRAME_BYTES, -errno.EISDIR, UNNAMED, -errno.ENXIO, -errno.EEXIST),
        *(FRAME_BYTES, -errno.EINVAL, -errno.ENOENT, BAD_CHECKSUM, -errno.EINVAL),
    ]
    of_rings = 1 if io.engine == "uring" else 0
    assert len(held[0] - before) == of_rings
    # A thread lets go of its ring while it ends, which may be after it can be joined.
    deadline = time.monotonic() + 60
    while descriptors() - before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not descriptors() - before


# Threads


def test_other_threads_run_during_a_call(io: ChunkIo, tmp_path: Path) -> None:
    frames = Frames(8, 1 << 20).filled()
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the lock is let go, or nobody else runs
    counting = threading.Thread(target=count)
    counting.start()
    try:
        with segment(tmp_path / "segment") as descriptor:
            slots = [descriptor] * 8, [i * frames.frame_bytes for i in range(8)]
            turns_before = turns
            # However often the other thread is not given a core meanwhile.
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                io.write_slots(*slots, frames.headers, frames.payloads)
                if turns > turns_before:
                    break
            turns_during = turns - turns_before
    finally:
        over.set()
        counting.join()
        sys.setswitchinterval(interval)
    assert turns_during > 0


def test_threads_use_one_engine_at_once(io: ChunkIo, tmp_path: Path) -> None:
    def work(number: int) -> bool:
        directory = tmp_path / str(number)
        directory.mkdir()
        frames = Frames(20, 4096 * number + 4095, aligned=bool(number % 2)).filled(number)
        into = frames.like()
        expected = [frames.frame_bytes] * 20
        for _ in range(2):
            assert write(io, directory, frames) == expected
            assert read_back(io, directory, into) == expected
            assert into.whole() == frames.whole()
        return True

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(work, range(8)))


FORKS = """
import os, sys, threading
from pathlib import Path
from frame_batches import Frames
from frame_batches import read_back, write
from test_chunkio_process import descriptors
from tiering_kernels.engines import open_engine

io, directory = open_engine(sys.argv[1]), Path(sys.argv[2])
before = len(descriptors())
frames = Frames(40, 8192).filled()
write(io, directory, frames)
used, end = threading.Event(), threading.Event()

def another():
    read_back(io, directory, frames.like())
    used.set()
    end.wait()

thread = threading.Thread(target=another)
thread.start()
used.wait()
rings = len(descriptors()) - before
assert rings == (2 if io.engine == "uring" else 0), rings

def goes_round():
    into = frames.like()
    assert read_back(io, directory, into) == [frames.frame_bytes] * 40
    assert into.whole() == frames.whole()

child = os.fork()
if child == 0:
    code = 1
    try:
        assert len(descriptors()) == before, "rings of the parent"
        goes_round()
        assert len(descriptors()) == before + rings // 2
        code = 0
    finally:
        os._exit(code)
goes_round()
assert os.waitpid(child, 0)[1] == 0, "the child failed"
goes_round()
end.set()
thread.join()
"""


@pytest.mark.slow
def test_after_a_fork_both_go_on_and_share_no_ring(io: ChunkIo, tmp_path: Path) -> None:
    run_python(FORKS, io.engine, str(tmp_path))


# What a kernel or a C library does


CUTS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/uio.h>

/* Moves at most 5000 bytes a call, of the first part only, and is interrupted now and then. */
typedef ssize_t (*call)(int, const struct iovec *, int, off_t);
static ssize_t cut(const char *name, int fd, const struct iovec *parts, off_t offset)
{
    static __thread unsigned calls;
    if (++calls % 7 == 0) {
        errno = EINTR;
        return -1;
    }
    struct iovec part = *parts;
    if (part.iov_len > 5000)
        part.iov_len = 5000;
    return ((call)dlsym(RTLD_NEXT, name))(fd, &part, 1, offset);
}
#define CUT(name, of) ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) \\
    { (void)count; return cut(#of, fd, parts, offset); }
#define CUT2(name, of) \\
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) \\
    { (void)count, (void)flags; return cut(#of, fd, parts, offset); }
CUT(preadv, preadv) CUT(preadv64, preadv) CUT(pwritev, pwritev) CUT(pwritev64, pwritev)
CUT2(preadv2, preadv) CUT2(preadv64v2, preadv) CUT2(pwritev2, pwritev) CUT2(pwritev64v2, pwritev)
"""

SHORT = """
import sys
from pathlib import Path
from frame_batches import Frames, contents, names, segment
from frame_batches import read_back, write
from tiering_kernels.engines import open_engine

io, directory = open_engine(sys.argv[1]), Path(sys.argv[2])
for payload_bytes in (65536, 20001):
    frames = Frames(5, payload_bytes).filled()
    expected = [frames.frame_bytes] * 5
    assert write(io, directory, frames) == expected
    assert contents(names(directory, "final", 5)) == frames.whole()
    into = frames.like()
    assert read_back(io, directory, into) == expected
    assert into.whole() == frames.whole()
    with segment(directory / "segment") as descriptor:
        slots = [descriptor] * 5, [i * frames.frame_bytes for i in range(5)]
        assert io.write_slots(*slots, frames.headers, frames.payloads) == expected
        into = frames.like()
        assert io.read_slots(*slots, into.headers, into.payloads) == expected
        assert into.whole() == frames.whole()
"""


# A ring calls no function that could be cut; what goes on after a short transfer is shared.
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["threads", "portable"])
def test_short_and_interrupted_transfers_go_on_where_they_stopped(
    engine: str, tmp_path: Path
) -> None:
    (tmp_path / "cuts.c").write_text(CUTS)
    library = str(tmp_path / "cuts.so")
    compiler = sysconfig.get_config_var("CC").split()[0]
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, str(tmp_path / "cuts.c")], check=True
    )
    run_python(SHORT, engine, str(tmp_path), LD_PRELOAD=library)


NO_RING = """
import ctypes, struct, sys, threading
from pathlib import Path

IO_URING_SETUP, EPERM = 425, 1
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | EPERM

def forbid():
    # Loads the number of the system call; where it is io_uring_setup, it fails, else it goes on.
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, IO_URING_SETUP), (6, 0, 0, REFUSE), (6, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()

from frame_batches import Frames
from frame_batches import read_back, write
from tiering_kernels.chunkio import EngineUnavailable
from tiering_kernels.engines import open_engine

early = open_engine("uring")
forbid()
try:
    open_engine("uring")
except EngineUnavailable as error:
    print(error)
print(open_engine().engine)
frames = Frames(40, 8192).filled()
into = frames.like()
assert write(early, Path(sys.argv[1]), frames) == [frames.frame_bytes] * 40
assert read_back(early, Path(sys.argv[1]), into) == [frames.frame_bytes] * 40
assert into.whole() == frames.whole()
"""


@pytest.mark.slow
def test_where_io_uring_is_forbidden_the_engine_says_so_and_threads_are_used(
    tmp_path: Path,
) -> None:
    said, instead = run_python(NO_RING, str(tmp_path)).splitlines()
    assert said.startswith("uring: no io_uring here: Operation not permitted (forbidden by")
    assert instead == "threads"
