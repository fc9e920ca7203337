"""The engine's end of one child: its process, the stream of messages, the channel of its logs.

Owns the descriptors and what could not be sent at once. `send` and `receive` are for the portal's
owner and never wait; `flush`, `relay_logs` and `ended` are for the keeper's thread.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Callable

import msgspec

from tiering.process.logs import relay
from tiering.process.messages import Frames, Order, Report, framed, reports

log = logging.getLogger("tiering")

BACKLOG_BYTES_MAX = 16 << 20
"""Of orders that the child does not take: it hangs, or is stopped."""

RECEIVED_BYTES_MAX = 1 << 20
"""In one call, so that what has piled up is taken in over several steps of the scheduler's."""

PIECE_BYTES = 1 << 18
DATAGRAM_BYTES_MAX = 1 << 17


class Link:
    """One for each child. `wake` makes the keeper call `flush`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stream: socket.socket,
        logs: socket.socket,
        wake: Callable[[], None],
    ) -> None:
        self.process = process
        self.stream = stream
        self.logs = logs
        self.ended = threading.Event()
        """Set by the keeper once the process, and with it its mapping of the region, is gone."""
        self.is_open = False
        self.is_silent = False
        """Nothing more will come."""
        self._wake = wake
        self._frames = Frames()
        self._lock = threading.Lock()
        self._backlog = bytearray()
        stream.setblocking(False)

    def send(self, order: Order) -> bool:
        """False if it was not taken, since too much waits to be sent. What is taken may be lost
        with the child all the same."""
        data = framed(order)
        with self._lock:
            if self._backlog:
                if len(self._backlog) + len(data) > BACKLOG_BYTES_MAX:
                    return False
                self._backlog += data
                return True
            sent = self._sent(data)
            self._backlog += data[sent:]
        if sent < len(data):
            self._wake()
        return True

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def flush(self) -> None:
        """Send what can be sent by now of what could not before."""
        with self._lock:
            if self._backlog:
                del self._backlog[: self._sent(self._backlog)]

    def receive(self) -> list[Report]:
        """What has come, oldest first, up to some bytes; sets `is_silent` after the last. A child
        that is not understood is killed."""
        # Looked at first: all that the child has sent is there once it has ended.
        is_last = self.ended.is_set()
        left = RECEIVED_BYTES_MAX
        while left > 0 and not self.is_silent:
            try:
                piece = self.stream.recv(PIECE_BYTES)
            except BlockingIOError:
                self.is_silent = is_last
                break
            except ConnectionError:
                piece = b""
            self.is_silent = not piece
            self._frames.feed(piece)
            left -= len(piece)
            if len(piece) < PIECE_BYTES:
                break
        found: list[Report] = []
        try:
            found += map(reports.decode, self._frames.take())
        except (ValueError, msgspec.MsgspecError):
            log.exception("the process of the tiers is not understood, and is killed")
            self.is_silent = True
            self.process.kill()
        return found

    @property
    def is_over(self) -> bool:
        """The process is gone, and all that it said was received."""
        return self.is_silent and self.ended.is_set()

    def relay_logs(self) -> bool:
        """Log what the child has sent; False once it has closed the channel."""
        while True:
            try:
                datagram = self.logs.recv(DATAGRAM_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not datagram:
                return False
            try:
                relay(datagram)
            except msgspec.MsgspecError as error:
                log.warning("a log record of the tiers' process cannot be read: %s", error)

    def how_it_ended(self) -> str:
        """As a user reads it."""
        code = self.process.returncode or 0
        if code >= 0:
            return f"exit status {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    def close(self) -> None:
        """The child ends at once if it has not."""
        self.stream.close()
        self.logs.close()

    def _sent(self, data: bytes | bytearray) -> int:
        """How much of `data` is out of the way: sent, or without anybody to read it."""
        try:
            return self.stream.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def __repr__(self) -> str:
        state = "ended" if self.ended.is_set() else "open" if self.is_open else "opening"
        return f"<Link to process {self.process.pid}, {state}, {len(self._backlog)} bytes back>"
