"""SQLite files that processes share: opened and removed one at a time, by who means that one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiering.tiers.disk import database


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Another process opens or removes a database there."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def named(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


def test_none_is_removed_but_the_one_that_was_found_broken(tmp_path: Path) -> None:
    path = tmp_path / "database"
    broken, identity = database.connect(path)
    database.remove(path, identity)
    assert named(path) == []
    made, other = database.connect(path)
    made.execute("CREATE TABLE good(number)")
    database.remove(path, identity)
    broken.close()
    assert database.identity_of(path) == other != identity
    made.execute("INSERT INTO good VALUES(1)")
    made.close()
    opened, _ = database.connect(path)
    assert opened.execute("SELECT number FROM good").fetchall() == [(1,)]
    opened.close()


def test_what_is_no_database_makes_way_where_it_is_the_openers(tmp_path: Path) -> None:
    path = tmp_path / "database"
    path.write_bytes(b"no database at all, but long enough to be taken for one" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        database.connect(path)
    assert path.exists()
    with pytest.raises(sqlite3.DatabaseError):
        database.connect(path, discards=True)
    assert not path.exists()


def test_who_opens_or_removes_one_waits_for_others_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "database"
    opened, identity = database.connect(path)
    monkeypatch.setattr(database, "BUSY_SECONDS_MAX", 0.02)
    with locked(tmp_path):
        with pytest.raises(sqlite3.OperationalError, match="another process") as caught:
            database.connect(path, discards=True)
        assert caught.value.sqlite_errorcode == sqlite3.SQLITE_BUSY
        with pytest.raises(sqlite3.OperationalError):
            database.remove(path, identity)
    assert path.exists()
    opened.close()


@pytest.mark.parametrize(
    ("code", "is_broken"),
    [
        (sqlite3.SQLITE_CORRUPT, True),
        (sqlite3.SQLITE_NOTADB, True),
        (sqlite3.SQLITE_BUSY, False),
        (sqlite3.SQLITE_BUSY_RECOVERY, False),
        (sqlite3.SQLITE_PROTOCOL, False),
        (sqlite3.SQLITE_CANTOPEN, False),
        (sqlite3.SQLITE_FULL, False),
    ],
)
def test_a_file_is_not_at_fault_for_what_others_do(code: int, is_broken: bool) -> None:
    error = sqlite3.OperationalError("told by SQLite")
    error.sqlite_errorcode = code
    assert database.is_broken(error) is is_broken
