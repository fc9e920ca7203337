"""The file behind the host tier's memory: its name, its header, and who may create or remove it.

Every process that has the region mapped holds a shared lock on the file for exactly as long as
it is mapped, and the kernel lets go of both when the process dies. So a file on which nobody
holds a lock is a dead engine's: `sweep` removes it, and nothing else does but `Region.unlink`.
The process that builds a region holds the exclusive lock meanwhile, and writes the header last.
Used by `tiers.host` only. Everything here blocks, and is for start-up.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import hashlib
import logging
import mmap
import os
import stat
import struct
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path

from tiering.clock import MonotonicClock
from tiering.errors import ConfigError, RegionError
from tiering.layout import RowLayout, aligned
from tiering_kernels import numa

POLL_SECONDS = 0.005
GENERATION_BYTES = 8

_MAGIC = b"KVTIER\r\n"
_VERSION = 3
# Magic, version, shares, row_bytes, rows, share_bytes, ranks.
_HEADER = struct.Struct("<8sIIQQQQ")
_RECORD_STRIDE = 64  # the header proper takes one stride as well, then each rank has one
_BUILD_STEP_BYTES = 16 << 20
_BUILD_THREADS_MAX = 8  # beyond that they only wait for the memory
_TELL_SECONDS = 10.0

_log = logging.getLogger(__name__)
_clock = MonotonicClock()


@dataclass(frozen=True, slots=True)
class Geometry:
    """What every process of an engine must agree on before it touches a row: `shares` of
    `share_bytes` make a row. `ranks` workers announce themselves; several may have one share.
    The header has a generation for each row, behind the ranks' records."""

    row_bytes: int
    rows: int
    shares: int
    share_bytes: int
    ranks: int

    @classmethod
    def within(cls, capacity_bytes: int, layout: RowLayout, ranks: int) -> Geometry:
        """As many rows as fit, header included, in `capacity_bytes`; ConfigError if not one."""
        if layout.share_bytes < 1 or layout.ranks < 1 or ranks < 1:
            raise ValueError(f"a row needs at least one rank and one byte: {layout}, {ranks}")
        rows = layout.rows_in(capacity_bytes - _header_bytes(ranks, 0))
        # Their generations take a little of that.
        while rows and _header_bytes(ranks, rows) + rows * layout.row_bytes > capacity_bytes:
            rows -= 1
        if rows < 1:
            need = _header_bytes(ranks, 1) + layout.row_bytes
            raise ConfigError(
                "cpu_bytes_to_use",
                capacity_bytes,
                f"is less than one chunk of all {ranks} ranks together, {need} bytes",
                f"write {need} or more, or make chunks smaller with blocks_per_chunk",
            )
        return cls(layout.row_bytes, rows, layout.ranks, layout.share_bytes, ranks)

    @property
    def header_bytes(self) -> int:
        return _header_bytes(self.ranks, self.rows)

    @property
    def generations_offset(self) -> int:
        """Where the header has the rows' generations, in bytes."""
        return _RECORD_STRIDE * (1 + self.ranks)

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.rows * self.row_bytes

    def require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} of a region for {self.ranks} ranks")

    def record_offset(self, rank: int) -> int:
        """Where the header says whether `rank` is attached, in bytes."""
        self.require_rank(rank)
        return _RECORD_STRIDE * (1 + rank)

    def packed(self) -> bytes:
        """The header as it stands in the file, up to the ranks' records."""
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.shares,
            self.row_bytes,
            self.rows,
            self.share_bytes,
            self.ranks,
        )

    @classmethod
    def unpacked(cls, header: bytes) -> Geometry | None:
        """Of a header as it stands in the file; None if it is another version's."""
        magic, version, shares, row_bytes, rows, share_bytes, ranks = _HEADER.unpack(header)
        if magic != _MAGIC or version != _VERSION:
            return None
        return cls(row_bytes, rows, shares, share_bytes, ranks)


def region_name(token: str) -> str:
    """The file name of the region of the engine that `token` names. Any text will do as token,
    as long as it is the same in all processes of one engine and never used again."""
    return _own_names().replace("*", hashlib.sha256(token.encode()).hexdigest()[:16])


def is_region_name(name: str) -> bool:
    """Whether `sweep` would find a file of this name."""
    return fnmatch.fnmatchcase(name, _own_names())


def sweep(directory: Path) -> list[str]:
    """Remove the regions in `directory` that this user's dead engines left; gives their names.

    A region that any living process has mapped, or is building, is never touched.
    """
    removed: list[str] = []
    for path in sorted(directory.glob(_own_names())):
        try:
            fd = _open_own(path)
        except OSError:
            continue  # another user put it there: neither ours to remove nor a reason to stop
        if fd is None:
            continue
        try:
            # Between opening and locking, the name may have passed on to another file.
            if _try_lock(fd, fcntl.LOCK_EX) and _is_named(fd, path):
                path.unlink(missing_ok=True)
                removed.append(path.name)
                _log.info("removed %s, left behind by an engine that is gone", path)
        finally:
            os.close(fd)
    return removed


def attach(
    path: Path,
    geometry: Geometry,
    capacity_bytes: int,
    deadline_seconds: float,
    nodes: Collection[int] = (),
) -> int:
    """A descriptor of the finished region at `path`, built here if need be, holding the shared
    lock. Raises as `Region.open` does, OSError where the directory cannot be used."""
    seen_bytes = 0
    give_up = _clock.now() + deadline_seconds
    while True:
        sweep(path.parent)
        try:
            fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            fd = _open_own(path)
        if fd is not None:
            try:
                if _claim(fd, path, geometry, capacity_bytes, nodes):
                    _verify(fd, path, geometry)
                    return os.dup(fd)  # the lock belongs to both, and stays with this one
                size_bytes = os.fstat(fd).st_blocks * 512
            finally:
                os.close(fd)
            if size_bytes > seen_bytes:
                seen_bytes, give_up = size_bytes, _clock.now() + deadline_seconds
        if _clock.now() >= give_up:
            raise RegionError(
                f"another process has been building {path} without progress for "
                f"{deadline_seconds:g} seconds: look for its error, or stop it"
            )
        time.sleep(POLL_SECONDS)


def join(path: Path, deadline_seconds: float) -> tuple[int, Geometry]:
    """A descriptor of the region at `path`, holding the shared lock, and its geometry, once other
    processes have built it. Raises as `attach` does."""
    give_up = _clock.now() + deadline_seconds
    while True:
        fd = _open_own(path)
        if fd is not None:
            try:
                is_ours = _try_lock(fd, fcntl.LOCK_SH) and _is_named(fd, path)
                if is_ours and _is_published(fd):
                    geometry = geometry_of(fd, path)
                    return os.dup(fd), geometry
            finally:
                os.close(fd)
        if _clock.now() >= give_up:
            raise RegionError(
                f"no worker has built {path} within {deadline_seconds:g} seconds: look for its "
                f"error in the log"
            )
        time.sleep(POLL_SECONDS)


def geometry_of(fd: int, path: Path) -> Geometry:
    """Of the finished region that `fd` is a descriptor of; RegionError if it is none."""
    geometry = Geometry.unpacked(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
    if geometry is None:
        raise RegionError(
            f"{path} was made by another version of kv-tiering: run one version in all processes "
            f"of an engine"
        )
    _verify(fd, path, geometry)
    return geometry


def _claim(
    fd: int, path: Path, geometry: Geometry, capacity_bytes: int, nodes: Collection[int]
) -> bool:
    """Take the shared lock on a finished region, building it first if this process is alone.

    False: not now (another process builds it, or the file was swept meanwhile); look again.
    """
    if _try_lock(fd, fcntl.LOCK_EX):
        # A file with something in it that nobody holds is a dead engine's, for the next sweep.
        if not _is_named(fd, path) or os.fstat(fd).st_size > 0:
            return False
        _build(fd, path, geometry, capacity_bytes, nodes)
    # Changing to the shared lock lets go for an instant, in which a sweep may take the file.
    return _try_lock(fd, fcntl.LOCK_SH) and _is_named(fd, path) and _is_published(fd)


def _build(
    fd: int, path: Path, geometry: Geometry, capacity_bytes: int, nodes: Collection[int]
) -> None:
    """Give the empty file its memory, then its header; on failure nothing stays behind."""
    total = geometry.total_bytes
    try:
        space = os.statvfs(path.parent)
        # A tmpfs without a size limit reports no blocks at all.
        if space.f_blocks and total > space.f_bavail * space.f_frsize:
            raise _too_little(path, total, space)
        if nodes:
            _place(fd, total, nodes)
        _fill(fd, total)
        os.pwrite(fd, geometry.packed(), 0)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            os.ftruncate(fd, 0)  # so that "free" below is what others left, not what we took
            raise _too_little(path, total, os.statvfs(path.parent)) from error
        raise
    _log.info(
        "host tier: %d bytes per rank, %d in total, %d rows of %d bytes, %d bytes unused of %d",
        geometry.rows * geometry.share_bytes,
        total,
        geometry.rows,
        geometry.row_bytes,
        capacity_bytes - total,
        capacity_bytes,
    )


def _fill(fd: int, total: int) -> None:
    """Every page is there, and zero; with several threads, since clearing one takes a while."""
    zeros = memoryview(bytes(_BUILD_STEP_BYTES))

    def fill(start: int) -> int:
        size = min(_BUILD_STEP_BYTES, total - start)
        os.posix_fallocate(fd, start, size)
        # Reserving alone leaves the clearing of each page to its first use: so write it.
        return os.pwrite(fd, zeros[:size], start)

    pool = ThreadPoolExecutor(min(_BUILD_THREADS_MAX, os.cpu_count() or 1), "tiering-build")
    done_bytes, told = 0, _clock.now()
    try:
        # In steps, since a signal makes the kernel undo an unfinished allocation as a whole.
        for filled_bytes in pool.map(fill, range(0, total, _BUILD_STEP_BYTES)):
            done_bytes += filled_bytes
            if _clock.now() - told >= _TELL_SECONDS:
                told = _clock.now()
                _log.info("host tier: %.0f of %.0f GB ready", done_bytes / 1e9, total / 1e9)
    finally:
        pool.shutdown(cancel_futures=True)


def _place(fd: int, total: int, nodes: Collection[int]) -> None:
    """Have the file's pages taken from these memory nodes; where that cannot be, it is slower."""
    os.ftruncate(fd, total)
    with mmap.mmap(fd, total) as memory:
        start = c_char.from_buffer(memory)
        reason = numa.place(addressof(start), total, nodes)
        del start
    names = ", ".join(map(str, sorted(nodes)))
    if reason is None:
        _log.info("host tier: on memory node %s, as the devices", names)
    else:
        _log.warning("the host tier cannot be put on memory node %s: %s", names, reason)


def _too_little(path: Path, need_bytes: int, space: os.statvfs_result) -> RegionError:
    return RegionError(
        f"the host tier needs {need_bytes} bytes in {path.parent}, which has "
        f"{space.f_bavail * space.f_frsize} free: lower cpu_bytes_to_use, or enlarge "
        f"{path.parent} (in a container: docker's --shm-size, or --ipc=host)"
    )


def _verify(fd: int, path: Path, geometry: Geometry) -> None:
    """RegionError unless the finished region is what this process expects."""
    found = os.pread(fd, _HEADER.size, 0)
    if found != geometry.packed():
        names = "version, shares, row_bytes, rows, share_bytes, ranks"
        raise RegionError(
            f"{path} was made with ({names}) = {_HEADER.unpack(found)[1:]}, this process needs "
            f"{_HEADER.unpack(geometry.packed())[1:]}: run one version of kv-tiering with one "
            f"model, block size and cpu_bytes_to_use in all processes of an engine"
        )
    if (size_bytes := os.fstat(fd).st_size) != geometry.total_bytes:
        raise RegionError(
            f"{path} has {size_bytes} bytes instead of {geometry.total_bytes}: something other "
            f"than the engine changed its size, so restart the engine"
        )


def _open_own(path: Path) -> int | None:
    """A descriptor of this user's file at `path`, None where nothing is; PermissionError where
    it is something else, such as a trap laid by another user of a world-writable directory."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, "the name is taken by what is not this user's file")


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(fd: int, path: Path) -> bool:
    return os.fstat(fd).st_ino == inode_of(path)


def inode_of(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


def _is_published(fd: int) -> bool:
    return os.pread(fd, len(_MAGIC), 0) == _MAGIC


def _header_bytes(ranks: int, rows: int) -> int:
    return aligned(_RECORD_STRIDE * (1 + ranks) + GENERATION_BYTES * rows)


def _own_names() -> str:
    return f"kvtier-{os.geteuid()}-*.region"
