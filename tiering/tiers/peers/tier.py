"""Other engines' host memory as a secondary tier: chunks of the peer that a request names.

Owns the control plane, the transports and the links, from open to close. Holds nothing by itself:
what is asked without a peer is a miss, and nothing is stored. What goes wrong with one peer is the
failure of what was asked of him, and of nothing else. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tiering.clock import Clock
from tiering.errors import ClosedError, ConfigError, PeerError, TierError
from tiering.metrics import Counters
from tiering.peers.addresses import Address
from tiering.peers.agreement import Introduction
from tiering.peers.auth import SharedKey, require_bindable
from tiering.peers.calls import Fetched, Peer
from tiering.peers.control import ControlPlane
from tiering.peers.messages import KEY_BYTES_MAX, KEYS_MAX, Reference
from tiering.peers.session import Patience
from tiering.peers.transports.base import Failed as RowFailed
from tiering.peers.transports.base import Moved, Outcome, Transport
from tiering.tiers.base import (
    Delete,
    DeleteOutcome,
    Failed,
    Listener,
    PeerTier,
    Read,
    Reading,
    ReadOutcome,
    Write,
    WriteOutcome,
    check_buffers,
)
from tiering.tiers.peers.links import Links
from tiering.tiers.peers.serving import Serving
from tiering.tiers.peers.source import PeerSource

log = logging.getLogger("tiering")

COUNTERS = ("peer_chunks_stale", "peer_errors")
_TIDY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """`unbound_store_seconds`: how long what a decoder is to fetch is kept for him. `wait_seconds`:
    how long a prefiller is given to have computed what is fetched."""

    peers_max: int = 128
    guests_max: int = 256
    unbound_store_seconds: float = 60.0
    wait_seconds: float = 30.0


class PeersTier(PeerTier):
    """This engine is at `at`, for peers to dial; `transports`, in order of preference, serve its
    rows of `chunk_bytes` and read theirs. One that cannot be opened is left out with a warning, but
    for the last."""

    def __init__(
        self,
        at: Address,
        introduction: Callable[[], Introduction],
        transports: Sequence[Transport],
        chunk_bytes: int,
        *,
        key: SharedKey | None = None,
        allow_unauthenticated: bool = False,
        where: str = "secondary_tiers[].host",
        rank: int = 0,
        limits: PeerLimits | None = None,
        patience: Patience | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`introduction` is asked for when the transports are open, without what they offer.
        Errors about `at` are under the key `where`; `rank` is the data-parallel one."""
        self._at = at
        self._introduction = introduction
        self._transports = transports
        self._chunk_bytes = chunk_bytes
        self._key = key or SharedKey()
        self._allow_unauthenticated = allow_unauthenticated
        self._where = where
        self._rank = rank
        self._limits = limits or PeerLimits()
        self._patience = patience
        self._clock = clock
        self._counters = Counters(COUNTERS)
        # Those that are open, also for these two.
        self._opened: list[Transport] = []
        self._serving = Serving(self._opened)
        self._links = Links(self._opened, clock)
        self._control: ControlPlane | None = None
        self._stack = AsyncExitStack()

    @property
    def name(self) -> str:
        return f"p2p:{self._at}"

    @property
    def address(self) -> Address:
        """Where peers dial, with its real port. REQUIRES: open."""
        return self._running().address

    def watch(self, removed: Listener) -> None:
        """Peers announce themselves what they hold."""

    async def open(self) -> None:
        if self._control is not None:
            raise RuntimeError(f"{self.name} is already open")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            None,
            require_bindable,
            self._where,
            self._at.host,
            self._key,
            self._allow_unauthenticated,
        )
        self._counters = Counters(COUNTERS)
        async with AsyncExitStack() as stack:
            await self._open_transports(stack)
            stack.push_async_callback(self._links.close)
            me = self._introduction()
            control = ControlPlane(
                Introduction(
                    me.engine_id,
                    me.incarnation,
                    me.namespace,
                    me.description,
                    me.hash_seed,
                    me.rows,
                    me.row_bytes,
                    tuple(transport.offer() for transport in self._opened),
                ),
                self._serving,
                self._at,
                self._key,
                name=self._where,
                rank=self._rank,
                peers_max=self._limits.peers_max,
                guests_max=self._limits.guests_max,
                patience=self._patience,
                clock=self._clock,
            )
            await control.open()
            stack.push_async_callback(control.close)
            tidying = loop.create_task(self._tidy())
            stack.callback(tidying.cancel)
            self._control = control
            self._stack = stack.pop_all()

    async def _open_transports(self, stack: AsyncExitStack) -> None:
        """The last is what all fall back to, or the only one that was asked for."""
        stack.callback(self._opened.clear)
        for transport in self._transports:
            try:
                await transport.open()
            except ConfigError as error:
                if transport is self._transports[-1]:
                    raise
                log.warning("%s: no chunks over %s: %s", self.name, transport.name, error.reason)
                continue
            stack.push_async_callback(transport.close)
            self._opened.append(transport)

    # Of a peer

    def at(self, peer: bytes) -> Reading:
        return _AtPeer(self, PeerSource.unpacked(peer))

    def release(self, peer: bytes) -> None:
        whom = PeerSource.unpacked(peer)
        if (found := self._running().known(whom.address)) is not None:
            found.request_over(whom.kv_request_id)

    async def ask(self, whom: PeerSource, keys: Sequence[bytes]) -> list[ReadOutcome]:
        """Which of `keys` the peer has now."""
        try:
            peer = await self._running().peer(whom.address)
            hits = b"".join([await peer.lookup(whom.kv_request_id, part) for part in _parts(keys)])
        except PeerError as error:
            return self._all_failed(keys, error)
        return [Read.HIT if hit else Read.MISS for hit in hits]

    async def fetch(
        self, whom: PeerSource, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        """Read `keys` from the peer."""
        check_buffers(keys, buffers, self._chunk_bytes)
        outcomes: list[ReadOutcome] = []
        try:
            peer = await self._running().peer(whom.address)
            for part in _parts(keys):
                start = len(outcomes)
                into = buffers[start : start + len(part)]
                outcomes += await self._fetch(peer, whom, part, into)
        except PeerError as error:
            return outcomes + self._all_failed(keys[len(outcomes) :], error)
        return outcomes

    async def _fetch(
        self, peer: Peer, whom: PeerSource, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        seconds = self._limits.wait_seconds if whom.is_prefiller else None
        link = await self._links.link(peer)
        fetched = await peer.fetch(whom.kv_request_id, keys, seconds)
        is_read = False
        try:
            wanted = [at for at, place in enumerate(fetched.places) if place is not None]
            moved = await link.read(_references(fetched, wanted), [buffers[at] for at in wanted])
            is_read = all(each is Moved.HIT for each in moved)
        except ClosedError as error:
            raise PeerError(str(peer.at), "its link was closed while it was read") from error
        finally:
            peer.done(fetched.of, success=is_read)
        if any(isinstance(each, RowFailed) for each in moved):
            await self._links.drop(peer, link)
        outcomes: list[ReadOutcome] = [Read.MISS] * len(keys)
        for at, each in zip(wanted, moved, strict=True):
            outcomes[at] = self._outcome(keys[at], each)
        return outcomes

    def _outcome(self, key: bytes, moved: Outcome) -> ReadOutcome:
        if isinstance(moved, RowFailed):
            self._counters.add("peer_errors")
            return Failed(TierError(self.name, key, str(moved.error)))
        if moved is Moved.STALE:
            # Evicted there while it was read: a miss like any other.
            self._counters.add("peer_chunks_stale")
            return Read.MISS
        return Read.HIT

    def _all_failed(self, keys: Sequence[bytes], error: PeerError) -> list[ReadOutcome]:
        self._counters.add("peer_errors", len(keys))
        return [Failed(TierError(self.name, key, str(error))) for key in keys]

    # For peers

    def show(self, keys: Sequence[bytes], slots: Sequence[int], generations: Sequence[int]) -> None:
        self._serving.showcase.show(keys, slots, generations)

    def hide(self, keys: Sequence[bytes]) -> None:
        self._serving.showcase.hide(keys)

    async def keep(self, kv_request_id: str, keys: Sequence[bytes]) -> list[ReadOutcome]:
        seconds = self._limits.unbound_store_seconds
        fetched = await self._serving.keep(kv_request_id, keys, seconds)
        return [Read.HIT if key in fetched else Read.MISS for key in keys]

    # Without a peer

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        self._running()
        return [Read.MISS] * len(keys)

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        self._running()
        check_buffers(keys, buffers, self._chunk_bytes)
        return [Read.MISS] * len(keys)

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        self._running()
        check_buffers(keys, buffers, self._chunk_bytes)
        return [Write.REFUSED] * len(keys)

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        self._running()
        return [Delete.MISSING] * len(keys)

    async def touch(self, keys: Sequence[bytes]) -> None:
        self._running()

    async def scan(self) -> AsyncIterator[list[bytes]]:
        self._running()
        return
        yield []

    def stats(self) -> dict[str, int]:
        told = self._counters.snapshot() | self._serving.counters.snapshot()
        showcase = self._serving.showcase
        told |= {"now_shown_chunks": len(showcase), "now_kept_chunks": showcase.kept_chunks}
        told["now_links"] = len(self._links)
        if (control := self._control) is not None:
            stats = control.stats()
            told |= {"now_peers": stats.peers, "now_guests": stats.guests}
            told |= {f"sessions_{name}": getattr(stats, name) for name in _SESSION_COUNTERS}
        return told

    async def close(self) -> None:
        self._control = None
        await self._stack.aclose()

    def __repr__(self) -> str:
        state = "closed" if self._control is None else f"{self._control!r}, {self._serving!r}"
        return f"<PeersTier {self._at}: {state}>"

    def _running(self) -> ControlPlane:
        if self._control is None:
            raise ClosedError(f"{self.name} is not open")
        return self._control

    async def _tidy(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(_TIDY_SECONDS)
                await self._links.tidy()


_SESSION_COUNTERS = ("opened", "refused", "malformed", "failed", "ignored")


class _AtPeer:
    """What one peer has, for one request."""

    def __init__(self, tier: PeersTier, whom: PeerSource) -> None:
        self._tier = tier
        self._whom = whom

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        return await self._tier.ask(self._whom, keys)

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        return await self._tier.fetch(self._whom, keys, buffers)


def _references(fetched: Fetched, wanted: Sequence[int]) -> list[Reference]:
    return [place for at in wanted if (place := fetched.places[at]) is not None]


def _parts(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    """As many as one message is about. PeerError where they cannot be in one."""
    if any(len(key) > KEY_BYTES_MAX or len(key) != len(keys[0]) for key in keys):
        raise PeerError("peers", f"keys are of one length, and at most {KEY_BYTES_MAX} bytes")
    return [keys[start : start + KEYS_MAX] for start in range(0, len(keys), KEYS_MAX)]
