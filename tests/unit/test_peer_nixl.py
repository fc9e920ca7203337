"""NIXL's transport over an agent that the test drives: what its thread does, and what becomes of
READs that nobody waits for any more. Over NIXL itself: `tests/contract`."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.errors import PeerError
from tiering.peers.messages import Offer, Reference
from tiering.peers.transports import landing
from tiering.peers.transports.base import Failed, Link, Moved
from tiering.peers.transports.nixl import NixlTransport
from tiering.testing.rowspace import RowSpace, holds

ROW_BYTES = 4096
ROWS = 8
PLACES = 4
SECONDS = 30.0
SESSION = bytes(16)

Pairs = list[tuple[int, int, int]]


class Read:
    def __init__(self, here: Pairs, there: Pairs, peer: str) -> None:
        self.here, self.there, self.peer = here, there, peer


class Agent:
    """All agents are of this process, and each one's metadata is its name. READs from `stopped`
    do not end; a call of the name `held` does not return while `gate` is not set."""

    stopped: set[str]
    held: str
    gate: threading.Event
    threads: dict[str, set[int]]

    def __init__(self, name: str, config: object) -> None:
        self.name = name
        self.known: set[str] = set()
        self.memories: list[list[tuple[int, int, int, str]]] = []
        self._called("made")

    def _called(self, call: str) -> None:
        self.threads.setdefault(self.name, set()).add(threading.get_ident())
        if call == self.held:
            assert self.gate.wait(SECONDS)

    def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> object:
        self._called("register_memory")
        self.memories.append(places)
        return places

    def deregister_memory(self, places: list[tuple[int, int, int, str]]) -> None:
        self._called("deregister_memory")
        self.memories.remove(places)

    def get_partial_agent_metadata(self, of: object, connects: bool, backends: list[str]) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._called("add_remote_agent")
        self.known.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, peer: str) -> None:
        self._called("remove_remote_agent")
        self.known.remove(peer)

    def send_notif(self, peer: str, notif: bytes) -> None:
        self._called("send_notif")

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._called("get_new_notifs")
        return {}

    def get_xfer_descs(self, descriptions: Pairs, kind: str) -> Pairs:
        return descriptions

    def initialize_xfer(self, kind: str, here: Pairs, there: Pairs, peer: str) -> Read:
        self._called("initialize_xfer")
        if peer not in self.known:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return Read(here, there, peer)

    def transfer(self, read: Read) -> str:
        self._called("transfer")
        return "PROC"

    def check_xfer_state(self, read: Read) -> str:
        self._called("check_xfer_state")
        if read.peer not in self.known:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")  # as NIXL does, whatever still lands
        if read.peer in self.stopped:
            return "PROC"
        for (here, size, _), (there, _, _) in zip(read.here, read.there, strict=True):
            ctypes.memmove(here, there, size)
        return "DONE"

    def release_xfer_handle(self, read: Read) -> None:
        self._called("release_xfer_handle")


@pytest.fixture(autouse=True)
def _agents(monkeypatch: pytest.MonkeyPatch) -> None:
    api = SimpleNamespace(nixl_agent=Agent, nixl_agent_config=lambda **of: of)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    for name, value in (
        ("stopped", set()),
        ("held", ""),
        ("gate", threading.Event()),
        ("threads", {}),
    ):
        monkeypatch.setattr(Agent, name, value, raising=False)
    monkeypatch.setattr(landing, "LANDING_BYTES", PLACES * (ROW_BYTES + 16))


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[NixlTransport, RowSpace]]:
    space = RowSpace(ROWS, ROW_BYTES)
    transport = NixlTransport(space.served, quiet_seconds_max=0.05)
    async with asyncio.timeout(SECONDS):
        await transport.open()
        try:
            yield transport, space
        finally:
            await transport.close()
            space.close()


async def linked(ours: NixlTransport, theirs: NixlTransport) -> Link:
    return await ours.connect(theirs.offer(), SESSION, b"")


def wanted(space: RowSpace, count: int) -> tuple[list[Reference], list[memoryview]]:
    into = [memoryview(bytearray(ROW_BYTES)) for _ in range(count)]
    return [space.reference(slot) for slot in range(count)], into


async def require_reads(link: Link, space: RowSpace, count: int = ROWS) -> None:
    references, into = wanted(space, count)
    assert await link.read(references, into) == [Moved.HIT] * count
    for reference, buffer in zip(references, into, strict=True):
        assert holds(reference, buffer)


def inside(transport: NixlTransport) -> Any:
    """Its agent."""
    return transport._agent._inside._agent  # type: ignore[union-attr]


async def until(what: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if what():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come to that")


CALLS = (
    "made register_memory add_remote_agent send_notif initialize_xfer transfer check_xfer_state "
    "get_new_notifs release_xfer_handle remove_remote_agent"
)


@pytest.mark.parametrize("call", CALLS.split())
async def test_the_loop_goes_on_while_nixl_works(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whatever it does, it does in the one thread of its agent."""
    monkeypatch.setattr(Agent, "held", call)
    asyncio.get_running_loop().call_later(0.05, Agent.gate.set)
    async with opened() as (theirs, space), opened() as (ours, _):
        theirs.admit(SESSION, b"")
        link = await linked(ours, theirs)
        await require_reads(link, space)
        await link.close()
        await until(lambda: not inside(ours).known)
    assert len(Agent.threads) == 2
    assert all(len(each) == 1 for each in Agent.threads.values())
    assert threading.get_ident() not in set.union(*Agent.threads.values())


async def test_a_peer_that_does_not_answer_takes_no_memory_from_others() -> None:
    async with opened() as (silent, there), opened() as (lively, space), opened() as (ours, _):
        link, other = await linked(ours, silent), await linked(ours, lively)
        Agent.stopped.add(silent._name)
        references, into = wanted(there, ROWS)
        outcomes = await link.read(references, into)
        assert [type(each) for each in outcomes] == [Failed] * ROWS
        await link.close()
        assert repr(ours._landing) == "<Landing 0 of 4 free, 4 adrift>"
        await require_reads(other, space)
        assert repr(ours._landing) == "<Landing 4 of 8 free, 4 adrift>"
        # It is not forgotten before, or nobody could tell when they have landed.
        assert silent._name in inside(ours).known
        Agent.stopped.clear()
        await until(lambda: silent._name not in inside(ours).known)
        assert repr(ours._landing) == "<Landing 8 of 8 free, 0 adrift>"


async def test_memory_for_reads_that_do_not_land_has_an_end() -> None:
    async with AsyncExitStack() as stack:
        ours, _ = await stack.enter_async_context(opened())
        lively, _ = await stack.enter_async_context(opened())
        for _ in range(landing.TIMES_MAX):
            silent, there = await stack.enter_async_context(opened())
            link = await linked(ours, silent)
            Agent.stopped.add(silent._name)
            references, into = wanted(there, PLACES)
            await link.read(references, into)
        assert repr(ours._landing) == "<Landing 0 of 16 free, 16 adrift>"
        with pytest.raises(PeerError, match="all memory for READs is held up by peers that do not"):
            await linked(ours, lively)
        Agent.stopped.clear()
        await until(lambda: ours._landing._adrift == 0)  # type: ignore[union-attr]
        await linked(ours, lively)


async def test_two_links_to_one_engine_end_by_themselves() -> None:
    """It has two sessions where it is known by two names."""
    async with opened() as (theirs, space), opened() as (ours, _):
        first, second = await linked(ours, theirs), await linked(ours, theirs)
        await first.close()
        await first.close()
        await require_reads(second, space)
        await second.close()
        await until(lambda: not inside(ours).known)


async def test_who_waits_for_memory_is_told_that_the_link_is_closed() -> None:
    async with opened() as (silent, there), opened() as (ours, _):
        link = await linked(ours, silent)
        Agent.stopped.add(silent._name)
        references, into = wanted(there, PLACES)
        async with asyncio.TaskGroup() as group:
            reads = [group.create_task(link.read(references, into)) for _ in range(3)]
            await asyncio.sleep(0)
            await link.close()
        assert {type(each) for read in reads for each in read.result()} == {Failed}


@pytest.mark.parametrize("call", ["add_remote_agent", "transfer"])
async def test_who_does_not_wait_for_a_link_leaves_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(Agent, "held", call)
    async with opened() as (theirs, _), opened() as (ours, _):
        linking = asyncio.get_running_loop().create_task(linked(ours, theirs))
        await asyncio.sleep(0.02)
        linking.cancel()
        asyncio.get_running_loop().call_later(0.05, Agent.gate.set)
        await asyncio.wait([linking])
        assert linking.cancelled()
        await until(lambda: not inside(ours).known)
        assert repr(ours._landing) == "<Landing 4 of 4 free, 0 adrift>"


async def test_what_was_lent_is_taken_back_at_the_end() -> None:
    async with opened() as (theirs, space), opened() as (ours, _):
        await require_reads(await linked(ours, theirs), space)
        agents = [inside(ours), inside(theirs)]
        assert [len(agent.memories) for agent in agents] == [2, 2]
    assert [agent.memories for agent in agents] == [[], []]
    assert not agents[0].known


async def test_what_leads_nowhere_is_no_link() -> None:
    async with opened() as (ours, _):
        with pytest.raises(PeerError, match="no link over nixl"):
            await ours.connect(Offer("nixl", "nowhere", b""), SESSION, b"")
