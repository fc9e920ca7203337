"""One chunk's way into the bucket and back: the frame, what is tried again, what an error becomes.

A chunk is read straight into the caller's buffer and then verified; what is wrong twice is deleted.
Whatever a store fails at is an outcome of the key. Used on the tier's event loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import assert_never

from tiering.errors import DamagedChunk, TierError
from tiering.metrics import Counters
from tiering.tiers import frame
from tiering.tiers.base import Failed, Read, ReadOutcome, Write, WriteOutcome
from tiering.tiers.disk.paths import why_not_a_key
from tiering.tiers.obj.existence import Existence
from tiering.tiers.obj.frames import Frames
from tiering.tiers.obj.lookup import Known, Lookup
from tiering.tiers.obj.names import ObjNames
from tiering.tiers.obj.pacing import Lane, LateError, Pacer
from tiering.tiers.obj.store import LengthError, ObjectStore, StoreError, ThrottledError
from tiering_kernels.chunkio import HEADER_BYTES

log = logging.getLogger("tiering")

COUNTERS = ("lengths", "refetched")


class Chunks:
    """Of the tier `tier`, chunks of `chunk_bytes`. `damage` counts them by cause."""

    def __init__(
        self,
        tier: str,
        store: ObjectStore,
        names: ObjNames,
        frames: Frames,
        lookup: Lookup,
        existence: Existence,
        pacer: Pacer,
        chunk_bytes: int,
    ) -> None:
        self._tier = tier
        self._store = store
        self._names = names
        self._frames = frames
        self._lookup = lookup
        self._existence = existence
        self._pacer = pacer
        self._object_bytes = HEADER_BYTES + chunk_bytes
        self.counters = Counters(COUNTERS)
        self.damage: Counter[str] = Counter()

    def contained(self, key: bytes, known: Known | Failed) -> ReadOutcome:
        """As `Tier.contains` answers, of what is `known`."""
        match known:
            case Failed():
                return known
            case True:
                return Read.HIT
            case False:
                return Read.MISS
            case StoreError():
                return Read.BUSY if _is_pressure(known) else self.failed(key, known)
            case _:
                assert_never(known)

    def not_written(self, key: bytes, known: Known | Failed) -> WriteOutcome:
        """As `Tier.write` answers where nothing is written because of what is `known`; FULL for
        what is not there and found no room."""
        match known:
            case True:
                return Write.ALREADY_THERE
            case False:
                return Write.FULL
            case Failed():
                return known
            case StoreError():
                return Write.REFUSED if _is_pressure(known) else self.failed(key, known)
            case _:
                assert_never(known)

    async def read(self, key: bytes, buffer: memoryview, deadline: float) -> ReadOutcome:
        """As `Tier.read`, by `deadline`. What arrives with a wrong length or checksum is fetched
        once more before it is called so."""
        if wrong := why_not_a_key(key):
            return Failed(TierError(self._tier, key, wrong))
        header = memoryview(bytearray(HEADER_BYTES))
        try:
            outcome = await self._fetch(key, header, buffer, deadline)
            if isinstance(outcome, str):
                self.counters.add("refetched")
                outcome = await self._fetch(key, header, buffer, deadline)
            if outcome == "":
                return await self._not_as_long(key, deadline)
            if isinstance(outcome, str):
                return await self._condemn(key, outcome, deadline)
            return outcome
        except StoreError as error:
            return Read.BUSY if _is_pressure(error) else self.failed(key, error)

    async def write(self, key: bytes, buffer: memoryview, deadline: float) -> WriteOutcome:
        """As `Tier.write`, by `deadline`, of a chunk that is not there."""
        header = memoryview(bytearray(HEADER_BYTES))
        name = self._names.chunk(key)
        try:
            await self._frames.pack(header, key, buffer)
            body = (header, buffer)
            await self._pacer.run(Lane.STORE, deadline, lambda: self._store.put(name, body))
        except StoreError as error:
            # It may have arrived even so.
            self._existence.forget([key])
            return Write.REFUSED if _is_pressure(error) else self.failed(key, error)
        self._existence.stored([key])
        return Write.STORED

    def failed(self, key: bytes, error: StoreError) -> Failed:
        """`error` as an outcome. The traceback, which has the caller's buffers, stays behind."""
        return Failed(TierError(self._tier, key, str(error)))

    async def _fetch(
        self, key: bytes, header: memoryview, buffer: memoryview, deadline: float
    ) -> ReadOutcome | str:
        """What became of one GET; a text where the bytes are wrong, "" where their number is."""
        name, into = self._names.chunk(key), (header, buffer)
        try:
            is_there = await self._pacer.run(
                Lane.LOAD, deadline, lambda: self._store.get(name, into)
            )
        except LengthError:
            self.counters.add("lengths")
            return ""
        if not is_there:
            self._existence.missing([key])
            return Read.MISS
        wrong = await self._frames.check(header, key, buffer)
        if wrong is not None:
            return wrong
        self._existence.found([key])
        return Read.HIT

    async def _not_as_long(self, key: bytes, deadline: float) -> ReadOutcome:
        """The answer where a GET was too short or too long twice: a listing says whose fault it
        is, the object's or the way's."""
        size = await self._lookup.size_of(key, deadline)
        if size is not None and size != self._object_bytes:
            return await self._condemn(key, f"{size} bytes, not {self._object_bytes}", deadline)
        self._existence.missing([key])
        return Read.MISS

    async def _condemn(self, key: bytes, wrong: str, deadline: float) -> Failed:
        """Delete what lies under `key`; where that fails, it is found out again at the next use."""
        self.damage[frame.cause_of(wrong)] += 1
        name = self._names.chunk(key)
        told = "was deleted"
        try:
            if await self._pacer.run(Lane.LOAD, deadline, lambda: self._store.delete([name])):
                told = "cannot be deleted"
        except StoreError as error:
            told = f"cannot be deleted now: {error}"
        self._existence.missing([key])
        return Failed(DamagedChunk(self._tier, key, f"{wrong}; {name} {told}"))


def _is_pressure(error: StoreError) -> bool:
    """Whether `error` says nothing but that there is too much to do for now."""
    if isinstance(error, LateError):
        return not error.hangs
    return isinstance(error, ThrottledError)
