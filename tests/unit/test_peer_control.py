"""The control plane over real sockets: two engines and more, in this process and in others."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import socket
import threading
from collections.abc import Sequence

import pytest

from peer_engine import HANG_SECONDS, LOOPBACK, PATIENT, QUICK, Engine, Shelf, engine, until
from peer_frames import KEY, OTHER_KEY, introduction, keys
from tiering.errors import ClosedError, ConfigError, PeerError
from tiering.peers.addresses import Address
from tiering.peers.auth import SharedKey
from tiering.peers.calls import Peer
from tiering.peers.control import ControlPlane
from tiering.peers.messages import Reference
from tiering.testing.ports import free_port
from tiering.testing.transports import descriptors


async def peer_at_last(control: ControlPlane, at: Address) -> Peer:
    """Also where it was silent a moment ago, and is left alone for now."""
    for _ in range(1000):
        try:
            return await control.peer(at)
        except PeerError:
            await asyncio.sleep(0.02)
    raise AssertionError(f"nobody at {at}")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_what_is_looked_up_is_fetched_and_let_go(host: str) -> None:
    at = Address(host, 0)
    async with engine(1, at=at) as (serves, shelf), engine(2, at=at) as (asks, _):
        assert serves.address.host == host
        peer = await asks.peer(serves.address)
        assert await peer.lookup("r", keys(5)) == b"\1\0\1\0\1"
        fetched = await peer.fetch("r", [keys(5)[0], keys(5)[1], keys(5)[4]])
        assert fetched.places == [Reference(0, 1), None, Reference(4, 5)]
        assert list(shelf.pinned.values()) == [fetched.places]
        peer.done(fetched.of, True)
        peer.request_over("r")
        await until(lambda: len(shelf.told) == 3)
        assert shelf.told == [("greeted",), ("released", fetched.of, True), ("request over", "r")]
        assert shelf.pinned == {}
        assert peer.token == shelf.guests[0].token
        assert peer.introduction.engine_id == introduction(1).engine_id
        assert shelf.guests[0].introduction.engine_id == introduction(2).engine_id


async def test_a_peer_is_dialled_once_however_many_ask() -> None:
    async with engine(1) as (serves, shelf), engine(2) as (asks, _):
        peers = await asyncio.gather(*(asks.peer(serves.address) for _ in range(10)))
        assert len(set(map(id, peers))) == 1
        answers = await asyncio.gather(*(peers[0].lookup("r", keys(9, n)) for n in range(50)))
        assert {answer[0] for answer in answers} == {0, 1}
        assert len(shelf.guests) == 1


async def test_more_questions_than_may_be_open_wait_for_their_turn() -> None:
    few = dataclasses.replace(PATIENT, rounds_max=4)
    async with engine(1, patience=few) as (serves, shelf), engine(2, patience=few) as (asks, _):
        peer = await asks.peer(serves.address)

        async def fetched(number: int) -> int:
            found = await peer.fetch("r", keys(9, number))
            await asyncio.sleep(0.01)  # it is read
            peer.done(found.of, True)
            return sum(place is not None for place in found.places)

        counts = await asyncio.gather(*map(fetched, range(40)))
        assert set(counts) == {4, 5}
        held = [await peer.fetch("r", keys(2)) for _ in range(4)]
        late = asyncio.create_task(peer.lookup("r", keys(2)))
        given_up = asyncio.create_task(peer.fetch("r", keys(2)))
        await asyncio.sleep(0.05)
        assert not late.done()
        given_up.cancel()
        peer.done(held.pop().of, False)
        assert await late == b"\1\0"
        held += [await peer.fetch("r", keys(2))]
        waiting = [asyncio.create_task(peer.lookup("r", keys(2))) for _ in range(3)]
        await asyncio.sleep(0)
        peer.close("closing", "the test is over")
        for each in held:
            peer.done(each.of, False)
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(ended, PeerError)
        assert peer.is_open is False
    assert shelf.pinned == {}


async def test_two_pull_from_one_another() -> None:
    async with engine(1) as (one, _), engine(2) as (two, _):
        first, second = await asyncio.gather(one.peer(two.address), two.peer(one.address))
        hits = await asyncio.gather(first.lookup("a", keys(2)), second.lookup("b", keys(3)))
        assert hits == [b"\1\0", b"\1\0\1"]


async def test_a_large_question_is_answered() -> None:
    async with engine(1) as (serves, _), engine(2) as (asks, _):
        peer = await asks.peer(serves.address)
        many = keys(16_384, size=64)
        assert await peer.lookup("r", many) == bytes(key[-1] % 2 == 0 for key in many)
        fetched = await peer.fetch("r", many)
        assert sum(place is not None for place in fetched.places) == 8_192


async def test_a_cancelled_fetch_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(1) as (serves, shelf), engine(2) as (asks, _):
        peer = await asks.peer(serves.address)
        shelf.is_held = True
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(peer.fetch("r", keys(2))) for _ in range(3)]
            await until(lambda: len(shelf.waiting) == 3)
            for task in tasks:
                task.cancel()
        await until(lambda: len(shelf.told) == 4)
        assert [shelf.answer(*each) for each in shelf.waiting] == [False] * 3
        assert shelf.pinned == {}
        await until(lambda: peer.session.is_idle)
        # An answer that has come, for a caller that is gone before it could take it.
        shelf.is_held = False
        take_in = peer.received

        def received(frames: Sequence[bytes]) -> None:
            take_in(frames)
            task.cancel()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(peer.fetch("r", keys(2)))
            monkeypatch.setattr(peer, "received", received)
            await asyncio.wait([task])
            monkeypatch.undo()
        assert task.cancelled()
        await until(lambda: shelf.pinned == {} and len(shelf.told) == 5)


# Who is refused


@pytest.mark.parametrize(
    ("me", "key", "reason"),
    [
        ({"hash_seed": "7"}, KEY, "another hash seed: hash_seed is '7' on the dialling engine"),
        ({"row_bytes": 1}, KEY, "rows of another size"),
        ({}, OTHER_KEY, "the two engines have different shared keys"),
        ({}, SharedKey(), "the dialled engine has a shared key and the dialling one has none"),
    ],
)
async def test_who_does_not_fit_is_refused_with_the_reason_on_both_sides(
    me: dict[str, object],
    key: SharedKey,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with engine(1) as (serves, shelf), engine(2, me=me, key=key) as (asks, _):
        for _ in range(2):  # the second time without asking
            with pytest.raises(PeerError) as caught:
                await asks.peer(serves.address)
            assert str(caught.value).startswith(f"peer {serves.address}: {reason}")
        assert f"peers: an engine that dialled was refused: {reason}" in caplog.text
        assert (asks.stats().refused, serves.stats().refused) == (1, 1)
        assert (asks.stats().peers, serves.stats().guests) == (0, 0)
        assert shelf.told == []


async def test_as_many_are_served_as_may_be_and_the_idle_make_room() -> None:
    async with (
        engine(1, guests_max=1) as (serves, shelf),
        engine(2) as (first, _),
        engine(3) as (second, _),
    ):
        peer = await first.peer(serves.address)
        shelf.is_held = True
        async with asyncio.TaskGroup() as group:
            fetch = group.create_task(peer.fetch("r", keys(1)))
            await until(lambda: shelf.waiting)
            with pytest.raises(PeerError, match="1 engines are served already"):
                await second.peer(serves.address)
            shelf.answer(*shelf.waiting[0])
            peer.done((await fetch).of, True)
        await until(lambda: shelf.guests[0].is_idle)
        await peer_at_last(second, serves.address)
        await until(lambda: peer.over is not None)
        assert peer.over is not None
        assert peer.over.reason.startswith("not used for the longest")


async def test_as_many_are_dialled_as_may_be_and_the_idle_make_room() -> None:
    async with (
        engine(1) as (one, _),
        engine(2) as (two, shelf),
        engine(3, peers_max=1) as (asks, _),
    ):
        first = await asks.peer(one.address)
        second = await asks.peer(two.address)
        assert not first.is_open
        shelf.is_held = True
        async with asyncio.TaskGroup() as group:
            fetch = group.create_task(second.fetch("r", keys(1)))
            await until(lambda: shelf.waiting)
            with pytest.raises(PeerError, match="1 peers are in use already"):
                await asks.peer(one.address)
            shelf.answer(*shelf.waiting[0])
        with pytest.raises(PeerError, match="1 peers are in use already"):
            await asks.peer(one.address)  # while it reads what it has fetched
        second.done(fetch.result().of, True)
        await asks.peer(one.address)


# Whoever is gone


@pytest.mark.slow
async def test_nobody_there_costs_a_deadline_and_not_each_time() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nowhere = Address("127.0.0.1", taken.getsockname()[1])
        async with engine(1, patience=QUICK) as (asks, _):
            with pytest.raises(PeerError, match=r"no answer to our greeting within 1\.5 seconds$"):
                await asks.peer(nowhere)
            with pytest.raises(PeerError, match=r"no answer to our greeting.*tried again in"):
                await asks.peer(nowhere)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_what_cannot_be_dialled_is_an_error_at_once_and_leaves_nothing(host: str) -> None:
    async with engine(1) as (asks, _):
        for reason in ("cannot be dialled: Invalid argument$", "tried again in"):
            with pytest.raises(PeerError, match=reason):
                await asks.peer(Address(host, -1))
            assert (asks.stats().peers, asks._dealers) == (0, {})


@pytest.mark.parametrize("kv_request_id", ["", "r" * 513])
async def test_a_request_that_cannot_be_named_costs_its_question_only(kv_request_id: str) -> None:
    async with engine(1) as (serves, _), engine(2) as (asks, _):
        peer = await asks.peer(serves.address)
        for ask in (peer.lookup, peer.fetch):
            with pytest.raises(PeerError, match=r"cannot be asked.*kv_request_id"):
                await ask(kv_request_id, keys(2))
        peer.request_over(kv_request_id)
        assert peer.session.is_idle
        assert await peer.lookup("r", keys(2)) == b"\1\0"


async def test_a_name_without_an_address_is_an_error_that_says_so() -> None:
    async with engine(1) as (asks, _):
        with pytest.raises(PeerError, match="its name has no address"):
            await asks.peer(Address("no.such.host.invalid", 5710))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_peer_that_is_gone_fails_what_waits_for_it(how: str) -> None:
    with Engine() as other:
        async with engine(1, patience=QUICK) as (asks, _):
            peer = await asks.peer(other.at)
            assert await peer.lookup("r", keys(2)) == b"\1\0"
            getattr(other, how)()
            with pytest.raises(PeerError, match="no word for 1 seconds"):
                await peer.lookup("r", keys(2))
            assert peer.over is not None
            with pytest.raises(PeerError):
                await peer.fetch("r", keys(2))
            with pytest.raises(PeerError, match="tried again in"):
                await asks.peer(other.at)
            assert asks.stats().failed == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_guest_that_is_gone_holds_no_pins(how: str) -> None:
    async with engine(1, patience=QUICK) as (serves, shelf):
        port = serves.address.port
        with await asyncio.to_thread(Engine, dials=port) as other:
            assert len(shelf.pinned) == 1
            getattr(other, how)()
            await until(lambda: not shelf.guests)
        assert shelf.pinned == {}
        assert shelf.told[-1][1] in (
            "no word for 1 seconds",
            "it takes no messages: it is gone, or has not read any for long",
        )


@pytest.mark.slow
async def test_a_peer_that_starts_anew_at_its_address_gets_a_new_session() -> None:
    with Engine(port=free_port()) as first:
        async with engine(1, patience=QUICK) as (asks, _):
            before = await asks.peer(first.at)
            first.kill()
            with Engine(port=first.at.port):
                await until(lambda: before.over is not None)
                after = await peer_at_last(asks, first.at)
                assert after is not before
                assert after.session_id != before.session_id
                assert after.introduction.engine_id != before.introduction.engine_id
                assert await after.lookup("r", keys(1)) == b"\1"


async def test_a_peer_that_ends_can_be_dialled_in_the_same_instant_a_hundred_times() -> None:
    async with engine(1) as (serves, shelf), engine(2) as (asks, _):
        for _ in range(100):
            peer = await asks.peer(serves.address)
            peer.close("closing", "for now")
            again = await asks.peer(serves.address)
            assert again is not peer
            assert await again.lookup("r", keys(1)) == b"\1"
        await until(lambda: len(shelf.guests) == 1)
        assert asks.stats().peers == 1


async def test_an_engine_that_dials_again_and_has_lost_its_session_is_given_up_sooner() -> None:
    patient = dataclasses.replace(PATIENT, silence_seconds_max=2 * HANG_SECONDS)
    async with engine(1, patience=patient) as (serves, shelf), engine(2) as (asks, _):
        peer = await asks.peer(serves.address)
        await peer.fetch("r", keys(2))
        assert asks._ticking is not None
        asks._ticking.cancel()  # and not a word more comes of it
        async with engine(2) as (again, _):
            await again.peer(serves.address)
            await until(lambda: shelf.told[-1][0] == "over")
            assert shelf.pinned == {}
            assert len(shelf.guests) == 1


async def test_an_engine_that_knows_another_by_two_names_has_two_sessions() -> None:
    at = Address("localhost", 0)
    async with engine(1, at=at) as (serves, shelf), engine(2, at=at) as (asks, _):
        names = [Address(host, serves.address.port) for host in ("localhost", "127.0.0.1")]
        peers = [await asks.peer(name) for name in names]
        for _ in range(5):
            await asyncio.sleep(PATIENT.heartbeat_seconds)
            for peer in peers:
                assert await peer.lookup("r", keys(1)) == b"\1"
        assert [await asks.peer(name) for name in names] == peers
        assert shelf.told == [("greeted",)] * 2


@pytest.mark.slow
async def test_siblings_of_a_silent_engine_are_given_up_sooner() -> None:
    patience = dataclasses.replace(QUICK, silence_seconds_max=5.0)
    with Engine() as first, Engine() as second:
        async with engine(1, patience=patience) as (asks, _):
            one, two = await asks.peer(first.at), await asks.peer(second.at)
            first.stop()
            second.stop()
            one.session._heard_at -= 4.5  # the first one fell silent earlier
            await until(lambda: one.over is not None)
            with pytest.raises(PeerError, match="another engine of its host has fallen silent"):
                await asks.peer(second.at)
            await until(lambda: two.over is not None)


async def test_who_stops_says_so() -> None:
    async with engine(1) as (serves, shelf):
        async with engine(2) as (asks, _):
            peer = await asks.peer(serves.address)
            await peer.fetch("r", keys(2))
        await until(lambda: not shelf.guests)
        assert shelf.told[-1] == ("over", "the engine that asks stops")
        assert shelf.pinned == {}
    async with engine(2) as (asks, _):
        async with engine(1) as (serves, shelf):
            peer = await asks.peer(serves.address)
            # Who asks knows of the session first.
            await until(lambda: bool(shelf.guests))
        await until(lambda: peer.over is not None)
        assert peer.over is not None
        assert peer.over.reason == "the engine that serves stops"
        assert shelf.told[-1] == ("over", "the engine that serves stops")


# Places and ends


async def test_a_taken_port_names_rank_and_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        at = Address("127.0.0.1", port)
        control = ControlPlane(introduction(), Shelf(), at, KEY, name="tiers.0.host", rank=3)
        with pytest.raises(ConfigError) as caught:
            await control.open()
        assert str(caught.value).startswith(f"tiers.0.port = {port - 3}: port {port} of data-")
        assert "data-parallel rank 3 is taken" in str(caught.value)
        await control.close()


@pytest.mark.parametrize(
    ("host", "reason"),
    [("192.0.2.1", "is no address of this host"), ("no.such.host.invalid", "has no address")],
)
async def test_what_is_not_of_this_host_cannot_be_bound(host: str, reason: str) -> None:
    control = ControlPlane(introduction(), Shelf(), Address(host, 0), KEY)
    with pytest.raises(ConfigError, match=reason):
        await control.open()


@pytest.mark.slow
async def test_nothing_is_left_behind() -> None:
    async with engine(1) as (serves, _), engine(2) as (asks, _):
        await asks.peer(serves.address)
    gc.collect()
    # Of the whole process: other tests may have left some.
    files, threads = descriptors(), set(threading.enumerate())
    for _ in range(3):
        async with engine(1) as (serves, _), engine(2) as (asks, _):
            peer = await asks.peer(serves.address)
            await peer.fetch("r", keys(2))
            del serves, asks, peer
    gc.collect()
    now = descriptors()
    assert now == files, now - files
    new = set(threading.enumerate()) - threads
    # Those of the loop's executor stay, up to as many as there may be.
    assert len(new) <= 8
    assert {thread.name.split("_")[0] for thread in new} <= {"asyncio"}


async def test_what_is_not_open_dials_nobody() -> None:
    control = ControlPlane(introduction(), Shelf(), LOOPBACK, KEY, patience=PATIENT)
    with pytest.raises(ClosedError):
        await control.peer(Address("127.0.0.1", 1))
    await control.open()
    assert repr(control).startswith("<ControlPlane at 127.0.0.1:")
    await control.close()
    await control.close()
    with pytest.raises(ClosedError):
        await control.peer(Address("127.0.0.1", 1))
