"""Names of files that are being written, and the sweeping of those that nobody writes any more.

A name tells its writer: `<process space>-<pid>-<start>-<number>.tmp`. A process space is one
boot of one machine and one PID namespace in it, so that a PID means the same to all who share
it. Within the own space a dead writer is known for certain; in another (another host or
container on the same mount) only by age.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tiering.tiers.disk.paths import TEMP_SUFFIX

FOREIGN_AGE_SECONDS_MAX = 24 * 3600
FOREIGN_SILENCE_SECONDS_MAX = 600.0

_NAME = re.compile(r"(?P<space>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d+)-\d+\.tmp")
_NUMBERS = itertools.count()


def temp_name() -> str:
    """A file name that no other call, process or machine gives. Safe in any thread."""
    return f"{_writer(os.getpid())}-{next(_NUMBERS)}{TEMP_SUFFIX}"


def owner_name() -> str:
    """A name for one tier of this process, by which others can tell when it is gone."""
    return temp_name().removesuffix(TEMP_SUFFIX)


def is_owner(name: str) -> bool:
    """Whether `name` could be an `owner_name`."""
    return _NAME.fullmatch(name + TEMP_SUFFIX) is not None


def is_gone(owner: str, silent_seconds: float) -> bool:
    """Whether the process behind `owner_name` has ended; one that cannot be seen from here counts
    as gone when it has been silent for long."""
    found = _NAME.fullmatch(owner + TEMP_SUFFIX)
    if found is None:
        return True
    if found["space"] == _space():
        return _start_of(int(found["pid"])) != int(found["start"])
    return silent_seconds > FOREIGN_SILENCE_SECONDS_MAX


def sweep(directories: Iterable[Path], now_seconds: float) -> int:
    """Remove abandoned temp files directly in `directories`, and say how many.

    `now_seconds` is the time by the clock that stamps the files, which on a network mount is the
    server's. What another sweeper removes first is not counted.
    """
    swept = 0
    for directory in directories:
        for path in abandoned(directory, now_seconds):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                swept += 1
    return swept


def abandoned(directory: Path, now_seconds: float) -> Iterator[Path]:
    """The temp files directly in `directory` that `sweep` would remove."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):
                if _is_abandoned(directory / name, now_seconds):
                    yield directory / name


def _is_abandoned(path: Path, now_seconds: float) -> bool:
    found = _NAME.fullmatch(path.name)
    if found is None:
        return False
    if found["space"] == _space():
        return _start_of(int(found["pid"])) != int(found["start"])
    return now_seconds - path.stat().st_mtime > FOREIGN_AGE_SECONDS_MAX


@functools.cache
def _writer(pid: int) -> str:
    """This process's part of a temp name; by `pid`, since a fork is another writer."""
    return f"{_space()}-{pid}-{_start_of(pid)}"


@functools.cache
def _space() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    pids = os.stat("/proc/self/ns/pid")
    return hashlib.sha256(boot + b"%d %d" % (pids.st_dev, pids.st_ino)).hexdigest()[:12]


def _start_of(pid: int) -> int | None:
    """When `pid` was started, in clock ticks since boot; None where there is no such process.

    A zombie counts as gone, as it writes nothing any more, once its other threads are: the first
    to end after a kill may be the first one, and another be in the middle of a write.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in brackets, and may itself contain brackets.
    state, *fields = stat.rpartition(b")")[2].split()
    is_over = state in (b"Z", b"X") and int(fields[16]) <= 1
    return None if is_over else int(fields[18])
