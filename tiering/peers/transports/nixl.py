"""Rows by NIXL: RDMA where there is any, whatever its backends offer where not.

The reader issues READs: of the generations, of the rows, and of the generations again. They land in
memory of this transport and are copied to their buffers, since a READ that was given up may still
land later; its part of that memory is used again only when it has. Whoever knows the keys of the
served memory can read it, so they are told to peers in the sealed greeting only, and `dismiss`
cannot take them back. NIXL is imported when this is opened. Its progress thread, which takes a
whole core, is off: both ends progress from the loop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

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
    Transport,
    check_read,
)

QUIET_SECONDS_MAX = 4.0
STAGING_BYTES = 64 << 20
STEP_BYTES = 16 << 20
"""What one transfer moves: it has to be whole within `quiet_seconds_max`."""

_PLACE = struct.Struct("<QQQQ")  # where rows begin, how many, of how many bytes; generations
_WORD_BYTES = 8
_POLL_SECONDS = 0.0002
# Where a peer is heard of, the serving end lets UCX work this often, for so long; else seldom.
_BUSY_SECONDS, _BUSY_FOR_SECONDS, _IDLE_SECONDS = 0.0005, 0.05, 0.01
_INFINIBAND = Path("/sys/class/infiniband")
_READING = b"reading"


def has_infiniband() -> bool:
    """Whether this host has a device for RDMA: InfiniBand or RoCE."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


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
        self._backends = list(backends)
        self._num_threads = num_threads
        self._where = where
        self._quiet_seconds_max = quiet_seconds_max
        self._name = f"kv-tiering-{secrets.token_hex(8)}"
        self._sessions: set[bytes] = set()
        self._links: set[NixlLink] = set()
        # Made by `open`.
        self._agent: Any = None
        self._registered: list[Any] = []
        self._details = b""
        self._staging: _Staging | None = None
        self._progress: asyncio.TimerHandle | None = None
        self._busy_until = 0.0

    @property
    def name(self) -> str:
        return "nixl"

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        made = partial(_new_agent, self._name, self._backends, self._num_threads)
        try:
            self._agent = await loop.run_in_executor(None, made)
        except ConfigError as error:
            raise error.under(self._where) from error.__cause__
        rows, generations = self._served.rows, self._served.generations
        self._staging = _Staging(self._served.row_bytes)
        try:
            ours = [_place(rows), _place(generations.view(np.uint8))]
            told = self._agent.register_memory(ours, "DRAM")
            self._registered = [told]
            staged = self._agent.register_memory([_place(self._staging.memory)], "DRAM")
            self._registered.append(staged)
            metadata = self._agent.get_partial_agent_metadata(told, True, self._backends)
        except Exception as error:
            await self.close()
            raise _unusable(self._backends, error).under(self._where) from error
        place = _PLACE.pack(rows.ctypes.data, *rows.shape, generations.ctypes.data)
        self._details = place + metadata
        self._make_progress()

    def offer(self) -> Offer:
        self._opened()
        return Offer(self.name, self._name, self._details)

    def admit(self, session: bytes, token: bytes) -> None:
        self._opened()
        self._sessions.add(session)

    def dismiss(self, session: bytes) -> None:
        self._opened()
        self._sessions.discard(session)

    async def connect(self, offer: Offer, session: bytes, token: bytes) -> Link:
        agent = self._opened()
        row_bytes = self._served.row_bytes
        try:
            place = _PLACE.unpack_from(offer.details)
            if place[2] != row_bytes:
                raise ValueError(f"its rows are of {place[2]} bytes, ours of {row_bytes}")
            peer = agent.add_remote_agent(offer.details[_PLACE.size :])
        except Exception as error:
            raise PeerError(offer.address, f"no link over nixl: {_why(error)}") from error
        assert self._staging is not None
        link = NixlLink(
            agent, peer, place, self._staging, self._quiet_seconds_max, self._links.discard
        )
        self._links.add(link)
        try:
            await link.begin()
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        for link in list(self._links):
            await link.close()
        if self._progress is not None:
            self._progress.cancel()
        agent, self._agent = self._agent, None
        if agent is None:
            return
        # What was given up and is still under way has nowhere to land any more.
        for registered in self._registered:
            _quietly(agent.deregister_memory, registered)
        self._registered, self._staging = [], None
        self._sessions.clear()

    def __repr__(self) -> str:
        state = "closed" if self._agent is None else f"{len(self._links)} links of its own"
        return f"<NixlTransport {self._name} over {','.join(self._backends)}: {state}>"

    def _make_progress(self) -> None:
        """Let UCX do for readers what the hardware does not."""
        loop = asyncio.get_running_loop()
        if (self._sessions or self._links) and _quietly(self._agent.get_new_notifs):
            self._busy_until = loop.time() + _BUSY_FOR_SECONDS
        is_busy = loop.time() < self._busy_until
        seconds = _BUSY_SECONDS if is_busy else _IDLE_SECONDS
        self._progress = loop.call_later(seconds, self._make_progress)

    def _opened(self) -> Any:
        if self._agent is None:
            raise ClosedError("the transport nixl is not open")
        return self._agent


class _Staging:
    """Memory that READs land in: places of one row and two words each."""

    def __init__(self, row_bytes: int) -> None:
        self._place_bytes = -(-row_bytes // _WORD_BYTES) * _WORD_BYTES + 2 * _WORD_BYTES
        count = max(4, STAGING_BYTES // self._place_bytes)
        self.memory: npt.NDArray[np.uint8] = np.zeros(count * self._place_bytes, np.uint8)
        self._free = list(range(count))
        self._freed = asyncio.Event()
        self.address: int = self.memory.ctypes.data
        self._row_bytes = row_bytes

    async def take(self, most: int) -> list[int]:
        """Some places, at most so many, as soon as there is one."""
        while not self._free:
            self._freed.clear()
            await self._freed.wait()
        taken, self._free = self._free[:most], self._free[most:]
        return taken

    def give(self, places: Iterable[int]) -> None:
        self._free.extend(places)
        self._freed.set()

    def row_at(self, place: int) -> int:
        return place * self._place_bytes

    def word_at(self, place: int, number: int) -> int:
        return (place + 1) * self._place_bytes - (2 - number) * _WORD_BYTES

    def row(self, place: int) -> npt.NDArray[np.uint8]:
        start = self.row_at(place)
        return self.memory[start : start + self._row_bytes]

    def word(self, place: int, number: int) -> int:
        start = self.word_at(place, number)
        return int.from_bytes(self.memory[start : start + _WORD_BYTES].tobytes(), "little")


class NixlLink(Link):
    """Reads of one other agent's memory."""

    def __init__(
        self,
        agent: Any,
        peer: Any,
        place: tuple[int, int, int, int],
        staging: _Staging,
        quiet_seconds_max: float,
        closed: Callable[[NixlLink], None],
    ) -> None:
        """For NixlTransport."""
        self._agent = agent
        self._peer = peer
        self._name = peer.decode() if isinstance(peer, bytes) else str(peer)
        self._rows_at, self._rows, self._row_bytes, self._generations_at = place
        self._staging = staging
        self._quiet_seconds_max = quiet_seconds_max
        self._closed = closed
        self._is_closed = False
        self._why: str | None = None
        # READs that nobody waits for any more, and where they may still land.
        self._adrift: list[tuple[Any, list[int]]] = []

    async def begin(self) -> None:
        """Read one word, so that a peer that is not there is found out now."""
        (outcome,) = await self._step([Reference(0, 0)], None)
        if isinstance(outcome, Failed):
            told = f"no link over nixl: {outcome.error.reason}"
            raise PeerError(self._name, told) from outcome.error

    async def read(
        self, references: Sequence[Reference], into: Sequence[memoryview]
    ) -> list[Outcome]:
        check_read(references, into, self._row_bytes)
        if self._is_closed:
            raise ClosedError(f"the link to {self._name} is closed")
        outcomes: list[Outcome] = []
        each = max(1, STEP_BYTES // self._row_bytes)
        while len(outcomes) < len(references):
            span = slice(len(outcomes), len(outcomes) + each)
            outcomes += await self._step(references[span], into[span])
        return outcomes

    async def close(self) -> None:
        self._is_closed = True
        self._fail("the link was closed")
        self._settle()
        _quietly(self._agent.remove_remote_agent, self._peer)
        self._closed(self)

    def __repr__(self) -> str:
        return f"<NixlLink to {self._name}: {self._why or 'open'}, {len(self._adrift)} adrift>"

    async def _step(
        self, references: Sequence[Reference], into: Sequence[memoryview] | None
    ) -> list[Outcome]:
        """Of the first of `references`, as many as there is room for; `into` None is a trial."""
        self._settle()
        places = await self._staging.take(len(references))
        there = [
            (place, reference.slot)
            for place, reference in zip(places, references, strict=False)
            if reference.slot < self._rows
        ]
        held: list[Any] = []
        try:
            _quietly(self._agent.send_notif, self._peer, _READING)
            if there:
                await self._read_words(there, 0, places, held)
                if into is not None:
                    await self._move(
                        [
                            (self._staging.row_at(place), self._rows_at + slot * self._row_bytes)
                            for place, slot in there
                        ],
                        self._row_bytes,
                        places,
                        held,
                    )
                    await self._read_words(there, 1, places, held)
            return self._outcomes(references[: len(places)], places, into)
        except _GivenUp as error:
            self._fail(str(error))
            return [Failed(PeerError(self._name, f"nixl: {error}"))] * len(places)
        finally:
            if not held:
                self._staging.give(places)

    async def _read_words(
        self, there: Sequence[tuple[int, int]], number: int, places: list[int], held: list[Any]
    ) -> None:
        at = self._generations_at
        words = [
            (self._staging.word_at(place, number), at + slot * _WORD_BYTES) for place, slot in there
        ]
        await self._move(words, _WORD_BYTES, places, held)

    async def _move(
        self, pairs: Sequence[tuple[int, int]], size: int, places: list[int], held: list[Any]
    ) -> None:
        """READ `size` bytes for each (offset in staging, address there). _GivenUp where it fails or
        takes too long; what may still land then stays in `held`, and `places` with it."""
        if self._why is not None:
            raise _GivenUp(self._why)
        agent, base = self._agent, self._staging.address
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._quiet_seconds_max
        try:
            ours = agent.get_xfer_descs([(base + here, size, 0) for here, _ in pairs], "DRAM")
            theirs = agent.get_xfer_descs([(far, size, 0) for _, far in pairs], "DRAM")
            handle = agent.initialize_xfer("READ", ours, theirs, self._peer)
        except Exception as error:
            raise _GivenUp(_why(error)) from error
        held.append(handle)
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                await asyncio.sleep(_POLL_SECONDS)
                if self._why is not None:
                    raise _GivenUp(self._why)
                if loop.time() >= give_up_at:
                    told = f"nothing came for {self._quiet_seconds_max:g} seconds"
                    raise _GivenUp(told)
                state = agent.check_xfer_state(handle)
        except (_GivenUp, asyncio.CancelledError):
            self._adrift.append((handle, places))
            raise
        except Exception as error:
            held.clear()
            _quietly(agent.release_xfer_handle, handle)
            raise _GivenUp(_why(error)) from error
        held.clear()
        _quietly(agent.release_xfer_handle, handle)
        if state != "DONE":
            raise _GivenUp(f"a transfer ended as {state}")

    def _outcomes(
        self,
        references: Sequence[Reference],
        places: Sequence[int],
        into: Sequence[memoryview] | None,
    ) -> list[Outcome]:
        if into is None:
            return [Moved.HIT]
        outcomes: list[Outcome] = []
        for number, (reference, place) in enumerate(zip(references, places, strict=True)):
            generations = {self._staging.word(place, each) for each in (0, 1)}
            if reference.slot >= self._rows or generations != {reference.generation}:
                outcomes.append(Moved.STALE)
                continue
            np.copyto(np.frombuffer(into[number], np.uint8), self._staging.row(place))
            outcomes.append(Moved.HIT)
        return outcomes

    def _fail(self, why: str) -> None:
        if self._why is None:
            self._why = why

    def _settle(self) -> None:
        """Take back what READs that were given up no longer land in."""
        for handle, places in list(self._adrift):
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception:
                state = "ERR"
            if state != "PROC":
                self._adrift.remove((handle, places))
                _quietly(self._agent.release_xfer_handle, handle)
                self._staging.give(places)


class _GivenUp(Exception):
    """A transfer that is not waited for any longer, and why."""


def _new_agent(name: str, backends: list[str], num_threads: int) -> Any:
    """Blocks for a second or two. ConfigError where NIXL cannot be had."""
    if not has_infiniband():
        # Without such a device UCX's modules for it have nothing to do, and a library of theirs
        # crashes the interpreter at its exit. UCX reads this when it is loaded.
        os.environ.setdefault("UCX_MODULES", "^ib,rdmacm")
    try:
        api = import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            "transport",
            "nixl",
            f"NIXL cannot be imported: {error}",
            "run pip install 'kv-tiering[nixl]', or set transport: tcp",
        ) from error
    try:
        config = api.nixl_agent_config(
            enable_prog_thread=False, num_threads=num_threads, backends=backends
        )
        return api.nixl_agent(name, config)
    except Exception as error:
        raise _unusable(backends, error) from error


def _unusable(backends: Sequence[str], error: Exception) -> ConfigError:
    return ConfigError(
        "backends",
        list(backends),
        f"NIXL cannot use them here: {_why(error)}",
        "name others that move host memory, such as UCX, or set transport: tcp",
    )


def _place(of: npt.NDArray[np.uint8]) -> tuple[int, int, int, str]:
    return of.ctypes.data, of.nbytes, 0, ""


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    """What `call` gives, None where it fails: where nothing could be done about it."""
    try:
        return call(*arguments)
    except Exception:
        return None


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
