"""The files layout's bound: who may write how much, who has to go, and what was used last.

Owns the manifest, the ticks that are not in it yet, and the counting that makes it anew from the
files. Lives on the tier's event loop; the manifest is used in the tier's threads, one call at a
time, and nothing is awaited while a transaction is open. Whatever happens to the manifest, the
files go on to be read; until it can be used again, writes are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tiering.clock import Clock
from tiering.metrics import Counters
from tiering.tiers.base import Listener, nobody
from tiering.tiers.disk import diskio, mounts, temps
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.tiers.disk.paths import FsPaths
from tiering.tiers.disk.ticks import Ticks
from tiering.tiers.files.bookings import (
    DIRECTORY_BYTES,
    Booked,
    Flight,
    ManifestBroken,
    ManifestBusy,
    ManifestFull,
)
from tiering.tiers.files.chunks import ChunkFiles
from tiering.tiers.files.count import Shard, count_all, shards_of, there_in
from tiering.tiers.files.limits import Limits
from tiering.tiers.files.manifest import Manifest

log = logging.getLogger("tiering")

T = TypeVar("T")

FLUSH_SECONDS = 1.0
UNFLUSHED_MAX = 1 << 16
CHUNKS_WHEN_FULL = 16
LOOK_SECONDS = 60.0
MAKE_AGAIN_SECONDS = 1.0
COUNT_SECONDS_MAX = 1.0
SETTLE_TRIES_MAX = 5
OPEN_TRIES_MAX, OPEN_SECONDS = 20, 0.02

COUNTERS = (
    *("evicted", "refused_counting"),
    *("manifest_busy", "manifest_full", "manifest_broken", "manifest_remade"),
)


class Books:
    """Between `open` and `close`."""

    def __init__(
        self,
        name: str,
        paths: FsPaths,
        files: ChunkFiles,
        limits: Limits,
        clock: Clock,
        pool: IoPool,
        removed: Listener = nobody,
    ) -> None:
        """`clock` counts from 1970. `removed` is told of what has to go, when that is decided."""
        self._name = name
        self._paths = paths
        self._files = files
        self._limits = limits
        self._clock = clock
        self._pool = pool
        self._removed = removed
        self._owner = temps.owner_name()
        self._ticks = Ticks(clock)
        self._manifest: Manifest | None = None
        self._is_counted = False
        self._turn = asyncio.Lock()
        self._making = asyncio.Lock()
        self._used: dict[bytes, int] = {}
        self._gone: dict[bytes, None] = {}
        self._left: dict[str, Booked] = {}
        # What has to go, until it has gone.
        self._leaving: dict[bytes, None] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counting: asyncio.Task[Any] | None = None
        self._is_closing = False
        self._looked_at = 0.0
        self.reading: set[bytes] = set()
        self.counters = Counters(COUNTERS)
        self.booked_chunks = self.booked_bytes = 0

    async def open(self) -> None:
        """Open the manifest, or make it and count; counting goes on in the background after
        COUNT_SECONDS_MAX, and until it is done nothing can be written. Raises OSError."""
        self.is_shared = await self._pool.call(
            Lane.WRITE, lambda: mounts.is_local(self._paths.root)
        )
        await self._make()
        if self._counting is not None:
            await asyncio.wait({self._counting}, timeout=COUNT_SECONDS_MAX)

    async def close(self) -> None:
        """Write down what was used, and let go of the manifest."""
        self._is_closing = True
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        await self._end_tasks()
        await self._flush()
        await self._ask(lambda manifest: manifest.leave())
        await self._end_tasks()  # of who has found it broken now
        if self._manifest is not None:
            manifest, self._manifest = self._manifest, None
            await self._pool.call(Lane.WRITE, manifest.close)

    async def _end_tasks(self) -> None:
        while self._tasks:
            if self._counting is not None:
                self._counting.cancel()
            await asyncio.wait(set(self._tasks))

    @property
    def is_counting(self) -> bool:
        return not self._is_counted

    async def admit(self, keys: Sequence[bytes]) -> Flight | None:
        """Room for the leading `keys`, and who has to go for them; None where nothing can be
        said now. Whoever gets a flight calls `land`."""
        await self._flush()
        self._look_around()
        if not self._is_counted:
            self.counters.add("refused_counting", len(keys))
            return None
        spared = frozenset(self.reading)

        def admit(manifest: Manifest) -> Flight:
            high, low = self._bounds(manifest)
            directory, size = self._paths.rank_dir.name, self._files.file_bytes
            return manifest.admit(directory, keys, size, high, low, spared, self._there)

        return self._told(await self._ask(admit))

    async def make_room(self, chunks: int) -> Flight | None:
        """Victims for `chunks` files of ours, whatever the limits say: the disk is full."""
        want = chunks * (self._files.file_bytes + DIRECTORY_BYTES)
        directory = self._paths.rank_dir.name
        spared = frozenset((directory, key) for key in self.reading)
        return self._told(await self._ask(lambda manifest: manifest.evict(want, spared)))

    def _told(self, flight: Flight | None) -> Flight | None:
        """Say of its victims that they are gone: from now on nobody counts on them. That is before
        another write of one of them can end, since those ask the manifest after this."""
        if flight is not None:
            self._leaving.update(dict.fromkeys(self._say_gone(flight.victims)))
        return flight

    def _say_gone(self, victims: Iterable[Booked]) -> list[bytes]:
        own = self._paths.rank_dir.name
        keys = [each.key for each in victims if each.directory == own]
        self._removed(keys)
        return keys

    def found(self, keys: Iterable[bytes]) -> None:
        """There are files of `keys`. Of those that have to go it is said once more that they are
        gone, for whoever hears now that they are there."""
        if self._leaving and (leaving := self.are_leaving(keys)):
            self._removed(leaving)

    def are_leaving(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` whose files are about to be removed, if they are not yet."""
        return [key for key in keys if key in self._leaving]

    def land(
        self, flight: Flight, arrived: Sequence[bytes], kept: Sequence[Booked] = ()
    ) -> asyncio.Task[Any]:
        """The flight is over; `arrived` are there for sure, and of the others those count that
        have a file all the same. Goes on by itself if nobody waits, and after the task that is
        given, where the manifest cannot be asked now."""
        self.counters.add("evicted", len(flight.victims) - len(kept))
        ticks = self._ticks.of([each.key for each in flight.arriving])
        sure = frozenset(arrived)
        for key in (*arrived, *(each.key for each in flight.victims)):
            self._leaving.pop(key, None)
        unsure = [each for each in flight.arriving if each.key not in sure]

        def settle(manifest: Manifest) -> bool:
            here = sure.union(each.key for each in self._files.there(unsure))
            return manifest.settle(flight, {key: ticks[key] for key in ticks if key in here}, kept)

        async def land() -> None:
            if not await self._ask(settle):
                self._spawn(land_later())
            self._prune(flight.victims)

        async def land_later() -> None:
            # Held by another process, or being made anew: then the flight is unknown to it, but not
            # what it has left there. Who comes after a process that is gone settles, too.
            tries = 1
            while not (self._is_closing and tries >= SETTLE_TRIES_MAX):
                await asyncio.sleep(FLUSH_SECONDS)
                if await self._ask(settle):
                    break
                tries += 1

        return self._spawn(land())

    def used(self, keys: Sequence[bytes]) -> None:
        """`keys` were used, head first; written down within FLUSH_SECONDS."""
        self._used.update(self._ticks.of(keys))
        self._flush_soon()

    def gone(self, keys: Iterable[bytes]) -> None:
        """There are no files of `keys`."""
        self._gone.update(dict.fromkeys(keys))
        self._flush_soon()

    # Recency

    def _flush_soon(self) -> None:
        if self._flush_timer is None and not self._is_closing:
            delay = FLUSH_SECONDS if len(self._used) < UNFLUSHED_MAX else 0.0
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(delay, lambda: self._spawn(self._flush()))

    async def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        used, self._used = self._used, {}
        gone, self._gone = self._gone, {}
        if not used and not gone:
            return
        now, directory = self._clock.now(), self._paths.rank_dir.name

        def flush(manifest: Manifest) -> bool:
            manifest.touch(directory, used)
            # Whatever a read has met: what is there counts.
            manifest.forget(directory, gone, self._there)
            manifest.beat(now)
            if not self.is_shared:
                self._stamp(used)
            return True

        if not await self._ask(flush) and len(self._used) + len(used) < UNFLUSHED_MAX:
            # Another time; what has come in meanwhile is newer.
            self._used, self._gone = used | self._used, gone | self._gone

    def _stamp(self, used: Mapping[bytes, int]) -> None:
        """Where no manifest survives us, the files' own times carry the recency."""
        for key, tick in used.items():
            with contextlib.suppress(OSError, ValueError):
                os.utime(self._paths.chunk(key), ns=(tick * 1000, tick * 1000))

    # Limits

    def _there(self, keys: Sequence[bytes]) -> set[bytes]:
        directory, size = self._paths.rank_dir.name, self._files.file_bytes
        own = [Booked(directory, key, size) for key in keys]
        return {each.key for each in self._files.there(own)}

    def _bounds(self, manifest: Manifest) -> tuple[int, int]:
        """Bytes of disk that all under the root may take, and down to which to evict."""
        totals = manifest.totals()
        spare = diskio.spare_bytes(self._paths.root, self._limits.min_free_bytes)
        return self._limits.for_chunks(self._files.file_bytes, totals.disk_bytes, spare)

    def _prune(self, victims: Sequence[Booked]) -> None:
        """Directories that victims have left empty go, when they are many: a chunk that comes
        later may want them again."""
        self._left.update((f"{each.directory}/{each.key[:3].hex()}", each) for each in victims)
        if len(self._left) >= self._limits.emptied_max and not self._is_closing:
            left, self._left = list(self._left.values()), {}
            self._spawn(self._pool.call(Lane.WRITE, lambda: self._files.prune(left)))

    # The manifest

    async def _ask(self, question: Callable[[Manifest], T]) -> T | None:
        """`question` of the manifest, in a thread; None where it cannot answer. On a disk so full
        that the manifest cannot be written, a few chunks go first, and it is asked again."""
        try:
            return await self._put(question)
        except ManifestFull as error:
            self.counters.add("manifest_full")
            log.debug("%s: the manifest cannot be written: %s", self._name, error)
        try:
            self._say_gone(await self._put(self._unlink_oldest) or ())
            return await self._put(question)
        except ManifestFull:
            return None

    def _unlink_oldest(self, manifest: Manifest) -> list[Booked]:
        """Which have gone: files first, which makes the room to say so; what stays there stays
        booked."""
        victims = manifest.oldest(CHUNKS_WHEN_FULL)
        kept = self._files.remove(victims)
        self.counters.add("evicted", len(victims) - len(kept))
        gone = [victim for victim in victims if victim not in kept]
        for directory in {each.directory for each in gone}:
            keys = [each.key for each in gone if each.directory == directory]
            # Unless another process has stored one again since.
            manifest.forget(directory, keys, there_in(self._paths.root / directory))
        return gone

    async def _put(self, question: Callable[[Manifest], T]) -> T | None:
        async with self._turn:
            if self._manifest is None:
                return None
            manifest = self._manifest
            try:
                answer: T = await self._pool.call(
                    Lane.WRITE, lambda: self._put_to(manifest, question)
                )
                return answer
            except OSError as error:
                # The root is gone, or not to be had now; what is booked stays as it is.
                log.debug("%s: %s", self._name, error)
            except ManifestBusy as error:
                self.counters.add("manifest_busy")
                log.debug("%s: the manifest is held by another process: %s", self._name, error)
            except ManifestBroken as error:
                self.counters.add("manifest_broken")
                log.warning("%s: the manifest is made anew from the files: %s", self._name, error)
                self._manifest, self._is_counted = None, False
                self._spawn(self._remake(manifest))
        return None

    def _put_to(self, manifest: Manifest, question: Callable[[Manifest], T]) -> T:
        self._files.require_root()  # what cannot be seen now is not gone
        answer = question(manifest)
        if not manifest.is_current:
            self._files.require_root()
            raise ManifestBroken("somebody removed it")  # so others keep other books
        # What was answered stands, whatever comes of this.
        with contextlib.suppress(OSError, ManifestBusy, ManifestBroken, ManifestFull):
            totals = manifest.totals()
            self.booked_chunks, self.booked_bytes = totals.chunks, totals.disk_bytes
        return answer

    def _look_around(self) -> None:
        """Now and then: is somebody gone? More often: can there be a manifest again?"""
        now = self._clock.now()
        if 0 <= now - self._looked_at < (LOOK_SECONDS if self._manifest else MAKE_AGAIN_SECONDS):
            return
        self._looked_at = now
        if self._manifest is not None:
            self._spawn(self._settle_the_dead())
        elif not self._making.locked():
            self._spawn(self._make_again())

    async def _settle_the_dead(self) -> bool:
        """Whether somebody has gone without a word: then files may lie there unbooked."""
        now = self._clock.now()

        def look(manifest: Manifest) -> tuple[list[str], list[Flight]]:
            manifest.beat(now)
            owners = manifest.others()
            dead = [name for name, beat in owners if temps.is_gone(name, now - beat)]
            return dead, [flight for name in dead for flight in manifest.inherit(name)]

        dead, flights = await self._ask(look) or ([], [])
        for flight in flights:
            await self._settle_inherited(flight)
        return bool(dead)

    async def _settle_inherited(self, flight: Flight) -> None:
        """Its writer is gone: what it had renamed is there, its victims are removed."""

        now = self._clock.now()
        self._say_gone(flight.victims)
        kept = await self._pool.call(Lane.WRITE, lambda: self._files.clean_up(flight, now))
        await self.land(flight, [], kept)

    async def _remake(self, broken: Manifest) -> None:
        def let_go() -> None:
            broken.discard()
            broken.close()

        await self._pool.call(Lane.WRITE, let_go)
        await self._make_again()
        if self._manifest is not None:
            self.counters.add("manifest_remade")

    async def _make_again(self) -> None:
        try:
            async with self._making:
                if self._manifest is None and not self._is_closing:
                    await self._make()
        except OSError as error:
            # Tried again by whoever writes next, MAKE_AGAIN_SECONDS after the last look.
            log.debug("%s: no manifest now: %s", self._name, error)

    async def _make(self) -> None:
        """Open the manifest; a new one, or one that is not sound, is filled by counting."""
        now = self._clock.now()
        for attempt in range(OPEN_TRIES_MAX):
            try:
                manifest = await self._pool.call(Lane.WRITE, lambda: self._opened(now))
                break
            except ManifestBusy:
                # Others open it at the same moment; SQLite does not wait for that by itself.
                self.counters.add("manifest_busy")
                await asyncio.sleep(OPEN_SECONDS * (attempt + 1))
            except (ManifestFull, ManifestBroken) as error:
                # A full disk, most likely. One in memory knows whom to evict, which makes room.
                log.warning("%s: the manifest is kept in memory: %s", self._name, error)
                manifest = await self._pool.call(
                    Lane.WRITE, lambda: Manifest(None, self._owner, now)
                )
                break
        else:
            return  # tried again by whoever writes, MAKE_AGAIN_SECONDS after the last look
        self._manifest, self._is_counted = manifest, manifest.is_counted
        self._ticks.after(await self._ask(lambda manifest: manifest.newest_tick()) or 0)
        if not manifest.is_counted or await self._settle_the_dead():
            self._counting = self._spawn(self._count(manifest))

    def _opened(self, now: float) -> Manifest:
        if not self.is_shared:
            return Manifest(None, self._owner, now)
        self._files.require_root()
        directory = self._paths.manifest_dir
        diskio.make_private_dirs(self._paths.root, directory)
        path = directory / "manifest.sqlite3"
        with contextlib.suppress(ManifestBroken):
            return Manifest(path, self._owner, now, discards=True)
        return Manifest(path, self._owner, now, discards=True)

    async def _count(self, manifest: Manifest) -> None:
        root = self._paths.root
        shards: list[Shard] = await self._pool.call(Lane.READ, lambda: shards_of(root))
        if await count_all(manifest, shards, self._ask):
            self._is_counted = True

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of ours: `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: a background task failed", self._name, exc_info=error)
