"""What the chunks on a disk are to a router, written beside them: for after a restart.

A cache in SQLite, shared by the engines that share the directory; a missing or broken one costs
announcements, never a byte. Owns its file and a thread, in which all of its work is done in the
order in which it was asked for. Called from one thread, which it never makes wait: answers are
collected by `take`. Too much work at once is left out and counted.
"""

from __future__ import annotations

import errno
import logging
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tiering.clock import Clock, UnixClock
from tiering.events.descriptions import (
    CATALOGUE_COUNTERS,
    Answer,
    Described,
    Run,
    Suspects,
    Told,
    decode,
    encode,
)
from tiering.metrics import Counters
from tiering.tiers.disk import database, diskio, mounts
from tiering.tiers.disk.paths import CATALOGUE_NAME, FsPaths

log = logging.getLogger("tiering")

VERSION = 1
TASKS_MAX = 4096
KEYS_IN_STATEMENT = 512
SUSPECTS_AT_ONCE = 512
CLOSE_SECONDS_MAX = 2.0

SCHEMA = """
CREATE TABLE chunk(key BLOB PRIMARY KEY, added INTEGER NOT NULL, body BLOB NOT NULL) WITHOUT ROWID;
"""


class Catalogue:
    """`prepare`, run in the thread, makes the directory and says where the file is to be; OSError
    where it cannot."""

    def __init__(self, prepare: Callable[[], Path], clock: Clock | None = None) -> None:
        self._prepare = prepare
        self._clock = clock or UnixClock()
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(TASKS_MAX)
        self._answers: deque[Answer] = deque()
        self._asked = 0
        self._database: sqlite3.Connection | None = None
        self._path: Path | None = None
        self._identity: database.Identity | None = None
        self._has_told = False
        self.counters = Counters(CATALOGUE_COUNTERS)
        self._thread = threading.Thread(target=self._run, name="tiering-catalogue", daemon=True)
        self._thread.start()

    # For the owner's thread

    @property
    def is_asked(self) -> bool:
        """Whether answers are still to come."""
        return self._asked > 0 or bool(self._answers)

    def keep(self, described: Run | list[Described]) -> None:
        """These chunks are on the disk."""
        self._put(lambda: self._keep(described), len(described))

    def forget(self, keys: Sequence[bytes]) -> None:
        """These are not there any more."""
        self._put(lambda: self._forget(keys), len(keys))

    def ask(self, keys: Sequence[bytes]) -> bool:
        """Have one Told for `keys`, later; False where there is too much to do."""
        if self._put(lambda: self._tell(keys), len(keys)):
            self._asked += 1
            return True
        return False

    def suspect(self, before_seconds: float, after: bytes = b"") -> None:
        """Have Suspects, later: the first of those behind the key `after` that were described
        before that, seconds since 1970."""
        self._put(lambda: self._suspect(before_seconds, after), 0)

    def take(self) -> list[Answer]:
        """What has been answered since the last call."""
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        self._asked -= sum(isinstance(answer, Told) for answer in answers)
        return answers

    def close(self) -> None:
        """Finish what was asked for, within CLOSE_SECONDS_MAX."""
        with suppress(queue.Full):
            self._tasks.put(None, timeout=CLOSE_SECONDS_MAX)
        self._thread.join(CLOSE_SECONDS_MAX)

    def _put(self, task: Callable[[], None], count: int) -> bool:
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self.counters.add("catalogue_skipped", count)
            return False
        return True

    # In the thread

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except (sqlite3.Error, OSError, msgspec.MsgspecError) as error:
                self._failed(error)
        self._let_go()

    def _failed(self, error: Exception) -> None:
        """What is in the file is not needed: if it is broken, another one is made."""
        self.counters.add("catalogue_errors", 1)
        level = logging.DEBUG if self._has_told else logging.WARNING
        self._has_told = True
        log.log(
            level,
            "what chunks on the disk hold cannot be written down or read, so routers may not be "
            "told of them after a restart: %s (further errors are counted only)",
            error,
        )
        if self._path is not None and self._database is not None and _is_broken(error):
            with suppress(OSError, sqlite3.Error):
                database.remove(self._path, self._identity)
        self._let_go()

    def _let_go(self) -> None:
        opened, self._database = self._database, None
        if opened is not None:
            with suppress(sqlite3.Error):
                opened.close()

    def _opened(self) -> sqlite3.Connection:
        if self._path is not None and database.identity_of(self._path) != self._identity:
            self._let_go()  # somebody removed it, and others have made another one
        if self._database is None:
            self._path = self._prepare()
            # What a power cut takes is not announced.
            self._database, self._identity = database.connect(self._path, discards=True)
            opened = self._database
            with database.transaction(opened):
                (version,) = opened.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    opened.execute(SCHEMA)
                    opened.execute(f"PRAGMA user_version = {VERSION}")
                elif version != VERSION:
                    raise sqlite3.DatabaseError(f"version {version} of {self._path}, not {VERSION}")
        return self._database

    def _keep(self, described: Iterable[Described]) -> None:
        now = int(self._clock.now())
        rows = [(key, now, encode(told)) for key, told in described]
        opened = self._opened()
        with database.transaction(opened):
            opened.executemany("INSERT OR REPLACE INTO chunk VALUES(?, ?, ?)", rows)
        self.counters.add("catalogue_kept", len(rows))

    def _forget(self, keys: Sequence[bytes]) -> None:
        opened = self._opened()
        with database.transaction(opened):
            opened.executemany("DELETE FROM chunk WHERE key = ?", [(key,) for key in keys])

    def _tell(self, keys: Sequence[bytes]) -> None:
        told: list[Described] = []
        try:
            for start in range(0, len(keys), KEYS_IN_STATEMENT):
                some = keys[start : start + KEYS_IN_STATEMENT]
                marks = ",".join("?" * len(some))
                query = f"SELECT key, body FROM chunk WHERE key IN ({marks})"
                rows = self._opened().execute(query, tuple(some))
                told += [(key, decode(body)) for key, body in rows]
        finally:
            described = {key for key, _ in told}
            missing = [key for key in keys if key not in described]
            self._answers.append(Told(told, missing))

    def _suspect(self, before_seconds: float, after: bytes) -> None:
        query = "SELECT key FROM chunk WHERE key > ? AND added < ? ORDER BY key LIMIT ?"
        page = (after, int(before_seconds), SUSPECTS_AT_ONCE)
        if keys := [key for (key,) in self._opened().execute(query, page)]:
            self._answers.append(Suspects(keys))


def catalogue_path(root: Path, namespace: str) -> Path:
    """Where the chunks of a namespace are described, in a directory that is there; OSError where
    that cannot be. Blocking."""
    if not mounts.is_local(root):
        told = "its file system may be another machine's, whose locks cannot be trusted"
        raise OSError(errno.ENOTSUP, told, str(root))
    directory = FsPaths(root, namespace, 0).config_dir
    diskio.make_private_dirs(root, directory)
    return directory / CATALOGUE_NAME


def _is_broken(error: Exception) -> bool:
    """Whether the file is at fault, rather than a full disk or another process."""
    if isinstance(error, sqlite3.Error):
        return database.is_broken(error)
    return isinstance(error, msgspec.MsgspecError)
