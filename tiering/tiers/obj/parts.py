"""The parts of an open object tier: how they fit together, what runs until it is closed.

Owns the limits and the background tasks. Built anew at each `open`.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from tiering.clock import Clock
from tiering.tiers.base import Listener
from tiering.tiers.disk.iopool import IoPool
from tiering.tiers.obj.chunks import Chunks
from tiering.tiers.obj.existence import KEYS_MAX, Existence
from tiering.tiers.obj.frames import Frames
from tiering.tiers.obj.lease import Lease, LeaseKeeper
from tiering.tiers.obj.lifecycle import Bound
from tiering.tiers.obj.lookup import Lookup
from tiering.tiers.obj.names import ObjNames
from tiering.tiers.obj.pacing import Pacer
from tiering.tiers.obj.recency import Recency
from tiering.tiers.obj.store import ObjectStore
from tiering.tiers.obj.uses import UseNotes
from tiering.tiers.obj.walker import Walker
from tiering_kernels.chunkio import HEADER_BYTES


@dataclass(frozen=True, kw_only=True)
class ObjLimits:
    """`requests_max`: under way at once. Loads that are not done after `load_deadline_seconds` are
    BUSY, stores after `store_deadline_seconds` REFUSED. `max_bytes`: of all chunks of a namespace;
    None leaves deleting to the bucket's rules. `walk_seconds`: between listings of everything.
    `absent_seconds`: how long a chunk that was not there is not asked for again. The lease to
    delete lasts `lease_seconds` without its holder."""

    requests_max: int = 4
    load_deadline_seconds: float = 30.0
    store_deadline_seconds: float = 60.0
    max_bytes: int | None = None
    walk_seconds: float = 600.0
    absent_seconds: float = 5.0
    lease_seconds: float = 60.0
    lease_settle_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What exists only between `open` and `close`. `bound` and `lease` where there is a bound."""

    store: ObjectStore
    frames: Frames
    existence: Existence
    recency: Recency
    pacer: Pacer
    lookup: Lookup
    chunks: Chunks
    walker: Walker
    bound: Bound | None
    lease: LeaseKeeper | None
    background: list[asyncio.Task[None]] = field(default_factory=list)

    def begin(self) -> None:
        """Start what goes on until `let_go`. Not in a TaskGroup, whose block `open` and `close`
        are not."""
        work: list[Coroutine[Any, Any, None]] = [self.walker.run()]
        if self.lease is not None:
            work.append(self.lease.run(self.walker.want))
        self.background.extend(map(asyncio.get_running_loop().create_task, work))

    async def let_go(self) -> None:
        """End everything; no operation is under way any more."""
        for task in self.background:
            task.cancel()
        if self.background:
            await asyncio.wait(self.background)
        await self.walker.close()
        if self.bound is not None:
            await self.bound.close()
        if self.lease is not None:
            await self.lease.give_up()
        await self.lookup.close()
        await self.frames.close()
        self.pacer.close()
        await self.store.close()
        for task in self.background:
            if not task.cancelled():
                task.result()  # A bug ended it.


def build_parts(
    name: str,
    store: ObjectStore,
    names: ObjNames,
    digest: bytes,
    chunk_bytes: int,
    limits: ObjLimits,
    chance: random.Random,
    clock: Clock,
    today: Clock,
    pool: IoPool | None,
    removed: Listener,
) -> Parts:
    """Of the tier `name`, whose chunks are under `digest`."""
    object_bytes = HEADER_BYTES + chunk_bytes
    objects_max = None if limits.max_bytes is None else limits.max_bytes // object_bytes
    # Whoever keeps a bound has to know of all that is under it.
    keys_max = max(KEYS_MAX, 2 * (objects_max or 0))
    existence = Existence(clock, absent_seconds=limits.absent_seconds, keys_max=keys_max)
    recency = Recency(today)
    hang_seconds = min(1.0, limits.load_deadline_seconds / 2)
    pacer = Pacer(limits.requests_max, clock, chance, hang_seconds=hang_seconds)
    lookup = Lookup(
        store, names, object_bytes, existence, pacer, clock, limits.load_deadline_seconds
    )
    frames = Frames(name, digest, pool)
    chunks = Chunks(name, store, names, frames, lookup, existence, pacer, chunk_bytes)
    lease: LeaseKeeper | None = None
    bound: Bound | None = None
    if objects_max is not None:
        me = uuid.uuid4().hex
        mine = Lease(me, limits.lease_seconds)
        lease = LeaseKeeper(
            store,
            names.lease,
            mine,
            pacer,
            clock,
            today,
            every_seconds=limits.lease_seconds / 3,
            settle_seconds=limits.lease_settle_seconds,
        )
        bound = Bound(
            store,
            names,
            existence,
            recency,
            UseNotes(store, names, me, recency, pacer, clock, today),
            pacer,
            clock,
            objects_max,
            may_delete=lambda: mine.is_held(clock.now()),
            walk=lambda: walker.walk(),
            removed=removed,
        )
    walker = Walker(lookup, bound, clock, chance, limits.walk_seconds)
    return Parts(store, frames, existence, recency, pacer, lookup, chunks, walker, bound, lease)
