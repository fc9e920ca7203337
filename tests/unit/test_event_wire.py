"""Messages of KV events byte for byte, and what is made of messages that others wrote."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from event_streams import cleared, payload, placeholder, removed, stored
from tiering.events.blocks import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from tiering.events.wire import (
    END_OF_REPLAY,
    Decoder,
    Encoder,
    Message,
    NotDecodable,
    answer,
    live,
    number_in,
    packed,
)

WHOLE = BlockStored(
    block_hashes=[0xFFFF_FFFF_FFFF_FFFE, 7],
    parent_block_hash=5,
    token_ids=[1, 2, 300, 70000],
    block_size=2,
    lora_id=None,
    medium="CPU",
    lora_name="adapter",
    extra_keys=[["salt"], None],
    group_idx=1,
    kv_cache_spec_kind="full_attention",
    locality="LOCAL",
)

# Of vLLM 0.32's own encoder; test_event_vllm.py has it encode them again.
GOLDEN: dict[str, tuple[EventBatch, str]] = {
    "all kinds": (
        EventBatch(1.5, [WHOLE, BlockRemoved([7], "STORAGE"), AllBlocksCleared()], 3),
        "93cb3ff8000000000000938ca474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
        "92cffffffffffffffffe07b1706172656e745f626c6f636b5f6861736805a9746f6b656e5f6964739401"
        "02cd012cce00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055a9"
        "6c6f72615f6e616d65a761646170746572aa65787472615f6b6579739291a473616c74c0a967726f7570"
        "5f69647801b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6ea86c6f"
        "63616c697479a54c4f43414c83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368"
        "65739107a66d656469756da753544f5241474581a474797065b0416c6c426c6f636b73436c6561726564"
        "03",
    ),
    "nothing": (EventBatch(0.0, [], 0), "93cb00000000000000009000"),
    "hashes as bytes": (
        EventBatch(2.0, [BlockRemoved([b"\x01\x02"], None, 0)], 0),
        "93cb40000000000000009184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865"
        "7391c4020102a66d656469756dc0a967726f75705f6964780000",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_batch_has_these_bytes(name: str) -> None:
    batch, expected = GOLDEN[name]
    assert Encoder().encode(batch).hex() == expected


def test_what_was_encoded_is_decoded() -> None:
    decoder = Decoder()
    for batch, expected in GOLDEN.values():
        assert decoder.decode(bytes.fromhex(expected)) == (batch, [])
        assert msgspec.msgpack.decode(bytes.fromhex(expected), type=EventBatch) == batch


def test_the_frames_of_a_message() -> None:
    assert packed(258) == bytes([0, 0, 0, 0, 0, 0, 1, 2])
    assert number_in(packed(2**64 - 1)) == 2**64 - 1
    assert live([b"topic", packed(3), b"body"]) == Message(3, b"body")
    assert answer([b"", b"topic", packed(3), b"body"]) == Message(3, b"body")
    assert answer([b"", packed(3), b"body"]) == Message(3, b"body"), "of older vLLM"
    assert answer([b"", b"", END_OF_REPLAY, b""]) == Message(None, b"")
    assert (-1).to_bytes(8, "big", signed=True) == END_OF_REPLAY


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"", packed(1)], "3 frames, not 2"),
        ([b"", packed(1), b"", b""], "3 frames, not 4"),
        ([b"", b"1234567", b""], "8 bytes, not 7"),
    ],
)
def test_what_is_no_message_says_why(frames: list[bytes], why: str) -> None:
    with pytest.raises(NotDecodable, match=why):
        live(frames)


def test_what_is_no_answer_says_why() -> None:
    for frames in ([b"", b""], [b"x", b"", packed(1), b""], [b"", b"", b"short", b""]):
        with pytest.raises(NotDecodable):
            answer(frames)


def encoded(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def test_positional_arrays_of_older_vllm_are_read() -> None:
    batch, troubles = Decoder().decode(
        encoded(
            ["BlockStored", [1, 2], None, [5, 6], 1, None],
            ["BlockStored", [3], 2, [7], 1, None, "CPU", "adapter", None, 1],
            ["BlockRemoved", [1]],
            ["BlockRemoved", [2], "CPU", 1, None, None, "more", "than", "is", "known"],
            ["AllBlocksCleared"],
        )
    )
    assert troubles == []
    assert batch.events == [
        BlockStored([1, 2], None, [5, 6], 1, None, None, None),
        BlockStored([3], 2, [7], 1, None, "CPU", "adapter", None, 1),
        BlockRemoved([1], None),
        BlockRemoved([2], "CPU", 1),
        AllBlocksCleared(),
    ]


def test_maps_with_less_or_more_than_is_known_are_read() -> None:
    batch, troubles = Decoder().decode(
        encoded(
            {"type": "BlockStored", "block_hashes": [1], "token_ids": [5], "block_size": 1,
             "parent_block_hash": None, "new": {"in": "vLLM 1.0"}},
            {"type": "BlockRemoved", "block_hashes": [-1, 2**64 - 1]},
        )
    )  # fmt: skip
    assert troubles == []
    assert batch.events == [
        BlockStored([1], None, [5], 1, None, None, None),
        BlockRemoved([-1, 2**64 - 1], None),
    ]


BAD_EVENTS: dict[str, object] = {
    "unknown type": {"type": "TierBlocksCleared", "medium": "CPU"},
    "no type": {"block_hashes": [1]},
    "no tokens": {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None},
    "text for hashes": {"type": "BlockRemoved", "block_hashes": ["a"]},
    "a number": 5,
    "an unknown array": ["Nothing", 1],
    "an empty array": [],
    "nil": None,
}


@pytest.mark.parametrize("bad", BAD_EVENTS.values(), ids=BAD_EVENTS)
def test_an_event_that_means_nothing_costs_only_itself(bad: object) -> None:
    good = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}
    batch, troubles = Decoder().decode(encoded(good, bad, good))
    assert batch.events == [BlockRemoved([1], "CPU")] * 2
    assert len(troubles) == 1
    assert troubles[0]


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x93", b"junk", msgspec.msgpack.encode({"ts": 1}), b"\xff" * 100],
    ids=repr,
)
def test_what_is_no_batch_is_not_decodable(body: bytes) -> None:
    with pytest.raises(NotDecodable, match="no batch of events"):
        Decoder().decode(body)


def test_what_cannot_be_sent_is_an_error_of_the_encoder() -> None:
    for event in (removed(2**64), BlockRemoved([object()], None)):  # type: ignore[list-item]
        with pytest.raises((TypeError, OverflowError, ValueError)):
            Encoder().encode(EventBatch(1.0, [event], 0))


SAMPLE = payload(stored(1, 2), removed(1), cleared(), placeholder(9))


@given(st.binary(max_size=200) | st.tuples(st.integers(0, len(SAMPLE) - 1), st.binary(max_size=4)))
def test_no_bytes_make_the_decoder_fail_otherwise(given_bytes: Any) -> None:
    if isinstance(given_bytes, tuple):
        at, planted = given_bytes
        given_bytes = SAMPLE[:at] + planted + SAMPLE[at + len(planted) :]
    try:
        batch, _ = Decoder().decode(given_bytes)
    except NotDecodable:
        return
    assert isinstance(batch, EventBatch)


def test_lists_in_lists_without_end_are_not_decodable() -> None:
    deep = b"\x93\xcb" + bytes(8) + b"\x91" * 100_000 + b"\x00" + b"\x00"
    with pytest.raises(NotDecodable):
        Decoder().decode(deep)
