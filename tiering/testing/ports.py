"""A port for a server of a test's or a benchmark's own."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000


def free_port() -> int:
    """Free now, on 127.0.0.1, and none of those that the system gives to whoever asks for any: a
    server that binds it late, or comes back to it, finds it taken only by who named it as well."""
    first, last = map(int, _GIVEN_AWAY.read_text().split())
    named = [port for port in range(_FIRST, 1 << 16) if not first <= port <= last]
    # Not that of `random`, which tests seed: two of them at a time would choose the same.
    chance = random.SystemRandom()
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", chance.choice(named) if named else 0))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
            return port
