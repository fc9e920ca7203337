"""Every transport keeps the contract of transports."""

from __future__ import annotations

from tiering.testing.transports import TransportContract


class TestTcp(TransportContract):
    maker = "peer_transports:tcp"
    reads_from_the_stopped = False


class TestShm(TransportContract):
    maker = "peer_transports:shm"
    reads_from_the_stopped = True
