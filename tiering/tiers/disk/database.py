"""SQLite files beside chunks: caches that processes share, private, made anew where they break."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiering.tiers.disk.diskio import create_private

BUSY_SECONDS_MAX = 5.0
FILE_ENDINGS = ("", "-wal", "-shm")
"""Of a database's file, and of what SQLite puts beside it."""


def connect(path: Path | None) -> sqlite3.Connection:
    """To the file at `path`, which is made if it is missing, or to one in memory. For one thread
    at a time, in transactions only where `transaction` begins one."""
    if path is not None:
        with suppress(FileExistsError):
            os.close(create_private(path, os.O_RDWR))  # SQLite gives its other files this mode
    return sqlite3.connect(
        ":memory:" if path is None else path,
        timeout=BUSY_SECONDS_MAX,
        isolation_level=None,
        check_same_thread=False,
    )


def set_up(database: sqlite3.Connection) -> None:
    """Several may read while one writes. A killed process loses nothing to the page cache; a power
    cut may take what it likes."""
    for pragma in ("journal_mode = WAL", "synchronous = OFF"):
        database.execute(f"PRAGMA {pragma}").fetchall()


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


def remove(path: Path) -> None:
    """The file and what is beside it; OSError where that cannot be."""
    for ending in FILE_ENDINGS:
        path.with_name(path.name + ending).unlink(missing_ok=True)
