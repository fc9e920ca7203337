"""Whole-file I/O with the modes and flags the fs tier wants; blocking, called from its threads.

Direct I/O is used where the root's probe found that it works, and given up for one file at a
time where the kernel refuses it (EINVAL: a buffer, length or offset that is not aligned).
Files are 0600 and directories 0700 whatever the umask.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tiering.layout import ALIGNMENT
from tiering.tiers.fs_temps import temp_name

IoPath = Literal["direct", "buffered"]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_FILE_MODE = 0o600
_DIR_MODE = 0o700


def make_private_dirs(root: Path, target: Path) -> None:
    """Make `target` and its parents below `root`, but never `root`: a mount that is gone must
    not grow a directory in its place."""
    made = root
    for part in target.relative_to(root).parts:
        made = made / part
        make_private_dir(made)


def make_private_dir(path: Path) -> None:
    """Make one directory for its owner alone, if it does not exist."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(_DIR_MODE)
        path.chmod(_DIR_MODE)  # the umask may have taken the owner's own rights


def create_private(path: str | Path, flags: int) -> int:
    """A descriptor of a new file for its owner alone; FileExistsError where there is one."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _FILE_MODE)
    try:
        os.fchmod(descriptor, _FILE_MODE)  # the umask may have taken the owner's own rights
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create_for_writing(path: Path, io_path: IoPath) -> int:
    """Like `create_private`, write only, with direct I/O where `io_path` says so and it works."""
    if io_path == "direct":
        try:
            return create_private(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some file systems make the file before they refuse the flag.
            path.unlink(missing_ok=True)
    return create_private(path, os.O_WRONLY)


def open_for_reading(path: str, io_path: IoPath) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW
    if io_path == "direct":
        try:
            return os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags)


def write_whole(descriptor: int, parts: Sequence[memoryview]) -> None:
    """Write all of `parts`, one after the other, from the file's start."""
    done, total = 0, sum(part.nbytes for part in parts)
    while done < total:
        try:
            written = os.pwritev(descriptor, _after(parts, done), done)
        except OSError as error:
            if not _gave_up_direct(descriptor, error):
                raise
            continue
        if written == 0:
            raise OSError(errno.EIO, "the file system took no bytes of a write")
        done += written


def read_whole(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Fill `parts`, one after the other, from the file's start; bytes had before it ended."""
    done, total = 0, sum(part.nbytes for part in parts)
    while done < total:
        try:
            got = os.preadv(descriptor, _after(parts, done), done)
        except OSError as error:
            if not _gave_up_direct(descriptor, error):
                raise
            continue
        if got == 0:
            break
        done += got
    return done


def _after(parts: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What is left of `parts` after their first `done` bytes."""
    if done == 0:
        return parts
    left = []
    for part in parts:
        if done < part.nbytes:
            left.append(part.cast("B")[done:])
        done = max(0, done - part.nbytes)
    return left


def _gave_up_direct(descriptor: int, error: OSError) -> bool:
    """Whether `error` came of direct I/O, which the descriptor then no longer does."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def aligned_page() -> memoryview:
    """ALIGNMENT bytes that direct I/O can use."""
    return memoryview(mmap.mmap(-1, ALIGNMENT))


def probe(directory: Path) -> IoPath:
    """Which way files in `directory` can be read and written, tried with one page.

    A full disk does not tell, so it counts as direct: what the kernel then refuses falls back.
    Raises OSError where `directory` cannot be written to at all.
    """
    path = directory / temp_name()
    try:
        return "direct" if _page_goes_round(path) else "buffered"
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "buffered"
        if error.errno in NO_SPACE:
            return "direct"
        raise
    finally:
        path.unlink(missing_ok=True)


def _page_goes_round(path: Path) -> bool:
    page = aligned_page()
    descriptor = create_private(path, os.O_RDWR | os.O_DIRECT)
    try:
        os.pwritev(descriptor, [page], 0)
        return os.preadv(descriptor, [page], 0) == ALIGNMENT
    finally:
        os.close(descriptor)
