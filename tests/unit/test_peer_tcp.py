"""Rows over TCP between a transport and somebody who does not keep to what was agreed."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import xxhash

from tiering.errors import ConfigError, PeerError
from tiering.peers.addresses import Address
from tiering.peers.auth import proof
from tiering.peers.messages import Offer, Reference
from tiering.peers.transports import doors
from tiering.peers.transports.base import ROWS_MAX, Failed, Link, Moved, Outcome
from tiering.peers.transports.tcp import TcpTransport
from tiering.testing.producer import SESSION, TOKEN
from tiering.testing.rowspace import RowSpace, holds

ROW = 64 << 10
QUIET = 1.0
"""Of transports whose other side is silent on purpose: on a busy machine any may be as long."""
MAGIC = b"KVPEER\r\n"
HANG_SECONDS = 30.0

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def transport(row_bytes: int = ROW, **options: Any) -> AsyncIterator[TcpTransport]:
    space = RowSpace(3, row_bytes)
    options = {"at": Address("127.0.0.1", 0), "quiet_seconds_max": HANG_SECONDS, **options}
    made = TcpTransport(space.served, **options)
    await made.open()
    made.admit(SESSION, TOKEN)
    try:
        async with asyncio.timeout(HANG_SECONDS):
            yield made
    finally:
        await made.close()
        space.close()


@asynccontextmanager
async def served_by(talk: Talk, *, token: bytes = TOKEN, rows: int = 3) -> AsyncIterator[Offer]:
    """An impostor that lets everybody in, and then talks as it likes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            nonce = bytes(32)
            writer.write(MAGIC + nonce)
            hello = await reader.readexactly(80)
            terms = struct.pack("<QQQQ", rows, ROW, 0, 0)
            writer.write(terms + proof(token, "link, dialled", nonce, hello[16:48], terms))
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield Offer("tcp", f"127.0.0.1:{port}")
    finally:
        server.close()


async def wanted(reader: asyncio.StreamReader) -> int:
    (count,) = struct.unpack("<Q", await reader.readexactly(8))
    await reader.readexactly(12 * count)
    return int(count)


def row(content: bytes, verdict: int = 1, checksum: int | None = None) -> bytes:
    value = xxhash.xxh3_128_intdigest(content) if checksum is None else checksum
    tail = struct.pack("<QQQ", verdict, value & (2**64 - 1), value >> 64)
    return struct.pack("<Q", 1) + content + tail


async def read_three(link: Link) -> tuple[list[Outcome], list[memoryview]]:
    into = [memoryview(bytearray(ROW)) for _ in range(3)]
    return await link.read([Reference(slot, 1) for slot in range(3)], into), into


GOOD = bytes(ROW)
LEAD = struct.pack("<Q", 1)


@pytest.mark.parametrize(
    ("answer", "come", "reason"),
    [
        (row(GOOD) + row(GOOD)[: ROW // 2], 1, "the other side has closed the connection"),
        (row(GOOD) * 2 + LEAD[:3], 2, "the other side has closed the connection"),
        (row(GOOD) + row(GOOD, checksum=7), 1, "a row came damaged"),
        (row(GOOD) + row(GOOD, verdict=9), 1, "a row came damaged"),
        (row(GOOD) * 2 + struct.pack("<Q", 99), 2, "an answer that means nothing"),
        (b"", 0, "the other side has closed the connection"),
    ],
)
async def test_a_stream_that_ends_or_lies_costs_the_rows_behind_it(
    answer: bytes, come: int, reason: str
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wanted(reader)
        writer.write(answer)
        await writer.drain()

    async with served_by(talk) as offer, transport() as ours:
        link = await ours.connect(offer, SESSION, TOKEN)
        outcomes, _ = await read_three(link)
        assert outcomes[:come] == [Moved.HIT] * come
        for outcome in outcomes[come:]:
            assert isinstance(outcome, Failed)
            assert reason in outcome.error.reason
        # And it goes on failing: there is no telling what would come next.
        again, _ = await read_three(link)
        assert all(isinstance(outcome, Failed) for outcome in again)


async def test_a_bit_that_flips_on_the_way_is_noticed() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wanted(reader)
        damaged = bytearray(row(GOOD))
        damaged[ROW // 2] ^= 1
        writer.write(bytes(damaged))
        await asyncio.sleep(HANG_SECONDS)

    async with served_by(talk) as offer, transport() as ours:
        link = await ours.connect(offer, SESSION, TOKEN)
        outcomes, _ = await read_three(link)
        assert all(isinstance(outcome, Failed) for outcome in outcomes)


@pytest.mark.slow
async def test_a_slow_answer_is_waited_for_as_long_as_something_comes() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wanted(reader)
        whole = row(GOOD) * 3
        for at in range(0, len(whole), len(whole) // 8 + 1):
            writer.write(whole[at : at + len(whole) // 8 + 1])
            await asyncio.sleep(QUIET / 5)  # all of them together exceed what is quiet

    async with served_by(talk) as offer, transport(quiet_seconds_max=QUIET) as ours:
        link = await ours.connect(offer, SESSION, TOKEN)
        outcomes, _ = await read_three(link)
        assert outcomes == [Moved.HIT] * 3


@pytest.mark.slow
async def test_silence_in_the_middle_of_a_row_is_given_up() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wanted(reader)
        writer.write(row(GOOD) + row(GOOD)[:100])
        await asyncio.sleep(HANG_SECONDS)

    async with served_by(talk) as offer, transport(quiet_seconds_max=QUIET) as ours:
        link = await ours.connect(offer, SESSION, TOKEN)
        (first, *others), _ = await read_three(link)
        assert first is Moved.HIT
        for outcome in others:
            assert isinstance(outcome, Failed)
            assert outcome.error.reason == "tcp: nothing moved for too long"


async def test_an_impostor_without_the_token_is_not_believed() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(HANG_SECONDS)

    async with served_by(talk, token=bytes(32)) as offer, transport() as ours:
        with pytest.raises(PeerError, match="does not know this session's token"):
            await ours.connect(offer, SESSION, TOKEN)


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40),
        pytest.param(b"", marks=pytest.mark.slow),
    ],
)
async def test_what_is_no_peer_is_told_from_one(greeting: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, transport(quiet_seconds_max=QUIET) as ours:
        offer = Offer("tcp", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        reason = "no peer of kv-tiering" if greeting else "nothing moved for"
        with pytest.raises(PeerError, match=reason):
            await ours.connect(offer, SESSION, TOKEN)
        server.close()


# Strangers at the door


async def dialled(to: TcpTransport) -> socket.socket:
    came = socket.socket()
    came.setblocking(False)
    at = Address.parse("address", to.offer().address)
    await asyncio.get_running_loop().sock_connect(came, (at.host, at.port))
    return came


async def let_in(to: TcpTransport) -> socket.socket:
    """A reader that will do as it likes."""
    loop, came = asyncio.get_running_loop(), await dialled(to)
    greeting = await loop.sock_recv(came, 40)
    proven = proof(TOKEN, "link, dialling", greeting[8:], bytes(32))
    await loop.sock_sendall(came, SESSION + bytes(32) + proven)
    assert len(await loop.sock_recv(came, 64)) == 64
    return came


async def is_closed(of: socket.socket) -> bool:
    """Whether the other side closes `of`, whatever it says before."""
    loop = asyncio.get_running_loop()
    try:
        while await loop.sock_recv(of, 4096):
            pass
    except ConnectionError:
        pass
    of.close()
    return True


@pytest.mark.parametrize(
    "hello",
    [
        SESSION + bytes(64),  # no proof
        bytes(80),
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(60),
        pytest.param(b"x", marks=pytest.mark.slow),  # and then nothing
        pytest.param(b"", marks=pytest.mark.slow),
    ],
)
async def test_a_stranger_is_shown_the_door(hello: bytes) -> None:
    async with transport(quiet_seconds_max=QUIET) as ours, transport() as theirs:
        came = await dialled(ours)
        await asyncio.get_running_loop().sock_sendall(came, hello)
        assert await is_closed(came)
        link = await theirs.connect(ours.offer(), SESSION, TOKEN)
        assert (await read_three(link))[0] != []


@pytest.mark.slow
async def test_strangers_that_keep_standing_there_do_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doors, "STRANGERS_MAX", 3)
    async with transport(quiet_seconds_max=QUIET) as ours, transport() as theirs:
        strangers = [await dialled(ours) for _ in range(5)]
        for stranger in strangers:
            assert await is_closed(stranger)
        await theirs.connect(ours.offer(), SESSION, TOKEN)


@pytest.mark.slow
async def test_a_stranger_that_says_a_byte_now_and_then_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doors, "STRANGER_SECONDS_MAX", 1.0)
    async with transport() as ours:
        came = await dialled(ours)
        closed = asyncio.ensure_future(is_closed(came))
        said = 0
        while not closed.done() and said < 79:  # the 80th byte would be the last of its hello
            try:
                await asyncio.get_running_loop().sock_sendall(came, b"x")
            except OSError:
                break
            said += 1
            await asyncio.sleep(0.1)
        assert await closed
        assert said < 79


@pytest.mark.slow
async def test_who_was_let_in_and_asks_for_nonsense_is_shown_the_door() -> None:
    loop = asyncio.get_running_loop()
    async with transport(quiet_seconds_max=QUIET) as ours:
        for request in (
            struct.pack("<Q", 0),
            struct.pack("<Q", ROWS_MAX + 1),
            struct.pack("<Q", 2**64 - 1),
            struct.pack("<Q", 2) + bytes(13),  # and no more
        ):
            came = await let_in(ours)
            await loop.sock_sendall(came, request)
            assert await is_closed(came)


@pytest.mark.slow
async def test_a_reader_that_does_not_take_its_rows_is_given_up() -> None:
    loop = asyncio.get_running_loop()
    async with transport(row_bytes=32 << 20, quiet_seconds_max=QUIET) as ours:
        came = await let_in(ours)
        request = struct.pack("<QIQ", 1, 0, 1)
        assert "1 links served" in repr(ours)
        await loop.sock_sendall(came, request)
        while "0 links served" not in repr(ours):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        came.close()


# Places


async def test_readers_that_take_their_time_do_not_keep_others_waiting() -> None:
    """As many as come over a slow line, or are stopped: who waits behind them would think that
    nothing comes at all."""
    loop = asyncio.get_running_loop()
    request = struct.pack("<Q", ROWS_MAX) + struct.pack("<IQ", 0, 1) * ROWS_MAX
    async with transport() as ours, transport() as theirs:
        slow = [await let_in(ours) for _ in range(40)]
        for reader in slow:
            await loop.sock_sendall(reader, request)
            assert await loop.sock_recv(reader, 1)
        link = await theirs.connect(ours.offer(), SESSION, TOKEN)
        assert (await read_three(link))[0] == [Moved.HIT] * 3
        for reader in slow:
            reader.close()


async def test_rows_come_over_ipv6_and_by_name() -> None:
    for host in ("::1", "localhost"):
        async with transport(at=Address(host, 0)) as ours:
            assert ours.offer().address.startswith("[::1]:" if host == "::1" else "localhost:")
            link = await ours.connect(ours.offer(), SESSION, TOKEN)
            outcomes, into = await read_three(link)
            assert outcomes == [Moved.HIT] * 3
            assert all(holds(Reference(slot, 1), into[slot]) for slot in range(3))


async def test_a_peer_that_offers_what_is_no_name_of_a_host_is_not_linked_to() -> None:
    async with transport() as ours:
        with pytest.raises(PeerError, match="no connection"):
            await ours.connect(Offer("tcp", f"{'a' * 64}.invalid:5711"), SESSION, TOKEN)


async def test_peers_are_told_another_host_where_there_is_one() -> None:
    async with transport(host="node-7.example") as ours:
        assert ours.offer().address.startswith("node-7.example:")


async def test_an_address_that_cannot_be_bound_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for at in (taken.getsockname(), ("192.0.2.1", 0), ("no.such.host.invalid", 0)):
            space = RowSpace(1, 4096)
            made = TcpTransport(space.served, Address(*at), name="tiers.0.host")
            with pytest.raises(ConfigError, match=r"tiers\.0\.host = .*cannot listen there"):
                await made.open()
            await made.close()
            space.close()


async def test_several_connections_share_a_large_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.peers.transports.tcp.SPAN_BYTES", ROW)
    async with transport() as ours:
        link = await ours.connect(ours.offer(), SESSION, TOKEN)
        outcomes, into = await read_three(link)
        assert outcomes == [Moved.HIT] * 3
        assert all(holds(Reference(slot, 1), into[slot]) for slot in range(3))
        assert repr(link).endswith("3 connections idle, 0 busy>")
        assert "3 links served, 1 of its own" in repr(ours)
