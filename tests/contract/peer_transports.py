"""The transports under test, as other processes can make them as well."""

from __future__ import annotations

from tiering.peers.addresses import Address
from tiering.peers.transports.base import Served
from tiering.peers.transports.shm import ShmTransport
from tiering.peers.transports.tcp import TcpTransport

QUIET_SECONDS_MAX = 0.7


def tcp(served: Served) -> TcpTransport:
    return TcpTransport(served, Address("127.0.0.1", 0), quiet_seconds_max=QUIET_SECONDS_MAX)


def shm(served: Served) -> ShmTransport:
    return ShmTransport(served, quiet_seconds_max=QUIET_SECONDS_MAX)
