"""A file system as a secondary tier: one file for each chunk, bounded, self-verifying, shareable.

Owns the threads that do the I/O and what this process has under way; the files belong to the
directory, which other processes, hosts and cleaners may share. Used from one event loop; every
blocking call runs in the pool. Layout and bytes: docs/format.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tiering.clock import Clock, MonotonicClock, UnixClock
from tiering.errors import ClosedError, DamagedChunk, TierError
from tiering.metrics import Counters
from tiering.namespace import Namespace
from tiering.tiers.base import (
    Delete,
    DeleteOutcome,
    Failed,
    Listener,
    Read,
    ReadOutcome,
    Tier,
    Write,
    WriteOutcome,
    check_buffers,
    nobody,
)
from tiering.tiers.disk import diskio, temps
from tiering.tiers.disk.beginning import begin
from tiering.tiers.disk.diskio import Direct, IoPath
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.tiers.disk.paths import FsPaths
from tiering.tiers.files.batch import WriteBatch
from tiering.tiers.files.books import Books
from tiering.tiers.files.chunks import ChunkFiles
from tiering.tiers.files.limits import Limits
from tiering.underway import UnderWay
from tiering_kernels.chunkio import HEADER_BYTES, ChunkIo
from tiering_kernels.engines import open_engine

Durability = Literal["none", "close", "batch"]

SCAN_KEYS_MAX = 1024
# Chunks that one thread moves in one call: with io_uring it keeps that many under way at once.
_SPAN_CHUNKS = {"uring": 32, "threads": 16, "portable": 4}
_LOOKUP_SPAN_CHUNKS = 256

COUNTERS = ("stored", "already_there", "full", "refused", "write_errors", "read_errors")

_WRITE_COUNTERS: dict[WriteOutcome, str] = {
    Write.STORED: "stored",
    Write.ALREADY_THERE: "already_there",
    Write.FULL: "full",
    Write.REFUSED: "refused",
}


class FsTier(Tier):
    """Chunks of `chunk_bytes` under `root_dir`, for rank `rank` of `namespace`.

    `n_read_threads` prefer reads and `n_write_threads` writes; each group helps the other when
    its own queue is empty. `root_dir` is created if only its last part is missing. `io` moves the
    bytes, `pool` has the threads; for tests, as are the clocks, of which `clock` counts from 1970.
    """

    def __init__(
        self,
        root_dir: Path,
        namespace: Namespace,
        chunk_bytes: int,
        *,
        limits: Limits | None = None,
        durability: Durability = "none",
        read_path: IoPath = "auto",
        write_path: IoPath = "auto",
        n_read_threads: int = 16,
        n_write_threads: int = 16,
        rank: int = 0,
        io: ChunkIo | None = None,
        pool: IoPool | None = None,
        clock: Clock | None = None,
        stopwatch: Clock | None = None,
    ) -> None:
        if chunk_bytes < 1 or rank < 0:
            raise ValueError(f"chunk_bytes {chunk_bytes} must be positive, rank {rank} not below 0")
        self._paths = FsPaths(Path(root_dir).absolute(), namespace.directory, rank)
        self._namespace = namespace
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self._limits = limits or Limits()
        self._durability: Durability = durability
        self._read_path: IoPath = read_path
        self._write_path: IoPath = write_path
        self._io = io or open_engine()
        self._pool = pool or IoPool(self.name, n_read_threads, n_write_threads)
        self._clock = clock or UnixClock()
        self._stopwatch = stopwatch or MonotonicClock()
        self._span = _SPAN_CHUNKS[self._io.engine]
        self._counters = Counters(COUNTERS)
        self._direct: Direct | None = None
        self._open_parts: tuple[ChunkFiles, Books] | None = None
        self._under_way = UnderWay()
        self._removed: Listener = nobody

    def __repr__(self) -> str:
        state = "not open" if self._open_parts is None else f"{self._direct}, {self._io.engine}"
        return f"<FsTier {self._paths.rank_dir}: {state}, {self._pool!r}>"

    @property
    def name(self) -> str:
        return f"fs:{self._paths.root}"

    @property
    def direct(self) -> Direct:
        """Which way the files are read and written. ClosedError unless open."""
        if self._open_parts is None or self._direct is None:
            raise ClosedError(f"{self.name} is not open")
        return self._direct

    def watch(self, removed: Listener) -> None:
        self._removed = removed

    async def open(self) -> None:
        """Make the directories, agree on config.json, probe direct I/O, sweep dead temp files,
        open the manifest.

        ConfigError where the user can help it, TierError for the rest.
        """
        self._pool.start()
        try:
            try:
                paths = self._paths
                directories = (paths.staging, paths.rank_dir)
                files = await begin(
                    self._pool, paths.root, self._namespace, directories, self._prepare
                )
                books = Books(
                    self.name,
                    self._paths,
                    files,
                    self._limits,
                    self._clock,
                    self._pool,
                    self._removed,
                )
                await books.open()
            except OSError as error:
                raise diskio.open_error(self.name, self._paths.root, error) from error
        except BaseException:
            await self._pool.close()
            raise
        self._open_parts = files, books

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        async with self._using() as (files, books):
            outcomes: list[ReadOutcome] = await self._pool.run_spans(
                Lane.READ,
                lambda span: files.contains(_part(keys, span)),
                len(keys),
                _LOOKUP_SPAN_CHUNKS,
            )
            if leaving := set(books.are_leaving(keys)):
                pairs = zip(keys, outcomes, strict=True)
                return [Read.MISS if key in leaving else outcome for key, outcome in pairs]
            return outcomes

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        async with self._using() as (files, books):
            check_buffers(keys, buffers, self._chunk_bytes)
            # So that our own evictions leave them alone; those of others make them misses.
            books.reading.update(keys)
            try:
                outcomes: list[ReadOutcome] = await self._pool.run_spans(
                    Lane.READ,
                    lambda span: files.read(_part(keys, span), _part(buffers, span)),
                    len(keys),
                    self._span,
                )
            finally:
                books.reading.difference_update(keys)
            found = list(zip(keys, outcomes, strict=True))
            hits = [key for key, outcome in found if outcome is Read.HIT]
            books.used(hits)
            books.found(hits)
            books.gone([key for key, outcome in found if _is_gone(outcome)])
            self._counters.add("read_errors", sum(map(_is_error, outcomes)))
            return outcomes

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        async with self._using() as (files, books):
            check_buffers(keys, buffers, self._chunk_bytes)
            batch = WriteBatch(files, books, self._pool, self._span, keys, buffers)
            outcomes = await batch.carry_out()
            self._counters.tally(outcomes, _WRITE_COUNTERS, "write_errors")
            return outcomes

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        async with self._using() as (files, books):
            outcomes: list[DeleteOutcome] = await self._pool.run_spans(
                Lane.WRITE, lambda span: files.delete(_part(keys, span)), len(keys)
            )
            found = zip(keys, outcomes, strict=True)
            books.gone([key for key, outcome in found if isinstance(outcome, Delete)])
            return outcomes

    async def touch(self, keys: Sequence[bytes]) -> None:
        async with self._using() as (_, books):
            books.used(keys)

    def stats(self) -> dict[str, int]:
        told = self._counters.snapshot()
        if self._open_parts is not None:
            files, books = self._open_parts
            told |= books.counters.snapshot()
            told |= {f"damaged_{cause}": count for cause, count in files.damage.items()}
            told["now_chunks"] = books.booked_chunks
            told["now_bytes"] = books.booked_bytes
            told["now_counting"] = int(books.is_counting)
        return told

    async def scan(self) -> AsyncIterator[list[bytes]]:
        async with self._using() as (files, books):
            keys = files.walk()
            try:
                while batch := await self._pool.call(
                    Lane.READ, lambda: list(islice(keys, SCAN_KEYS_MAX))
                ):
                    leaving = set(books.are_leaving(batch))
                    yield [key for key in batch if key not in leaving]
            except OSError as error:
                raise TierError(self.name, None, f"cannot list the chunks: {error}") from error

    async def close(self) -> None:
        opened, self._open_parts = self._open_parts, None
        if opened is not None:
            await self._under_way.end()
            await opened[1].close()
            if self._durability == "close":
                await self._pool.call(Lane.WRITE, self._sync)
        await self._pool.close()

    # Parts of the above

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[tuple[ChunkFiles, Books]]:
        """What an operation works with; `close` waits for the end of the block."""
        if self._open_parts is None:
            raise ClosedError(f"{self.name} is not open")
        with self._under_way.one():
            yield self._open_parts

    def _prepare(self) -> ChunkFiles:
        staging = self._paths.staging
        self._direct = diskio.probe(staging, self._read_path, self._write_path, self._stopwatch)
        # The probe's file has just come and gone, so this is now by the clock that stamps files.
        now_seconds = staging.stat().st_mtime
        temps.sweep((staging, self._paths.config_dir), now_seconds)
        return ChunkFiles(
            self.name,
            self._paths,
            self._namespace.digest_of_rank(self._rank),
            self._chunk_bytes,
            self._io,
            self._direct,
            self._durability == "batch",
            self._limits.quarantined_max(self._chunk_bytes + HEADER_BYTES),
        )

    def _sync(self) -> None:
        try:
            diskio.sync_file_system(self._paths.root)
        except OSError as error:
            raise TierError(self.name, None, f"cannot be synced: {error}") from error


def _part(items: Sequence[Any], span: range) -> Sequence[Any]:
    return items[span.start : span.stop]


def _is_gone(outcome: ReadOutcome) -> bool:
    """Whether there is no file any more."""
    return outcome is Read.MISS or (isinstance(outcome, Failed) and _is_damage(outcome))


def _is_damage(outcome: Failed) -> bool:
    return isinstance(outcome.error, DamagedChunk)


def _is_error(outcome: ReadOutcome) -> bool:
    return isinstance(outcome, Failed) and not _is_damage(outcome)
