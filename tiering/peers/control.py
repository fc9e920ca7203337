"""The control plane of one engine: who has dialled it, whom it has dialled, and the sockets.

Owns the sockets and both tables; what is said is decided in `session`. A ROUTER is bound and serves
guests; each dialled peer has a DEALER of its own, never shared and never used again, so a peer that
was given up can be dialled anew in the same instant. Everything runs in callbacks of one loop: no
task, no thread but ZeroMQ's own, and nothing of it waits. Guests are served for as long as the loop
runs, whether or not the engine has anything to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from tiering.clock import Clock, MonotonicClock
from tiering.errors import ClosedError, ConfigError, PeerError
from tiering.metrics import is_worth_a_line
from tiering.peers import sockets
from tiering.peers.addresses import Address
from tiering.peers.agreement import Introduction
from tiering.peers.auth import SharedKey
from tiering.peers.calls import Guest, Peer, Source
from tiering.peers.directory import Directory
from tiering.peers.messages import ID_BYTES, Disconnect, encode
from tiering.peers.names import resolved
from tiering.peers.session import Frames, Patience, Session
from tiering.peers.sockets import Pipe

log = logging.getLogger("tiering")

_TICKS_A_HEARTBEAT = 4
_REASONS_MAX = 256
_Place = tuple[socket.AddressFamily, str]


def new_engine_id() -> bytes:
    """Random, for one start of one engine."""
    return secrets.token_bytes(ID_BYTES)


@dataclass(slots=True)
class ControlStats:
    """Counters since `open`, and how many sessions there are now. `refused`, `malformed` and
    `failed` are ends of sessions, whoever ended them; `ignored` were messages about rounds that
    were over, in sessions that are over."""

    peers: int = 0
    guests: int = 0
    opened: int = 0
    refused: int = 0
    malformed: int = 0
    failed: int = 0
    ignored: int = 0


class ControlPlane:
    """Between `open` and `close`, or within `async with`."""

    def __init__(
        self,
        me: Introduction,
        source: Source,
        at: Address,
        key: SharedKey | None = None,
        *,
        name: str = "host",
        rank: int = 0,
        peers_max: int = 128,
        guests_max: int = 256,
        patience: Patience | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`at` is bound, port 0 being any; errors about it are under the key `name`, and name
        `rank`, whose port it is. `peers_max` are dialled and `guests_max` served at a time."""
        self.me = me
        self._source = source
        self._at = at
        self._key = key or SharedKey()
        self._name = name
        self._rank = rank
        self._guests_max = guests_max
        self._patience = patience or Patience()
        self._clock = clock or MonotonicClock()
        self._directory: Directory[Peer] = Directory(peers_max)
        self._guests: dict[bytes, Guest] = {}
        self._dealers: dict[Peer, Pipe] = {}
        self._stats = ControlStats()
        self._refusals = _Refusals()
        # Made by `open`.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: sockets.Context | None = None
        self._router: Pipe | None = None
        self._ticking: asyncio.TimerHandle | None = None

    @property
    def address(self) -> Address:
        """What is bound, with its real port."""
        self._running()
        return self._at

    async def open(self) -> None:
        """ConfigError where the address cannot be bound."""
        loop = asyncio.get_running_loop()
        try:
            family, host = (await loop.run_in_executor(None, resolved, self._at.host))[0]
        except OSError as error:
            raise ConfigError(
                self._name, self._at.host, f"has no address: {error}", "write one of this host"
            ) from error
        context = sockets.Context()
        router = sockets.router(context, self._heard, family is socket.AF_INET6)
        try:
            bound = router.bind(self._name, Address(host, self._at.port), self._rank)
        except BaseException:
            router.close()
            context.term()
            raise
        self._at = Address(self._at.host, bound.port)
        self._context, self._router, self._loop = context, router, loop
        self._tick()

    async def close(self) -> None:
        """Tell everybody, and let go of sockets and threads. May be called twice."""
        if self._loop is None or self._router is None or self._context is None:
            return
        loop, self._loop = self._loop, None
        context, self._context = self._context, None
        if self._ticking is not None:
            self._ticking.cancel()
        for _, peer in self._directory:
            peer.close("closing", "the engine that asks stops")
        for guest in list(self._guests.values()):
            guest.close("closing", "the engine that serves stops")
        self._guests.clear()
        for dealer in self._dealers.values():
            dealer.close(sockets.GOODBYE_MILLISECONDS)
        self._dealers.clear()
        self._router.close(sockets.GOODBYE_MILLISECONDS)
        # Returns when the last words have left, or their time is over.
        await asyncio.shield(loop.run_in_executor(None, context.term))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def peer(self, at: Address) -> Peer:
        """The engine at `at`, with an open session, dialled if need be. PeerError where there
        is none, was none a moment ago, or where it refuses."""
        self._running()
        if why := self._directory.why_not(at, self._clock.now()):
            raise PeerError(str(at), why)
        peer = self._directory.get(at)
        if peer is not None:
            self._look_after(peer)  # it may have ended while something was said
        peer = self._directory.get(at) or self._dial(at)
        if peer.over is not None:
            raise PeerError(str(at), peer.over.reason)
        await peer.opened()
        return peer

    def known(self, at: Address) -> Peer | None:
        """The engine at `at`, if there is an open session with it; nobody is dialled."""
        peer = self._directory.get(at)
        return peer if peer is not None and peer.is_open else None

    def stats(self) -> ControlStats:
        self._stats.peers, self._stats.guests = len(self._directory), len(self._guests)
        return self._stats

    def __repr__(self) -> str:
        state = "closed" if self._loop is None else f"at {self._at}"
        return f"<ControlPlane {state}: {len(self._directory)} peers, {len(self._guests)} guests>"

    # Those that this engine dials

    def _dial(self, at: Address) -> Peer:
        room = self._directory.room()
        if room is False:
            told = f"{self._directory.peers_max} peers are in use already, which is all that may be"
            raise PeerError(str(at), told)
        if isinstance(room, tuple):
            room[1].close("closing", "not used for the longest, and there is another to be dialled")
            self._look_after(room[1])
        session = Session(self.me, self._key, "dialling", self._clock.now(), self._patience)
        peer = Peer(at, session, self._clock)
        self._directory.add(at, peer)
        if _is_literal(at.host):
            self._connect(peer, at.host)
        else:
            looked_up = self._running().run_in_executor(None, resolved, at.host)
            looked_up.add_done_callback(partial(self._found, peer))
        return peer

    def _found(self, peer: Peer, places: asyncio.Future[list[_Place]]) -> None:
        if places.cancelled():
            return
        error = places.exception()  # first of all: it is to be heard, even where nobody cares
        if self._loop is None or peer.over is not None:
            return
        if error is not None:
            peer.close("failed", f"its name has no address: {error}")
            self._look_after(peer)
            return
        self._connect(peer, places.result()[0][1])

    def _connect(self, peer: Peer, host: str) -> None:
        assert self._context is not None
        heard = partial(self._heard_of, peer)
        dealer = sockets.dealer(self._context, heard, ":" in host)
        self._dealers[peer] = dealer
        try:
            dealer.connect(Address(host, peer.at.port))
        except PeerError as error:
            peer.close("failed", error.reason)
            self._look_after(peer)
            return
        peer.sends_with(dealer.send)

    def _heard_of(self, peer: Peer, frames: list[bytes]) -> None:
        was_open = peer.is_open
        peer.received(frames)
        if peer.is_open and not was_open:
            self._stats.opened += 1
            self._directory.opened(peer.at)
        self._look_after(peer)

    def _look_after(self, peer: Peer) -> None:
        """Where the session of `peer` is over, so is everything about it."""
        if peer.over is None or self._directory.get(peer.at) is not peer:
            return
        self._count(peer)
        ending, reason, is_told = peer.over
        if not (ending == "closing" and not is_told):
            log.info("peer %s: the session is over: %s", peer.at, reason)
        now = self._clock.now()
        self._directory.ended(peer.at, peer, ending, reason, now, is_told=is_told)
        if (dealer := self._dealers.pop(peer, None)) is not None:
            dealer.close(0 if is_told else sockets.GOODBYE_MILLISECONDS)

    # Those that have dialled this engine

    def _heard(self, frames: list[bytes]) -> None:
        whence, *rest = frames
        guest = self._guests.get(whence)
        if guest is None:
            self._greeted(whence, rest)
            return
        was_open = guest.is_open
        guest.received(rest)
        if guest.is_open and not was_open:
            self._stats.opened += 1
            self._doubt_others_of(guest)
        self._look_after_guest(whence, guest)

    def _greeted(self, whence: bytes, frames: list[bytes]) -> None:
        """Somebody new, or somebody whose session is over."""
        send: Callable[[Frames], bool] = partial(self._send_to, whence)
        if len(self._guests) >= self._guests_max and not self._make_room():
            full = f"{self._guests_max} engines are served already, which is all that may be"
            # Not a refusal, which would have the two leave one another alone for long.
            send((encode(Disconnect("failed", full)), b""))
            self._stats.failed += 1
            self._refusals.tell(full)
            return
        session = Session(self.me, self._key, "dialled", self._clock.now(), self._patience)
        guest = Guest(session, self._clock, self._source)
        guest.sends_with(send)
        self._guests[whence] = guest
        guest.received(frames)
        self._look_after_guest(whence, guest)

    def _make_room(self) -> bool:
        """Whether there is room for one more guest, now that the longest unused one has gone."""
        idle = [
            (guest.used_at, whence)
            for whence, guest in self._guests.items()
            if guest.is_open and guest.is_idle
        ]
        if not idle:
            return False
        whence = min(idle)[1]
        guest = self._guests[whence]
        guest.close("closing", "not used for the longest, and there is another to be served")
        self._look_after_guest(whence, guest)
        return True

    def _doubt_others_of(self, newest: Guest) -> None:
        """An engine that dials again may have lost its session, and is then given up sooner; or it
        has two, under two names of this host, and both go on."""
        now = self._clock.now()
        for guest in self._guests.values():
            if (
                guest is not newest
                and guest.is_open
                and guest.introduction.engine_id == newest.introduction.engine_id
            ):
                guest.hurry(now)

    def _look_after_guest(self, whence: bytes, guest: Guest) -> None:
        if guest.over is None or self._guests.get(whence) is not guest:
            return
        del self._guests[whence]
        self._count(guest)
        if guest.over.ending in ("refused", "malformed") and (
            guest.was_greeted or not guest.over.is_told
        ):
            self._refusals.tell(guest.over.reason)

    def _send_to(self, whence: bytes, frames: Frames) -> bool:
        return self._router is not None and self._router.send((whence, *frames))

    # Of both

    def _count(self, end: Peer | Guest) -> None:
        assert end.over is not None
        self._stats.ignored += end.session.asked.ignored + end.session.served.ignored
        if end.over.ending in ("refused", "malformed", "failed"):
            setattr(self._stats, end.over.ending, getattr(self._stats, end.over.ending) + 1)

    def _tick(self) -> None:
        loop, now = self._running(), self._clock.now()
        # First of all: without it nobody would ever be given up.
        seconds = self._patience.heartbeat_seconds / _TICKS_A_HEARTBEAT
        self._ticking = loop.call_later(seconds, self._tick)
        for _, peer in self._directory:
            peer.tick(now)
            self._look_after(peer)
        for whence, guest in list(self._guests.items()):
            guest.tick(now)
            self._look_after_guest(whence, guest)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ClosedError("the control plane of peers is not open")
        return self._loop


class _Refusals:
    """Tells why engines were refused, each reason by itself, and more and more seldom. Whoever
    thinks up new ones, which anybody can who reaches the port, has them counted as one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def tell(self, reason: str) -> None:
        is_new = reason not in self._counts and len(self._counts) >= _REASONS_MAX
        key = "" if is_new else reason
        self._counts[key] += 1
        if is_worth_a_line(count := self._counts[key]):
            log.warning("peers: an engine that dialled was refused: %s (%d so far)", reason, count)


def _is_literal(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return True
    return False
