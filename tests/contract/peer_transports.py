"""The transports under test, as other processes can make them as well."""

from __future__ import annotations

import os

from tiering.peers.addresses import Address
from tiering.peers.transports.base import Served
from tiering.peers.transports.nixl import NixlTransport
from tiering.peers.transports.shm import ShmTransport
from tiering.peers.transports.tcp import TcpTransport

QUIET_SECONDS_MAX = 2.0


def tcp(served: Served) -> TcpTransport:
    return TcpTransport(served, Address("127.0.0.1", 0), quiet_seconds_max=QUIET_SECONDS_MAX)


def shm(served: Served) -> ShmTransport:
    return ShmTransport(served, quiet_seconds_max=QUIET_SECONDS_MAX)


def nixl(served: Served) -> NixlTransport:
    # Over the network: by default UCX would read the other process's memory without asking it.
    os.environ.setdefault("UCX_TLS", "tcp,self")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    return NixlTransport(served, quiet_seconds_max=QUIET_SECONDS_MAX)
