"""Messages of KV events as bytes: frames, sequence numbers, batches. Pure functions.

A live message has three frames: topic, sequence number in 8 bytes big-endian, batch. A replay is
asked for with an empty frame and the first number wanted, and answered by an empty frame and a
message for each batch, then the number -1 with an empty batch. What is sent is in vLLM 0.32's form,
see `blocks`; what is read may also be the positional arrays of older vLLM, and batches of which
single events mean nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tiering.events.blocks import (
    AllBlocksCleared,
    BlockEvent,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
)

NUMBER_BYTES = 8
END_OF_REPLAY = b"\xff" * NUMBER_BYTES

_LIVE_FRAMES = 3
_UNKNOWN_TEXT_CHARS_MAX = 200


class NotDecodable(ValueError):
    """Bytes that are no message, no batch or no event; says why."""


class Decoded(NamedTuple):
    """A batch without those of its events that mean nothing here; `troubles`: why, one of each."""

    batch: EventBatch
    troubles: list[str]


def packed(number: int) -> bytes:
    """A sequence number as it stands in a frame."""
    return number.to_bytes(NUMBER_BYTES, "big")


def number_in(frame: bytes) -> int:
    """The sequence number in a frame; NotDecodable where it has another length."""
    if len(frame) != NUMBER_BYTES:
        raise NotDecodable(f"a sequence number has {NUMBER_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")


class Message(NamedTuple):
    """A batch that was not looked into yet, and its number; None at the end of a replay."""

    number: int | None
    payload: bytes


def live(frames: Sequence[bytes]) -> Message:
    """What a publisher sent; NotDecodable where it is no message."""
    if len(frames) != _LIVE_FRAMES:
        raise NotDecodable(f"a message has {_LIVE_FRAMES} frames, not {len(frames)}")
    return Message(number_in(frames[1]), frames[2])


def answer(frames: Sequence[bytes]) -> Message:
    """One of the answers to a request for a replay, as a DEALER gets it; older vLLM leaves out the
    topic. NotDecodable where it is none."""
    if len(frames) not in (_LIVE_FRAMES, _LIVE_FRAMES + 1) or frames[0]:
        raise NotDecodable(f"no answer of a replay: {len(frames)} frames")
    if frames[-2] == END_OF_REPLAY:
        return Message(None, b"")
    return Message(number_in(frames[-2]), frames[-1])


class Encoder:
    """For one thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, batch: EventBatch) -> bytes:
        """Raises TypeError, ValueError or OverflowError for what has no place in a message."""
        return self._encoder.encode(batch)


class Decoder:
    """For one thread."""

    def __init__(self) -> None:
        self._whole = msgspec.msgpack.Decoder(EventBatch)
        self._loose = msgspec.msgpack.Decoder(_LooseBatch)
        self._as_map = msgspec.msgpack.Decoder(_STORED_MAP | _REMOVED_MAP | AllBlocksCleared)
        self._as_array = msgspec.msgpack.Decoder(_STORED_ARRAY | _REMOVED_ARRAY | _ClearedArray)

    def decode(self, payload: bytes) -> Decoded:
        """NotDecodable where `payload` is no batch at all."""
        try:
            return Decoded(self._whole.decode(payload), [])
        except _FAILURES:
            pass  # one by one, then
        try:
            loose = self._loose.decode(payload)
        except _FAILURES as error:
            raise NotDecodable(f"no batch of events: {_short(error)}") from None
        events: list[BlockEvent] = []
        troubles: list[str] = []
        for raw in loose.events:
            try:
                events.append(self._event(bytes(raw)))
            except _FAILURES as error:
                troubles.append(_short(error))
        return Decoded(EventBatch(loose.ts, events, loose.data_parallel_rank), troubles)

    def _event(self, raw: bytes) -> BlockEvent:
        decoder = self._as_array if _is_array(raw) else self._as_map
        found = decoder.decode(raw)
        if isinstance(found, _STORED_MAP | _STORED_ARRAY):
            return BlockStored(*msgspec.structs.astuple(found))
        if isinstance(found, _REMOVED_MAP | _REMOVED_ARRAY):
            return BlockRemoved(*msgspec.structs.astuple(found))
        return AllBlocksCleared()


class _LooseBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


def _lenient(of: type[msgspec.Struct], required: dict[str, Any], is_array: bool) -> Any:
    """`of` with all but `required` optional: older vLLM leaves out what it does not know yet."""
    hints = {field.name: field.type for field in msgspec.structs.fields(of)}
    fields = [
        (name, required[name]) if name in required else (name, hint | None, None)
        for name, hint in hints.items()
    ]
    return msgspec.defstruct(f"_{of.__name__}", fields, tag=of.__name__, array_like=is_array)


_STORED_FIELDS = {
    "block_hashes": list[BlockHash],
    "parent_block_hash": BlockHash | None,
    "token_ids": list[int],
    "block_size": int,
}
_STORED_MAP = _lenient(BlockStored, _STORED_FIELDS, False)
_STORED_ARRAY = _lenient(BlockStored, _STORED_FIELDS, True)
_REMOVED_MAP = _lenient(BlockRemoved, {"block_hashes": list[BlockHash]}, False)
_REMOVED_ARRAY = _lenient(BlockRemoved, {"block_hashes": list[BlockHash]}, True)

# Bytes from anywhere: a text that is none, a map with a list for a key, lists in lists without end.
_FAILURES = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError)


def _is_array(raw: bytes) -> bool:
    return bool(raw) and (0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD))


def _short(error: Exception) -> str:
    return str(error)[:_UNKNOWN_TEXT_CHARS_MAX]
