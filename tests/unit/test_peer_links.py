"""Links to peers whose sessions end, or that are given up, while somebody opens or uses them."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from peer_engine import LOOPBACK, PATIENT, Shelf, engine
from peer_frames import KEY, introduction
from test_peers_tier import Engine, engines
from tiering.clock import Clock
from tiering.errors import PeerError
from tiering.peers.calls import Peer
from tiering.peers.control import ControlPlane
from tiering.peers.messages import Offer
from tiering.peers.transports.tcp import TcpTransport
from tiering.testing.clocks import ManualClock
from tiering.testing.rowspace import RowSpace
from tiering.tiers.peers.links import Links


@asynccontextmanager
async def mute(clock: Clock | None = None) -> AsyncIterator[tuple[Links, Peer]]:
    """Links of an engine, and a peer of it that takes connections and says nothing there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        offer = Offer("tcp", f"127.0.0.1:{listening.getsockname()[1]}")
        offers = dataclasses.replace(introduction(1), transports=(offer,))
        space = RowSpace(1, 4096)
        transport = TcpTransport(space.served, LOOPBACK, quiet_seconds_max=1.0)
        await transport.open()
        links = Links([transport], clock)
        async with (
            ControlPlane(offers, Shelf(), LOOPBACK, KEY, patience=PATIENT) as serves,
            engine(2) as (asks, _),
        ):
            yield links, await asks.peer(serves.address)
            await links.close()
        await transport.close()
        space.close()


async def test_who_waits_for_a_link_is_told_that_its_session_is_over() -> None:
    async with mute() as (links, peer):
        opening = asyncio.get_running_loop().create_task(links.link(peer))
        await asyncio.sleep(0.1)
        assert not opening.done()
        peer.close("closing", "for now")
        await links.tidy()
        with pytest.raises(PeerError, match="its session was over before a link was open"):
            await opening
        assert len(links) == 0


async def test_who_tidies_can_be_stopped_at_any_moment() -> None:
    async with mute() as (links, peer):
        loop = asyncio.get_running_loop()
        opening = loop.create_task(links.link(peer))
        await asyncio.sleep(0.1)
        peer.close("closing", "for now")
        tidying = loop.create_task(links.tidy())
        await asyncio.sleep(0)
        tidying.cancel()
        await asyncio.wait([tidying, opening])
        assert tidying.cancelled()
        with pytest.raises(PeerError):
            await opening


async def test_a_link_that_is_given_up_twice_costs_nobody_the_next_one() -> None:
    has, wants = Engine(), Engine()
    async with engines(has, wants):
        links = wants.tier._links
        peer = await wants.tier._running().peer(has.tier.address)
        first = await links.link(peer)
        await links.drop(peer, first)
        second = await links.link(peer)
        assert second is not first
        await links.drop(peer, first)
        assert await links.link(peer) is second
        await links.drop(peer, second)
        assert len(links) == 0


@pytest.mark.slow
async def test_where_there_is_no_link_none_is_tried_for_a_while_that_doubles() -> None:
    clock = ManualClock()
    async with mute(clock) as (links, peer):
        for seconds in (0.5, 1.0, 2.0):
            with pytest.raises(PeerError, match=r"cannot be moved: .*nothing moved for 1 seconds$"):
                await links.link(peer)
            tried = links._links[peer]
            with pytest.raises(PeerError, match=rf"nothing moved .*again in {seconds} seconds$"):
                await links.link(peer)
            assert links._links[peer] is tried
            clock.advance(seconds)
        peer.close("closing", "for now")
        await links.tidy()
        assert not links._troubles
