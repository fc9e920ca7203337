"""Which peer a request names, and for what: what crosses from the connector to the tier. Pure."""

from __future__ import annotations

import msgspec

from tiering.peers.addresses import Address


class PeerSource(msgspec.Struct, frozen=True):
    """Another engine, reached at `host` and `port`, its tier's. `kv_request_id`, 1 to 512
    characters, says to it what this is for; an orchestrator's, the same on both sides.
    `is_prefiller`: the peer computes, or has computed, all that is asked for, and what is not there
    yet is waited for."""

    host: str
    port: int
    kv_request_id: str
    is_prefiller: bool = False

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)

    def packed(self) -> bytes:
        """As steps carry it."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpacked(cls, peer: bytes) -> PeerSource:
        return msgspec.msgpack.decode(peer, type=cls)
