"""Rows over TCP: straight from the region into the socket, and from the socket into the buffers.

A request is a number of rows and a slot and generation for each; what is answered is that of
`tiering_kernels.rowstream`. Requests are received by the loop; rows are moved in threads, one call
for a request, since what moves gigabytes must not hold up the loop, nor wait for the interpreter
lock. Neither side keeps any row: what a slow receiver has not taken stays in the region.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

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
    check_read,
)
from tiering.peers.transports.doors import LINKS_MAX, Door, DoorTransport, Terms, enter
from tiering.peers.transports.wire import Broken, Line, Wire
from tiering.underway import to_the_end
from tiering_kernels.rowstream import StreamEnded, row_stream

log = logging.getLogger("tiering")

QUIET_SECONDS_MAX = 4.0
CONNECTIONS_MAX = 4
"""Of one link. A read takes another one for every SPAN_BYTES: on one host more only compete."""
SPAN_BYTES = 64 << 20
THREADS_MAX = 16
"""That receive rows. For each connection that asks for some there is one that sends: a reader with
a slow line holds it for long, and one that takes nothing until he is given up, and who waited
behind them would take the silence for a peer that is gone."""
_BACKLOG = 128

_COUNT = struct.Struct("<Q")
_WANTED = struct.Struct("<IQ")
_MOVED = {True: Moved.HIT, False: Moved.STALE}
Of = TypeVar("Of")


class TcpTransport(DoorTransport):
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
        super().__init__(served)
        self._at = at
        self._host = host or at.host
        self._name = name
        self._quiet_seconds_max = quiet_seconds_max
        self._connections_max = connections_max
        self._threads: tuple[_Threads, ...] = ()  # to serve, and to read

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
        self._threads = _Threads("serve", LINKS_MAX), _Threads("read", THREADS_MAX)
        terms = Terms(*self._served.rows.shape)
        self._door = Door(listening, terms, self._quiet_seconds_max, self._welcome)

    def offer(self) -> Offer:
        return Offer(self.name, str(Address(self._host, self._at.port)))

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
            self._threads[1],
            self._links.discard,
        )
        await link.begin()
        self._links.add(link)
        return link

    async def close(self) -> None:
        await self._shut()
        threads, self._threads = self._threads, ()
        for each in threads:
            await each.close()

    def __repr__(self) -> str:
        return f"<TcpTransport at {self._at}: {self._told_links()}>"

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
        try:
            self._require_fit(terms)
        except Broken:
            line.close()
            raise
        return line

    def _welcome(self, wire: Wire) -> Callable[[str], None]:
        _tune(wire.connection)
        _Serving(self._served, wire, self._threads[0]).expect()
        return lambda why: log.debug("peers: a link over tcp has ended: %s", why)

    def _refused(self, error: OSError) -> ConfigError:
        told = f"the data plane cannot listen there: {error.strerror or error}"
        return ConfigError(self._name, str(self._at), told, "write an address of this host")


class _Serving:
    """The serving end of one connection: one request at a time."""

    def __init__(self, served: Served, wire: Wire, threads: _Threads) -> None:
        self._served = served
        self._wire = wire
        self._threads = threads

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
        slots, generations = zip(*_WANTED.iter_unpack(wanted), strict=True)
        served, over = self._served, self._wire.lend()
        work = self._threads.run(
            row_stream().send, over, served.rows, served.generations, slots, generations
        )
        work.add_done_callback(self._sent)

    def _sent(self, work: asyncio.Future[None]) -> None:
        error = work.exception()
        if not self._wire.take_back():
            return
        if error is not None:
            self._wire.fail(str(error))
        else:
            self.expect()


class _Threads:
    """Threads that rows are moved in, one for each request under way."""

    def __init__(self, name: str, threads_max: int) -> None:
        self._pool = ThreadPoolExecutor(threads_max, thread_name_prefix=f"tiering-peers-tcp-{name}")
        self._work: set[asyncio.Future[Any]] = set()

    def run(self, call: Callable[..., Of], *arguments: object) -> asyncio.Future[Of]:
        work = asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return work

    async def close(self) -> None:
        """REQUIRES: whatever they wait for has been ended."""
        while self._work:
            await asyncio.wait(self._work)
        self._pool.shutdown()


class TcpLink(Link):
    """Several connections to one engine, made as they are needed."""

    def __init__(
        self,
        at: Address,
        enter_one: Callable[[], Coroutine[Any, Any, Line]],
        row_bytes: int,
        connections_max: int,
        threads: _Threads,
        closed: Callable[[TcpLink], None],
    ) -> None:
        """For TcpTransport."""
        self._at = at
        self._enter = enter_one
        self._row_bytes = row_bytes
        self._connections_max = connections_max
        self._turns = asyncio.Semaphore(connections_max)
        self._threads = threads
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._idled = asyncio.Event()
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
        while self._busy:
            self._idled.clear()
            await self._idled.wait()
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
                if self._why is not None:  # by now
                    line.close()
                    raise Broken(self._why)
                self._busy.add(line)
                try:
                    for at in range(0, len(references), ROWS_MAX):
                        span = slice(at, at + ROWS_MAX)
                        came = await self._exchange(line, references[span], into[span])
                        outcomes += [_MOVED[is_right] for is_right in came]
                    self._idle.append(line)
                except BaseException as error:
                    line.close(str(error))
                    raise
                finally:
                    self._busy.discard(line)
                    self._idled.set()
            except StreamEnded as error:
                outcomes += [_MOVED[is_right] for is_right in error.came]
                outcomes += self._failed(error, len(references) - len(outcomes))
            except (Broken, OSError) as error:
                outcomes += self._failed(error, len(references) - len(outcomes))
        return outcomes

    async def _exchange(
        self, line: Line, references: Sequence[Reference], into: Sequence[memoryview]
    ) -> list[bool]:
        """Ask for rows and fill `into`, in a thread. StreamEnded or OSError; cancelled, it closes
        the line and comes back when the thread has."""
        if not references:
            return []
        wanted = [_WANTED.pack(each.slot, each.generation) for each in references]
        request = _COUNT.pack(len(wanted)) + b"".join(wanted)
        work = self._threads.run(_ask, line.wire.lend(), request, into)
        try:
            return await to_the_end(work, line.close)
        finally:
            line.wire.take_back()

    def _failed(self, error: Exception, count: int) -> list[Outcome]:
        self._fail(str(error))
        return [Failed(PeerError(str(self._at), f"tcp: {self._why}"))] * count

    def _fail(self, why: str) -> None:
        """Nothing comes from there any more: whoever reads is told now, all at once."""
        if self._why is None:
            self._why = why
        for line in [*self._idle, *self._busy]:
            line.close(why)
        self._idle.clear()


def _ask(over: socket.socket, request: bytes, into: Sequence[memoryview]) -> list[bool]:
    over.sendall(request)
    return row_stream().receive(over, into)


def _tune(of: socket.socket) -> None:
    of.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    of.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
