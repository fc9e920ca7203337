"""What two engines say to one another: typed messages, one MessagePack map each.

Fields are named as in vLLM's P2P tier where it has them. Keys of one message are of one length and
travel joined, and so do what is answered for each of them: a message then has a handful of values
however many chunks it is about, and can be looked at before it is decoded (`bounds`). Fields that
are not known are ignored, so a later version may add some; what is malformed is a value that says
why. Pure. docs/peers-protocol.md has every message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from tiering.peers.bounds import OutOfBounds, outline

PROTOCOL = 1
"""The version that this engine speaks, and PROTOCOL_OLDEST the oldest that it understands."""
PROTOCOL_OLDEST = 1

KEYS_MAX = 16_384
"""Chunks that one message may be about; more are asked for in several rounds."""
KEY_BYTES_MAX = 64
ID_BYTES = 16
NONCE_BYTES = 32
DIGEST_BYTES = 32
OFFERS_MAX = 8
FIELDS_MAX = 48
FIELD_CHARS_MAX = 1024
REASON_CHARS_MAX = 4096
REQUEST_ID_CHARS_MAX = 512

_Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Round = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_RequestId = Annotated[str, Meta(min_length=1, max_length=REQUEST_ID_CHARS_MAX)]
_Keys = Annotated[bytes, Meta(max_length=KEYS_MAX * KEY_BYTES_MAX)]
_KeyBytes = Annotated[int, Meta(ge=1, le=KEY_BYTES_MAX)]
_Marks = Annotated[bytes, Meta(max_length=KEYS_MAX)]

Auth = Literal["none", "hmac-sha256"]
Ending = Literal["closing", "refused", "malformed", "unknown", "failed"]
"""Why a session ends: its engine stops; the two do not fit; a message meant nothing; the session is
not known here (any more); anything else."""


class _Message(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of all: a map with its name under "type"."""


class Offer(msgspec.Struct, frozen=True):
    """One way by which this engine's rows can be read, and where: what `address` and `details`
    mean is the transport's business."""

    transport: Annotated[str, Meta(min_length=1, max_length=16)]
    address: Annotated[str, Meta(max_length=512)]
    details: Annotated[bytes, Meta(max_length=16_384)] = b""


class Connect(_Message, frozen=True, tag="connect"):
    """The dialling engine says who it is, before anything else. `protocol` is the newest version
    that it speaks. `description` is what `namespace` is a digest of, for people: so that a refusal
    can say what differs. `hash_seed` is what its block hashes start from."""

    protocol: _Number
    protocol_oldest: _Number
    engine_id: _Id
    incarnation: _Number
    nonce: _Nonce
    auth: Auth
    namespace: _Digest
    description: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=FIELD_CHARS_MAX)]],
        Meta(max_length=FIELDS_MAX),
    ]
    hash_seed: Annotated[str, Meta(max_length=256)]
    rows: _Number
    row_bytes: _Number
    transports: Annotated[list[Offer], Meta(max_length=OFFERS_MAX)]


class ConnectAck(Connect, frozen=True, tag="connect_ack"):
    """The dialled engine says the same of itself, and names the session."""

    session: _Id


class Lookup(_Message, frozen=True, tag="lookup"):
    """Which of these chunks could be fetched? `keys` are joined, `key_bytes` each."""

    kv_request_id: _RequestId
    round_seq: _Round
    key_bytes: _KeyBytes
    keys: _Keys


class LookupResp(_Message, frozen=True, tag="lookup_resp"):
    """`hits`: a byte for each key of the question, 1 where it is there, else 0."""

    kv_request_id: _RequestId
    round_seq: _Round
    hits: _Marks


class Fetch(_Message, frozen=True, tag="fetch"):
    """Pin these chunks, and say where they are; with `waits` when all of them are there, or no more
    will come. Without keys: this request is over, nothing more will be asked for it."""

    kv_request_id: _RequestId
    round_seq: _Round
    key_bytes: _KeyBytes
    keys: _Keys
    waits: bool = False


class FetchResp(_Message, frozen=True, tag="fetch_resp"):
    """`hits` as in LookupResp; for each key, little-endian, its slot in 4 bytes and the generation
    of that slot in 8, both 0 where it is no hit. Hits are pinned until `transfer_done`."""

    kv_request_id: _RequestId
    round_seq: _Round
    hits: _Marks
    slots: Annotated[bytes, Meta(max_length=4 * KEYS_MAX)]
    generations: Annotated[bytes, Meta(max_length=8 * KEYS_MAX)]


class TransferDone(_Message, frozen=True, tag="transfer_done"):
    """The consumer has read what it wanted of a fetch; `success`: all of it."""

    kv_request_id: _RequestId
    round_seq: _Round
    success: bool


class Abort(_Message, frozen=True, tag="abort"):
    """The consumer wants nothing any more of this round."""

    kv_request_id: _RequestId
    round_seq: _Round


class AbortAck(_Message, frozen=True, tag="abort_ack"):
    """Nothing is pinned for this round any more, and nothing more will be said of it."""

    kv_request_id: _RequestId
    round_seq: _Round


class Disconnect(_Message, frozen=True, tag="disconnect"):
    """The session is over, or never was. `reason` is a sentence for the other side's log."""

    ending: Ending
    reason: Annotated[str, Meta(max_length=REASON_CHARS_MAX)]


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """I am here. The dialling engine's first one proves that it knows the shared key."""


Message = (
    Connect
    | ConnectAck
    | Lookup
    | LookupResp
    | Fetch
    | FetchResp
    | TransferDone
    | Abort
    | AbortAck
    | Disconnect
    | Heartbeat
)

_SMALL_BYTES = 1024 + 512 * 4  # a request id of 512 characters, of 4 bytes each at most
_HELLO_BYTES = 256 << 10
LIMITS_BYTES: dict[str, int] = {
    "connect": _HELLO_BYTES,
    "connect_ack": _HELLO_BYTES,
    "lookup": _SMALL_BYTES + KEYS_MAX * KEY_BYTES_MAX,
    "lookup_resp": _SMALL_BYTES + KEYS_MAX,
    "fetch": _SMALL_BYTES + KEYS_MAX * KEY_BYTES_MAX,
    "fetch_resp": _SMALL_BYTES + KEYS_MAX * 13,
    "transfer_done": _SMALL_BYTES,
    "abort": _SMALL_BYTES,
    "abort_ack": _SMALL_BYTES,
    "disconnect": _SMALL_BYTES + REASON_CHARS_MAX * 4,
    "heartbeat": _SMALL_BYTES,
}
"""The longest frame of each kind, by its "type"."""
MESSAGE_BYTES_MAX = max(LIMITS_BYTES.values())

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are no message, and why: fit for telling the other side."""

    reason: str


def encode(message: Message) -> bytes:
    """ValueError for what the other side would refuse: more keys, a longer text than is taken."""
    frame = _encoder.encode(message)
    if isinstance(refused := decode(frame), Malformed):
        raise ValueError(f"{type(message).__name__}: {refused.reason}")
    return frame


def decode(frame: bytes) -> Message | Malformed:
    """Makes nothing that is larger than its frame, and nothing of a frame beyond its limit."""
    if len(frame) > MESSAGE_BYTES_MAX:
        return Malformed(f"a message of {len(frame)} bytes, more than {MESSAGE_BYTES_MAX}")
    try:
        kind = outline(frame)
        limit = LIMITS_BYTES.get(kind)
        if limit is None:
            return Malformed(f"a message of type {kind!r}, which is not known")
        if len(frame) > limit:
            return Malformed(f"{len(frame)} bytes of {kind}, more than {limit}")
        message = _decoder.decode(frame)
    except OutOfBounds as error:
        return Malformed(f"no message: {error}")
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        return Malformed(f"no message: {str(error)[:200]}")
    if why := _contradiction(message):
        return Malformed(why)
    return message


def _contradiction(message: Message) -> str | None:
    """What of a message does not fit together, though each of its fields is well by itself."""
    match message:
        case Lookup() | Fetch():
            length = len(message.keys)
            if length % message.key_bytes or length // message.key_bytes > KEYS_MAX:
                return f"{length} bytes of keys of {message.key_bytes} bytes, at most {KEYS_MAX}"
        case FetchResp():
            count = len(message.hits)
            if len(message.slots) != 4 * count or len(message.generations) != 8 * count:
                return f"{count} hits, but slots and generations of another number"
        case Connect():
            if message.protocol < message.protocol_oldest:
                return "a protocol that is older than the oldest that is understood"
    if isinstance(message, LookupResp | FetchResp) and not set(message.hits) <= {0, 1}:
        return "hits that are neither 0 nor 1"
    return None


def joined(keys: Sequence[bytes]) -> tuple[int, bytes]:
    """`key_bytes` and `keys` of a message; ValueError where they are not of one length."""
    lengths = set(map(len, keys))
    if len(lengths) > 1:
        raise ValueError(f"keys of one message are of one length, not {sorted(lengths)}")
    return lengths.pop() if lengths else 1, b"".join(keys)


def keys_of(message: Lookup | Fetch) -> list[bytes]:
    """The keys of a question, in order."""
    size, keys = message.key_bytes, message.keys
    return [keys[at : at + size] for at in range(0, len(keys), size)]


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a chunk lies in its engine's host tier: good for as long as the generation of its slot
    is this one."""

    slot: int
    generation: int


def references_of(message: FetchResp) -> list[Reference | None]:
    """One for each key of the question, None where it was no hit."""
    slots: npt.NDArray[np.uint32] = np.frombuffer(message.slots, "<u4")
    generations: npt.NDArray[np.uint64] = np.frombuffer(message.generations, "<u8")
    return [
        Reference(slot, generation) if hit else None
        for hit, slot, generation in zip(
            message.hits, slots.tolist(), generations.tolist(), strict=True
        )
    ]


def fetched(question: Fetch, found: Sequence[Reference | None]) -> FetchResp:
    """The answer to `question`: a reference, or None, for each of its keys."""
    nowhere = Reference(0, 0)
    places = [each or nowhere for each in found]
    return FetchResp(
        question.kv_request_id,
        question.round_seq,
        bytes(each is not None for each in found),
        np.array([place.slot for place in places], "<u4").tobytes(),
        np.array([place.generation for place in places], "<u8").tobytes(),
    )
