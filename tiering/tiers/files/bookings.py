"""What the manifest of the files layout speaks of: its schema, bookings, flights, totals, errors.

Plain values and pure functions, safe in any thread.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import msgspec

DIRECTORY_BYTES = 4096
SHARDS_MAX = 4096

# `total` counts all that is booked, of which the `leaving` are victims of flights.
SCHEMA = """
CREATE TABLE place(id INTEGER PRIMARY KEY, directory TEXT NOT NULL UNIQUE);
CREATE TABLE owner(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, beat INTEGER NOT NULL);
CREATE TABLE flight(id INTEGER PRIMARY KEY, owner INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE chunk(
    place INTEGER NOT NULL, key BLOB NOT NULL, bytes INTEGER NOT NULL, tick INTEGER NOT NULL,
    PRIMARY KEY(place, key)) WITHOUT ROWID;
CREATE INDEX recency ON chunk(tick);
CREATE TABLE total(
    chunks INTEGER NOT NULL, bytes INTEGER NOT NULL,
    leaving INTEGER NOT NULL, leaving_bytes INTEGER NOT NULL);
INSERT INTO total VALUES(0, 0, 0, 0);
"""


# Says which of the keys that it is given have a file, or may have one.
There = Callable[[Sequence[bytes]], Collection[bytes]]


def nowhere(keys: Sequence[bytes]) -> Collection[bytes]:
    """The `There` of who knows already that they have none."""
    return ()


class ManifestBroken(Exception):
    """The table cannot be used, now or at all; says why. What is to be done: make it anew."""


class ManifestBusy(Exception):
    """Another process has held the table for longer than SQLite waits."""


class ManifestFull(Exception):
    """The disk has no room for the table's own changes; it can still be read."""


class Booked(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that is counted: the rank directory that holds its file, the file's size, and when
    it was last used."""

    directory: str
    key: bytes
    file_bytes: int
    tick: int = 0


class Flight(msgspec.Struct, frozen=True, array_like=True):
    """What is on its way: `arriving` may be written once `victims` are gone. All of it is booked
    until `Manifest.settle`. `id` is that of no other flight, also where the table is made anew."""

    id: int
    arriving: list[Booked]
    victims: list[Booked]


class Totals(msgspec.Struct, frozen=True):
    """Everything booked under the root, of which the `leaving` are flights' victims."""

    chunks: int
    file_bytes: int
    leaving: int = 0
    leaving_bytes: int = 0

    @property
    def disk_bytes(self) -> int:
        return disk_bytes(self.chunks, self.file_bytes)


def disk_bytes(chunks: int, file_bytes: int) -> int:
    """What `chunks` files of `file_bytes` together take on the disk with their directories: each
    may have a leaf directory of its own, and there are at most SHARDS_MAX above those."""
    return file_bytes + DIRECTORY_BYTES * (chunks + min(chunks, SHARDS_MAX))


def unique_number() -> int:
    """For what others may still speak of when it is gone."""
    return int.from_bytes(os.urandom(8), "big") >> 1


packed = msgspec.msgpack.Encoder().encode
_BODY = msgspec.msgpack.Decoder(tuple[list[Booked], list[Booked]])


def unpacked(number: int, body: bytes) -> Flight:
    try:
        return Flight(number, *_BODY.decode(body))
    except msgspec.MsgspecError as error:
        raise ManifestBroken(f"flight {number} cannot be read: {error}") from error


def fitting(chunks: int, held_bytes: int, file_bytes: int, wanted: int, limit_bytes: int) -> int:
    """How many files of `file_bytes` can be added without exceeding the limit."""
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if disk_bytes(chunks + middle, held_bytes + middle * file_bytes) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        kind = error.sqlite_errorcode & 0xFF  # without what SQLite adds to tell why
        # SQLITE_PROTOCOL: others came first each of the many times that it was tried.
        if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
            raise ManifestBusy(str(error)) from error
        if kind in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY):
            raise ManifestFull(str(error)) from error
        raise ManifestBroken(str(error)) from error
    except (sqlite3.Error, UnicodeDecodeError, TypeError, OverflowError) as error:
        # The latter three: text, numbers or whole rows that are not what the schema has.
        raise ManifestBroken(str(error)) from error
