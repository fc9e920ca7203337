"""One batch of chunks on its way to files: what is there, what has room, whose files it takes.

Owns the batch from the first question to the books' last entry, on the tier's event loop. However
it ends, also cut off, the books learn which chunks have come and which victims are still there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tiering.tiers.base import Write, WriteOutcome
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.tiers.files.bookings import Booked, Flight
from tiering.tiers.files.books import Books
from tiering.tiers.files.chunks import ChunkFiles

_LOOKUP_SPAN_CHUNKS = 256


class WriteBatch:
    """For one call of `carry_out`."""

    def __init__(
        self,
        files: ChunkFiles,
        books: Books,
        pool: IoPool,
        span_chunks: int,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
    ) -> None:
        self._files = files
        self._books = books
        self._pool = pool
        self._span_chunks = span_chunks
        self._keys = keys
        self._buffers = buffers
        self._outcomes: list[WriteOutcome] = [Write.ALREADY_THERE] * len(keys)

    async def carry_out(self) -> list[WriteOutcome]:
        """Write what is not there; where the disk is full, once more after making room."""
        keys, files = self._keys, self._files

        def look_up(span: range) -> list[int]:
            files.require_root()
            return files.sizes(keys[span.start : span.stop])

        try:
            try:
                sizes = await self._pool.run_spans(
                    Lane.WRITE, look_up, len(keys), _LOOKUP_SPAN_CHUNKS
                )
            except OSError as error:
                return files.failed(keys, error)
            wanted = [at for at, size in enumerate(sizes) if size != files.file_bytes]
            there = [key for key, size in zip(keys, sizes, strict=True) if size == files.file_bytes]
            self._books.used(there)
            self._books.found(there)
            full = await self._write(wanted)
            if full and await self._make_room(len(full)):
                await self._write(full)
            return self._outcomes
        finally:
            # An error's traceback must not keep the caller's memory.
            self._buffers = ()

    async def _write(self, wanted: Sequence[int]) -> list[int]:
        """Write the chunks at the places `wanted`, as far as there is room; which of them found
        the disk full."""
        keys, outcomes = self._keys, self._outcomes
        flight = await self._books.admit([keys[at] for at in wanted]) if wanted else None
        granted = wanted[: len(flight.arriving)] if flight else []
        for at in wanted:
            outcomes[at] = Write.FULL if flight else Write.REFUSED
        if flight is None:
            return []
        for at in granted:
            outcomes[at] = Write.REFUSED  # until it is written
        writing = _Writing(self._files, flight, len(granted))

        def work(span: range) -> list[None]:
            places = [granted[i] for i in span]
            written = self._files.write(
                [keys[at] for at in places],
                [self._buffers[at] for at in places],
                writing.make_way(span),
            )
            for at, outcome in zip(places, written, strict=True):
                outcomes[at] = outcome
            return []

        try:
            await self._pool.run_spans(Lane.WRITE, work, len(granted), self._span_chunks)
        finally:
            stored = [keys[at] for at in granted if outcomes[at] is Write.STORED]
            landing = self._books.land(flight, stored, writing.left)
        await asyncio.shield(landing)
        return [at for at in granted if outcomes[at] is Write.FULL]

    async def _make_room(self, chunks: int) -> bool:
        """The disk is full: remove the least recently used `chunks`; whether any went."""
        flight = await self._books.make_room(chunks)
        if flight is None:
            return False
        kept = flight.victims
        try:
            kept = await self._pool.call(Lane.WRITE, lambda: self._files.remove(flight.victims))
        finally:
            landing = self._books.land(flight, [], kept)
        await asyncio.shield(landing)
        return len(kept) < len(flight.victims)


class _Writing:
    """The victims of a flight, shared out over its `count` chunks: the first ones give theirs
    files, which are overwritten; the others are removed before that."""

    def __init__(self, files: ChunkFiles, flight: Flight, count: int) -> None:
        self._files = files
        self._count = count
        fits = [victim.file_bytes == files.file_bytes for victim in flight.victims]
        fitting = [victim for victim, fit in zip(flight.victims, fits, strict=True) if fit]
        others = [victim for victim, fit in zip(flight.victims, fits, strict=True) if not fit]
        self._reused = fitting[:count]
        self._removed = fitting[count:] + others
        self._left = {id(victim): victim for victim in flight.victims}

    @property
    def left(self) -> list[Booked]:
        """Victims whose files are where they were."""
        return list(self._left.values())

    def make_way(self, span: range) -> list[str | None]:
        """Have the victims of the chunks in `span` gone; a file to overwrite, or None, for each.
        In a thread; the spans are each done once."""
        removed = [victim for i in span for victim in self._removed[i :: self._count]]
        self._are_gone(removed, self._files.remove(removed))
        reused = self._reused[span.start : span.stop]
        taken = self._files.take(reused)
        self._are_gone(reused, [victim for _, victim in taken if victim is not None])
        return [spare for spare, _ in taken] + [None] * (len(span) - len(taken))

    def _are_gone(self, victims: Sequence[Booked], kept: Sequence[Booked]) -> None:
        stays = set(map(id, kept))
        for victim in victims:
            if id(victim) not in stays:
                del self._left[id(victim)]
