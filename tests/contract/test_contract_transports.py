"""Every transport keeps the contract of transports."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tiering.testing.transports import TransportContract


class TestTcp(TransportContract):
    maker = "peer_transports:tcp"
    reads_from_the_stopped = False
    checks_tokens = True


class TestShm(TransportContract):
    maker = "peer_transports:shm"
    reads_from_the_stopped = True
    checks_tokens = True


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl")
class TestNixl(TransportContract):
    maker = "peer_transports:nixl"
    reads_from_the_stopped = False
    checks_tokens = False
