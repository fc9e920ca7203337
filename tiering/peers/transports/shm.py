"""Rows of an engine on the same host: its region is mapped, read-only, and copied from.

The region's descriptor comes over a UNIX socket whose name is of the abstract namespace, so it is
gone with its engine; both sides ask the kernel who the other one is, and go on only with the same
user. While the socket is open the engine lives. Once it is not, nothing is read any more: what lies
there is whole, but nobody says what it is.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiering.errors import ClosedError, ConfigError, PeerError
from tiering.peers.messages import Offer, Reference
from tiering.peers.transports.base import (
    Failed,
    Link,
    Moved,
    Outcome,
    Served,
    Space,
    check_read,
)
from tiering.peers.transports.doors import Door, DoorTransport, Terms, enter
from tiering.peers.transports.wire import Broken, Line, Wire
from tiering.underway import UnderWay, to_the_end
from tiering_kernels.copies import copy_rows

QUIET_SECONDS_MAX = 4.0
INLINE_BYTES_MAX = 128 << 10
"""What is copied at once: handing it to a thread would take longer."""
STEP_BYTES = 32 << 20
"""What a thread copies before it looks whether its read was cancelled."""
_THREADS = 2
_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ShmTransport(DoorTransport):
    """Serves what has spaces; links to engines of this host and this user."""

    def __init__(
        self,
        served: Served,
        *,
        where: str = "secondary_tiers[]",
        quiet_seconds_max: float = QUIET_SECONDS_MAX,
    ) -> None:
        """Errors of `open` are under the tier's path `where`."""
        if served.rows_space is None or served.generations_space is None:
            raise ValueError("rows and generations that other processes cannot map")
        super().__init__(served)
        self._spaces = served.rows_space, served.generations_space
        self._where = where
        self._quiet_seconds_max = quiet_seconds_max
        # Never guessed, and never there before: nobody can be listening in its place.
        self._address = f"kv-tiering-{secrets.token_hex(16)}"
        self._granted: list[int] = []
        self._threads: ThreadPoolExecutor | None = None

    @property
    def name(self) -> str:
        return "shm"

    async def open(self) -> None:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(f"\0{self._address}")
            listening.listen(_BACKLOG)
            for space in self._spaces:
                self._granted.append(_read_only(space.descriptor))
        except OSError as error:
            listening.close()
            self._let_go()
            told = f"cannot be served to other processes: {error.strerror or error}"
            key = f"{self._where}.transport"
            raise ConfigError(key, "shm", told, "set transport: tcp") from error
        rows, row_bytes = self._served.rows.shape
        terms = Terms(rows, row_bytes, *(space.offset for space in self._spaces))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiering-peers-shm")
        self._door = Door(
            listening,
            terms,
            self._quiet_seconds_max,
            self._welcome,
            descriptors=tuple(self._granted),
            is_trusted=_is_same_user,
        )

    def offer(self) -> Offer:
        return Offer(self.name, self._address, _boot_id())

    async def connect(self, offer: Offer, session: bytes, token: bytes) -> Link:
        self._opened()
        if offer.details != _boot_id():
            raise PeerError(offer.address, "no link over shm: it is on another host")
        came = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            came.setblocking(False)
            came.connect(f"\0{offer.address}")
            if not _is_same_user(came):
                raise PermissionError("it runs as another user")
        except OSError as error:
            came.close()
            told = f"no link over shm: {error.strerror or error}"
            raise PeerError(offer.address, told) from error
        try:
            line, terms, granted = await enter(came, session, token, self._quiet_seconds_max, 2)
        except Broken as error:
            raise PeerError(offer.address, f"no link over shm: {error}") from error
        try:
            link = self._map(offer.address, line, terms, granted)
        except (OSError, ValueError, Broken) as error:
            line.close()
            raise PeerError(offer.address, f"no link over shm: {error}") from error
        finally:
            for descriptor in granted:
                os.close(descriptor)
        self._links.add(link)
        return link

    async def close(self) -> None:
        await self._shut()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()  # whose links are closed: nothing is left in them
        self._let_go()

    def __repr__(self) -> str:
        return f"<ShmTransport {self._address}: {self._told_links()}>"

    def _map(self, peer: str, line: Line, terms: Terms, granted: list[int]) -> ShmLink:
        self._require_fit(terms)
        rows = _mapped(Space(granted[0], terms.rows_offset, terms.rows * terms.row_bytes))
        generations = _mapped(Space(granted[1], terms.generations_offset, terms.rows * 8))
        assert self._threads is not None
        return ShmLink(
            peer,
            line,
            rows.reshape(terms.rows, terms.row_bytes),
            generations.view(np.uint64),
            self._threads,
            self._links.discard,
        )

    def _welcome(self, wire: Wire) -> Callable[[str], None]:
        def spoke() -> None:
            wire.fail("a word where none is expected")

        wire.fill([memoryview(bytearray(1))], spoke, is_awaited=False)
        return lambda why: None

    def _let_go(self) -> None:
        while self._granted:
            os.close(self._granted.pop())


class ShmLink(Link):
    """Another engine's rows, mapped."""

    def __init__(
        self,
        peer: str,
        line: Line,
        rows: npt.NDArray[np.uint8],
        generations: npt.NDArray[np.uint64],
        threads: ThreadPoolExecutor,
        closed: Callable[[ShmLink], None],
    ) -> None:
        """For ShmTransport."""
        self._peer = peer
        self._line = line
        self._rows = rows
        self._generations = generations
        self._row_bytes = int(rows.shape[1])
        self._threads = threads
        self._closed = closed
        self._is_closed = False
        self._reading = UnderWay()
        # Nothing comes but the end of it, when its engine ends or wants us no longer.
        line.wire.fill([memoryview(bytearray(1))], self._spoke, is_awaited=False)

    async def read(
        self, references: Sequence[Reference], into: Sequence[memoryview]
    ) -> list[Outcome]:
        check_read(references, into, self._row_bytes)
        if self._is_closed:
            raise ClosedError(f"the link to {self._peer} is closed")
        each = max(1, STEP_BYTES // self._row_bytes)
        outcomes: list[Outcome] = []
        with self._reading.one():
            for at in range(0, len(references), each):
                span = slice(at, at + each)
                outcomes += await self._step(references[span], into[span])
        return outcomes

    async def close(self) -> None:
        self._is_closed = True
        self._line.close("the link was closed")
        await self._reading.end()
        # The mappings go with the last that looks at them.
        self._rows = np.empty((0, self._row_bytes), np.uint8)
        self._generations = np.empty(0, np.uint64)
        self._closed(self)

    def __repr__(self) -> str:
        return f"<ShmLink to {self._peer}: {self._line.why or len(self._rows)}>"

    async def _step(
        self, references: Sequence[Reference], into: Sequence[memoryview]
    ) -> list[Outcome]:
        if self._line.wire.is_closed:
            failed = Failed(PeerError(self._peer, f"shm: {self._line.why}"))
            return [failed] * len(references)
        slots = [reference.slot for reference in references]
        wanted = [reference.generation for reference in references]
        rows, generations = self._rows, self._generations
        if len(slots) * self._row_bytes <= INLINE_BYTES_MAX:
            copied = copy_rows(rows, generations, slots, wanted, into)
        else:
            copied = await to_the_end(
                asyncio.get_running_loop().run_in_executor(
                    self._threads, copy_rows, rows, generations, slots, wanted, into
                )
            )
        return [Moved.HIT if is_right else Moved.STALE for is_right in copied]

    def _spoke(self) -> None:
        self._line.close("a word where none is expected")


def _mapped(space: Space) -> npt.NDArray[np.uint8]:
    """`space`, read-only; ValueError where it is no memory or not that large."""
    status = os.fstat(space.descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size < space.offset + space.size:
        raise ValueError(f"memory of {status.st_size} bytes, not {space.offset + space.size}")
    start = space.offset - space.offset % mmap.ALLOCATIONGRANULARITY
    length = space.offset + space.size - start
    memory = mmap.mmap(space.descriptor, length, prot=mmap.PROT_READ, offset=start)
    return np.frombuffer(memory, np.uint8, count=space.size, offset=space.offset - start)


def _read_only(descriptor: int) -> int:
    """Another descriptor of the same, which nothing can be written through, and which does not hold
    the lock that the first one may have."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def _is_same_user(of: socket.socket) -> bool:
    raw = of.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def _boot_id() -> bytes:
    """Of this host since its start."""
    return _BOOT_ID.read_bytes().strip()
