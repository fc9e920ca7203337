"""A bucket as a secondary tier: one object for each chunk, self-verifying, shareable.

Owns what this process has under way and what it knows of the bucket; the objects belong to the
bucket, which other engines and the bucket's own rules share. Used from one event loop. No request
is a HEAD, and no number of requests grows with what is only asked for. Names and bytes:
docs/object-store.md, docs/format.md.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import orjson

from tiering.clock import Clock, MonotonicClock, UnixClock
from tiering.errors import ClosedError, ConfigError, DamagedChunk, TierError
from tiering.metrics import Counters
from tiering.namespace import Namespace
from tiering.tiers.base import (
    Delete,
    DeleteOutcome,
    Failed,
    Listener,
    ReadOutcome,
    Tier,
    Write,
    WriteOutcome,
    check_buffers,
    nobody,
)
from tiering.tiers.disk.configfile import difference
from tiering.tiers.disk.iopool import IoPool
from tiering.tiers.disk.paths import why_not_a_key
from tiering.tiers.obj.chunks import Chunks
from tiering.tiers.obj.lifecycle import DELETED_AT_ONCE_MAX, Bound
from tiering.tiers.obj.lookup import Known
from tiering.tiers.obj.names import ObjNames
from tiering.tiers.obj.pacing import Lane, Pacer, at_once
from tiering.tiers.obj.parts import ObjLimits, Parts, build_parts
from tiering.tiers.obj.store import ObjectStore, StoreError
from tiering.underway import UnderWay
from tiering_kernels.chunkio import HEADER_BYTES

OPEN_SECONDS_MAX = 30.0
"""How long a store that asks for fewer requests is asked again at the start."""

COUNTERS = ("stored", "already_there", "full", "refused", "write_errors", "read_errors")

_WRITE_COUNTERS: dict[WriteOutcome, str] = {
    Write.STORED: "stored",
    Write.ALREADY_THERE: "already_there",
    Write.FULL: "full",
    Write.REFUSED: "refused",
}


class ObjTier(Tier):
    """Chunks of `chunk_bytes` in `store` under `prefix`, for rank `rank` of `namespace`.

    `name` is how the tier is called. `where` is its place in the configuration, for errors.
    `chance` spreads what would happen at once with many engines; it, `pool`, which has the
    thread that checks bytes, and the clocks are for tests. `today` counts from 1970.
    """

    def __init__(
        self,
        name: str,
        store: ObjectStore,
        prefix: str,
        namespace: Namespace,
        chunk_bytes: int,
        *,
        limits: ObjLimits | None = None,
        rank: int = 0,
        where: str = "secondary_tiers[]",
        chance: random.Random | None = None,
        clock: Clock | None = None,
        today: Clock | None = None,
        pool: IoPool | None = None,
    ) -> None:
        if chunk_bytes < 1 or rank < 0:
            raise ValueError(f"chunk_bytes {chunk_bytes} must be positive, rank {rank} not below 0")
        self._name = name
        self._store = store
        self._names = ObjNames(prefix, namespace.directory, rank)
        self._namespace = namespace
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self._limits = limits or ObjLimits()
        self._where = where
        self._chance = chance or random.Random()
        self._clock = clock or MonotonicClock()
        self._today = today or UnixClock()
        self._pool = pool
        self._counters = Counters(COUNTERS)
        self._opened: Parts | None = None
        self._last_stats: dict[str, int] = {}
        self._removed: Listener = nobody
        self._under_way = UnderWay()

    def __repr__(self) -> str:
        opened = self._opened
        told = "not open" if opened is None else f"{opened.existence!r}, {opened.pacer!r}"
        return f"<ObjTier {self._names.chunks}: {told}>"

    @property
    def name(self) -> str:
        return self._name

    def watch(self, removed: Listener) -> None:
        self._removed = removed

    async def open(self) -> None:
        """Find out whether the bucket can be used, agree on config.json, begin to list what is
        there. ConfigError where the user can help it, TierError for the rest."""
        if self._opened is not None:
            raise RuntimeError(f"{self.name} is already open")
        self._counters = Counters(COUNTERS)
        opened = self._parts()
        opened.frames.start()
        try:
            try:
                await self._store.open()
                # One deadline for all that follows: whoever opens it waits for a minute.
                seconds = min(self._limits.load_deadline_seconds, OPEN_SECONDS_MAX)
                deadline = self._clock.now() + seconds
                await self._agree(opened.pacer, deadline)
            except StoreError as error:
                raise TierError(self.name, None, f"cannot be opened: {error}") from error
            await opened.walker.begin(max(0.0, deadline - self._clock.now()))
        except BaseException:
            await opened.let_go()
            raise
        opened.begin()
        self._opened = opened

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        """What a listing, a probe or our own use has shown; see `Lookup` for the rest."""
        async with self._using() as opened:
            known = await self._find(opened, keys)
            return list(map(opened.chunks.contained, keys, known))

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        async with self._using() as opened:
            check_buffers(keys, buffers, self._chunk_bytes)
            opened.recency.used(keys)
            deadline = self._clock.now() + self._limits.load_deadline_seconds
            outcomes = await at_once(
                opened.chunks.read(key, buffer, deadline)
                for key, buffer in zip(keys, buffers, strict=True)
            )
            self._counters.add("read_errors", sum(map(_is_error, outcomes)))
            return outcomes

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        async with self._using() as opened:
            check_buffers(keys, buffers, self._chunk_bytes)
            opened.recency.used(keys)
            deadline = self._clock.now() + self._limits.store_deadline_seconds
            known = await self._find(opened, keys)
            outcomes = list(map(opened.chunks.not_written, keys, known))
            wanted = [at for at, each in enumerate(known) if each is False]
            async with _booked(opened.bound, len(wanted), deadline) as booking:
                written = await at_once(
                    booking.put(opened.chunks, keys[at], buffers[at], deadline)
                    for at in wanted[: booking.granted]
                )
            for at, outcome in zip(wanted, written, strict=False):
                outcomes[at] = outcome
            self._counters.tally(outcomes, _WRITE_COUNTERS, "write_errors")
            return outcomes

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        """All are deleted, whatever is known of them: that only says which were there."""
        async with self._using() as opened:
            known = await self._find(opened, keys)
            left: dict[bytes, Failed] = {}
            for start in range(0, len(keys), DELETED_AT_ONCE_MAX):
                part = keys[start : start + DELETED_AT_ONCE_MAX]
                left |= await self._delete(opened, [key for key in part if not why_not_a_key(key)])
            return [self._deleted(key, each, left) for key, each in zip(keys, known, strict=True)]

    async def touch(self, keys: Sequence[bytes]) -> None:
        async with self._using() as opened:
            opened.recency.used(keys)

    def stats(self) -> dict[str, int]:
        """What became of chunks and of requests, and: requests sent by verb, `now_limit`, how many
        may be under way, `now_chunks` and `now_bytes` that are known to be there, and whether the
        lease to delete is ours."""
        opened = self._opened
        if opened is None:
            return dict(self._last_stats)
        told = self._counters.snapshot() | opened.pacer.counters.snapshot()
        told |= opened.chunks.counters.snapshot()
        told |= {f"damaged_{cause}": count for cause, count in opened.chunks.damage.items()}
        told |= {f"requests_{verb}": count for verb, count in self._store.requests().items()}
        told |= {"walks": opened.walker.walks, "walks_failed": opened.walker.walks_failed}
        if opened.bound is not None and opened.lease is not None:
            told |= opened.bound.counters.snapshot()
            told["now_lease_held"] = int(opened.lease.is_held)
        told["now_limit"] = opened.pacer.limit
        told["now_chunks"] = len(opened.existence)
        told["now_bytes"] = len(opened.existence) * self._object_bytes
        return told

    async def scan(self) -> AsyncIterator[list[bytes]]:
        async with self._using() as opened:
            try:
                async for keys in opened.lookup.keys():
                    yield keys
            except StoreError as error:
                raise TierError(self.name, None, f"cannot list the chunks: {error}") from error

    async def close(self) -> None:
        if self._opened is None:
            await self._store.close()
            return
        self._last_stats = self.stats()
        opened, self._opened = self._opened, None
        await self._under_way.end()
        await opened.let_go()

    # Parts of the above

    @property
    def _object_bytes(self) -> int:
        return HEADER_BYTES + self._chunk_bytes

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[Parts]:
        """What an operation works with; `close` waits for the end of the block."""
        if self._opened is None:
            raise ClosedError(f"{self.name} is not open")
        with self._under_way.one():
            yield self._opened

    async def _find(self, opened: Parts, keys: Sequence[bytes]) -> list[Known | Failed]:
        """Of each key, whether it is there; Failed for what cannot be a key. Takes no longer than a
        load may, however many questions that needs, so a store has time left for what it is for."""
        right = [key for key in keys if not why_not_a_key(key)]
        limits = self._limits
        seconds = min(limits.load_deadline_seconds, limits.store_deadline_seconds)
        told = iter(await opened.lookup.find(right, self._clock.now() + seconds))
        if len(right) == len(keys):
            return list(told)
        return [
            Failed(TierError(self.name, key, wrong))
            if (wrong := why_not_a_key(key))
            else next(told)
            for key in keys
        ]

    async def _delete(self, opened: Parts, keys: Sequence[bytes]) -> dict[bytes, Failed]:
        """Those of `keys` that are still there, and why."""
        names = list(map(self._names.chunk, keys))
        if not names:
            return {}
        deadline = self._clock.now() + self._limits.store_deadline_seconds
        try:
            left = set(
                await opened.pacer.run(Lane.STORE, deadline, lambda: self._store.delete(names))
            )
        except StoreError as error:
            return {key: opened.chunks.failed(key, error) for key in keys}
        pairs = list(zip(keys, names, strict=True))
        gone = [key for key, name in pairs if name not in left]
        opened.existence.missing(gone)
        opened.recency.gone(gone)
        reason = "the store did not delete it"
        return {
            key: Failed(TierError(self.name, key, reason)) for key, name in pairs if name in left
        }

    def _deleted(
        self, key: bytes, known: Known | Failed, left: dict[bytes, Failed]
    ) -> DeleteOutcome:
        if isinstance(known, Failed):
            return known
        return left.get(key) or (Delete.MISSING if known is False else Delete.DELETED)

    def _parts(self) -> Parts:
        return build_parts(
            self.name,
            self._store,
            self._names,
            self._namespace.digest_of_rank(self._rank),
            self._chunk_bytes,
            self._limits,
            self._chance,
            self._clock,
            self._today,
            self._pool,
            lambda keys: self._removed(keys),
        )

    async def _agree(self, pacer: Pacer, deadline: float) -> None:
        """Leave the namespace's description in config.json, or find it there, by `deadline`."""
        description, name = self._namespace.describe(), self._names.config
        content = orjson.dumps(description, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

        # Many engines may start at once.
        found = await pacer.insist(Lane.LOAD, deadline, lambda: self._store.get_small(name))
        if found is None:
            written = await pacer.insist(
                Lane.LOAD,
                deadline,
                lambda: self._store.put_small(name, content, if_absent=True),
            )
            if written is not None:
                return
            # Somebody else was quicker.
            found = await pacer.insist(Lane.LOAD, deadline, lambda: self._store.get_small(name))
        differing = None if found is None else difference(found[0], description)
        if differing is not None:
            raise ConfigError(
                f"{self._where}.prefix",
                self._names.prefix,
                f"the object {name} describes another run than this one ({differing})",
                "delete it and the chunks beside it, or use another prefix",
            )


class _Booking:
    """Room for `granted` chunks."""

    def __init__(self, bound: Bound | None, granted: int) -> None:
        self.granted = granted
        self._bound = bound
        self._left = granted

    async def put(
        self, chunks: Chunks, key: bytes, buffer: memoryview, deadline: float
    ) -> WriteOutcome:
        """Write one of them."""
        try:
            return await chunks.write(key, buffer, deadline)
        finally:
            self.settle(1)

    def settle(self, count: int) -> None:
        self._left -= count
        if self._bound is not None:
            self._bound.settle(count)

    def close(self) -> None:
        """Give back the room of what was never begun."""
        self.settle(self._left)


@asynccontextmanager
async def _booked(bound: Bound | None, wanted: int, deadline: float) -> AsyncIterator[_Booking]:
    """Room by `deadline` for as many of `wanted` chunks as may be put, which has to be done within
    the block."""
    booking = _Booking(bound, wanted if bound is None else await bound.book(wanted, deadline))
    try:
        yield booking
    finally:
        booking.close()


def _is_error(outcome: ReadOutcome) -> bool:
    return isinstance(outcome, Failed) and not isinstance(outcome.error, DamagedChunk)
