"""Endpoints of KV events and the ZeroMQ sockets at them. The one importer of zmq, which the extra
`events` brings: whoever uses sockets takes it from here, so that its absence is one sentence.

Owns vLLM's conventions: which endpoints a publisher binds, and how a data-parallel rank changes
one. Whatever cannot be used is a ConfigError with the key, the value and the way out.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from typing import Any

from tiering.errors import ConfigError

try:
    import zmq as zmq
    import zmq.asyncio
    from zmq.utils.monitor import parse_monitor_message as parse_monitor_message
except ImportError as error:
    raise ImportError(
        "KV events go over ZeroMQ, and the package pyzmq is not installed: "
        "install this package with its extra `events`, or pyzmq by itself"
    ) from error

PORT_MAX = 65535
# Names of an interface, a host or an address; IPv6 in brackets, as ZeroMQ wants it.
_TCP = re.compile(r"tcp://(?P<host>\[[\w:.%]+\]|[^\[\]/:]+):(?P<port>\d{1,5}|\*)", re.ASCII)
_EXAMPLE = "write for example tcp://*:5557, tcp://127.0.0.1:5557 or ipc:///tmp/kv-events"
_IS_A_SOCKET_SECONDS = 1.0

Socket = zmq.Socket[bytes]


def checked(key: str, endpoint: str) -> str:
    """`endpoint` if it is one; ConfigError under `key` if not. libzmq itself takes port 99999."""
    scheme, found, rest = endpoint.partition("://")
    if not found or scheme not in ("tcp", "ipc", "inproc") or not rest:
        raise ConfigError(key, endpoint, "is no endpoint that is known here", _EXAMPLE)
    if scheme != "tcp":
        return endpoint
    parts = _TCP.fullmatch(endpoint)
    if parts is None:
        raise ConfigError(key, endpoint, "is not tcp://HOST:PORT", _EXAMPLE)
    if parts["port"] != "*" and int(parts["port"]) > PORT_MAX:
        raise ConfigError(key, endpoint, f"has a port above {PORT_MAX}", "write a smaller one")
    return endpoint


def of_rank(key: str, endpoint: str, rank: int) -> str:
    """The endpoint of data-parallel rank `rank`, as vLLM makes it: the port plus the rank. A port
    of 0 stays; what has no port gets an ending."""
    checked(key, endpoint)
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    if port in ("0", "*"):
        return endpoint
    return checked(key, f"{host}:{int(port) + rank}")


def is_bound_by_convention(endpoint: str) -> bool:
    """Whether a publisher binds `endpoint`, as vLLM has it: wildcards, and what has no port. Port 0
    can only be bound."""
    return (
        "*" in endpoint
        or "::" in endpoint
        or endpoint.startswith(("ipc://", "inproc://"))
        or endpoint.endswith(":0")
    )


def is_in_process(*endpoints: str | None) -> bool:
    """Whether one of them is only there within the process's shared ZeroMQ context."""
    return any(each is not None and each.startswith("inproc://") for each in endpoints)


def reachable(endpoint: str) -> str:
    """What to connect to for what is bound at `endpoint`: a wildcard is this host's loopback."""
    for wildcard, loopback in (
        ("tcp://*:", "tcp://127.0.0.1:"),
        ("tcp://0.0.0.0:", "tcp://127.0.0.1:"),
        ("tcp://[::]:", "tcp://[::1]:"),
    ):
        if endpoint.startswith(wildcard):
            return loopback + endpoint.removeprefix(wildcard)
    return endpoint


def bind(of: zmq.Socket[Any], key: str, endpoint: str) -> str:
    """Bind and say where: the endpoint with its real port. ConfigError where it cannot be."""
    checked(key, endpoint)
    if _is_listened_to(endpoint):
        raise _taken(key, endpoint)
    _choose_family(of, endpoint)
    try:
        of.bind(endpoint)
    except zmq.ZMQError as error:
        raise _refused(key, endpoint, error) from error
    if endpoint.startswith("inproc://"):
        return endpoint
    return of.getsockopt_string(zmq.LAST_ENDPOINT)


def close(of: zmq.Socket[Any], linger_ms: int, *, is_bound: bool) -> None:
    """Close, and let go at once of a name in this process, which libzmq does some time later. Who
    is connected still gets what was sent."""
    endpoint = of.getsockopt_string(zmq.LAST_ENDPOINT)  # none if it was refused
    if is_bound and is_in_process(endpoint):
        of.unbind(endpoint)
    of.close(linger=linger_ms)


def connect(of: zmq.Socket[Any], key: str, endpoint: str) -> None:
    """Connect, which goes on trying until somebody binds. ConfigError where it never can be."""
    checked(key, endpoint)
    _choose_family(of, endpoint)
    try:
        of.connect(endpoint)
    except zmq.ZMQError as error:
        raise _refused(key, endpoint, error) from error


def _choose_family(of: zmq.Socket[Any], endpoint: str) -> None:
    # Else a host with IPv6 switched off could not bind even an IPv4 address.
    if "[" in endpoint:
        of.setsockopt(zmq.IPV6, 1)


def _is_listened_to(endpoint: str) -> bool:
    """Whether another process has bound this path: libzmq takes it away from it without a word."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@"):
        return False
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial,
    ):
        trial.settimeout(_IS_A_SOCKET_SECONDS)
        trial.connect(path)
        return True
    return False


def _taken(key: str, endpoint: str) -> ConfigError:
    if endpoint.startswith("tcp://"):
        remedy = "stop what listens there, write another port, or 0 for any that is free"
    else:
        remedy = "stop what listens there, or write another name"
    return ConfigError(key, endpoint, "is taken", remedy)


def _refused(key: str, endpoint: str, error: zmq.ZMQError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return _taken(key, endpoint)
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        reason, remedy = "is no address of this host", "write one that is, or * for all"
    elif error.errno == errno.ENAMETOOLONG:
        reason, remedy = "has a path that is too long for a socket", "write a shorter one"
    elif error.errno == errno.ENOENT:
        reason, remedy = "is in a directory that does not exist", "make it, or write another one"
    elif error.errno in (errno.EACCES, errno.EPERM):
        reason, remedy = (
            "may not be bound by this user",
            "write a port above 1023, or a path of own",
        )
    else:
        reason, remedy = f"cannot be used: {zmq.strerror(error.errno or 0)}", _EXAMPLE
    return ConfigError(key, endpoint, reason, remedy)
