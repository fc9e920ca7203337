"""What happens in one turn of the loop, or in an order that is nobody's to choose: over sessions
without a network, and over links whose connections come when the test says so."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from peer_engine import QUICK, Shelf, engine
from peer_frames import KEY, introduction, keys
from peer_sessions import PATIENCE
from tiering.errors import PeerError
from tiering.peers import control
from tiering.peers.addresses import Address
from tiering.peers.calls import Guest, Peer
from tiering.peers.messages import Reference
from tiering.peers.session import Frames, Session
from tiering.peers.transports.base import Failed
from tiering.peers.transports.tcp import TcpTransport
from tiering.peers.transports.wire import Line
from tiering.testing.clocks import ManualClock
from tiering.testing.producer import SESSION, TOKEN
from tiering.testing.rowspace import RowSpace
from tiering.tiers.peers.showcase import Showcase


class Two:
    """A peer and the guest that it is there. What each says waits until it is brought."""

    def __init__(self) -> None:
        clock = ManualClock()
        asks = Session(introduction(1), KEY, "dialling", clock.now(), PATIENCE)
        serves = Session(introduction(2), KEY, "dialled", clock.now(), PATIENCE)
        self.shelf = Shelf()
        self.peer = Peer(Address("127.0.0.1", 1), asks, clock)
        self.guest = Guest(serves, clock, self.shelf)
        self._said: list[tuple[Any, Frames]] = []
        self.peer.sends_with(lambda frames: self._say(self.guest, frames))
        self.guest.sends_with(lambda frames: self._say(self.peer, frames))
        self.bring()

    def bring(self) -> None:
        while self._said:
            whom, frames = self._said.pop(0)
            whom.received(frames)

    def _say(self, whom: object, frames: Frames) -> bool:
        self._said.append((whom, frames))
        return True


async def test_an_answer_in_the_turn_in_which_its_question_is_cancelled_leaves_nothing_pinned() -> (
    None
):
    two = Two()
    fetch = asyncio.get_running_loop().create_task(two.peer.fetch("r", keys(3)))
    await asyncio.sleep(0)
    fetch.cancel()
    two.bring()  # before the task has heard of it
    await asyncio.wait([fetch])
    two.bring()
    assert fetch.cancelled()
    assert two.shelf.pinned == {}
    assert two.guest.is_idle
    assert two.peer.is_idle


async def test_a_peer_that_is_being_dialled_is_in_use() -> None:
    """Somebody waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = Address("127.0.0.1", silent.getsockname()[1])
        hurried = {"peers_max": 1, "patience": QUICK}
        async with engine(1) as (serves, _), engine(2, **hurried) as (asks, _):
            dialling = asyncio.get_running_loop().create_task(asks.peer(at))
            await asyncio.sleep(0.05)
            with pytest.raises(PeerError, match="1 peers are in use already"):
                await asks.peer(serves.address)
            with pytest.raises(PeerError, match="no answer to our greeting"):
                await dialling
            assert (await asks.peer(serves.address)).is_open


async def test_a_name_that_is_found_to_have_no_address_too_late_is_nobodys_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    gate, resolved = threading.Event(), control.resolved

    def slow(host: str) -> Any:
        if host != "slow.example":
            return resolved(host)
        gate.wait(10.0)
        raise OSError("no such name")

    monkeypatch.setattr(control, "resolved", slow)
    async with engine(1, patience=QUICK) as (asks, _):
        with pytest.raises(PeerError, match="no answer to our greeting"):
            await asks.peer(Address("slow.example", 1))
        gate.set()
        await asyncio.sleep(0.1)
    gc.collect()
    assert not told


async def test_a_link_that_is_closed_while_a_read_waits_for_a_connection_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = RowSpace(1, 4096)
    transport = TcpTransport(space.served, Address("127.0.0.1", 0))
    await transport.open()
    transport.admit(SESSION, TOKEN)
    link: Any = await transport.connect(transport.offer(), SESSION, TOKEN)
    came, goes_on, enter = asyncio.Event(), asyncio.Event(), link._enter
    lines: list[Line] = []

    async def slow() -> Line:
        lines.append(await enter())
        came.set()
        await goes_on.wait()
        return lines[0]

    monkeypatch.setattr(link, "_enter", slow)
    link._idle.pop().close()
    into = memoryview(bytearray(4096))
    reading = asyncio.get_running_loop().create_task(link.read([space.reference(0)], [into]))
    await came.wait()
    await link.close()
    goes_on.set()
    (outcome,) = await reading
    assert isinstance(outcome, Failed)
    assert bytes(into) == bytes(4096)
    assert lines[0].wire.is_closed
    await transport.close()
    space.close()


async def test_who_wants_nothing_more_before_it_was_kept_has_nothing_kept() -> None:
    """A decoder may give up before its prefiller's last copies have ended."""
    seen: list[Sequence[bytes]] = []
    showcase, chunks = Showcase(seen.append), keys(2)
    showcase.show(chunks, [0, 1], [1, 1])
    showcase.request_over("r")
    async with asyncio.timeout(5.0):
        assert await showcase.keep("r", chunks, 60.0) == set()
    assert showcase.is_complete("r")
    assert showcase.places(chunks) == [Reference(0, 1), Reference(1, 1)]
