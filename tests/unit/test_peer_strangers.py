"""The control plane over real sockets, and who says something else there than an engine would."""

from __future__ import annotations

import asyncio
import logging

import pytest
import zmq

from peer_engine import engine
from peer_frames import keys
from tiering.peers import control
from tiering.peers.addresses import Address
from tiering.peers.messages import (
    MESSAGE_BYTES_MAX,
    Disconnect,
    Ending,
    Malformed,
    decode,
    encode,
)


async def strangers_answer(at: Address, *frames: bytes, seconds: float = 60.0) -> list[bytes]:
    """What a socket that is none of ours gets for `frames`."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(at.endpoint)
        dealer.send_multipart(frames)
        for _ in range(int(seconds * 100)):
            if dealer.poll(0):
                return list(dealer.recv_multipart())
            await asyncio.sleep(0.01)
        return []
    finally:
        dealer.close(linger=0)
        context.term()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ((b"hello",), "a message of 1 frames, not 2"),
        ((b"", b""), "no message: cut off"),
        ((b"\xdd\xff\xff\xff\xff", b""), "no message: no map"),
        ((bytes(200_000), b""), "no message: no map"),
        ((b"\x81\xa4type\xa9heartbeat", b""), "a Heartbeat of no session that is known here"),
    ],
)
async def test_who_talks_nonsense_is_told_and_nobody_else_notices(
    frames: tuple[bytes, ...], reason: str
) -> None:
    async with engine(1) as (serves, shelf), engine(2) as (asks, _):
        peer = await asks.peer(serves.address)
        payload, _ = await strangers_answer(serves.address, *frames)
        message = decode(payload)
        assert isinstance(message, Disconnect)
        assert message.reason.startswith(reason)
        assert await peer.lookup("r", keys(1)) == b"\1"
        assert (serves.stats().guests, len(shelf.guests)) == (1, 1)


@pytest.mark.slow
async def test_a_message_of_a_gib_is_not_even_taken_in() -> None:
    async with engine(1) as (serves, _), engine(2) as (asks, _):
        peer = await asks.peer(serves.address)
        large = bytes(MESSAGE_BYTES_MAX + 1)
        assert await strangers_answer(serves.address, large, b"", seconds=3.0) == []
        assert await peer.lookup("r", keys(1)) == b"\1"


@pytest.mark.slow
async def test_a_goodbye_to_nobody_is_not_answered() -> None:
    goodbye = b"\x83\xa4type\xaadisconnect\xa6ending\xa7closing\xa6reason\xa1x"
    assert not isinstance(decode(goodbye), Malformed)
    async with engine(1) as (serves, _):
        assert await strangers_answer(serves.address, goodbye, b"", seconds=1.0) == []


@pytest.mark.parametrize("ending", ["refused", "malformed", "failed"])
async def test_what_a_stranger_says_it_was_refused_for_is_not_told(
    ending: Ending, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(1) as (serves, _):
        await strangers_answer(
            serves.address, encode(Disconnect(ending, "a lie")), b"", seconds=0.3
        )
        assert (await strangers_answer(serves.address, b"hello")) != []
    assert "a lie" not in caplog.text
    assert "a message of 1 frames" in caplog.text


async def test_who_goes_on_talking_nonsense_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "_REASONS_MAX", 1)
    with caplog.at_level(logging.WARNING, "tiering"):
        async with engine(1) as (serves, _):
            for frames in ([b"x"] * number for number in (1, 1, 1, 3, 4, 5, 6)):
                assert await strangers_answer(serves.address, *frames)
    lines = [line.rpartition(": ")[2] for line in caplog.messages]
    assert lines == [
        f"a message of {number} frames, not 2 ({count} so far)"
        for number, count in ((1, 1), (1, 2), (3, 1), (4, 2), (6, 4))
    ]
