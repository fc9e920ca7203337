"""Messages between peers: what is taken, what is not, and why."""

from __future__ import annotations

import tracemalloc
from typing import get_args

import msgspec
import pytest

from peer_frames import changed, connect, keys, largest_of_each, one_of_each
from tiering.peers import messages
from tiering.peers.bounds import DEPTH_MAX, NODES_MAX
from tiering.peers.messages import (
    KEYS_MAX,
    MESSAGE_BYTES_MAX,
    Abort,
    Connect,
    Disconnect,
    Fetch,
    FetchResp,
    Heartbeat,
    Lookup,
    LookupResp,
    Malformed,
    Message,
    Reference,
    decode,
    encode,
    fetched,
    joined,
    keys_of,
    references_of,
)


@pytest.mark.parametrize("message", one_of_each(), ids=lambda each: type(each).__name__)
def test_a_message_is_what_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", largest_of_each(), ids=lambda each: type(each).__name__)
def test_the_limit_of_a_kind_has_room_for_the_largest(message: Message) -> None:
    assert decode(encode(message)) == message


def test_every_kind_has_a_limit_and_an_example() -> None:
    kinds = {type(message) for message in one_of_each()}
    assert kinds == set(get_args(Message)) == {type(message) for message in largest_of_each()}
    assert {kind.__struct_config__.tag for kind in kinds} == set(messages.LIMITS_BYTES)


def test_fields_that_are_not_known_are_ignored() -> None:
    later = changed(Abort("r", 1), hurry=True, why={"a": [1, 2.5, None, b"x"]}, score=1e300)
    assert decode(later) == Abort("r", 1)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "no message: cut off"),
        (b"\xc1", "no message: a value of type 0xc1"),
        (b"\x01", "no message: no map"),
        (b"\x80", "no message: no type"),
        (encode(Heartbeat())[:-1], "no message: cut off"),
        (encode(Heartbeat()) + b"\0", "no message: 1 bytes behind the message"),
        (changed(Heartbeat(), type="hello"), "a message of type 'hello', which is not known"),
        (changed(Heartbeat(), type=7), "no message: a type that is no short text"),
        (changed(Abort("r", 1), round_seq=None), "no message: Object missing required field"),
        (changed(Abort("r", 1), round_seq="1"), "no message: Expected `int`, got `str`"),
        (changed(Abort("r", 1), round_seq=0), "no message: Expected `int` >= 1"),
        (changed(Abort("r", 1), round_seq=2**64 - 1), "no message: Expected `int` <= 9"),
        (changed(Abort("r", 1), kv_request_id=""), "no message: Expected `str` of length >= 1"),
        (changed(Abort("r", 1), kv_request_id="r" * 513), "no message: Expected `str` of length"),
        (changed(Abort("r", 1), kv_request_id="r" * 4000), "4040 bytes of abort, more than 3072"),
        (changed(Lookup("r", 1, 36, bytes(37))), "37 bytes of keys of 36 bytes"),
        (changed(Lookup("r", 1, 1, bytes(KEYS_MAX + 1))), f"{KEYS_MAX + 1} bytes of keys of 1"),
        (changed(Lookup("r", 1, 65, bytes(65))), "no message: Expected `int` <= 64"),
        (changed(LookupResp("r", 1, b"\1\2")), "hits that are neither 0 nor 1"),
        (changed(FetchResp("r", 1, b"\1\0", bytes(4), bytes(16))), "2 hits, but slots"),
        (changed(FetchResp("r", 1, b"\1\0", bytes(8), bytes(15))), "2 hits, but slots"),
        (changed(connect(), protocol_oldest=2), "a protocol that is older than the oldest"),
        (changed(connect(), engine_id=bytes(15)), "no message: Expected `bytes` of length >= 16"),
        (changed(connect(), auth="password"), "no message: Invalid enum value 'password'"),
        (changed(connect(), description={str(i): "" for i in range(49)}), "no message: Expected"),
        (changed(Disconnect("closing", "x"), ending="bored"), "no message: Invalid enum value"),
        (changed(Heartbeat(), x=[[[[[[[[]]]]]]]]), f"no message: nested deeper than {DEPTH_MAX}"),
        (changed(Heartbeat(), x=[0] * NODES_MAX), f"no message: more than {NODES_MAX} values"),
        (changed(Heartbeat(), x=msgspec.msgpack.Ext(5, b"x")), "no message: a value of type 0xd4"),
    ],
)
def test_what_is_malformed_says_why(frame: bytes, why: str) -> None:
    refused = decode(frame)
    assert isinstance(refused, Malformed)
    assert refused.reason.startswith(why)


@pytest.mark.parametrize(
    "claim",
    [
        b"\x81\xa1x\xdd\xff\xff\xff\xff",  # a list of four thousand million items
        b"\x81\xa1x\xdf\xff\xff\xff\xff",
        b"\x81\xa1x\xc6\x40\x00\x00\x00",  # a GiB of bytes
        b"\x81\xa1x\xdb\x40\x00\x00\x00",
        b"\xdf\xff\xff\xff\xff\xa4type\xa9heartbeat",
        b"\x82\xa4type\xa7connect\xaatransports\xdd\x00\xff\xff\xff" + b"\xc0" * 1000,
    ],
)
def test_a_length_that_is_claimed_costs_nothing(claim: bytes) -> None:
    decode(claim)
    tracemalloc.start()
    try:
        assert isinstance(decode(claim), Malformed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_frame_beyond_every_limit_is_not_looked_at() -> None:
    refused = decode(bytes(MESSAGE_BYTES_MAX + 1))
    assert refused == Malformed(
        f"a message of {MESSAGE_BYTES_MAX + 1} bytes, more than {MESSAGE_BYTES_MAX}"
    )


def test_nothing_is_sent_that_would_be_refused() -> None:
    for wrong in (
        Lookup("r", 1, 1, bytes(KEYS_MAX + 1)),
        Abort("r" * 513, 1),
        FetchResp("r", 1, b"\1", b"", b""),
    ):
        with pytest.raises(ValueError, match=type(wrong).__name__):
            encode(wrong)


def test_keys_of_a_message_are_of_one_length() -> None:
    assert keys_of(Lookup("r", 1, *joined(keys(3)))) == keys(3)
    assert keys_of(Lookup("r", 1, *joined([]))) == []
    with pytest.raises(ValueError, match=r"of one length, not \[4, 36\]"):
        joined([*keys(1), b"four"])


def test_places_are_those_of_the_hits() -> None:
    question = Fetch("r", 7, *joined(keys(3)))
    places = [Reference(2**32 - 1, 2**64 - 1), None, Reference(0, 1)]
    answer = decode(encode(fetched(question, places)))
    assert isinstance(answer, FetchResp)
    assert (answer.kv_request_id, answer.round_seq, answer.hits) == ("r", 7, b"\1\0\1")
    assert references_of(answer) == places


def test_a_greeting_of_an_acknowledged_kind_is_no_greeting() -> None:
    """ConnectAck has all the fields of Connect; the two are told apart by type only."""
    assert type(decode(encode(one_of_each()[1]))) is not Connect
