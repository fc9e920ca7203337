"""`TieredStore`: the engine for a Python program, on the program's own event loop.

Owns the host tier's memory, the core and the portal from `async with` to its end. All methods are
for the loop that opened it; copies of payload run in threads. Invariant: whatever a call holds it
gives back however it ends, and a cancelled call returns only when its copy has stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiering.clock import Clock, MonotonicClock
from tiering.config import StoreConfig
from tiering.engine import Engine
from tiering.errors import ClosedError, ConfigError, TieringError
from tiering.events import EventSink, NoEvents
from tiering.layout import RowLayout
from tiering.namespace import Namespace
from tiering.portal import LoopPortal
from tiering.residency.core import Residency
from tiering.residency.state import SlotState
from tiering.tiers.base import Tier
from tiering.tiers.host import Region, region_name
from tiering.tiers.peers.source import PeerSource
from tiering.underway import to_the_end
from tiering.wiring import announced_tiers, build_core, build_tiers, peer_tiers

FLUSH_SECONDS = 60.0
DRAIN_SECONDS = 10.0

# Any writable (to load) or readable (to save) C-contiguous buffer of the layout's chunk_bytes:
# bytearray, memoryview, a numpy array, a CPU tensor's numpy().
Page = Any


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A moment's picture. `counters` only grow; the slots add up to `slots`; `tiers` has what each
    tier counts, by its name, where names that begin with `now_` are states."""

    slots: int
    slots_free: int
    slots_ready: int
    slots_held: int
    steps_under_way: int
    tiers: dict[str, dict[str, int]]
    counters: dict[str, int]


class LoadedChunks:
    """A prefix in host memory, pinned until its `async with` ends. `found` leading chunks.

    After that other chunks may be where these were: ClosedError for whoever still looks."""

    def __init__(self, region: Region, slots: Sequence[int], chunk_bytes: int) -> None:
        self._region = region
        self._slots = slots
        self._chunk_bytes = chunk_bytes
        self._is_pinned = True

    def _require_pinned(self) -> None:
        if not self._is_pinned:
            raise ClosedError("loaded chunks can be used only inside their `async with` block")

    @property
    def found(self) -> int:
        """How many leading chunks are here: fewer than matched if one vanished meanwhile."""
        return len(self._slots)

    def view(self, index: int) -> memoryview:
        """Chunk `index` in place, read-only; not to be used after the load has ended."""
        self._require_pinned()
        return self._region.row(self._slots[index])[: self._chunk_bytes].toreadonly()

    async def copy_to(self, pages: Sequence[Page]) -> None:
        """Copy the leading chunks, one to each of `pages`; ValueError for more pages than
        `found`, or for a page of another size than chunk_bytes."""
        if len(pages) > self.found:
            raise ValueError(f"{len(pages)} pages for {self.found} chunks")
        views = [_as_bytes(page, self._chunk_bytes) for page in pages]
        await _in_thread(self._copy, views)
        # A copy that the load's end overtook may have read other chunks.
        self._require_pinned()

    def _copy(self, views: list[memoryview]) -> None:
        for index, view in enumerate(views):
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(self.view(index), np.uint8))


class TieredStore:
    """Chunks by key, kept in host memory and passed on to the tiers of the configuration.

    `tiers` takes the place of those in `config`, for tiers of one's own; `clock` and `events`
    are for tests and for whoever keeps an index of what is where.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: Clock | None = None,
        events: EventSink | None = None,
        tiers: Sequence[Tier] | None = None,
    ) -> None:
        if not isinstance(config, StoreConfig):
            told = f"is a {type(config).__name__}"
            raise ConfigError("config", None, told, "write TieredStore(StoreConfig(...))")
        self._config = config
        self._row = RowLayout(config.layout.chunk_bytes)
        self._clock = clock or MonotonicClock()
        self._events = events or NoEvents()
        self._surveyed = () if events is None or tiers is not None else announced_tiers(config)
        self._peers = () if tiers is not None else peer_tiers(config)
        self._own_tiers = tiers
        self._tiers: Sequence[Tier] = () if tiers is None else tiers
        self._stack = AsyncExitStack()
        self._opened: _Opened | None = None
        self._turn = asyncio.Event()
        self._owners = itertools.count()

    # Life

    async def __aenter__(self) -> TieredStore:
        """Take the memory, open the tiers; RegionError, ConfigError or TierError if it cannot
        be, and then nothing is left behind."""
        if self._opened is not None:
            raise TieringError("this TieredStore is open already: use it inside its one block")
        async with AsyncExitStack() as stack:
            name = region_name(f"{os.getpid()} {uuid.uuid4()}")
            region = await asyncio.to_thread(
                Region.open, name, self._row, self._config.cpu_bytes_to_use
            )
            stack.callback(region.close)
            region.unlink()
            if self._own_tiers is None:
                namespace = namespace_of(self._config)
                self._tiers = build_tiers(self._config, namespace, self._row.row_bytes, region)
            core = build_core(
                self._config,
                region.geometry.rows,
                len(self._tiers),
                self._clock,
                self._surveyed,
                self._peers,
                region.generations(),
            )
            portal = LoopPortal(self._tiers, region.row, self._pump)
            await stack.enter_async_context(portal)
            self._opened = _Opened(region, core, portal, Engine(core, portal, self._events))
            self._stack = stack.pop_all()
        # What is announced is surveyed from the start on.
        self._pump()
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Pass on what is still to be passed on, within 10 seconds; then close the tiers."""
        opened = self._running()
        try:
            await self.flush(DRAIN_SECONDS)
            await opened.portal.finish(DRAIN_SECONDS)
        finally:
            self._opened = None
            self._notify()
            await self._stack.aclose()

    # The six verbs

    async def match(self, keys: Sequence[bytes], source: PeerSource | None = None) -> int:
        """How many leading `keys`, a chain of them, are stored in some tier, or by `source`.
        Changes nothing, promises nothing: what is found may be gone a moment later."""
        async with self._request(source) as (owner, opened):
            return await self._find(opened, owner, keys)

    @asynccontextmanager
    async def load(
        self, keys: Sequence[bytes], source: PeerSource | None = None
    ) -> AsyncIterator[LoadedChunks]:
        """Bring the stored prefix of `keys` to host memory and keep it there for the block; what
        is in no tier of one's own, from `source`, another store or engine, which takes a tier of
        type p2p: else ConfigError.

        Shorter than the match if the host tier cannot hold more at once, if a chunk vanished or
        was damaged, or after `load_deadline_seconds`; `found` tells. Does not raise for that.
        """
        async with self._request(source) as (owner, opened):
            slots = await self._hold(opened, owner, keys)
            chunks = LoadedChunks(opened.region, slots, self._config.layout.chunk_bytes)
            try:
                yield chunks
            finally:
                chunks._is_pinned = False

    async def save(self, keys: Sequence[bytes], pages: Sequence[Page]) -> int:
        """Store `pages[i]` under `keys[i]`, a chain; returns once host memory has the bytes, how
        many leading chunks are stored. They are on their way to the other tiers then.

        Fewer than given if the host tier is full of what is in use; with tiers below it, chunks
        pass through even a small one. ValueError for a page of another size than chunk_bytes.
        """
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys for {len(pages)} pages")
        views = [_as_bytes(page, self._config.layout.chunk_bytes) for page in pages]
        async with self._request() as (owner, opened):
            end = 0
            give_up = self._clock.now() + self._config.load_deadline_seconds
            while end < len(keys):
                reservation = opened.core.reserve(owner, keys, end, keep_unwritten=True)
                await self._fill(opened, reservation.slots, [views[i] for i in reservation.indices])
                end = reservation.end
                if not reservation.slots:
                    if not opened.core.may_make_room or self._clock.now() >= give_up:
                        break
                    await self._next_turn(opened, owner)
            return end

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Remove `keys` from every tier; from the moment of the call they match no more."""
        opened = self._running()
        opened.core.drop(keys)
        self._pump()

    async def flush(self, deadline_seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all that was saved is in every tier that takes it; False if it is not by the
        deadline."""
        opened = self._running()
        try:
            async with asyncio.timeout(deadline_seconds):
                while not opened.core.is_settled:
                    await self._turn.wait()
        except TimeoutError:
            return False
        return True

    def stats(self) -> StoreStats:
        """What is where, and what has been counted so far."""
        core = self._running().core
        census = core.index.slots.census()
        return StoreStats(
            slots=len(core.index.slots),
            slots_free=census[SlotState.FREE],
            slots_ready=census[SlotState.READY],
            slots_held=core.budget.held,
            steps_under_way=core.steps_out,
            tiers={tier.name: tier.stats() for tier in self._tiers},
            counters=core.counters.snapshot(),
        )

    # Parts of the above

    async def _find(self, opened: _Opened, owner: str, keys: Sequence[bytes]) -> int:
        while (match := opened.core.match(keys, owner)).is_open:
            opened.core.ask(owner, keys)
            opened.engine.pump()
            await self._next_turn(opened, owner)
        return match.reach

    async def _hold(self, opened: _Opened, owner: str, keys: Sequence[bytes]) -> list[int]:
        """Slots of the stored prefix, ready and pinned for `owner`."""
        core = opened.core
        await self._find(opened, owner, keys)
        found = core.match(keys, owner)
        core.count_lookup(owner, found.host, found.reach - found.host, len(keys) - found.reach)
        while (match := core.match(keys, owner)).reach > match.host:
            if core.hold(owner, keys):
                opened.engine.pump()
                while core.held(owner) is None:
                    await self._next_turn(opened, owner)
                return core.claim(owner)
            await self._next_turn(opened, owner)
        core.hold_ready(owner, keys)
        return core.claim(owner)

    async def _fill(
        self, opened: _Opened, slots: Sequence[int], views: Sequence[memoryview]
    ) -> None:
        def copy() -> None:
            for slot, view in zip(slots, views, strict=True):
                row = np.frombuffer(opened.region.row(slot), np.uint8)
                np.copyto(row[: len(view)], np.frombuffer(view, np.uint8))

        if not slots:
            return
        try:
            await _in_thread(copy)
        except BaseException:
            opened.core.unfilled(slots)
            raise
        opened.core.filled(slots)
        self._pump()

    @asynccontextmanager
    async def _request(
        self, source: PeerSource | None = None
    ) -> AsyncIterator[tuple[str, _Opened]]:
        opened = self._running()
        if source is not None and not opened.core.peers:
            # Else it would be a miss, for ever and without a word.
            remedy = "add P2pTierConfig() to secondary_tiers, here and at the source"
            raise ConfigError("source", source, "there is no tier of type p2p", remedy)
        owner = f"call {next(self._owners)}"
        opened.core.open(owner)
        if source is not None:
            opened.core.peers.ask(owner, source.packed(), has_all=source.is_prefiller)
        try:
            yield owner, opened
        finally:
            opened.core.close(owner)
            self._pump()

    def _running(self) -> _Opened:
        if self._opened is None:
            raise ClosedError("a TieredStore can be used only inside its `async with` block")
        return self._opened

    def _pump(self) -> None:
        """Outcomes in, steps out; then whoever waits looks again."""
        if self._opened is not None:
            self._opened.engine.pump()
            self._notify()

    def _notify(self) -> None:
        self._turn.set()
        self._turn = asyncio.Event()

    async def _next_turn(self, opened: _Opened, owner: str) -> None:
        """Until something has changed, or the request's deadline has come."""
        turn = self._turn
        try:
            async with asyncio.timeout(opened.core.seconds_left(owner)):
                await turn.wait()
        except TimeoutError:
            pass  # The core says what a request gets at its deadline.
        if self._opened is not opened:
            raise ClosedError("the TieredStore was closed meanwhile")

    def __repr__(self) -> str:
        told = "closed" if self._opened is None else repr(self._opened.core)
        return f"<TieredStore {told}>"


@dataclass(frozen=True, slots=True)
class _Opened:
    """What exists only between `async with` and its end."""

    region: Region
    core: Residency
    portal: LoopPortal
    engine: Engine


def namespace_of(config: StoreConfig) -> Namespace:
    """The namespace of a program's own chunks. vLLM's are never found in it, nor the reverse."""
    layout = config.layout
    return Namespace(
        model=config.model,
        revision=config.revision,
        weights_fingerprint=config.weights_fingerprint,
        kv_dtype=layout.dtype,
        layout=f"layers={layout.layers} kv_heads={layout.kv_heads} head_dim={layout.head_dim}",
        backend="program",
        platform="",
        isa="",
        engine="tiering.TieredStore",
        tokens_per_block=layout.block_tokens,
        blocks_per_chunk=layout.blocks_per_chunk,
        groups=("full attention",),
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        share_bytes=layout.chunk_bytes,
        ranks=1,
        hash_algorithm="tiering.keys.token_keys",
    )


def _as_bytes(page: Page, size: int) -> memoryview:
    view = memoryview(page).cast("B")
    if view.nbytes != size:
        raise ValueError(f"a page of {view.nbytes} bytes, but a chunk has {size}")
    return view


async def _in_thread(work: Callable[..., None], *args: object) -> None:
    """Run `work` in a thread; if cancelled, come back only when it has ended."""
    await to_the_end(asyncio.get_running_loop().run_in_executor(None, work, *args))
