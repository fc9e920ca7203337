"""A transport that moves rows between engines of one simulated run, piece by piece.

It keeps the contract of `tiering.peers.transports.base`, and can be as slow as the network wants:
between two pieces of a row anything may happen, to the slot as well as to either engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tiering.errors import ClosedError, PeerError
from tiering.peers.messages import Offer, Reference
from tiering.peers.transports.base import (
    Failed,
    Link,
    Moved,
    Outcome,
    Served,
    Transport,
    check_read,
)
from tiering.testing.simnet import Node, SimNet

QUIET_SECONDS_MAX = 4.0
PIECES = 4
PIECE_SECONDS = (0.0, 0.001, 0.02, 0.3)
_POLL_SECONDS = 0.05

Struck = Callable[[str, Node, Node], None]
"""Told of each step of a link: which, who serves, who reads."""


class SimRows:
    """Where transports of one run find one another, by what they offer."""

    def __init__(self, net: SimNet) -> None:
        self.net = net
        self.doors: dict[str, SimTransport] = {}
        self.struck: Struck = lambda step, serves, reads: None
        self._made = 0

    def name_next(self) -> str:
        self._made += 1
        return f"door {self._made}"


class SimTransport(Transport):
    """With `is_mapped` as over shared memory: rows of an engine that is stopped can be read."""

    def __init__(self, rows: SimRows, served: Served, is_mapped: bool) -> None:
        self.served = served
        self.is_mapped = is_mapped
        self.node: Node | None = None
        self.tokens: dict[bytes, bytes] = {}
        self.links: set[SimLink] = set()
        self._rows = rows
        self._address = ""

    @property
    def name(self) -> str:
        return "shm" if self.is_mapped else "tcp"

    async def open(self) -> None:
        self.node = self._rows.net.node()
        self._address = self._rows.name_next()
        self._rows.doors[self._address] = self

    def offer(self) -> Offer:
        return Offer(self.name, self._address)

    def admit(self, session: bytes, token: bytes) -> None:
        self._require_open()
        self.tokens[session] = token

    def dismiss(self, session: bytes) -> None:
        self._require_open()
        self.tokens.pop(session, None)

    async def connect(self, offer: Offer, session: bytes, token: bytes) -> Link:
        mine = self._require_open()
        net = self._rows.net
        theirs = self._rows.doors.get(offer.address)
        await asyncio.sleep(net.delay_seconds())
        if theirs is None or theirs.node is None or theirs.node.process.is_dead:
            raise PeerError(offer.address, "nobody is there")
        self._rows.struck("link", theirs.node, mine)
        link = SimLink(self._rows, theirs, mine, offer.address, session, self.links.discard)
        if why := await link.passed():
            raise PeerError(offer.address, why)
        if theirs.tokens.get(session) != token:
            raise PeerError(offer.address, "our token was not taken")
        self._require_open()
        self.links.add(link)
        return link

    async def close(self) -> None:
        self.node = None
        self._rows.doors.pop(self._address, None)
        for link in list(self.links):
            await link.close()
        self.tokens.clear()

    def _require_open(self) -> Node:
        if self.node is None:
            raise ClosedError(f"the transport {self.name} is not open")
        return self.node


class SimLink(Link):
    """Reads rows of another engine, PIECES times a part of one."""

    def __init__(
        self,
        rows: SimRows,
        theirs: SimTransport,
        mine: Node,
        address: str,
        session: bytes,
        closed: Callable[[SimLink], None],
    ) -> None:
        """For SimTransport."""
        assert theirs.node is not None
        self.session = session
        self.serves = theirs.node
        self._rows = rows
        self._theirs = theirs
        self._mine = mine
        self._address = address
        self._closed = closed
        self._why: str | None = None
        self._is_closed = False

    async def read(
        self, references: Sequence[Reference], into: Sequence[memoryview]
    ) -> list[Outcome]:
        check_read(references, into, self._theirs.served.row_bytes)
        if self._is_closed:
            raise ClosedError(f"the link to {self._address} is closed")
        return [
            await self._read(reference, buffer)
            for reference, buffer in zip(references, into, strict=True)
        ]

    async def close(self) -> None:
        self._is_closed = True
        self._fail("the link was closed")
        self._closed(self)

    async def passed(self) -> str | None:
        """Wait until something can be moved; why nothing can be, any more."""
        net, serves = self._rows.net, self.serves
        await asyncio.sleep(net.chance.choice(PIECE_SECONDS) * net.chance.random())
        quiet = 0.0
        while self._why is None:
            if serves.process.is_dead and not serves.is_dark:
                self._fail("the connection broke")
            elif self._theirs.node is not serves:
                self._fail("the other side has closed the connection")
            elif self._is_dismissed:
                self._fail("the other side has ended the session")
            elif quiet >= QUIET_SECONDS_MAX:
                self._fail(f"nothing moved for {QUIET_SECONDS_MAX:g} seconds")
            elif self._is_at_hand:
                return None
            else:
                await asyncio.sleep(_POLL_SECONDS)
                quiet += _POLL_SECONDS
        return self._why

    @property
    def _is_dismissed(self) -> bool:
        can_tell = not self.serves.process.is_stopped
        return can_tell and self.session not in self._theirs.tokens

    @property
    def _is_at_hand(self) -> bool:
        if self._theirs.is_mapped:
            return True
        is_stopped = self.serves.process.is_stopped
        return not is_stopped and self._rows.net.is_passable(self.serves, self._mine)

    async def _read(self, of: Reference, into: memoryview) -> Outcome:
        served = self._theirs.served
        if not self._has(of):
            return Moved.STALE
        row = served.rows[of.slot]
        size = -(-len(into) // PIECES)
        for start in range(0, len(into), size):
            self._rows.struck("rows", self.serves, self._mine)
            if (why := await self.passed()) is not None:
                return Failed(PeerError(self._address, why))
            into[start : start + size] = row[start : start + size].tobytes()
        return Moved.HIT if self._has(of) else Moved.STALE

    def _has(self, of: Reference) -> bool:
        generations = self._theirs.served.generations
        return of.slot < len(generations) and int(generations[of.slot]) == of.generation

    def _fail(self, why: str) -> None:
        self._why = self._why or why
