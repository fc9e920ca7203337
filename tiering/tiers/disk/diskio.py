"""What every disk tier needs of a file system: private files, locks, a probe, syncing; blocking.

Files are 0600 and directories 0700 whatever the umask. How bytes move is for the engines of
`tiering_kernels.chunkio`; here is decided which way, by trying: direct I/O, which leaves the page
cache to others, or buffered where direct is refused or far slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiering.clock import Clock
from tiering.errors import ConfigError, TierError
from tiering.layout import ALIGNMENT
from tiering.tiers.disk.temps import temp_name

IoPath = Literal["auto", "direct", "buffered"]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Direct I/O has to be this much slower than buffered, with its sync, to be given up.
SLOWER_MAX = 2.0

FREE_SHARE = 0.05
FREE_BYTES_MAX = 20 << 30

USER_ERRORS = {
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.EROFS: "mount it writable",
    errno.ENOENT: "create the parent directory or mount it, or name another directory",
    errno.ENOTDIR: "name a directory",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ELOOP: "name a directory, not a loop of symbolic links",
}

# Cleaners take empty directories; each comes by once, so they cannot win this often in a row.
MAKING_TRIES_MAX = 64

_LOCK_POLL_SECONDS = 0.005
_PROBE_BYTES = 1 << 20
_PROBE_ROUNDS = 3
_FILE_MODE = 0o600
_DIR_MODE = 0o700


@dataclass(frozen=True, slots=True)
class Direct:
    """Which directions go around the page cache."""

    reads: bool
    writes: bool

    def __str__(self) -> str:
        names = {True: "direct", False: "buffered"}
        if self.reads == self.writes:
            return names[self.reads]
        return f"{names[self.reads]} reads, {names[self.writes]} writes"


def make_private_dirs(root: Path, target: Path) -> None:
    """Make `target` and its parents below `root`, but never `root`: a mount that is gone must
    not grow a directory in its place. What a cleaner takes under our hands is made again."""
    for tries_left in reversed(range(MAKING_TRIES_MAX)):
        made = root
        try:
            for part in target.relative_to(root).parts:
                made = made / part
                make_private_dir(made)
            return
        except FileNotFoundError:
            if made.parent == root or not tries_left:
                raise


def make_private_dir(path: Path) -> None:
    """Make one directory for its owner alone, if it does not exist."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(_DIR_MODE)
        path.chmod(_DIR_MODE)  # the umask may have taken the owner's own rights


def make_leaf(root: Path, leaf: str) -> None:
    """Make the directory `leaf` below `root`, in the common case with one call."""
    try:
        os.mkdir(leaf, _DIR_MODE)
        os.chmod(leaf, _DIR_MODE)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_private_dirs(root, Path(leaf))


def lock(descriptor: int, seconds_max: float) -> bool:
    """Have the lock of an open file or directory; whether it came within about `seconds_max`. It
    is let go of with the descriptor."""
    for tries_left in reversed(range(1 + int(seconds_max / _LOCK_POLL_SECONDS))):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if tries_left:
            time.sleep(_LOCK_POLL_SECONDS)
    return False


def create_private(path: str | Path, flags: int) -> int:
    """A descriptor of a new file for its owner alone; FileExistsError where there is one."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _FILE_MODE)
    try:
        os.fchmod(descriptor, _FILE_MODE)  # the umask may have taken the owner's own rights
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def children(directory: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """What lies in `directory`; nothing where it is gone."""
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def pages(headers: memoryview) -> Iterator[memoryview]:
    """The header pages in a batch's buffer, one after the other."""
    for start in range(0, headers.nbytes, ALIGNMENT):
        yield headers[start : start + ALIGNMENT]


class HeaderPages:
    """Aligned header pages for one batch at a time in each thread; what the last one left in them
    is still there."""

    def __init__(self) -> None:
        self._local = threading.local()

    def lease(self, count: int) -> memoryview:
        memory: mmap.mmap | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < count * ALIGNMENT:
            memory = self._local.memory = mmap.mmap(-1, count * ALIGNMENT)
        return memoryview(memory)[: count * ALIGNMENT]


def free_bytes(root: Path) -> tuple[int, int]:
    """Free for this user, and all, of the file system that `root` is on."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def spare_bytes(root: Path, min_free_bytes: int | None) -> int:
    """What is free for this user on the file system of `root` over `min_free_bytes`, which is
    FREE_SHARE of it, at most FREE_BYTES_MAX, if None; negative where too little is free."""
    free, size = free_bytes(root)
    if min_free_bytes is None:
        min_free_bytes = min(int(size * FREE_SHARE), FREE_BYTES_MAX)
    return free - min_free_bytes


def open_error(tier: str, root: Path, error: OSError) -> ConfigError | TierError:
    """What `tier` says when `root` cannot be used at start: a ConfigError where a user can help."""
    remedy = USER_ERRORS.get(error.errno or 0)
    if remedy is None:
        return TierError(tier, None, f"cannot be opened: {error}")
    reason = f"{error.strerror}: {error.filename}"
    return ConfigError("secondary_tiers[].root_dir", str(root), reason, remedy)


def sync_directories(directories: Iterable[str]) -> None:
    """Have the names in `directories` on the disk, and those of the directories themselves."""
    for directory in {parent for each in directories for parent in (each, os.path.dirname(each))}:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def sync_file_system(root: Path) -> None:
    """Have all of the file system that `root` is on, on the disk."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(root))
    finally:
        os.close(descriptor)


def aligned_page() -> memoryview:
    """ALIGNMENT bytes that direct I/O can use."""
    return memoryview(mmap.mmap(-1, ALIGNMENT))


def probe(directory: Path, reads: IoPath, writes: IoPath, clock: Clock) -> Direct:
    """Which way files in `directory` are read and written: as asked, or with `auto` by trying.

    A full disk does not tell, so it counts as direct: what the kernel then refuses falls back.
    Raises OSError where `directory` cannot be written to at all, and ConfigError where direct
    I/O is asked for and refused.
    """
    path = directory / temp_name()
    try:
        can = _page_goes_round(path)
        path.unlink(missing_ok=True)
        for name, asked in (("read_path", reads), ("write_path", writes)):
            if asked == "direct" and not can:
                raise ConfigError(
                    f"secondary_tiers[].{name}",
                    asked,
                    f"the file system of {directory} refuses direct I/O",
                    'write "auto", or leave the key out',
                )
        fast = _not_much_slower(path, clock) if can and "auto" in (reads, writes) else (can, can)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        fast = (True, True)
    finally:
        path.unlink(missing_ok=True)
    asked_for = {"direct": True, "buffered": False}
    return Direct(asked_for.get(reads, fast[0]), asked_for.get(writes, fast[1]))


def _page_goes_round(path: Path) -> bool:
    """Whether a page can be written and read with direct I/O."""
    page = aligned_page()
    try:
        descriptor = create_private(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    try:
        os.pwritev(descriptor, [page], 0)
        return os.preadv(descriptor, [page], 0) == ALIGNMENT
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(descriptor)


def _not_much_slower(path: Path, clock: Clock) -> tuple[bool, bool]:
    """Whether direct reads and direct writes are about as fast as buffered ones, the best of a
    few rounds each; buffered writes are timed with their sync, buffered reads from the disk."""
    memory = memoryview(mmap.mmap(-1, _PROBE_BYTES))
    best: dict[tuple[bool, str], float] = {}
    os.close(create_private(path, os.O_RDWR))
    for _ in range(_PROBE_ROUNDS):
        for direct in (False, True):
            descriptor = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
            try:
                start = clock.now()
                os.pwritev(descriptor, [memory], 0)
                os.fdatasync(descriptor)
                written = clock.now()
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                dropped = clock.now()
                os.preadv(descriptor, [memory], 0)
                took = {"read": clock.now() - dropped, "write": written - start}
            finally:
                os.close(descriptor)
            for what, seconds in took.items():
                best[direct, what] = min(seconds, best.get((direct, what), seconds))
    reads, writes = (
        best[True, what] <= SLOWER_MAX * best[False, what] for what in ("read", "write")
    )
    return reads, writes
