"""Disk segments as a secondary tier: chunks in slots of preallocated files, recycled in place.

Owns the order of things: what the index decides on the event loop, `SlotIo` carries out in the
pool's threads, one hop for a batch, and the index hears of it whatever became of the call. One
engine writes a rank's segments; to share, there is layout "files". Bytes: `segment_table`, `frame`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tiering.clock import Clock
from tiering.errors import ClosedError, DamagedChunk, TierError
from tiering.keys import GROUP_BYTES, KEY_BYTES_MAX
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
from tiering.tiers.disk.diskio import IoPath
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.tiers.segments import opening as segment_open
from tiering.tiers.segments.files import SegmentFiles
from tiering.tiers.segments.index import SegmentIndex, WritePlan
from tiering.tiers.segments.runs import Runs
from tiering.tiers.segments.slots import Kind, SlotIo, Verdict
from tiering.underway import UnderWay
from tiering_kernels.chunkio import ChunkIo

SCAN_KEYS_MAX = 1024
GROW_AGAIN_SECONDS = 10.0
"""After the disk gave no more room, how long until it is asked again."""

Durability = Literal["none", "close", "batch"]

_SPAN_BYTES = 16 << 20
_SPAN_ITEMS = 256
# Without an engine that overlaps the items of a call, only more calls overlap them.
_PORTABLE_SPAN_ITEMS = 4

_COUNTERS = (
    *("stored", "already_there", "full", "damaged_checksum", "damaged_frame", "stale"),
    *("read_errors", "write_errors", "table_errors", "growth_refused", "dropped_records"),
)


class SegmentTier(Tier):
    """Chunks of `chunk_bytes` in at most `max_bytes` under `root_dir`, for one rank.

    It grows by a segment where that leaves `min_free_bytes` on the file system, None for the
    floor that layout "files" has; else it recycles its least recently used slots. `durability`
    says when chunks are on the disk: when the kernel likes, from `close` on, or before each is
    STORED. `clock` counts from 1970. `pool` is this tier's own, started by `open` and ended by
    `close`. ConfigError where `max_bytes` is too small.
    """

    def __init__(
        self,
        root_dir: Path,
        namespace: Namespace,
        chunk_bytes: int,
        *,
        max_bytes: int,
        io: ChunkIo,
        pool: IoPool,
        clock: Clock,
        min_free_bytes: int | None = 0,
        low_watermark: float = 1.0,
        high_watermark: float = 1.0,
        durability: Durability = "none",
        read_path: IoPath = "auto",
        write_path: IoPath = "auto",
        rank: int = 0,
    ) -> None:
        if chunk_bytes < 1 or rank < 0:
            raise ValueError(f"chunk_bytes {chunk_bytes} must be positive, rank {rank} not below 0")
        self._root = Path(root_dir).absolute()
        self._namespace = namespace
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._watermarks = (low_watermark, high_watermark)
        self._durability = durability
        self._io_paths = (read_path, write_path)
        self._io = io
        self._pool = pool
        self._clock = clock
        by_bytes = min(_SPAN_ITEMS, max(4, _SPAN_BYTES // chunk_bytes))
        self._span_items = _PORTABLE_SPAN_ITEMS if io.engine == "portable" else by_bytes
        self._written: dict[bytes, asyncio.Future[None]] = {}
        self._grow_lock = asyncio.Lock()
        self._close_lock = asyncio.Lock()
        self._under_way = UnderWay()
        self._is_open = False
        self._is_started = False
        self._removed: Listener = nobody
        self._start_afresh()

    def _start_afresh(self) -> None:
        directory = self._root / f"{self._namespace.directory}_r{self._rank}.segments"
        digest = self._namespace.digest_of_rank(self._rank)
        self._files = files = SegmentFiles(
            directory, digest, self._chunk_bytes, self._max_bytes, self._min_free_bytes
        )
        self._slot_io = SlotIo(files, self._io, self._durability == "batch")
        self._index = SegmentIndex(files.slots_max, *self._watermarks)
        self._counters = Counter(dict.fromkeys(_COUNTERS, 0))
        self._growth_refused_seconds: float | None = None
        self._runs = Runs(self._pool, self._index, files, self._clock, self._span_items)

    def __repr__(self) -> str:
        state = repr(self._index) if self._is_open else "not open"
        return f"<SegmentTier {self._files.directory}: {state}>"

    @property
    def name(self) -> str:
        return f"segments:{self._root}"

    @property
    def io_path(self) -> str:
        """`direct`, `buffered`, or which for what; ClosedError unless open."""
        self._require_open()
        return str(self._files.direct)

    def watch(self, removed: Listener) -> None:
        self._removed = removed

    async def open(self) -> None:
        """Take the lock, and the index from the table; the slots are read only where the table
        is lost. ConfigError where the user can help it, TierError for the rest."""
        self._pool.start()
        self._is_started = True
        self._start_afresh()
        try:
            records = await segment_open.make_ready(
                self.name, self._files, self._namespace, self._io_paths, self._pool, self._clock
            )
            self._index.extend(self._files.n_slots)
            n_twice = self._index.restore(
                records.slots, records.keys, records.ticks, records.recorded
            )
            self._counters["dropped_records"] = n_twice + records.n_dropped
        except BaseException:
            await self._let_go(self._files.close)
            raise
        self._is_open = True

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        self._require_open()
        index = self._index
        return [Read.HIT if key in index else Read.MISS for key in keys]

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        with self._inside():
            check_buffers(keys, buffers, self._chunk_bytes)
            outcomes: list[ReadOutcome] = [Read.MISS] * len(keys)
            slots = self._index.begin_read(keys, self._now_tick())
            found = [at for at, slot in enumerate(slots) if slot >= 0]
            verdicts: list[Verdict | None] = [None] * len(found)
            slot_io = self._slot_io

            def work(span: range) -> list[None]:
                some = found[span.start : span.stop]
                rows = [(slots[at], keys[at], buffers[at]) for at in some]
                verdicts[span.start : span.stop] = slot_io.read(*map(list, zip(*rows, strict=True)))
                return [None] * len(span)

            try:
                await self._runs.run(Lane.READ, work, len(found))
            finally:
                del work
                for at, verdict in zip(found, verdicts, strict=True):
                    outcomes[at] = self._end_read(keys[at], slots[at], verdict)
            return outcomes

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        with self._inside():
            check_buffers(keys, buffers, self._chunk_bytes)
            outcomes: list[WriteOutcome] = [Write.FULL] * len(keys)
            left = list(range(len(keys)))
            for at, key in enumerate(keys):
                if not GROUP_BYTES < len(key) <= KEY_BYTES_MAX:
                    outcomes[at] = self._failed(key, f"{len(key)} bytes cannot be a key")
                    left.remove(at)
            while left:
                left = await self._write_some(keys, buffers, outcomes, left)
            return outcomes

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        with self._inside():
            while busy := {self._written[key] for key in keys if key in self._written}:
                await asyncio.wait(busy)
            outcomes: list[DeleteOutcome] = [Delete.MISSING] * len(keys)
            doomed = [(at, self._index.doom_pinned(key)) for at, key in enumerate(keys)]
            gone = [(at, slot) for at, slot in doomed if slot is not None]
            verdicts: list[Verdict | None] = [None] * len(gone)

            def work(span: range) -> list[None]:
                some = [slot for _, slot in gone[span.start : span.stop]]
                verdicts[span.start : span.stop] = self._slot_io.clear(some)
                return [None] * len(span)

            try:
                await self._runs.run(Lane.WRITE, work, len(gone))
            finally:
                for (at, slot), verdict in zip(gone, verdicts, strict=True):
                    outcomes[at] = self._end_delete(keys[at], slot, verdict)
            return outcomes

    async def touch(self, keys: Sequence[bytes]) -> None:
        with self._inside():
            self._index.touch(keys, self._now_tick())
            await self._runs.write_if_due()

    def stats(self) -> dict[str, int]:
        index, files = self._index, self._files
        return {
            **self._counters,
            "table_errors": self._counters["table_errors"] + self._runs.n_errors,
            "evicted": index.n_evicted,
            "retired_slots": index.n_retired,
            "now_chunks": len(index),
            "now_bytes": len(index) * files.geometry.frame_bytes,
            "now_segments": -(-files.n_slots // files.geometry.slots_per_segment),
        }

    async def scan(self) -> AsyncIterator[list[bytes]]:
        self._require_open()
        keys = self._index.keys()
        for first in range(0, len(keys), SCAN_KEYS_MAX):
            self._require_open()
            yield keys[first : first + SCAN_KEYS_MAX]

    async def close(self) -> None:
        self._is_open = False
        async with self._close_lock:
            await self._under_way.end()
            if self._is_started:
                await self._let_go(self._close_files)

    # Parts of the above

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError(f"{self.name} is not open")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """A call that `close` has to wait for."""
        self._require_open()
        with self._under_way.one():
            yield

    def _now_tick(self) -> int:
        return int(self._clock.now() * 1e6)

    def _failed(self, key: bytes, reason: str) -> Failed:
        return Failed(TierError(self.name, key, reason))

    async def _let_go(self, last: Callable[[], None]) -> None:
        """Do `last` in the pool, and end it."""
        try:
            await self._pool.call(Lane.WRITE, last)
        finally:
            await self._pool.close()
            self._is_started = False

    def _close_files(self) -> None:
        try:
            self._runs.write_all()
            if self._durability != "none":
                self._files.sync()
        except OSError:
            self._counters["table_errors"] += 1
        finally:
            self._files.close()

    def _end_read(self, key: bytes, slot: int, verdict: Verdict | None) -> ReadOutcome:
        if verdict is None or verdict.kind is Kind.DONE:
            self._index.unpin(slot)
            return Read.MISS if verdict is None else Read.HIT
        if verdict.kind is Kind.ERROR:
            self._index.unpin(slot)
            self._counters["read_errors"] += 1
            return self._failed(key, verdict.reason)
        # One of several who read it at once finds it first.
        is_news = self._index.doom(key, slot) is not None
        self._index.unpin(slot, cleared=verdict.is_cleared)
        self._counters[verdict.kind.value] += is_news
        if verdict.kind is Kind.STALE:
            return Read.MISS
        return Failed(DamagedChunk(self.name, key, verdict.reason))

    def _end_delete(self, key: bytes, slot: int, verdict: Verdict | None) -> DeleteOutcome:
        self._index.unpin(slot, cleared=verdict is not None and verdict.is_cleared)
        if verdict is None or verdict.kind is Kind.DONE:
            return Delete.DELETED
        self._counters["table_errors"] += 1
        reason = verdict.reason or "no space left on the device"
        return self._failed(key, f"out of reach, but only until a restart: {reason}")

    async def _write_some(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        outcomes: list[WriteOutcome],
        left: Sequence[int],
    ) -> list[int]:
        """Write what is new of the positions `left`; those that others were writing meanwhile,
        who may have failed, are given back."""
        some = [keys[at] for at in left]
        await self._grow_for(some)
        plan = self._index.begin_write(some, self._now_tick())
        self._removed(plan.evicted)
        for at in plan.there:
            outcomes[left[at]] = Write.ALREADY_THERE
        for at in plan.full:
            outcomes[left[at]] = Write.FULL
        self._counters["already_there"] += len(plan.there)
        self._counters["full"] += len(plan.full)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        new = [left[at] for at in plan.positions]
        self._written.update((keys[at], written) for at in new)
        busy = {self._written[some[at]] for at in plan.busy}
        try:
            verdicts = await self._carry_out(
                plan, [keys[at] for at in new], [buffers[at] for at in new]
            )
        finally:
            for at in new:
                del self._written[keys[at]]
            written.set_result(None)
        for at, verdict in zip(new, verdicts, strict=True):
            outcomes[at] = self._write_outcome(keys[at], verdict)
        if busy:
            await asyncio.wait(busy)
        return [left[at] for at in plan.busy]

    async def _carry_out(
        self, plan: WritePlan, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[Verdict | None]:
        verdicts: list[Verdict | None] = [None] * len(keys)
        slot_io = self._slot_io

        def work(span: range) -> list[None]:
            some = slice(span.start, span.stop)
            verdicts[some] = slot_io.write(
                plan.slots[some], keys[some], plan.ticks[some], buffers[some], plan.uncleared
            )
            return [None] * len(span)

        try:
            await self._runs.run(Lane.WRITE, work, len(keys))
        finally:
            del work
            for slot, verdict in zip(plan.slots, verdicts, strict=True):
                if verdict is not None and verdict.kind is Kind.DONE:
                    self._index.commit(slot)
                    self._counters["stored"] += 1
                elif verdict is not None and verdict.kind is Kind.BAD_SLOT:
                    self._index.retire(slot)
                else:
                    self._index.release(slot)
        return verdicts

    def _write_outcome(self, key: bytes, verdict: Verdict | None) -> WriteOutcome:
        if verdict is not None and verdict.kind is Kind.DONE:
            return Write.STORED
        if verdict is not None and verdict.kind is Kind.FULL:
            self._counters["full"] += 1
            return Write.FULL
        self._counters["write_errors"] += 1
        return self._failed(key, verdict.reason if verdict is not None else "not written")

    async def _grow_for(self, keys: Sequence[bytes]) -> None:
        """Make slots until there are enough for what is new of `keys`, or no more can be had."""
        index, files = self._index, self._files
        while index.lacks_slots(keys) and self._may_grow():
            async with self._grow_lock:
                if not (index.lacks_slots(keys) and self._may_grow()):
                    continue
                try:
                    grown = await self._pool.call(Lane.WRITE, files.grow)
                finally:
                    index.extend(files.n_slots)
                if not grown:
                    self._growth_refused_seconds = self._clock.now()
                    self._counters["growth_refused"] += 1

    def _may_grow(self) -> bool:
        refused = self._growth_refused_seconds
        return refused is None or abs(self._clock.now() - refused) >= GROW_AGAIN_SECONDS
