"""Rows over TCP: straight from the region into the socket, and from the socket into the buffers.

A request is a number of rows and a slot and generation for each. The answer has for each a lead,
which says whether bytes follow, then the row, then a tail: whether the slot still had its
generation when the last byte had left, and XXH3-64 of what was sent. The receiver compares that
with what has come. Neither side keeps any row: what a slow receiver has not taken stays in the
region.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import xxhash

from tiering.errors import ClosedError, ConfigError, PeerError
from tiering.peers.addresses import Address
from tiering.peers.messages import Offer, Reference
from tiering.peers.names import resolved
from tiering.peers.transports.base import (
    ROWS_MAX,
    Failed,
    Link,
    Moved,
    Outcome,
    Served,
    Transport,
    check_read,
)
from tiering.peers.transports.doors import Door, Terms, enter
from tiering.peers.transports.wire import Broken, Line, Then, Wire

log = logging.getLogger("tiering")

QUIET_SECONDS_MAX = 4.0
CONNECTIONS_MAX = 4
"""Of one link. A read takes another one for every SPAN_BYTES."""
SPAN_BYTES = 16 << 20
_BACKLOG = 128

_COUNT = struct.Struct("<Q")
_WANTED = struct.Struct("<IQ")
_LEAD = struct.Struct("<Q")
_TAIL = struct.Struct("<QQ")
_STALE, _ROW = 0, 1
_LEAD_STALE, _LEAD_ROW = memoryview(_LEAD.pack(_STALE)), memoryview(_LEAD.pack(_ROW))


class TcpTransport(Transport):
    """Listens at `at`, port 0 being any, and has peers told `host`, or the same."""

    def __init__(
        self,
        served: Served,
        at: Address,
        host: str | None = None,
        *,
        name: str = "host",
        quiet_seconds_max: float = QUIET_SECONDS_MAX,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Errors about `at` are under the key `name`. A connection on which nothing moves for
        `quiet_seconds_max`, while something should, has failed."""
        self._served = served
        self._at = at
        self._host = host or at.host
        self._name = name
        self._quiet_seconds_max = quiet_seconds_max
        self._connections_max = connections_max
        self._door: Door | None = None
        self._links: set[TcpLink] = set()

    @property
    def name(self) -> str:
        return "tcp"

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            family, host = (await loop.run_in_executor(None, resolved, self._at.host))[0]
            listening = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise self._refused(error) from error
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, self._at.port))
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            raise self._refused(error) from error
        self._at = Address(self._at.host, listening.getsockname()[1])
        terms = Terms(*self._served.rows.shape)
        self._door = Door(listening, terms, self._quiet_seconds_max, self._welcome)

    def offer(self) -> Offer:
        return Offer(self.name, str(Address(self._host, self._at.port)))

    def admit(self, session: bytes, token: bytes) -> None:
        self._opened().admit(session, token)

    def dismiss(self, session: bytes) -> None:
        self._opened().dismiss(session)

    async def connect(self, offer: Offer, session: bytes, token: bytes) -> Link:
        self._opened()
        try:
            at = Address.parse("address", offer.address)
        except ConfigError as error:
            raise PeerError(offer.address, f"no address of a peer: {error.reason}") from error
        link = TcpLink(
            at,
            partial(self._enter, at, session, token),
            self._served.row_bytes,
            self._connections_max,
            self._links.discard,
        )
        await link.begin()
        self._links.add(link)
        return link

    async def close(self) -> None:
        door, self._door = self._door, None
        if door is not None:
            door.close()
        for link in list(self._links):
            await link.close()

    def __repr__(self) -> str:
        links = f"{len(self._door or ())} links served, {len(self._links)} of its own"
        return f"<TcpTransport at {self._at}: {links}>"

    async def _enter(self, at: Address, session: bytes, token: bytes) -> Line:
        """One more connection; Broken where there is none to be had."""
        loop = asyncio.get_running_loop()
        came: socket.socket | None = None
        try:
            async with asyncio.timeout(self._quiet_seconds_max):
                family, host = (await loop.run_in_executor(None, resolved, at.host))[0]
                came = socket.socket(family, socket.SOCK_STREAM)
                came.setblocking(False)
                _tune(came)
                await loop.sock_connect(came, (host, at.port))
        except TimeoutError as error:
            if came is not None:
                came.close()
            told = f"no connection within {self._quiet_seconds_max:g} seconds"
            raise Broken(told) from error
        except OSError as error:
            if came is not None:
                came.close()
            raise Broken(f"no connection: {error.strerror or error}") from error
        except BaseException:
            if came is not None:
                came.close()
            raise
        line, terms, _ = await enter(came, session, token, self._quiet_seconds_max)
        if terms.row_bytes != self._served.row_bytes:
            line.close()
            ours = self._served.row_bytes
            raise Broken(f"its rows are of {terms.row_bytes} bytes, ours of {ours}")
        return line

    def _welcome(self, wire: Wire) -> Callable[[str], None]:
        _tune(wire.socket)
        _Serving(self._served, wire).expect()
        return lambda why: log.debug("peers: a link over tcp has ended: %s", why)

    def _opened(self) -> Door:
        if self._door is None:
            raise ClosedError("the transport tcp is not open")
        return self._door

    def _refused(self, error: OSError) -> ConfigError:
        told = f"the data plane cannot listen there: {error.strerror or error}"
        return ConfigError(self._name, str(self._at), told, "write an address of this host")


class _Serving:
    """The serving end of one connection: one request at a time, row by row."""

    def __init__(self, served: Served, wire: Wire) -> None:
        self._rows = served.rows
        self._generations = memoryview(served.generations.data)
        self._wire = wire
        self._wanted: list[tuple[int, int]] = []
        self._at = 0
        self._sending: tuple[int, int] | None = None
        self._checksum = xxhash.xxh3_64()

    def expect(self) -> None:
        """Wait for the next request."""
        count = bytearray(_COUNT.size)
        self._wire.fill([memoryview(count)], lambda: self._counted(count), is_awaited=False)

    def _counted(self, raw: bytearray) -> None:
        (count,) = _COUNT.unpack(raw)
        if not 1 <= count <= ROWS_MAX:
            self._wire.fail(f"a request for {count} rows")
            return
        wanted = bytearray(count * _WANTED.size)
        self._wire.fill([memoryview(wanted)], lambda: self._begin(wanted))

    def _begin(self, wanted: bytearray) -> None:
        self._wanted, self._at = list(_WANTED.iter_unpack(wanted)), 0
        self._go_on()

    def _go_on(self) -> None:
        """Send the tail of the row that has left, and the next row behind it."""
        parts: list[memoryview] = []
        if self._sending is not None:
            # Only now: what was sent is right if the slot has not been given away until here.
            verdict = _ROW if self._has(*self._sending) else _STALE
            parts.append(memoryview(_TAIL.pack(verdict, self._checksum.intdigest())))
            self._sending = None
        while self._at < len(self._wanted):
            slot, generation = self._wanted[self._at]
            self._at += 1
            if not self._has(slot, generation):
                parts.append(_LEAD_STALE)
                continue
            self._sending, self._checksum = (slot, generation), xxhash.xxh3_64()
            parts += _LEAD_ROW, memoryview(self._rows[slot])
            self._wire.send(parts, self._go_on, self._checksum.update)
            return
        self._wire.send(parts, self.expect)

    def _has(self, slot: int, generation: int) -> bool:
        return slot < len(self._generations) and self._generations[slot] == generation


class TcpLink(Link):
    """Several connections to one engine, made as they are needed."""

    def __init__(
        self,
        at: Address,
        enter_one: Callable[[], Coroutine[Any, Any, Line]],
        row_bytes: int,
        connections_max: int,
        closed: Callable[[TcpLink], None],
    ) -> None:
        """For TcpTransport."""
        self._at = at
        self._enter = enter_one
        self._row_bytes = row_bytes
        self._connections_max = connections_max
        self._turns = asyncio.Semaphore(connections_max)
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._closed = closed
        self._why: str | None = None
        self._is_closed = False

    async def begin(self) -> None:
        """Make the first connection; PeerError where there is none to be had."""
        try:
            self._idle.append(await self._enter())
        except Broken as error:
            raise PeerError(str(self._at), f"no link over tcp: {error}") from error

    async def read(
        self, references: Sequence[Reference], into: Sequence[memoryview]
    ) -> list[Outcome]:
        check_read(references, into, self._row_bytes)
        if self._is_closed:
            raise ClosedError(f"the link to {self._at} is closed")
        spans = self._spans(len(references))
        if len(spans) == 1:
            return await self._read_span(references, into)
        async with asyncio.TaskGroup() as group:
            reads = [
                group.create_task(self._read_span(references[span], into[span])) for span in spans
            ]
        return [outcome for read in reads for outcome in read.result()]

    async def close(self) -> None:
        self._is_closed = True
        self._fail("the link was closed")
        self._closed(self)

    def __repr__(self) -> str:
        state = self._why or f"{len(self._idle)} connections idle, {len(self._busy)} busy"
        return f"<TcpLink to {self._at}: {state}>"

    def _spans(self, count: int) -> list[slice]:
        """A batch as stretches, one for each connection, where it is large enough for several."""
        wanted = -(-count * self._row_bytes // SPAN_BYTES)
        number = max(1, min(self._connections_max, wanted, count))
        each = -(-count // number)
        return [slice(at, min(at + each, count)) for at in range(0, max(count, 1), each or 1)]

    async def _read_span(
        self, references: Sequence[Reference], into: Sequence[memoryview]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        async with self._turns:
            try:
                if self._why is not None:
                    raise Broken(self._why)
                line = self._idle.pop() if self._idle else await self._enter()
                self._busy.add(line)
                try:
                    for at in range(0, len(references), ROWS_MAX):
                        span = slice(at, at + ROWS_MAX)
                        await _Reading(line, references[span], into[span], outcomes).run()
                    self._idle.append(line)
                finally:
                    self._busy.discard(line)
            except Broken as error:
                self._fail(str(error))
                failed = Failed(PeerError(str(self._at), f"tcp: {error}"))
                outcomes += [failed] * (len(references) - len(outcomes))
        return outcomes

    def _fail(self, why: str) -> None:
        """Nothing comes from there any more: whoever reads is told now, all at once."""
        if self._why is None:
            self._why = why
        for line in [*self._idle, *self._busy]:
            line.close(why)
        self._idle.clear()


class _Reading:
    """One request on one line, whose outcomes are appended as rows come."""

    def __init__(
        self,
        line: Line,
        references: Sequence[Reference],
        into: Sequence[memoryview],
        outcomes: list[Outcome],
    ) -> None:
        self._line = line
        self._references = references
        self._into = into
        self._outcomes = outcomes
        self._at = 0
        self._lead, self._tail = (
            memoryview(bytearray(_LEAD.size)),
            memoryview(bytearray(_TAIL.size)),
        )
        self._checksum = xxhash.xxh3_64()
        self._done: Then = lambda: None

    async def run(self) -> None:
        """Raises Broken."""
        count = len(self._references)
        if not count:
            return
        request = bytearray(_COUNT.pack(count))
        for reference in self._references:
            request += _WANTED.pack(reference.slot, reference.generation)
        await self._line.send(memoryview(request))
        await self._line.until(self._begin)

    def _begin(self, done: Then) -> None:
        self._done = done
        self._line.wire.fill([self._lead], self._led)

    def _led(self) -> None:
        """The lead of the next row has come."""
        (verdict,) = _LEAD.unpack(self._lead)
        if verdict == _STALE:
            self._came(Moved.STALE)
            if self._at < len(self._into):
                self._line.wire.fill([self._lead], self._led)
            return
        if verdict != _ROW:
            self._line.close(f"an answer that means nothing: {verdict}")
            return
        self._checksum = xxhash.xxh3_64()
        views = [self._into[self._at].cast("B"), self._tail]
        if self._at + 1 < len(self._into):
            views.append(self._lead)  # of the row behind it, in the same call
        self._line.wire.fill(views, self._rowed, self._checksum.update)

    def _rowed(self) -> None:
        """A row, its tail and the next lead have come."""
        verdict, checksum = _TAIL.unpack(self._tail)
        if verdict == _STALE:
            self._came(Moved.STALE)
        elif verdict == _ROW and checksum == self._checksum.intdigest():
            self._came(Moved.HIT)
        else:
            self._line.close("a row came damaged: its checksum is not that of what was sent")
            return
        if self._at < len(self._into):
            self._led()

    def _came(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._at += 1
        if self._at == len(self._into):
            self._done()


def _tune(of: socket.socket) -> None:
    of.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    of.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
