"""How a link begins: a door that listens and lets in who proves a session's token, and the one who
comes to it. For data planes over sockets.

The dialled side greets with a nonce; the other answers with the session, a nonce of its own and a
proof of the token over both; the dialled one answers with its terms and a proof over all of that.
So neither can be played back, and both know that the other is who the control plane spoke with.
What a session is, and its token, never leave here in clear.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tiering.errors import ClosedError
from tiering.peers.auth import proof
from tiering.peers.messages import ID_BYTES, NONCE_BYTES
from tiering.peers.transports.base import Link, Served, Transport
from tiering.peers.transports.wire import Broken, Line, Wire

STRANGERS_MAX = 64
"""Connections that have proven nothing yet; more are closed at once."""
LINKS_MAX = 1024
STRANGER_SECONDS_MAX = 5.0
REST_SECONDS = 1.0
"""Until somebody who comes is looked at again, where the system had no room for one more."""

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MAGIC = b"KVPEER\r\n"
_GREETING_BYTES = len(_MAGIC) + NONCE_BYTES
_PROOF_BYTES = 32
_HELLO_BYTES = ID_BYTES + NONCE_BYTES + _PROOF_BYTES
_TERMS = struct.Struct("<QQQQ")
_WELCOME_BYTES = _TERMS.size + _PROOF_BYTES


class Terms(NamedTuple):
    """What is behind a door: rows, their bytes, and where in their memory rows and generations
    begin, for who can map it."""

    rows: int
    row_bytes: int
    rows_offset: int = 0
    generations_offset: int = 0


Welcome = Callable[[Wire], Callable[[str], None]]
"""Takes the wire of who was let in; gives who is told why it has failed."""


class Door:
    """Between `__init__` and `close`, on the running loop. Takes `listening` over."""

    def __init__(
        self,
        listening: socket.socket,
        terms: Terms,
        quiet_seconds_max: float,
        welcome: Welcome,
        *,
        descriptors: tuple[int, ...] = (),
        is_trusted: Callable[[socket.socket], bool] = lambda of: True,
    ) -> None:
        """`descriptors` go to who is let in. Who is not `is_trusted` is not even greeted."""
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._terms = _TERMS.pack(*terms)
        self._quiet_seconds_max = quiet_seconds_max
        self._welcome = welcome
        self._descriptors = descriptors
        self._is_trusted = is_trusted
        self._tokens: dict[bytes, bytes] = {}
        self._strangers: dict[Wire, asyncio.TimerHandle] = {}
        self._inside: dict[Wire, bytes] = {}
        self._resting: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._listen()

    def admit(self, session: bytes, token: bytes) -> None:
        self._tokens[session] = token

    def dismiss(self, session: bytes) -> None:
        self._tokens.pop(session, None)
        for wire in [wire for wire, whose in self._inside.items() if whose == session]:
            self._inside.pop(wire)
            wire.close()

    def close(self) -> None:
        self._loop.remove_reader(self._listening)
        if self._resting is not None:
            self._resting.cancel()
        self._listening.close()
        for wire in list(self._strangers):
            self._turn_away(wire)
        for wire in self._inside:
            wire.close()
        self._inside.clear()
        self._tokens.clear()

    def __len__(self) -> int:
        return len(self._inside)

    def _listen(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            came, _ = self._listening.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                # Who came goes on standing there, and would wake the loop for ever.
                self._loop.remove_reader(self._listening)
                self._resting = self._loop.call_later(REST_SECONDS, self._listen)
            return  # otherwise gone again
        full = len(self._strangers) >= STRANGERS_MAX or len(self._inside) >= LINKS_MAX
        if full or not self._is_trusted(came):
            came.close()
            return
        told: list[Callable[[str], None]] = []
        wire = Wire(came, self._quiet_seconds_max, lambda why: self._lost(wire, why, told))
        patience = self._loop.call_later(STRANGER_SECONDS_MAX, self._turn_away, wire)
        self._strangers[wire] = patience
        nonce, hello = secrets.token_bytes(NONCE_BYTES), bytearray(_HELLO_BYTES)
        heard = partial(self._heard, wire, nonce, hello, told)
        wire.send([memoryview(_MAGIC + nonce)], lambda: wire.fill([memoryview(hello)], heard))

    def _heard(
        self, wire: Wire, nonce: bytes, hello: bytearray, told: list[Callable[[str], None]]
    ) -> None:
        session = bytes(hello[:ID_BYTES])
        theirs = bytes(hello[ID_BYTES : ID_BYTES + NONCE_BYTES])
        token = self._tokens.get(session)
        proven = proof(token or b"", "link, dialling", nonce, theirs)
        if token is None or not hmac.compare_digest(proven, hello[ID_BYTES + NONCE_BYTES :]):
            self._turn_away(wire)
            return
        self._strangers.pop(wire).cancel()
        self._inside[wire] = session
        mine = proof(token, "link, dialled", nonce, theirs, self._terms)
        then = partial(self._let_in, wire, told)
        wire.send([memoryview(self._terms + mine)], then, descriptors=self._descriptors)

    def _let_in(self, wire: Wire, told: list[Callable[[str], None]]) -> None:
        told.append(self._welcome(wire))

    def _lost(self, wire: Wire, why: str, told: list[Callable[[str], None]]) -> None:
        self._turn_away(wire)
        self._inside.pop(wire, None)
        for tell in told:
            tell(why)

    def _turn_away(self, wire: Wire) -> None:
        if (patience := self._strangers.pop(wire, None)) is not None:
            patience.cancel()
            wire.close()


class DoorTransport(Transport):
    """What transports have in common whose links come through a door, which `open` makes."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._door: Door | None = None
        # Of its own, to others.
        self._links: set[Link] = set()

    def admit(self, session: bytes, token: bytes) -> None:
        self._opened().admit(session, token)

    def dismiss(self, session: bytes) -> None:
        self._opened().dismiss(session)

    async def _shut(self) -> None:
        """Close the door and every link; what is left is the transport's own."""
        door, self._door = self._door, None
        if door is not None:
            door.close()
        for link in list(self._links):
            await link.close()

    def _opened(self) -> Door:
        if self._door is None:
            raise ClosedError(f"the transport {self.name} is not open")
        return self._door

    def _require_fit(self, terms: Terms) -> None:
        """Broken where rows behind another door are not of our size."""
        ours = self._served.row_bytes
        if terms.row_bytes != ours:
            raise Broken(f"its rows are of {terms.row_bytes} bytes, ours of {ours}")

    def _told_links(self) -> str:
        return f"{len(self._door or ())} links served, {len(self._links)} of its own"


async def enter(
    came: socket.socket,
    session: bytes,
    token: bytes,
    quiet_seconds_max: float,
    descriptors_max: int = 0,
) -> tuple[Line, Terms, list[int]]:
    """Through the door that `came` is connected to, taking it over: a line, what is behind it, and
    the descriptors that came along, for the caller to close. Broken where it is not let in."""
    line = Line(came, quiet_seconds_max)
    line.wire.descriptors_max = descriptors_max
    try:
        greeting = bytearray(_GREETING_BYTES)
        await line.fill(memoryview(greeting))
        if not greeting.startswith(_MAGIC):
            raise Broken("what listens there is no peer of kv-tiering, or another version of it")
        nonce, mine = bytes(greeting[len(_MAGIC) :]), secrets.token_bytes(NONCE_BYTES)
        proven = proof(token, "link, dialling", nonce, mine)
        await line.send(memoryview(session + mine + proven))
        welcome = bytearray(_WELCOME_BYTES)
        try:
            await line.fill(memoryview(welcome))
        except Broken as error:
            raise Broken(f"our token was not taken: {error}") from error
        terms = bytes(welcome[: _TERMS.size])
        theirs = proof(token, "link, dialled", nonce, mine, terms)
        if not hmac.compare_digest(theirs, welcome[_TERMS.size :]):
            raise Broken("what listens there does not know this session's token")
        if len(line.wire.descriptors) != descriptors_max:
            raise Broken(f"{len(line.wire.descriptors)} descriptors came, not {descriptors_max}")
    except BaseException:
        line.close()
        while line.wire.descriptors:
            with contextlib.suppress(OSError):
                socket.close(line.wire.descriptors.pop())
        raise
    line.wire.descriptors_max = 0
    granted, line.wire.descriptors = line.wire.descriptors, []
    return line, Terms(*_TERMS.unpack(terms)), granted
