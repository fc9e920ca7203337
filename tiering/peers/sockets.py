"""The ZeroMQ sockets of peers, each driven by the event loop without a task. The one importer of
zmq here, which the extra `p2p` brings.

A `Pipe` is a socket whose messages are handed to a function, all that are there on each wake: a
coroutine for each message costs ten times as much. Nothing waits to be sent: what a socket does not
take at once has failed.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence

from tiering.errors import ConfigError, PeerError
from tiering.peers.addresses import Address
from tiering.peers.messages import MESSAGE_BYTES_MAX

try:
    import zmq
except ImportError as error:
    raise ImportError(
        "peers talk over ZeroMQ, and the package pyzmq is not installed: install this package "
        "with its extra `p2p`, or pyzmq by itself"
    ) from error

QUEUED_MESSAGES_MAX = 256
"""To or from one peer."""
GOODBYE_MILLISECONDS = 200
"""How long what was said last may take to leave, once a socket is closed."""
_MESSAGES_A_TURN = 256
_RECONNECT_MILLISECONDS = 100
_RECONNECT_MILLISECONDS_MAX = 1000
_HANDSHAKE_MILLISECONDS = 5000

Context = zmq.Context[zmq.Socket[bytes]]

Listener = Callable[[list[bytes]], None]
"""Takes a message as frames; behind a ROUTER the first one says from where it came."""


class Pipe:
    """One socket between `__init__` and `close`, on the running loop."""

    def __init__(self, context: Context, kind: int, listener: Listener, ipv6: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._socket: zmq.Socket[bytes] = context.socket(kind)
        self._is_due = False
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, QUEUED_MESSAGES_MAX),
            (zmq.RCVHWM, QUEUED_MESSAGES_MAX),
            (zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS),
            (zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MILLISECONDS_MAX),
            (zmq.IPV6, int(ipv6)),
        ):
            self._socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._fd = self._socket.FD
        self._loop.add_reader(self._fd, self._drain)

    @property
    def is_closed(self) -> bool:
        return self._socket.closed

    def bind(self, key: str, address: Address, rank: int) -> Address:
        """ConfigError under `key` where it cannot be; gives the real port."""
        try:
            self._socket.bind(address.endpoint)
        except zmq.ZMQError as error:
            raise _refused(key, address, rank, error) from error
        port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return Address(address.host, int(port))

    def connect(self, address: Address) -> None:
        """Begins to; it goes on trying by itself until `close`."""
        try:
            self._socket.connect(address.endpoint)
        except zmq.ZMQError as error:
            raise PeerError(
                str(address), f"cannot be dialled: {zmq.strerror(error.errno or 0)}"
            ) from error

    def send(self, frames: Sequence[bytes]) -> bool:
        """Whether the socket took it; False where the other side is gone, or takes nothing."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        # Sending may have taken the wake-up of a message that has come.
        self._look_again()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """May be called twice."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)

    def _look_again(self) -> None:
        if not self._is_due and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_due = False
        for _ in range(_MESSAGES_A_TURN):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._listener(frames)
        if not self._socket.closed:
            self._look_again()


def router(context: Context, listener: Listener, ipv6: bool) -> Pipe:
    return Pipe(context, zmq.ROUTER, listener, ipv6)


def dealer(context: Context, listener: Listener, ipv6: bool) -> Pipe:
    return Pipe(context, zmq.DEALER, listener, ipv6)


def _refused(key: str, address: Address, rank: int, error: zmq.ZMQError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        beside = key.rpartition("host")[0] + "port"
        reason = f"port {address.port} of data-parallel rank {rank} is taken at {address.host}"
        remedy = "stop what listens there, or write another base port (each rank adds its number)"
        return ConfigError(beside, address.port - rank, reason, remedy)
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        reason, remedy = "is no address of this host", "write one that is"
    elif error.errno in (errno.EACCES, errno.EPERM):
        reason = f"port {address.port} may not be bound by this user"
        remedy = "write a port above 1023"
    else:
        reason = f"cannot be bound: {zmq.strerror(error.errno or 0)}"
        remedy = "write an address of this host"
    return ConfigError(key, address.host, reason, remedy)
