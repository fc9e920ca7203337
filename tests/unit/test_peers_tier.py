"""Two engines' tiers of peers over real sockets: what one shows, the other has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from peer_engine import HANG_SECONDS, until
from tiering.errors import ConfigError
from tiering.keys import chunk_key
from tiering.peers.addresses import Address
from tiering.peers.agreement import Introduction
from tiering.peers.auth import SharedKey
from tiering.peers.calls import Guest
from tiering.peers.control import new_engine_id
from tiering.peers.session import Patience, State
from tiering.peers.transports.base import Transport
from tiering.peers.transports.shm import ShmTransport
from tiering.peers.transports.tcp import TcpTransport
from tiering.testing.ports import free_port
from tiering.testing.rowspace import RowSpace, holds
from tiering.tiers.base import Failed, Read, ReadOutcome, Write
from tiering.tiers.peers import showcase
from tiering.tiers.peers.source import PeerSource
from tiering.tiers.peers.tier import PeerLimits, PeersTier

ROWS, ROW_BYTES = 32, 8192
LOOPBACK = Address("127.0.0.1", 0)
KEYS = [chunk_key(b"%032d" % i, 0) for i in range(ROWS)]
PATIENT = Patience(heartbeat_seconds=0.1, silence_seconds_max=HANG_SECONDS)
"""Where nobody is gone: on a busy machine anybody may be silent for a second."""


class Engine:
    """A host tier, and the tier of peers over it. `transport`: which, in order of preference, with
    commas; `elsewhere` is TCP at an address that this host has not."""

    def __init__(
        self,
        *,
        namespace: str = "n",
        transport: str = "tcp",
        key: SharedKey | None = None,
        limits: PeerLimits | None = None,
        at: Address = LOOPBACK,
    ) -> None:
        self.space = RowSpace(ROWS, ROW_BYTES)
        served = self.space.served
        transports: dict[str, Transport] = {
            "tcp": TcpTransport(served, LOOPBACK),
            "shm": ShmTransport(served),
            "elsewhere": TcpTransport(served, Address("192.0.2.1", 0)),
        }

        def me() -> Introduction:
            digest = namespace.encode().ljust(32, b"\0")
            told = {"model": namespace}
            return Introduction(new_engine_id(), 0, digest, told, "0", ROWS, ROW_BYTES)

        self.tier = PeersTier(
            at,
            me,
            [transports[name] for name in transport.split(",")],
            ROW_BYTES,
            key=key,
            limits=limits,
            patience=PATIENT,
        )

    def show(self, numbers: Sequence[int]) -> None:
        """Chunk i is in slot i."""
        generations = [int(self.space.generations[i]) for i in numbers]
        self.tier.show([KEYS[i] for i in numbers], list(numbers), generations)

    def whom(self, kv_request_id: str = "r", is_prefiller: bool = False) -> bytes:
        at = self.tier.address
        return PeerSource(at.host, at.port, kv_request_id, is_prefiller).packed()

    async def close(self) -> None:
        """May be called twice."""
        await self.tier.close()
        if hasattr(self.space, "served"):
            self.space.close()


@asynccontextmanager
async def engines(*made: Engine) -> AsyncIterator[None]:
    try:
        for engine in made:
            await engine.tier.open()
        yield
    finally:
        for engine in made:
            await engine.close()


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(ROW_BYTES)) for _ in range(count)]


def reasons(outcomes: Sequence[ReadOutcome]) -> set[str]:
    return {each.error.reason for each in outcomes if isinstance(each, Failed)}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_what_one_shows_the_other_finds_and_reads(transport: str) -> None:
    has, wants = Engine(transport=transport), Engine(transport=transport)
    async with engines(has, wants):
        has.show(range(4))
        peer = wants.tier.at(has.whom())
        assert await peer.contains(KEYS[:6]) == [Read.HIT] * 4 + [Read.MISS] * 2
        into = buffers(4)
        assert await peer.read(KEYS[:4], into) == [Read.HIT] * 4
        assert all(holds(has.space.reference(i), into[i]) for i in range(4))
        stats = has.tier.stats()
        assert (stats["peers_asked"], stats["peers_found"], stats["now_guests"]) == (6, 4, 1)
        await until(lambda: has.tier.stats()["peers_fetched"] == 4)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_link_may_come_before_the_first_word_of_its_session(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two go over connections of their own, and which is faster nobody knows."""
    received = Guest.received

    def later(guest: Guest, frames: Sequence[bytes]) -> None:
        is_greeting = guest.session.state is State.GREETING
        asyncio.get_running_loop().call_later(0 if is_greeting else 0.2, received, guest, frames)

    monkeypatch.setattr(Guest, "received", later)
    has, wants = Engine(transport=transport), Engine(transport=transport)
    async with engines(has, wants):
        has.show(range(2))
        outcomes = await wants.tier.at(has.whom()).read(KEYS[:2], buffers(2))
        assert outcomes == [Read.HIT] * 2, reasons(outcomes)


async def test_a_transport_that_cannot_be_opened_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The peer has it and prefers it: neither of the two may try it."""
    lacks, other = Engine(transport="elsewhere,shm"), Engine(transport="tcp,shm")
    async with engines(lacks, other):
        for has, wants in ((lacks, other), (other, lacks)):
            has.show(range(2))
            into = buffers(2)
            outcomes = await wants.tier.at(has.whom()).read(KEYS[:2], into)
            assert outcomes == [Read.HIT] * 2, reasons(outcomes)
            assert all(holds(has.space.reference(i), into[i]) for i in range(2))
    assert "no chunks over tcp: the data plane cannot listen there: " in caplog.text


async def test_what_is_hidden_is_a_miss_and_so_is_a_slot_given_away_unseen() -> None:
    has, wants = Engine(), Engine()
    async with engines(has, wants):
        has.show(range(3))
        peer = wants.tier.at(has.whom())
        await peer.contains(KEYS[:3])
        has.tier.hide(KEYS[:1])
        has.space.refill(1)
        into = buffers(3)
        assert await peer.read(KEYS[:3], into) == [Read.MISS, Read.MISS, Read.HIT]
        assert holds(has.space.reference(2), into[2])
        assert wants.tier.stats()["peer_chunks_stale"] == 1


async def test_a_prefiller_is_waited_for_until_all_is_there() -> None:
    has, wants = Engine(), Engine()
    async with engines(has, wants):
        has.show(range(2))
        peer, into = wants.tier.at(has.whom("r", is_prefiller=True)), buffers(4)
        reading = asyncio.create_task(peer.read(KEYS[:4], into))
        await asyncio.sleep(0.3)
        assert not reading.done()
        has.show([2])
        await asyncio.sleep(0.1)
        assert not reading.done()
        has.show([3])
        assert await reading == [Read.HIT] * 4
        assert all(holds(has.space.reference(i), into[i]) for i in range(4))


async def test_a_prefiller_that_is_done_with_the_request_is_not_waited_for() -> None:
    has, wants = Engine(), Engine()
    async with engines(has, wants):
        has.show(range(2))
        peer = wants.tier.at(has.whom("r", is_prefiller=True))
        reading = asyncio.create_task(peer.read(KEYS[:4], buffers(4)))
        await asyncio.sleep(0.2)
        assert not reading.done()
        keeping = asyncio.create_task(has.tier.keep("r", KEYS[:2]))
        assert await reading == [Read.HIT] * 2 + [Read.MISS] * 2
        assert await keeping == [Read.HIT] * 2


@pytest.mark.parametrize("kept", [0, 2])
async def test_of_a_prefiller_that_has_done_without_some_nothing_is_waited_for(kept: int) -> None:
    """It had no room for them, was not to store them, or has kept them for long enough."""
    has, wants = Engine(limits=PeerLimits(unbound_store_seconds=0.1)), Engine()
    async with engines(has, wants):
        has.show(range(kept))
        assert await has.tier.keep("r", KEYS[:kept]) == [Read.MISS] * kept
        has.tier.hide(KEYS[:kept])
        peer = wants.tier.at(has.whom("r", is_prefiller=True))
        assert await peer.read(KEYS[:4], buffers(4)) == [Read.MISS] * 4


async def test_as_many_requests_are_remembered_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showcase, "COMPLETE_MAX", 2)
    has = showcase.Showcase(lambda keys: None)
    for kv_request_id in ("a", "b", "b", "c"):
        await has.keep(kv_request_id, [], 1.0)
    assert [has.is_complete(each) for each in "abc"] == [False, True, True]


async def test_after_a_lookup_nothing_is_waited_for() -> None:
    has, wants = Engine(), Engine()
    async with engines(has, wants):
        has.show(range(2))
        peer = wants.tier.at(has.whom())
        assert await peer.contains(KEYS[:2]) == [Read.HIT] * 2
        has.tier.hide(KEYS[1:2])
        assert await peer.read(KEYS[:2], buffers(2)) == [Read.HIT, Read.MISS]


async def test_what_is_kept_is_kept_until_all_of_it_was_fetched() -> None:
    has, wants = Engine(), Engine()
    async with engines(has, wants):
        has.show(range(4))
        keeping = asyncio.create_task(has.tier.keep("r", KEYS[:4]))
        peer = wants.tier.at(has.whom("r", is_prefiller=True))
        await asyncio.sleep(0)
        assert has.tier.stats()["now_kept_chunks"] == 4
        assert await peer.read(KEYS[:3], buffers(3)) == [Read.HIT] * 3
        await until(lambda: has.tier.stats()["now_kept_chunks"] == 1)
        assert not keeping.done()
        assert await peer.read(KEYS[3:4], buffers(1)) == [Read.HIT]
        assert await keeping == [Read.HIT] * 4


async def test_what_nobody_fetches_is_not_kept_for_ever() -> None:
    has = Engine(limits=PeerLimits(unbound_store_seconds=0.2))
    async with engines(has):
        has.show(range(2))
        assert await has.tier.keep("r", KEYS[:2]) == [Read.MISS] * 2
        assert has.tier.stats()["now_kept_chunks"] == 0


async def test_what_is_not_wanted_any_more_is_not_kept() -> None:
    has, wants = Engine(), Engine()
    async with engines(has, wants):
        has.show(range(4))
        keeping = asyncio.create_task(has.tier.keep("r", KEYS[:4]))
        whom = has.whom("r", is_prefiller=True)
        wants.tier.release(whom)
        assert wants.tier.stats()["now_peers"] == 0, "nobody is dialled for that"
        assert await wants.tier.at(whom).read(KEYS[:1], buffers(1)) == [Read.HIT]
        wants.tier.release(whom)
        assert await keeping == [Read.HIT] + [Read.MISS] * 3


async def test_what_another_request_fetches_does_not_end_the_wait() -> None:
    has, wants = Engine(limits=PeerLimits(unbound_store_seconds=0.5)), Engine()
    async with engines(has, wants):
        has.show(range(2))
        keeping = asyncio.create_task(has.tier.keep("r", KEYS[:2]))
        peer = wants.tier.at(has.whom("another"))
        await peer.contains(KEYS[:2])
        assert await peer.read(KEYS[:2], buffers(2)) == [Read.HIT] * 2
        assert await keeping == [Read.MISS] * 2


@pytest.mark.slow
async def test_a_peer_that_is_not_there_fails_what_was_asked_of_him_only() -> None:
    has, wants = Engine(), Engine()
    async with engines(has, wants):
        has.show(range(2))
        nowhere = wants.tier.at(PeerSource("127.0.0.1", 1, "r").packed())
        outcomes = await nowhere.contains(KEYS[:2])
        assert all(isinstance(each, Failed) for each in outcomes)
        peer = wants.tier.at(has.whom())
        assert await peer.contains(KEYS[:2]) == [Read.HIT] * 2


@pytest.mark.slow
async def test_a_peer_that_ends_fails_and_leaves_no_link_and_is_dialled_anew() -> None:
    has, wants = Engine(at=Address("127.0.0.1", free_port())), Engine()
    async with engines(has, wants):
        has.show(range(2))
        whom = has.whom()
        peer = wants.tier.at(whom)
        await peer.contains(KEYS[:2])
        assert await peer.read(KEYS[:2], buffers(2)) == [Read.HIT] * 2
        assert wants.tier.stats()["now_links"] == 1
        bound = has.tier.address
        await has.close()
        outcomes = await peer.read(KEYS[:2], buffers(2))
        assert all(isinstance(each, Failed) for each in outcomes)
        await until(lambda: wants.tier.stats()["now_links"] == 0)
        again = Engine(at=bound)
        async with engines(again):
            again.show(range(2))
            async with asyncio.timeout(HANG_SECONDS):  # it is left alone for a while
                while await wants.tier.at(whom).contains(KEYS[:2]) != [Read.HIT] * 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await wants.tier.at(whom).read(KEYS[:2], buffers(2)) == [Read.HIT] * 2


async def test_a_cancelled_read_touches_no_buffer_afterwards_and_leaves_nothing_open() -> None:
    has, wants = Engine(), Engine()
    async with engines(has, wants):
        peer, into = wants.tier.at(has.whom("r", is_prefiller=True)), buffers(2)
        reading = asyncio.create_task(peer.read(KEYS[:2], into))
        await asyncio.sleep(0.2)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        has.show(range(2))
        await asyncio.sleep(0.3)
        assert not any(bytes(buffer).strip(b"\0") for buffer in into)
        assert has.tier.stats()["peers_fetched"] == 0


async def test_who_does_not_fit_is_refused_with_the_reason() -> None:
    has, wants = Engine(namespace="one"), Engine(namespace="other")
    async with engines(has, wants):
        told = reasons(await wants.tier.at(has.whom()).contains(KEYS[:1]))
        (reason,) = told
        assert "model is 'other' on the dialling engine, 'one' on the dialled" in reason
        assert has.tier.stats()["sessions_refused"] == 1


async def test_who_has_another_key_is_refused() -> None:
    has = Engine(key=SharedKey(b"0123456789abcdef0123456789abcdef"))
    wants = Engine(key=SharedKey(b"0123456789abcdef0123456789abcdeF"))
    async with engines(has, wants):
        (told,) = reasons(await wants.tier.at(has.whom()).contains(KEYS[:1]))
        assert "key" in told


async def test_an_address_that_others_reach_is_not_bound_without_a_key() -> None:
    engine = Engine(at=Address("0.0.0.0", 0))
    with pytest.raises(ConfigError, match="can be reached from other hosts"):
        await engine.tier.open()
    engine.space.close()


async def test_without_a_peer_there_is_nothing() -> None:
    has = Engine()
    async with engines(has):
        has.show(range(2))
        assert await has.tier.contains(KEYS[:2]) == [Read.MISS] * 2
        assert await has.tier.read(KEYS[:2], buffers(2)) == [Read.MISS] * 2
        assert await has.tier.write(KEYS[:2], buffers(2)) == [Write.REFUSED] * 2
        assert [keys async for keys in has.tier.scan()] == []
