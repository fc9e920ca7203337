"""SQLite files beside chunks: caches that processes share, private, made anew where they break.

SQLite keeps three files, and cannot tell that somebody takes one of them away: so whoever opens
or removes a database has its directory locked meanwhile, and removes none but the one that it has
open. Blocking.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiering.tiers.disk.diskio import create_private, lock

BUSY_SECONDS_MAX = 5.0
FILE_ENDINGS = ("", "-wal", "-shm")
"""Of a database's file, and of what SQLite puts beside it."""

_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)

Identity = tuple[int, int]


def connect(
    path: Path | None, *, discards: bool = False
) -> tuple[sqlite3.Connection, Identity | None]:
    """To the file at `path`, which is made if it is missing, or to one in memory. For one thread
    at a time, in transactions only where `transaction` begins one. Several may read while one
    writes. A killed process loses nothing to the page cache; a power cut may take what it likes.
    With it the file's identity, None of what has no file.

    With `discards`, a file that is no database is removed, for the next call. Raises sqlite3.Error
    and OSError.
    """
    if path is None:
        return _connected(":memory:"), None
    with _alone(path.parent):
        with suppress(FileExistsError):
            os.close(create_private(path, os.O_RDWR))  # SQLite gives its other files this mode
        try:
            return _connected(path), identity_of(path)
        except sqlite3.Error as error:
            if discards and is_broken(error):
                _unlink(path)
            raise


def identity_of(path: Path) -> Identity | None:
    """Tells the file at `path` from all others, for as long as somebody has it open."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def remove(path: Path, identity: Identity | None) -> None:
    """The file, if it is the one of `identity`, and what is beside it. REQUIRES: the caller has
    that one open, as it was found. Raises OSError and sqlite3.Error."""
    with _alone(path.parent):
        if identity is not None and identity_of(path) == identity:
            _unlink(path)


def is_broken(error: sqlite3.Error) -> bool:
    """Whether the file is at fault, rather than a full disk, another process or this one."""
    if not isinstance(error, sqlite3.DatabaseError):
        return False
    if not isinstance(error, sqlite3.OperationalError):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BROKEN


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Taken for writing at once, so that it never has to be begun again."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _connected(path: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(
        path, timeout=BUSY_SECONDS_MAX, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in ("journal_mode = WAL", "synchronous = OFF"):
            database.execute(f"PRAGMA {pragma}").fetchall()
        # Has SQLite open all of its files here and now.
        database.execute("SELECT count(*) FROM sqlite_master").fetchall()
    except BaseException:
        database.close()
        raise
    return database


def _unlink(path: Path) -> None:
    for ending in FILE_ENDINGS:
        path.with_name(path.name + ending).unlink(missing_ok=True)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Nobody else opens or removes a database in `directory`; waited for as long as SQLite waits,
    and with its error after that."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock(descriptor, BUSY_SECONDS_MAX):
            raise _busy(directory)
        yield
    finally:
        os.close(descriptor)


def _busy(directory: Path) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(f"another process is opening a database in {directory}")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error
