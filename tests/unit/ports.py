"""A port for a server of a test's own."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Free now, on 127.0.0.1; somebody else may take it before it is used, though the system gives
    it to nobody soon."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
