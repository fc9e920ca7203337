"""Batches of a segment tier on their way through its pool, and the ticks that go along with them.

Owns when uses are written to the disk: with the next batch once a second has gone by, so that
they cost no hop of their own. Used by the tier on its event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiering.clock import Clock
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.tiers.segments.files import SegmentFiles
from tiering.tiers.segments.index import SegmentIndex

TICKS_EVERY_SECONDS = 1.0
"""What a kill can cost of the order of eviction."""

Work = Callable[[range], Sequence[Any]]


class Runs:
    """Runs `work` on spans of at most `span_items`; `n_errors` counts ticks not written."""

    def __init__(
        self, pool: IoPool, index: SegmentIndex, files: SegmentFiles, clock: Clock, span_items: int
    ) -> None:
        self._pool = pool
        self._index = index
        self._files = files
        self._clock = clock
        self._span_items = span_items
        self._written_seconds = clock.now()
        self._is_writing = False
        self.n_errors = 0

    async def run(self, lane: Lane, work: Work, count: int) -> None:
        """`work` on all of `range(count)`, as `IoPool.run_spans`; the ticks, too, if due."""
        if count and self._is_due():
            await self._run_with_ticks(lane, work, count)
        else:
            await self._pool.run_spans(lane, work, count, self._span_items)

    async def write_if_due(self) -> None:
        """The ticks alone, for uses that move no chunk."""
        if self._is_due():
            await self._run_with_ticks(Lane.WRITE, lambda span: [None], 1)

    def write_all(self) -> None:
        """All ticks, now; blocking, for a tier's close. Raises OSError."""
        self._files.write_ticks(self._index.take_dirty())

    def _is_due(self) -> bool:
        # A clock that went back must not put it off for as long as it went back.
        since_seconds = abs(self._clock.now() - self._written_seconds)
        return since_seconds >= TICKS_EVERY_SECONDS and not self._is_writing

    async def _run_with_ticks(self, lane: Lane, work: Work, count: int) -> None:
        stretches = self._index.take_dirty()
        self._written_seconds = self._clock.now()
        self._is_writing = True
        written: list[bool] = []

        def first(span: range) -> Sequence[Any]:
            if span.start == 0:
                try:
                    self._files.write_ticks(stretches)
                    written.append(True)
                except OSError:
                    written.append(False)
            return work(span)

        try:
            await self._pool.run_spans(lane, first, count, self._span_items)
        finally:
            self._is_writing = False
            if written != [True]:
                self._index.mark_dirty(stretches)
                self.n_errors += len(written)
