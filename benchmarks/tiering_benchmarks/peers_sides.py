"""The two ends of what `tiering-bench tiers --tier p2p` measures: how rows come from another
process, and who serves them there.

Every side moves the same number of rows of one size from another process, or from memory, into the
same page-aligned memory, and says nothing of time. What serves is a process of its own.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiering.peers.addresses import Address
from tiering.peers.agreement import Introduction
from tiering.peers.auth import SharedKey
from tiering.peers.calls import Guest, Peer
from tiering.peers.messages import Fetch, Lookup, Reference, keys_of
from tiering.peers.rounds import Round
from tiering.peers.transports.base import Link, Moved, Served, Transport
from tiering.peers.transports.nixl import NixlTransport
from tiering.peers.transports.shm import ShmTransport
from tiering.peers.transports.tcp import TcpTransport
from tiering.testing.producer import SESSION, TOKEN, Producer
from tiering.testing.rowspace import RowSpace, holds
from tiering_benchmarks.tiers_run import WrongAnswer

if TYPE_CHECKING:
    from tiering.peers.control import ControlPlane

BARE, TCP, NIXL, MEMCPY, SHM = "bare tcp", "tcp", "nixl", "memcpy", "shm"
SIDES = (BARE, TCP, NIXL, MEMCPY, SHM)
AGAINST = {TCP: BARE, NIXL: BARE, SHM: MEMCPY}
"""What a side's speed is a ratio of."""

_HERE = Address("127.0.0.1", 0)
_SPAWN = multiprocessing.get_context("spawn")
_KEY = SharedKey(bytes(range(64)))


def why_not(side: str) -> str | None:
    """Why `side` cannot be measured here; None where it can."""
    if side == NIXL and find_spec("nixl") is None:
        return "NIXL is not installed (pip install nixl)"
    return None


def tcp(served: Served) -> Transport:
    """For this process, and by its name for the one that serves; so are the next two."""
    return TcpTransport(served, _HERE)


def shm(served: Served) -> Transport:
    return ShmTransport(served)


def nixl(served: Served) -> Transport:
    return NixlTransport(served)


_MAKERS = {TCP: tcp, SHM: shm, NIXL: nixl}


class Landing:
    """Page-aligned memory for `rows` rows, touched once."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        memory = memoryview(mmap.mmap(-1, rows * row_bytes))
        memory[:] = bytes(len(memory))
        self.buffers = [memory[at * row_bytes : (at + 1) * row_bytes] for at in range(rows)]

    def clear(self) -> None:
        for buffer in self.buffers:
            buffer[:8] = bytes(8)

    def require(self, side: str) -> None:
        """WrongAnswer unless every row is there."""
        for slot, buffer in enumerate(self.buffers):
            if not holds(Reference(slot, 1), buffer):
                raise WrongAnswer(f"{side}: row {slot} is not what was served")


class Side(ABC):
    """One way for rows to come."""

    @abstractmethod
    async def move(self, landing: Landing) -> None:
        """Have all rows come into `landing`."""


class _Linked(Side):
    def __init__(self, link: Link) -> None:
        self._link = link

    async def move(self, landing: Landing) -> None:
        references = [Reference(slot, 1) for slot in range(len(landing.buffers))]
        outcomes = await self._link.read(references, landing.buffers)
        if outcomes != [Moved.HIT] * len(references):
            raise WrongAnswer(f"{self._link}: {set(outcomes)}")


class _Bare(Side):
    """A loop of `recv_into` in this thread, as plain as it can be."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def move(self, landing: Landing) -> None:
        receive = self._connection.recv_into
        self._connection.sendall(b"1")
        for buffer in landing.buffers:
            came = receive(buffer)
            while came < len(buffer):
                came += receive(buffer[came:])


class _Memcpy(Side):
    def __init__(self, rows: npt.NDArray[np.uint8]) -> None:
        self._rows = rows

    async def move(self, landing: Landing) -> None:
        for row, buffer in zip(self._rows, landing.buffers, strict=True):
            np.copyto(np.frombuffer(buffer, np.uint8), row)


@asynccontextmanager
async def side(name: str, rows: int, row_bytes: int) -> AsyncIterator[Side]:
    """`name`, ready to move rows."""
    if name == MEMCPY:
        space = RowSpace(rows, row_bytes)
        yield _Memcpy(space.rows)
        space.close()
    elif name == BARE:
        with _Helper(_send_bare, rows, row_bytes) as helper:  # noqa: SIM117
            with socket.create_connection(("127.0.0.1", helper.port)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield _Bare(connection)
    else:
        own = RowSpace(1, row_bytes)
        transport = _MAKERS[name](own.served)
        await transport.open()
        maker = f"{__name__}:{_MAKERS[name].__name__}"
        try:
            with await asyncio.to_thread(Producer, maker, rows, row_bytes) as producer:
                link = await transport.connect(producer.offer, SESSION, TOKEN)
                yield _Linked(link)
                await link.close()
        finally:
            await transport.close()
            own.close()


@asynccontextmanager
async def control(keys: int) -> AsyncIterator[Peer]:
    """Another process that holds every other key of `lookup_keys(keys)`."""
    with _Helper(_answer_lookups, keys, 0) as helper:
        plane = _plane(_Shelf())
        async with plane:
            yield await plane.peer(Address("127.0.0.1", helper.port))


class _Helper:
    """A process that serves; its port."""

    def __init__(self, work: Callable[..., None], *arguments: int) -> None:
        ours, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe = ours
        self.port: int = ours.recv()

    def __enter__(self) -> _Helper:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _send_bare(pipe: Connection, rows: int, row_bytes: int) -> None:
    space = RowSpace(rows, row_bytes)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            for row in space.rows:
                connection.sendall(row)


class _Shelf:
    """Holds every other key."""

    def greeted(self, guest: Guest) -> None: ...

    def wanted(self, guest: Guest, of: Round, question: Lookup | Fetch) -> None:
        # As a mirror would: one look into a dict for each key.
        held = self._held
        guest.hits(of, bytes(key in held for key in keys_of(question)))

    def released(self, guest: Guest, of: Round, success: bool | None) -> None: ...

    def request_over(self, guest: Guest, kv_request_id: str) -> None: ...

    def over(self, guest: Guest, reason: str) -> None: ...

    def __init__(self, keys: int = 0) -> None:
        self._held = dict.fromkeys(key for key in lookup_keys(keys) if key[-1] % 2 == 0)


def lookup_keys(count: int) -> list[bytes]:
    """Keys as vLLM's are: 32 bytes of hash, 4 of group."""
    return [number.to_bytes(36, "big") for number in range(count)]


def _plane(shelf: _Shelf) -> ControlPlane:
    # It takes ZeroMQ, which no other benchmark needs.
    from tiering.peers.control import ControlPlane, new_engine_id

    introduction = Introduction(new_engine_id(), 1, bytes(32), {}, "", 1, 4096)
    return ControlPlane(introduction, shelf, _HERE, _KEY)


def _answer_lookups(pipe: Connection, keys: int, unused: int) -> None:
    async def serve() -> None:
        async with _plane(_Shelf(keys)) as plane:
            pipe.send(plane.address.port)
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(pipe.fileno(), ended.set)
            await ended.wait()

    asyncio.run(serve())
