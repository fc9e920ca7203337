"""`tiering verify`: reads every chunk under a root and checks its whole frame.

Safe beside running engines: what was bad is looked at again, and is damage only if it is still
bad and was not replaced meanwhile. Reads around the page cache, several batches at a time, and no
faster than it is told. Changes nothing, unless damaged files are to be moved into quarantine.
Blocking; for a command, on its own thread, which may be interrupted at any time.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tiering.clock import Clock
from tiering.errors import ConfigError
from tiering.layout import aligned
from tiering.tiers.disk import diskio
from tiering.tiers.disk.paths import FsPaths
from tiering.tiers.files.count import there_in
from tiering.tiers.files.manifest import Manifest
from tiering.tiers.frame import cause_of
from tiering.tiers.upkeep import guest
from tiering.tiers.upkeep.namespaces import chosen, described, nothing_under, read_config
from tiering.tiers.upkeep.ratelimit import RateLimit
from tiering.tiers.upkeep.scrub_sources import FileSource, Place, SegmentSource, Source, Verdict
from tiering_kernels.chunkio import HEADER_BYTES, ChunkIo

EXAMPLES_MAX = 20

_THREADS = 4
_BATCH_CHUNKS_MAX = 32
_BATCH_BYTES_MAX = 8 << 20
# What an engine at work leaves for a moment, too.
_DOUBTFUL = (Verdict.DAMAGED, Verdict.STALE)
# With a rate limit, a batch is about as much as may be read in this time.
_BATCH_SECONDS = 0.25


class Finding(NamedTuple):
    """A damaged chunk, or what could not be read: where, what kind, and what exactly."""

    where: str
    cause: str
    reason: str


@dataclass(slots=True)
class ScrubReport:
    """`total` chunks as counted at the start, `checked` of them so far. `findings` and
    `troubles` are the first EXAMPLES_MAX of each; `skipped` directories were not looked into."""

    total: int = 0
    checked: int = 0
    checked_bytes: int = 0
    good: int = 0
    vanished: int = 0
    stale: int = 0
    unreadable: int = 0
    quarantined: int = 0
    skipped: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    troubles: list[Finding] = field(default_factory=list)


class _Result(NamedTuple):
    place: Place
    verdict: Verdict
    reason: str
    is_put_aside: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    """`places` are all of one size, or none of them can be read at all."""

    places: list[Place]
    size: int

    @property
    def read_bytes(self) -> int:
        return self.size * len(self.places) if self.size > HEADER_BYTES else 0


class Scrub:
    """One pass over `root`, or over its namespaces in `only`: construct, `count`, `run`. `report`
    is right at any time, also after an interruption."""

    def __init__(
        self,
        root: Path,
        io: ChunkIo,
        clock: Clock,
        unix_clock: Clock,
        sleep: Callable[[float], None],
        bytes_per_second: float = 0,
        quarantine: bool = False,
        only: Sequence[str] = (),
    ) -> None:
        """Waits with `sleep`, which takes seconds. Without `bytes_per_second` as fast as it goes.
        ConfigError where `root` cannot be read, has no namespace, or none of `only`."""
        self._root = root.absolute()
        self._io = io
        self._sleep = sleep
        self._unix_clock = unix_clock
        self._limit = RateLimit(bytes_per_second, clock)
        self._quarantine = quarantine
        self._batch_bytes = _BATCH_BYTES_MAX
        if bytes_per_second > 0:
            self._batch_bytes = min(_BATCH_BYTES_MAX, int(bytes_per_second * _BATCH_SECONDS))
        self._local = threading.local()
        self.report = ScrubReport()
        self._namespaces = chosen(self._root, only)
        if not self._namespaces:
            raise nothing_under(self._root)

    def count(self) -> int:
        """How many chunks there are to check, for whoever shows how far it is."""
        with contextlib.ExitStack() as stack:
            for source in self._sources(tell=False):
                stack.callback(source.close)
                self.report.total += source.count()
        return self.report.total

    def run(self, progress: Callable[[ScrubReport], None]) -> None:
        """Check everything; `progress` is called now and then. Raises OSError where even the
        names cannot be had."""
        for source in self._sources(tell=True):
            try:
                self._scrub(source, progress)
            finally:
                source.close()

    def _sources(self, *, tell: bool) -> Iterator[Source]:
        """Each rank's chunks; with `tell`, the report hears of what is left out."""
        for dirs in self._namespaces:
            namespace = described(read_config(dirs.config_path))
            if namespace is None or namespace.directory != dirs.directory:
                if tell and dirs.layouts:
                    reason = "missing, or not one of this version: nothing to check against"
                    self._skip(str(dirs.config_path), reason)
                continue
            for rank in dirs.ranks:
                paths = FsPaths(self._root, dirs.directory, rank)
                yield FileSource(paths, namespace.digest_of_rank(rank), self._io)
            for rank, directory in dirs.segments.items():
                try:
                    yield SegmentSource(directory, namespace.digest_of_rank(rank), self._io)
                except ConfigError as error:
                    if tell:
                        self._skip(str(directory), f"{error.reason}; {error.remedy}")

    def _scrub(self, source: Source, progress: Callable[[ScrubReport], None]) -> None:
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiering-scrub")
        pending: deque[Future[list[_Result]]] = deque()
        put_aside: list[bytes] = []
        try:
            for batch in self._batches(source):
                self._sleep(self._limit.take(batch.read_bytes))
                pending.append(pool.submit(self._check, source, batch))
                while pending and (len(pending) >= _THREADS or pending[0].done()):
                    self._add(source, pending.popleft().result(), put_aside)
                    progress(self.report)
            while pending:
                self._add(source, pending.popleft().result(), put_aside)
                progress(self.report)
        finally:
            # After an interruption, too, what has been read is told, and what was moved is known.
            pool.shutdown(cancel_futures=True)
            for future in pending:
                if not future.cancelled():
                    self._add(source, future.result(), put_aside)
            if put_aside and isinstance(source, FileSource):
                self._forget(source.paths.rank_dir, put_aside)

    def _batches(self, source: Source) -> Iterator[_Batch]:
        places: list[Place] = []
        try:
            for some in source.places():
                for place in some:
                    if places and self._is_full(places, place):
                        yield _Batch(places, places[0].size)
                        places = []
                    places.append(place)
        except (OSError, ConfigError) as error:
            self._skip(str(getattr(error, "filename", None) or self._root), str(error))
        if places:
            yield _Batch(places, places[0].size)

    def _is_full(self, places: Sequence[Place], more: Place) -> bool:
        size = places[0].size
        fits = max(1, min(_BATCH_CHUNKS_MAX, self._batch_bytes // max(size, 1)))
        return size != more.size or len(places) >= fits

    # In the pool's threads

    def _check(self, source: Source, batch: _Batch) -> list[_Result]:
        results: list[tuple[Place, _Result | None]] = []
        for place, (verdict, reason) in zip(batch.places, self._read(source, batch), strict=True):
            if verdict in _DOUBTFUL:
                results.append((place, None))
            else:
                results.append((place, _Result(place, verdict, reason)))
        # Only now, since a second look uses the same memory.
        return [result or self._looked_at_again(source, place) for place, result in results]

    def _read(self, source: Source, batch: _Batch) -> list[tuple[Verdict, str]]:
        if batch.size <= HEADER_BYTES:
            blank = memoryview(bytes(HEADER_BYTES))
            return [source.judge(place, place.size, blank) for place in batch.places]
        count, payload_bytes = len(batch.places), batch.size - HEADER_BYTES
        headers, payloads = self._buffers(count, payload_bytes)
        numbers = source.read(batch.places, headers, payloads)
        found = zip(batch.places, numbers, diskio.pages(headers), strict=True)
        return [source.judge(*each) for each in found]

    def _looked_at_again(self, source: Source, place: Place) -> _Result:
        """The verdict on `place`, which was not what it should be: as it is now, alone."""
        before = source.identity(place)
        again = source.refreshed(place)
        if before is None:
            return _Result(again, Verdict.VANISHED, "")
        ((verdict, reason),) = self._read(source, _Batch([again], again.size))
        if verdict in _DOUBTFUL and source.identity(place) != before:
            return _Result(again, Verdict.VANISHED, "")
        if verdict is not Verdict.DAMAGED or not self._quarantine:
            return _Result(again, verdict, reason)
        try:
            return _Result(again, verdict, reason, source.put_aside(again))
        except OSError as error:
            return _Result(again, verdict, f"{reason}; cannot be moved: {error.strerror}")

    def _buffers(self, count: int, payload_bytes: int) -> tuple[memoryview, list[memoryview]]:
        """This thread's memory, aligned for direct I/O, its content left over."""
        stride = aligned(payload_bytes)
        wanted = count * (HEADER_BYTES + stride)
        memory: mmap.mmap | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < wanted:
            memory = self._local.memory = mmap.mmap(-1, wanted)
        view, first = memoryview(memory), count * HEADER_BYTES
        starts = range(first, first + count * stride, stride)
        payloads = [view[at : at + payload_bytes] for at in starts]
        return view[:first], payloads

    # The report

    def _add(self, source: Source, results: Sequence[_Result], put_aside: list[bytes]) -> None:
        report = self.report
        for place, verdict, reason, is_put_aside in results:
            report.checked += 1
            report.checked_bytes += max(place.size, 0)
            match verdict:
                case Verdict.GOOD:
                    report.good += 1
                case Verdict.VANISHED:
                    report.vanished += 1
                case Verdict.STALE:
                    report.stale += 1
                case Verdict.UNREADABLE:
                    report.unreadable += 1
                    self._trouble(Finding(source.where(place), "unreadable", reason))
                case Verdict.DAMAGED:
                    cause = cause_of(reason)
                    report.damaged[cause] += 1
                    report.quarantined += is_put_aside
                    if is_put_aside:
                        put_aside.append(place.key)
                    if len(report.findings) < EXAMPLES_MAX:
                        report.findings.append(Finding(source.where(place), cause, reason))

    def _skip(self, where: str, reason: str) -> None:
        self.report.skipped += 1
        self._trouble(Finding(where, "skipped", reason))

    def _trouble(self, finding: Finding) -> None:
        if len(self.report.troubles) < EXAMPLES_MAX:
            self.report.troubles.append(finding)

    def _forget(self, rank_dir: Path, keys: Sequence[bytes]) -> None:
        def forget(manifest: Manifest) -> None:
            # An engine has had the time to store some again.
            manifest.forget(rank_dir.name, keys, there_in(rank_dir))

        # A manifest that cannot be told finds out when it wants to evict them.
        with contextlib.suppress(OSError, *guest.UNAVAILABLE):
            guest.ask(self._root, self._unix_clock, forget)
