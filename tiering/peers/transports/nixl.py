"""Rows by NIXL: RDMA where there is any, whatever its backends offer where not.

The reader issues READs: of the generations, of the rows, and of the generations again. They land in
memory of this transport and are copied to their buffers, since a READ that was given up may still
land later; its part of that memory is used again only when it has. Whoever knows the keys of the
served memory can read it, so they are told to peers in the sealed greeting only, and `dismiss`
cannot take them back.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Callable, Sequence

import numpy as np

from tiering.errors import ClosedError, ConfigError, PeerError
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
from tiering.peers.transports.landing import WORD_BYTES, Landing, NoRoom, Place
from tiering.peers.transports.nixlagent import NixlAgent, Transfer, why
from tiering.underway import UnderWay

QUIET_SECONDS_MAX = 4.0
STEP_BYTES = 16 << 20
"""What one transfer moves: it has to be whole within `quiet_seconds_max`."""

_PLACE = struct.Struct("<QQQQ")  # where rows begin, how many, of how many bytes; generations


class NixlTransport(Transport):
    """`backends` and `num_threads` are NIXL's; errors are under the tier's path `where`."""

    def __init__(
        self,
        served: Served,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        *,
        where: str = "secondary_tiers[]",
        quiet_seconds_max: float = QUIET_SECONDS_MAX,
    ) -> None:
        self._served = served
        self._backends = backends
        self._num_threads = num_threads
        self._where = where
        self._quiet_seconds_max = quiet_seconds_max
        self._name = f"kv-tiering-{secrets.token_hex(8)}"
        self._sessions: set[bytes] = set()
        self._links: set[NixlLink] = set()
        # Made by `open`.
        self._agent: NixlAgent | None = None
        self._details = b""
        self._landing: Landing | None = None

    @property
    def name(self) -> str:
        return "nixl"

    async def open(self) -> None:
        agent = NixlAgent(self._name, self._backends, self._num_threads)
        landing = Landing(self._served.row_bytes, agent.lend)
        rows, generations = self._served.rows, self._served.generations
        try:
            metadata = await agent.open([rows, generations.view(np.uint8)], landing.memory)
        except ConfigError as error:
            raise error.under(self._where) from error.__cause__
        place = _PLACE.pack(rows.ctypes.data, *rows.shape, generations.ctypes.data)
        self._details = place + metadata
        self._agent, self._landing = agent, landing

    def offer(self) -> Offer:
        self._opened()
        return Offer(self.name, self._name, self._details)

    def admit(self, session: bytes, token: bytes) -> None:
        self._sessions.add(session)
        self._opened().serves = True

    def dismiss(self, session: bytes) -> None:
        self._sessions.discard(session)
        self._opened().serves = bool(self._sessions)

    async def connect(self, offer: Offer, session: bytes, token: bytes) -> Link:
        agent = self._opened()
        row_bytes = self._served.row_bytes
        try:
            place = _PLACE.unpack_from(offer.details)
            if place[2] != row_bytes:
                raise ValueError(f"its rows are of {place[2]} bytes, ours of {row_bytes}")
            peer = await agent.add(offer.details[_PLACE.size :])
        except Exception as error:
            raise PeerError(offer.address, f"no link over nixl: {why(error)}") from error
        assert self._landing is not None
        link = NixlLink(
            agent, peer, place, self._landing, self._quiet_seconds_max, self._links.discard
        )
        self._links.add(link)
        try:
            await link.begin()
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for link in list(self._links):
            await link.close()
        await agent.close()
        self._landing = None
        self._sessions.clear()

    def __repr__(self) -> str:
        state = "closed" if self._agent is None else f"{len(self._links)} links of its own"
        return f"<NixlTransport {self._name} over {','.join(self._backends)}: {state}>"

    def _opened(self) -> NixlAgent:
        if self._agent is None:
            raise ClosedError("the transport nixl is not open")
        return self._agent


class NixlLink(Link):
    """Reads of one other agent's memory."""

    def __init__(
        self,
        agent: NixlAgent,
        peer: str,
        place: tuple[int, int, int, int],
        landing: Landing,
        quiet_seconds_max: float,
        closed: Callable[[NixlLink], None],
    ) -> None:
        """For NixlTransport. Takes what `agent.add` gave over."""
        self._agent = agent
        self._peer = peer
        self._rows_at, self._rows, self._row_bytes, self._generations_at = place
        self._landing = landing
        self._quiet_seconds_max = quiet_seconds_max
        self._closed = closed
        self._is_closed = False
        self._reading = UnderWay()
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def begin(self) -> None:
        """Read one word, so that a peer that is not there is found out now."""
        with self._reading.one():
            (outcome,) = await self._step([Reference(0, 0)], None)
        if isinstance(outcome, Failed):
            told = f"no link over nixl: {outcome.error.reason}"
            raise PeerError(self._peer, told) from outcome.error

    async def read(
        self, references: Sequence[Reference], into: Sequence[memoryview]
    ) -> list[Outcome]:
        check_read(references, into, self._row_bytes)
        if self._is_closed:
            raise ClosedError(f"the link to {self._peer} is closed")
        outcomes: list[Outcome] = []
        each = max(1, STEP_BYTES // self._row_bytes)
        with self._reading.one():
            while len(outcomes) < len(references):
                span = slice(len(outcomes), len(outcomes) + each)
                outcomes += await self._step(references[span], into[span])
        return outcomes

    async def close(self) -> None:
        self._fail("the link was closed")
        was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._agent.let_go(self._peer)
        await self._reading.end()
        self._closed(self)

    def __repr__(self) -> str:
        state = self._failed.result() if self._failed.done() else "open"
        return f"<NixlLink to {self._peer}: {state}>"

    async def _step(
        self, references: Sequence[Reference], into: Sequence[memoryview] | None
    ) -> list[Outcome]:
        """Of the first of `references`, as many as there is room for; `into` None is a trial."""
        places: list[Place] = []
        transfers: list[Transfer] = []
        try:
            places = await self._landing.take(len(references), self._failed)
            there = [
                (place, reference.slot)
                for place, reference in zip(places, references, strict=False)
                if reference.slot < self._rows
            ]
            if there:
                await self._read_words(there, 0, transfers)
                if into is not None:
                    rows = [
                        (place.row_at, self._rows_at + slot * self._row_bytes)
                        for place, slot in there
                    ]
                    await self._move(rows, self._row_bytes, transfers)
                    await self._read_words(there, 1, transfers)
            if into is None:
                return [Moved.HIT]
            few = references[: len(places)]
            return await self._agent.run(_copied, few, places, into, self._rows)
        except (_GivenUp, NoRoom) as error:
            self._fail(str(error))
            failed = Failed(PeerError(self._peer, f"nixl: {error}"))
            return [failed] * (len(places) or len(references))
        finally:
            self._landing.give(places, transfers[-1].ended if transfers else None)

    async def _read_words(
        self, there: Sequence[tuple[Place, int]], number: int, transfers: list[Transfer]
    ) -> None:
        at = self._generations_at
        words = [(place.word_at(number), at + slot * WORD_BYTES) for place, slot in there]
        await self._move(words, WORD_BYTES, transfers)

    async def _move(
        self, pairs: Sequence[tuple[int, int]], size: int, transfers: list[Transfer]
    ) -> None:
        """READ `size` bytes for each (address here, address there). _GivenUp where it fails or
        takes too long; the last of `transfers` may then still land."""
        if self._failed.done():
            raise _GivenUp(self._failed.result())
        transfer = Transfer(self._peer, pairs, size)
        transfers.append(transfer)
        try:
            await self._agent.begin(transfer)
            ends = [transfer.ended, self._failed]
            await asyncio.wait(
                ends, timeout=self._quiet_seconds_max, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            transfer.is_awaited = False
        if not transfer.ended.done():
            if self._failed.done():
                raise _GivenUp(self._failed.result())
            raise _GivenUp(f"nothing came for {self._quiet_seconds_max:g} seconds")
        if why_not := transfer.ended.result():
            raise _GivenUp(why_not)

    def _fail(self, why_not: str) -> None:
        if not self._failed.done():
            self._failed.set_result(why_not)


class _GivenUp(Exception):
    """A transfer that is not waited for any longer, and why."""


def _copied(
    references: Sequence[Reference],
    places: Sequence[Place],
    into: Sequence[memoryview],
    rows: int,
) -> list[Outcome]:
    """Fill `into` from where the rows have landed. For a thread."""
    outcomes: list[Outcome] = []
    for reference, place, buffer in zip(references, places, into, strict=False):
        generations = {place.word(0), place.word(1)}
        if reference.slot >= rows or generations != {reference.generation}:
            outcomes.append(Moved.STALE)
            continue
        np.copyto(np.frombuffer(buffer, np.uint8), place.row)
        outcomes.append(Moved.HIT)
    return outcomes
