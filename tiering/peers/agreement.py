"""Whether two engines may exchange chunks, and if not, what differs. Pure.

The sentence is the same on both sides: it speaks of the dialling and of the dialled engine, so
that two operators who compare their logs read the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tiering.namespace import Namespace
from tiering.peers.auth import SharedKey
from tiering.peers.messages import (
    FIELD_CHARS_MAX,
    NONCE_BYTES,
    PROTOCOL,
    PROTOCOL_OLDEST,
    Connect,
    ConnectAck,
    Offer,
)

_DIFFERENCES_MAX = 4


@dataclass(frozen=True, slots=True)
class Introduction:
    """What this engine says of itself. `engine_id`, random, is new with each start; `incarnation`
    rises within it when all that peers were told becomes void, such as when the region is made
    anew. `namespace` and `description` are of `described`; `rows` of `row_bytes` are served by
    `transports`."""

    engine_id: bytes
    incarnation: int
    namespace: bytes
    description: dict[str, str]
    hash_seed: str
    rows: int
    row_bytes: int
    transports: tuple[Offer, ...] = ()

    def connect(self, key: SharedKey, nonce: bytes) -> Connect:
        assert len(nonce) == NONCE_BYTES
        return Connect(
            protocol=PROTOCOL,
            protocol_oldest=PROTOCOL_OLDEST,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            nonce=nonce,
            auth=key.auth,
            namespace=self.namespace,
            description=self.description,
            hash_seed=self.hash_seed,
            rows=self.rows,
            row_bytes=self.row_bytes,
            transports=list(self.transports),
        )

    def connect_ack(self, key: SharedKey, nonce: bytes, session: bytes) -> ConnectAck:
        same = msgspec.structs.asdict(self.connect(key, nonce))
        return ConnectAck(**same, session=session)


def described(namespace: Namespace) -> tuple[bytes, dict[str, str]]:
    """The digest of `namespace`, and its fields as texts, cut where they are long."""
    fields = {
        name: str(value)[:FIELD_CHARS_MAX]
        for name, value in namespace.describe().items()
        if name != "digest"
    }
    return namespace.digest, fields


def stranger(dialling: Connect, dialled: Connect) -> str | None:
    """Why the two cannot even find out whether they have the same key. Fit for anybody to read."""
    if dialling.protocol < dialled.protocol_oldest or dialled.protocol < dialling.protocol_oldest:
        return (
            f"no protocol in common: the dialling engine speaks {_versions(dialling)}, the dialled "
            f"one {_versions(dialled)}; run versions of kv-tiering that are closer to one another"
        )
    if dialling.auth != dialled.auth:
        has, lacks = ("dialling", "dialled") if dialled.auth == "none" else ("dialled", "dialling")
        return (
            f"the {has} engine has a shared key and the {lacks} one has none; give both the same "
            f"file as auth"
        )
    return None


def refusal(dialling: Connect, dialled: Connect) -> str | None:
    """Why the two cannot exchange chunks; None where they can. Only for those who have the key."""
    if dialling.hash_seed != dialled.hash_seed:
        return (
            f"another hash seed: {_two('hash_seed', dialling.hash_seed, dialled.hash_seed)}; set "
            f"PYTHONHASHSEED to the same value on all engines"
        )
    if dialling.namespace != dialled.namespace:
        return f"another namespace: {_differences(dialling.description, dialled.description)}"
    if dialling.row_bytes != dialled.row_bytes:
        return f"rows of another size: {_two('row_bytes', dialling.row_bytes, dialled.row_bytes)}"
    return None


def _differences(dialling: dict[str, str], dialled: dict[str, str]) -> str:
    differing = [
        _two(name, dialling.get(name), dialled.get(name))
        for name in sorted(dialling.keys() | dialled.keys())
        if dialling.get(name) != dialled.get(name)
    ]
    if not differing:
        return "the engines describe themselves alike, and differ in what they leave out"
    more = len(differing) - _DIFFERENCES_MAX
    return "; ".join(differing[:_DIFFERENCES_MAX]) + (f"; and {more} more" if more > 0 else "")


def _two(name: str, dialling: object, dialled: object) -> str:
    return f"{name} is {_shown(dialling)} on the dialling engine, {_shown(dialled)} on the dialled"


def _shown(value: object) -> str:
    text = "not told" if value is None else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _versions(of: Connect) -> str:
    if of.protocol == of.protocol_oldest:
        return f"version {of.protocol}"
    return f"versions {of.protocol_oldest} to {of.protocol}"
