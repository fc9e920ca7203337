"""Keeps a namespace within `max_bytes`: which chunks were used last, and which go.

Owns the order of deletion and the deletions; `Oldest` is sans-IO. A chunk is as recent as its last
use, the head of a prefix before its tail: by this engine or, as their notes say (`uses.py`), by
others; where none is known of, as recent as its object. Only the holder of the lease deletes, up
to 1,000 objects in a request. Used on the tier's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from tiering.clock import Clock
from tiering.metrics import Counters
from tiering.tiers.base import Listener
from tiering.tiers.obj.existence import Existence
from tiering.tiers.obj.names import ObjNames
from tiering.tiers.obj.pacing import Lane, Pacer
from tiering.tiers.obj.recency import Recency
from tiering.tiers.obj.store import ObjectStore, StoreError
from tiering.tiers.obj.uses import UseNotes
from tiering_kernels.keytable import ABSENT

log = logging.getLogger("tiering")

DELETED_AT_ONCE_MAX = 1000
CANDIDATES_MAX = 20_000
WALK_SECONDS_MAX = 10.0
"""Whoever stores waits no longer for a walk: one over a million chunks takes minutes."""

COUNTERS = ("evicted", "evict_errors")


class Oldest:
    """The `keys_max` least recent chunks of a walk, least recent first."""

    def __init__(self, keys_max: int = CANDIDATES_MAX) -> None:
        self._keys_max = keys_max
        self._gathered: list[tuple[int, bytes]] = []
        self._newest: int | None = None
        self._next: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._next)

    def begin(self) -> None:
        """A walk begins; until it ends, those of the last one go on."""
        self._gathered, self._newest = [], None

    def add(self, chunks: Sequence[tuple[int, bytes]]) -> None:
        """The walk has shown `chunks`, each with when it was used."""
        newest = self._newest
        self._gathered += [each for each in chunks if newest is None or each[0] < newest]
        if len(self._gathered) > 2 * self._keys_max:
            self._prune()

    def end(self) -> None:
        """The walk has shown all."""
        self._prune()
        self._next, self._gathered = self._gathered[::-1], []

    def take(self, count: int) -> list[tuple[int, bytes]]:
        """The next `count`, each once."""
        start = max(0, len(self._next) - count)
        taken = self._next[start:][::-1]
        del self._next[start:]
        return taken

    def _prune(self) -> None:
        self._gathered.sort()
        if len(self._gathered) > self._keys_max:
            del self._gathered[self._keys_max :]
            self._newest = self._gathered[-1][0]


class Bound:
    """At most `objects_max` chunks, as far as this engine knows and while it `may_delete`.

    `walk` has `Oldest` filled anew and answers whether it was; it goes on if that is not waited
    for."""

    def __init__(
        self,
        store: ObjectStore,
        names: ObjNames,
        existence: Existence,
        recency: Recency,
        uses: UseNotes,
        pacer: Pacer,
        clock: Clock,
        objects_max: int,
        *,
        may_delete: Callable[[], bool],
        walk: Callable[[], Awaitable[bool]],
        removed: Listener,
        delete_seconds: float = 30.0,
    ) -> None:
        self._store = store
        self._names = names
        self._existence = existence
        self._recency = recency
        self._uses = uses
        self._pacer = pacer
        self._clock = clock
        self._objects_max = objects_max
        self._may_delete = may_delete
        self._walk = walk
        self._removed = removed
        self._delete_seconds = delete_seconds
        self._oldest = Oldest()
        self._has_walked = False
        self._booked = 0
        self._evicting: asyncio.Task[int] | None = None
        self.counters = Counters(COUNTERS)

    def __repr__(self) -> str:
        return f"<Bound {len(self._existence)} + {self._booked} of {self._objects_max} objects>"

    # What a walk shows

    async def walk_begins(self) -> None:
        """Hear what others have used, or tell whoever deletes."""
        await self._uses.exchange(deletes=self._may_delete())
        self._oldest.begin()

    def page(self, chunks: Sequence[tuple[bytes, float]]) -> None:
        """A page has shown `chunks`, and when each was put."""
        keys = [key for key, _ in chunks]
        put = np.fromiter((int(modified * 1e6) for _, modified in chunks), np.int64, len(chunks))
        used = self._recency.of(keys)
        # Our own puts are a moment younger than the use that they were, in no order.
        used = np.where(used == ABSENT, put, used)
        self._oldest.add(list(zip(used.tolist(), keys, strict=True)))

    def walk_ends(self) -> None:
        self._oldest.end()
        self._has_walked = True

    # Room

    async def book(self, count: int, deadline: float) -> int:
        """Make room for `count` chunks: how many may be put. Each has to be `settle`d, in the turn
        of the loop in which it becomes known, or it counts twice and others go for it. Whoever may
        not delete has room for all: the holder of the lease brings it back. What is not deleted by
        `deadline` goes on being deleted, and there is room for those who come later."""
        while (lacking := self._excess(count)) > 0 and await self._evict(lacking, deadline):
            pass
        granted = max(0, count - self._excess(count))
        self._booked += granted
        return granted

    def settle(self, count: int) -> None:
        """So many of what was booked were put, and are known to be there, or were not."""
        self._booked -= count

    async def trim(self) -> None:
        """Delete what is too much."""
        while (lacking := self._excess(0)) > 0 and await self._evict(lacking):
            pass

    async def close(self) -> None:
        if self._evicting is not None:
            # Nobody waits for it any more, and a store that hangs must not hold up the end.
            self._evicting.cancel()
            await asyncio.wait({self._evicting})

    def _excess(self, coming: int) -> int:
        if not self._has_walked or not self._may_delete():
            return 0
        return len(self._existence) + self._booked + coming - self._objects_max

    async def _evict(self, lacking: int, deadline: float | None = None) -> int:
        """Delete at least one batch; how many went, none where that is not known by `deadline`.
        Whoever asks meanwhile waits for the same."""
        evicting = self._evicting
        if evicting is None or evicting.done():
            # A twentieth more than is lacking now, so that not every write waits for a request.
            count = min(max(lacking, self._objects_max // 20), DELETED_AT_ONCE_MAX)
            # Not in a TaskGroup: several may wait for it, and a cancelled one must not end it.
            evicting = asyncio.get_running_loop().create_task(self._delete_oldest(count))
            self._evicting = evicting
        patience = None if deadline is None else max(0.0, deadline - self._clock.now())
        await asyncio.wait({evicting}, timeout=patience)
        return evicting.result() if evicting.done() else 0

    async def _delete_oldest(self, count: int) -> int:
        victims = self._victims(count)
        if not victims and await self._has_walked_soon():
            victims = self._victims(count)
        if not victims:
            return 0
        names = [self._names.chunk(key) for key in victims]
        deadline = self._clock.now() + self._delete_seconds
        try:
            left = set(
                await self._pacer.run(Lane.STORE, deadline, lambda: self._store.delete(names))
            )
        except StoreError as error:
            log.debug("%s: cannot be kept within max_bytes now: %s", self._names.chunks, error)
            self.counters.add("evict_errors", len(victims))
            return 0
        gone = [key for key, name in zip(victims, names, strict=True) if name not in left]
        self.counters.add("evicted", len(gone))
        self.counters.add("evict_errors", len(left))
        self._existence.missing(gone)
        self._recency.gone(gone)
        self._removed(gone)
        return len(gone)

    async def _has_walked_soon(self) -> bool:
        try:
            async with asyncio.timeout(WALK_SECONDS_MAX):
                return await self._walk()
        except TimeoutError:
            return False

    def _victims(self, count: int) -> list[bytes]:
        """The next `count` of the oldest that are still there and were not used since."""
        victims: list[bytes] = []
        while len(victims) < count and (taken := self._oldest.take(count - len(victims))):
            keys = [key for _, key in taken]
            used = self._recency.of(keys).tolist()
            known = self._existence.ask(keys)
            victims += [
                key
                for (tick, key), now, is_there in zip(taken, used, known, strict=True)
                if is_there is not False and now <= tick
            ]
        return victims
