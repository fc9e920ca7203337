"""What lies under one root, how large and how recently used: a table that processes share.

A cache of what the files say, in SQLite: never asked whether bytes are right, and rebuilt from the
files when it is missing or broken. What it owns is the *books*: chunks that are there, on their
way in (a flight's `arriving`) and on their way out (its `victims`) all count, so that what is on
the disk never exceeds what is booked. Each change is one short transaction, so any process may
be killed at any point. Blocking; one thread at a time. In memory (`path` None) it serves one
process, for file systems whose locks cannot be trusted.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tiering.tiers.disk import database
from tiering.tiers.files.bookings import (
    DIRECTORY_BYTES,
    SCHEMA,
    Booked,
    Flight,
    ManifestBroken,
    ManifestFull,
    There,
    Totals,
    disk_bytes,
    fitting,
    nowhere,
    packed,
    translated,
    unique_number,
    unpacked,
)

VERSION = 1
CACHE_KIB = 16 << 10
_KEYS_IN_STATEMENT = 512
_COUNTED = 1


class Manifest:
    """`owner` names this process, so that others can tell when it is gone."""

    def __init__(
        self, path: Path | None, owner: str, now_seconds: float, *, discards: bool = False
    ) -> None:
        """Opens or makes the table; ManifestBroken where what is there cannot be used. With
        `discards` all of a table is looked at, and one that is broken is out of the way then."""
        self._path = path
        self._owner_name = owner
        self._places: dict[str, int] = {}
        self._directories: dict[int, str] = {}
        with translated():
            # Used by whichever pool thread has its turn.
            self._db, self._identity = database.connect(path, discards=discards)
        try:
            with translated():
                self.is_counted = self._prepare()
                self._owner = self._enrol(owner, now_seconds)
            if discards and self.is_counted and not self.is_sound():
                raise ManifestBroken("it is not well formed")
        except ManifestBroken:
            if discards:
                self.discard()
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()

    def discard(self) -> None:
        """Take the file out of the way, if it is still the one under its name: another process
        may have made a good one there. For who has found it broken, before `close`."""
        if self._path is not None:
            with suppress(OSError, sqlite3.Error):
                database.remove(self._path, self._identity)

    @property
    def is_current(self) -> bool:
        """Whether the file is still the one under its name: nobody removed or replaced it.
        Raises OSError where that cannot be seen."""
        return self._path is None or database.identity_of(self._path) == self._identity

    def totals(self) -> Totals:
        with translated():
            return self._total()

    def admit(
        self,
        directory: str,
        keys: Sequence[bytes],
        file_bytes: int,
        limit_bytes: int,
        target_bytes: int,
        spared: Collection[bytes] = (),
        there: There = nowhere,
    ) -> Flight:
        """Book room for files of `file_bytes` each in `directory`, for as many leading `keys` as
        there is room. Where all would exceed `limit_bytes`, the least recently used chunks under
        the root become victims, until `target_bytes` would not be exceeded; but none of `keys`
        and `spared`. What is `there` of `keys` stays booked: it takes room until it is replaced,
        and for good where it is not."""
        with self._change():
            self._unbook(directory, keys, there)
            before, target = self._total(), min(target_bytes, limit_bytes)
            # Those who are on their way out already make room for no one else.
            chunks = before.chunks - before.leaving + len(keys)
            size = before.file_bytes - before.leaving_bytes + file_bytes * len(keys)
            victims: list[Booked] = []
            if disk_bytes(chunks, size) > limit_bytes:
                victims = self._oldest(
                    lambda count, gone: disk_bytes(chunks - count, size - gone) <= target,
                    len(keys),
                    {(directory, key) for key in (*keys, *spared)},
                )
            granted = fitting(
                chunks - len(keys) - len(victims),
                size - len(keys) * file_bytes - _bytes_of(victims),
                file_bytes,
                len(keys),
                limit_bytes,
            )
            self._count(granted, granted * file_bytes)
            arriving = [Booked(directory, key, file_bytes) for key in keys[:granted]]
            return self._take_off(arriving, victims)

    def evict(self, want_bytes: int, spared: Collection[tuple[str, bytes]] = ()) -> Flight:
        """The least recently used chunks that take `want_bytes` of disk, to be removed now; none
        of `spared`, each a directory and a key."""
        with self._change():
            victims = self._oldest(
                lambda count, gone: gone + count * DIRECTORY_BYTES >= want_bytes, 1, set(spared)
            )
            return self._take_off([], victims)

    def oldest(self, count: int) -> list[Booked]:
        """The `count` chunks that were used longest ago. Changes nothing, so it needs no room."""
        with translated():
            rows = self._db.execute(
                "SELECT directory, key, bytes, tick FROM chunk INDEXED BY recency "
                "JOIN place ON place = place.id ORDER BY tick LIMIT ?",
                (count,),
            )
            return [Booked(*row) for row in rows]

    def newest_tick(self) -> int:
        """When the most recently used chunk was used, 0 without any."""
        with translated():
            (tick,) = self._db.execute("SELECT max(tick) FROM chunk").fetchone()
            return tick if isinstance(tick, int) else 0

    def settle(
        self, flight: Flight, arrived: Mapping[bytes, int], kept: Iterable[Booked] = ()
    ) -> bool:
        """The flight is over: `arrived` keys are there, with their ticks, other arriving ones are
        not; victims are gone but for `kept`. One that is not known here, because another process
        has settled it or the table was made anew meanwhile, has left its files there all the same.
        True."""
        with self._change() as db:
            if db.execute("DELETE FROM flight WHERE id = ?", (flight.id,)).rowcount == 1:
                ends = [*flight.arriving, *flight.victims]
                self._count(-len(ends), -_bytes_of(ends))
                self._count_leaving(-len(flight.victims), -_bytes_of(flight.victims))
            here = [
                Booked(each.directory, each.key, each.file_bytes, arrived[each.key])
                for each in flight.arriving
                if each.key in arrived
            ]
            self._book([*here, *kept])
            return True

    def touch(self, directory: str, ticks: Mapping[bytes, int]) -> None:
        """Chunks were used; those not here are ignored."""
        with self._change() as db:
            place = self._place(directory)
            db.executemany(
                "UPDATE chunk SET tick = max(tick, ?) WHERE place = ? AND key = ?",
                [(tick, place, key) for key, tick in ticks.items()],
            )

    def forget(self, directory: str, keys: Collection[bytes], there: There = nowhere) -> None:
        """The files of `keys` are not there any more, but for what is `there`."""
        with self._change():
            self._unbook(directory, keys, there)

    def forget_directory(self, rank_dir: Path) -> None:
        """Forget the chunks of `rank_dir`, if it is gone: an engine may have made it anew."""
        with self._change() as db:
            if os.path.lexists(rank_dir):
                return
            db.execute(
                "DELETE FROM chunk WHERE place = (SELECT id FROM place WHERE directory = ?)",
                (rank_dir.name,),
            )
            self._recount()

    def last_used(self, directory: str) -> int:
        """The latest tick in `directory`, 0 where nothing is booked there."""
        with translated():
            (tick,) = self._db.execute(
                "SELECT ifnull(max(tick), 0) FROM chunk "
                "WHERE place = (SELECT id FROM place WHERE directory = ?)",
                (directory,),
            ).fetchone()
            return int(tick)

    def adopt(self, found: Iterable[Booked]) -> int:
        """Files that were found: book those that are not booked. How many."""
        with self._change() as db:
            before = db.total_changes
            self._insert(found)
            adopted = db.total_changes - before
            if adopted:
                self._recount()
            return adopted

    def booked(self, directory: str, first: bytes, last: bytes) -> list[bytes]:
        """The keys booked in `directory` from `first` up to, not including, `last`."""
        with translated():
            rows = self._db.execute(
                "SELECT key FROM chunk WHERE place = (SELECT id FROM place WHERE directory = ?) "
                "AND key >= ? AND key < ?",
                (directory, first, last),
            )
            return [key for (key,) in rows]

    def beat(self, now_seconds: float) -> None:
        """This process is alive, whatever others may have thought."""
        with self._change() as db:
            db.execute(
                "INSERT OR REPLACE INTO owner VALUES(?, ?, ?)",
                (self._owner, self._owner_name, int(now_seconds)),
            )

    def others(self) -> list[tuple[str, float]]:
        """The other processes that have the table open, or had it when they ended without a
        word, and when each last said that it is alive."""
        with translated():
            return self._db.execute(
                "SELECT name, beat FROM owner WHERE id <> ?", (self._owner,)
            ).fetchall()

    def leave(self) -> None:
        """This process goes, and has nothing under way."""
        with self._change() as db:
            db.execute(
                "DELETE FROM owner WHERE id = ? AND id NOT IN (SELECT owner FROM flight)",
                (self._owner,),
            )

    def inherit(self, name: str) -> list[Flight]:
        """The flights of the process `name`, which is gone: this one has to settle them."""
        with self._change() as db:
            found = db.execute(
                "SELECT flight.id, body FROM flight JOIN owner ON owner = owner.id WHERE name = ?",
                (name,),
            ).fetchall()
            db.execute(
                "UPDATE flight SET owner = ? WHERE owner = (SELECT id FROM owner WHERE name = ?)",
                (self._owner, name),
            )
            db.execute("DELETE FROM owner WHERE name = ?", (name,))
            return [unpacked(number, body) for number, body in found]

    # Parts of the above

    def _prepare(self) -> bool:
        """Whether the table has been compared with the files since it was made."""
        db = self._db
        db.execute(f"PRAGMA cache_size = {-CACHE_KIB}").fetchall()
        with self._change():
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {VERSION}")
                return False
            if version != VERSION:
                raise ManifestBroken(f"version {version}, not {VERSION}")
            self._recount()
            (counted,) = db.execute("PRAGMA application_id").fetchone()
        return bool(counted == _COUNTED)

    def counted(self) -> None:
        """Every file under the root has been booked."""
        with self._change() as db:
            db.execute(f"PRAGMA application_id = {_COUNTED}")

    def is_sound(self) -> bool:
        """Read the whole table and see whether it is well formed: a power cut takes what it likes.
        ManifestBusy where that cannot be said now."""
        try:
            with translated():
                found = self._db.execute("PRAGMA quick_check(1)").fetchone()
        except (ManifestBroken, ManifestFull):
            return False
        return found is not None and found[0] == "ok"

    def _enrol(self, name: str, now_seconds: float) -> int:
        with self._change() as db:
            db.execute(
                "INSERT INTO owner(id, name, beat) VALUES(?, ?, ?) "
                "ON CONFLICT(name) DO UPDATE SET beat = excluded.beat",
                (unique_number(), name, int(now_seconds)),
            )
            owner: int = db.execute("SELECT id FROM owner WHERE name = ?", (name,)).fetchone()[0]
            return owner

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        with translated(), database.transaction(self._db):
            try:
                yield self._db
            except BaseException:
                # What the transaction has put there is gone again.
                self._places.clear()
                raise

    def _place(self, directory: str) -> int:
        place = self._places.get(directory)
        if place is None:
            self._db.execute("INSERT OR IGNORE INTO place(directory) VALUES(?)", (directory,))
            found = self._db.execute("SELECT id FROM place WHERE directory = ?", (directory,))
            place = self._places[directory] = found.fetchone()[0]
        return place

    def _directory(self, place: int) -> str:
        directory = self._directories.get(place)
        if directory is None:
            found = self._db.execute("SELECT directory FROM place WHERE id = ?", (place,))
            directory = self._directories[place] = found.fetchone()[0]
        return directory

    def _oldest(
        self,
        are_enough: Callable[[int, int], bool],
        likely: int,
        spared: Collection[tuple[str, bytes]],
    ) -> list[Booked]:
        """Unbook chunks, the least recently used first, until so many with so many bytes in all
        are enough; as they were. What is counted stays counted. `likely`: how many that will be."""
        victims, kept, size = list[Booked](), list[Booked](), 0
        while not are_enough(len(victims), size):
            rows = self._db.execute(
                "SELECT place, key, bytes, tick FROM chunk INDEXED BY recency "
                "ORDER BY tick LIMIT ?",
                (min(likely, _KEYS_IN_STATEMENT),),
            ).fetchall()
            if not rows:
                break
            deleted = self._db.executemany(
                "DELETE FROM chunk WHERE place = ? AND key = ?", [row[:2] for row in rows]
            ).rowcount
            if deleted != len(rows):
                raise ManifestBroken("its index names chunks that it does not have")
            for place, key, file_bytes, tick in rows:
                booked = Booked(self._directory(place), key, file_bytes, tick)
                if (booked.directory, key) in spared or are_enough(len(victims), size):
                    kept.append(booked)
                else:
                    victims.append(booked)
                    size += file_bytes
        self._insert(kept)
        return victims

    def _take_off(self, arriving: list[Booked], victims: list[Booked]) -> Flight:
        flight = Flight(unique_number(), arriving, victims)
        body = packed([arriving, victims])
        # Others may have thought this process gone; a flight that nobody owns would stay for ever.
        owner = (self._owner, self._owner_name)
        self._db.execute("INSERT OR IGNORE INTO owner VALUES(?, ?, 0)", owner)
        self._db.execute("INSERT INTO flight VALUES(?, ?, ?)", (flight.id, self._owner, body))
        self._count_leaving(len(victims), _bytes_of(victims))
        return flight

    def _book(self, chunks: Sequence[Booked]) -> None:
        """Count and insert; what is booked already is not counted twice."""
        before = self._db.total_changes
        self._insert(chunks)
        if self._db.total_changes - before == len(chunks):
            self._count(len(chunks), _bytes_of(chunks))
        else:
            self._recount()

    def _insert(self, chunks: Iterable[Booked]) -> None:
        self._db.executemany(
            "INSERT OR IGNORE INTO chunk VALUES(?, ?, ?, ?)",
            [
                (self._place(each.directory), each.key, each.file_bytes, each.tick)
                for each in chunks
            ],
        )

    def _unbook(self, directory: str, keys: Collection[bytes], there: There = nowhere) -> None:
        """`there` is asked of what is booked, which nobody else can book meanwhile."""
        place, left = self._place(directory), list(keys)
        while left:
            some, left = left[:_KEYS_IN_STATEMENT], left[_KEYS_IN_STATEMENT:]
            marks = ",".join("?" * len(some))
            query = f"SELECT key, bytes FROM chunk WHERE place = ? AND key IN ({marks})"
            booked: dict[bytes, int] = dict(self._db.execute(query, (place, *some)))
            stays = there(list(booked)) if booked else ()
            gone = [(place, key) for key in booked if key not in stays]
            self._db.executemany("DELETE FROM chunk WHERE place = ? AND key = ?", gone)
            self._count(-len(gone), -sum(booked[key] for _, key in gone))

    def _count(self, chunks: int, file_bytes: int) -> None:
        if chunks:
            self._db.execute(
                "UPDATE total SET chunks = chunks + ?, bytes = bytes + ?", (chunks, file_bytes)
            )

    def _count_leaving(self, chunks: int, file_bytes: int) -> None:
        if chunks:
            self._db.execute(
                "UPDATE total SET leaving = leaving + ?, leaving_bytes = leaving_bytes + ?",
                (chunks, file_bytes),
            )

    def _total(self) -> Totals:
        return Totals(*self._db.execute("SELECT * FROM total").fetchone())

    def _recount(self) -> None:
        """Make the totals what the rows and the flights say."""
        chunks, size = self._db.execute(
            "SELECT count(*), ifnull(sum(bytes), 0) FROM chunk"
        ).fetchone()
        bodies = self._db.execute("SELECT id, body FROM flight").fetchall()
        flights = [unpacked(number, body) for number, body in bodies]
        victims = [each for flight in flights for each in flight.victims]
        ends = [*victims, *(each for flight in flights for each in flight.arriving)]
        self._db.execute("DELETE FROM total")
        self._db.execute(
            "INSERT INTO total VALUES(?, ?, ?, ?)",
            (chunks + len(ends), size + _bytes_of(ends), len(victims), _bytes_of(victims)),
        )


def _bytes_of(chunks: Iterable[Booked]) -> int:
    return sum(each.file_bytes for each in chunks)
