"""What other engines have used: each leaves a note in the bucket, the one that deletes reads them.

A bucket remembers when an object was put and not when it was read. Without the notes, the engine
that keeps the bound would delete what only others use. A note is msgpack: the keys used since the
last one, each with its tick. Losing one costs an order of deletion, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import numpy as np

from tiering.clock import Clock
from tiering.keys import GROUP_BYTES, KEY_BYTES_MAX
from tiering.tiers.obj.names import ObjNames
from tiering.tiers.obj.pacing import Lane, Pacer
from tiering.tiers.obj.recency import Recency
from tiering.tiers.obj.store import LengthError, Listed, ObjectStore, StoreError

log = logging.getLogger("tiering")

Result = TypeVar("Result")

NOTE_BYTES_MAX = 8 << 20
NOTES_MAX = 1000
NOTE_SECONDS_MAX = 86400.0
"""After so long a note is deleted: the engine that left it is gone."""

_REQUEST_SECONDS = 30.0
_TICKS_AHEAD_MAX = 3600 * 1_000_000


class _Note(msgspec.Struct, frozen=True, array_like=True):
    keys: list[bytes]
    ticks: list[int]


class UseNotes:
    """Of the engine `me`. `today` counts from 1970. Used on the tier's event loop."""

    def __init__(
        self,
        store: ObjectStore,
        names: ObjNames,
        me: str,
        recency: Recency,
        pacer: Pacer,
        clock: Clock,
        today: Clock,
    ) -> None:
        self._store = store
        self._names = names
        self._mine = names.use_note(me)
        self._recency = recency
        self._pacer = pacer
        self._clock = clock
        self._today = today
        self._seen: dict[str, float] = {}
        self._last: dict[bytes, int] = {}

    async def exchange(self, *, deletes: bool) -> None:
        """`gather` where we are the one that `deletes`, else `leave`; an error is of no account."""
        try:
            await (self.gather() if deletes else self.leave())
        except StoreError as error:
            log.debug("%s: uses cannot be exchanged now: %s", self._names.use_notes, error)

    async def leave(self) -> None:
        """Say what was used here since the last time. StoreError where that cannot be written;
        then it is said the next time."""
        used = self._recency.unsaid()
        if not used:
            return
        # With what the last note said, which may not have been read before this one replaces it.
        told = self._last | used
        body = memoryview(msgspec.msgpack.encode(_Note(list(told), list(told.values()))))
        await self._run(lambda: self._store.put(self._mine, (body,)))
        self._last = used
        self._recency.said(used)

    async def gather(self) -> None:
        """Take in what others have left since the last time. StoreError where they cannot be
        listed or read."""
        page = await self._run(lambda: self._store.page(self._names.use_notes, limit=NOTES_MAX))
        oldest = self._today.now() - NOTE_SECONDS_MAX
        found = {listed.name: listed.modified for listed in page.objects}
        for listed in page.objects:
            is_news = self._seen.get(listed.name) != listed.modified
            if is_news and listed.name != self._mine and listed.modified >= oldest:
                await self._take(listed)
        self._seen = found
        if gone := [name for name, modified in found.items() if modified < oldest]:
            await self._run(lambda: self._store.delete(gone))

    async def _take(self, listed: Listed) -> None:
        if not 0 < listed.size_bytes <= NOTE_BYTES_MAX:
            return
        body = bytearray(listed.size_bytes)
        try:
            if not await self._run(lambda: self._store.get(listed.name, (memoryview(body),))):
                return
        except LengthError:
            # Replaced since it was listed: the next listing has what came in its place.
            return
        try:
            note = msgspec.msgpack.decode(body, type=_Note)
        except msgspec.DecodeError as error:
            log.debug("%s: not a note of uses: %s", listed.name, error)
            return
        # Neither a broken note nor another's clock may make a key the most recent for ever.
        latest = int(self._today.now() * 1e6) + _TICKS_AHEAD_MAX
        told = {
            key: tick
            for key, tick in zip(note.keys, note.ticks, strict=False)
            if GROUP_BYTES < len(key) <= KEY_BYTES_MAX and 0 <= tick <= latest
        }
        self._recency.learned(list(told), np.fromiter(told.values(), np.int64, len(told)))

    async def _run(self, request: Callable[[], Awaitable[Result]]) -> Result:
        deadline = self._clock.now() + _REQUEST_SECONDS
        return await self._pacer.run(Lane.UPKEEP, deadline, request)
