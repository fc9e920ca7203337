"""Messages of every kind for tests of peers, and engines that introduce themselves."""

from __future__ import annotations

import msgspec

from tiering.namespace import Namespace
from tiering.peers.agreement import Introduction, described
from tiering.peers.auth import SharedKey
from tiering.peers.messages import (
    KEY_BYTES_MAX,
    KEYS_MAX,
    Abort,
    AbortAck,
    Connect,
    ConnectAck,
    Disconnect,
    Fetch,
    FetchResp,
    Heartbeat,
    Lookup,
    LookupResp,
    Message,
    Offer,
    TransferDone,
)
from tiering.testing.examples import example_namespace

KEY = SharedKey(bytes(range(64)))
OTHER_KEY = SharedKey(bytes(range(1, 65)))
NAMESPACE = example_namespace(tp_size=2, ranks=2)


def introduction(
    engine: int = 1,
    incarnation: int = 1,
    namespace: Namespace = NAMESPACE,
    hash_seed: str = "0",
    row_bytes: int = 4096,
) -> Introduction:
    digest, description = described(namespace)
    return Introduction(
        engine_id=bytes([engine]) * 16,
        incarnation=incarnation,
        namespace=digest,
        description=description,
        hash_seed=hash_seed,
        rows=10,
        row_bytes=row_bytes,
        transports=(Offer("tcp", "127.0.0.1:5711"), Offer("shm", "kv-tiering-1", b"host")),
    )


def keys(count: int, first: int = 0, size: int = 36) -> list[bytes]:
    return [number.to_bytes(size, "big") for number in range(first, first + count)]


def connect() -> Connect:
    return introduction().connect(KEY, bytes(32))


def connect_ack() -> ConnectAck:
    return introduction(2).connect_ack(KEY, bytes(range(32)), bytes(16))


def one_of_each() -> list[Message]:
    return [
        connect(),
        connect_ack(),
        Lookup("request-1", 1, 36, b"".join(keys(3))),
        LookupResp("request-1", 1, bytes([1, 0, 1])),
        Fetch("request-1", 2, 36, b"".join(keys(2))),
        Fetch("request-1", 3, 1, b""),
        FetchResp("request-1", 2, bytes([1, 0]), bytes(8), bytes(range(16))),
        TransferDone("request-1", 2, True),
        Abort("request-1", 2),
        AbortAck("request-1", 2),
        Disconnect("closing", "the engine stops"),
        Heartbeat(),
    ]


def largest_of_each() -> list[Message]:
    """As long as anything in them may be."""
    request_id = "\N{SNOWMAN}" * 512
    hello = {
        **msgspec.structs.asdict(connect()),
        "description": {f"{i:064}": "\N{SNOWMAN}" * 1024 for i in range(48)},
        "hash_seed": "\N{SNOWMAN}" * 256,
    }
    joined = bytes(KEYS_MAX * KEY_BYTES_MAX)
    marks = bytes(KEYS_MAX)
    return [
        Connect(**hello),
        ConnectAck(**hello, session=bytes(16)),
        Lookup(request_id, 2**63 - 1, KEY_BYTES_MAX, joined),
        LookupResp(request_id, 2**63 - 1, marks),
        Fetch(request_id, 2**63 - 1, KEY_BYTES_MAX, joined),
        FetchResp(request_id, 2**63 - 1, marks, bytes(4 * KEYS_MAX), bytes(8 * KEYS_MAX)),
        TransferDone(request_id, 2**63 - 1, False),
        Abort(request_id, 2**63 - 1),
        AbortAck(request_id, 2**63 - 1),
        Disconnect("malformed", "\N{SNOWMAN}" * 4096),
        Heartbeat(),
    ]


def changed(message: Message, **fields: object) -> bytes:
    """The frame of `message` with other fields, whatever they are; None leaves one out."""
    whole = {**msgspec.to_builtins(message, builtin_types=(bytes,)), **fields}
    kept = {name: value for name, value in whole.items() if value is not None}
    return msgspec.msgpack.encode(kept)
