"""One connection to a store: a request out of the caller's buffers, an answer into them.

Nothing is copied but by the kernel. Without TLS the body goes to the socket from where it lies, by
a callback of the loop that waits over a duplicate of the socket, since the loop waits for none that
a transport has; the transport would keep a copy of what the socket does not take at once.
Under TLS the transport encrypts it piece by piece. One request at a time; whatever does not end
well ends the connection, and no buffer is touched any more. Used from one loop, asyncio's or
uvloop's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from typing import cast

from tiering.tiers.obj.answering import Answering, NoHttpError
from tiering.tiers.obj.dialect import Answer
from tiering.tiers.obj.store import StoreError

_TLS_PIECE_BYTES = 256 << 10
# A longer send would hold up the loop for a millisecond and more.
_SEND_BYTES_MAX = 4 << 20
# The system takes up to 1,024.
_SEND_PARTS_MAX = 64


class StalledError(Exception):
    """Nothing was sent or received for as long as was allowed."""


class StaleError(Exception):
    """A connection that had been used before ended before anything of an answer came."""


class Connection(asyncio.BufferedProtocol):
    """`exchange` may be called again while `is_free`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._uses = 0
        self._answering: Answering | None = None
        self._done: asyncio.Future[None] | None = None
        self._unsent: list[memoryview] = []
        self._waited: socket.socket | None = None
        self._is_paused = False
        self._moved = 0.0
        self._patience = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # What comes unasked.
        self._spare = bytearray(1)

    def __repr__(self) -> str:
        state = "closed" if self._transport is None else "free" if self.is_free else "busy"
        return f"<Connection {state}, {self._uses} requests>"

    @property
    def is_free(self) -> bool:
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._done is None

    async def exchange(
        self,
        head: bytes,
        body: Sequence[memoryview],
        answering: Answering,
        seconds: float,
    ) -> Answer:
        """Send `head` and `body`, and return what came. Raises StalledError after `seconds` in
        which nothing moved, StaleError, NoHttpError, OSError, or what `answering` does."""
        if not self.is_free:
            # With the handshake of TLS its end may come already.
            raise ConnectionResetError("the connection ended")
        self._stop_timer()
        self._uses += 1
        self._answering = answering
        self._done = self._loop.create_future()
        self._unsent = [memoryview(head), *(view.cast("B") for view in body if view.nbytes)]
        self._moved, self._patience = self._loop.time(), seconds
        self._timer = self._loop.call_at(self._moved + seconds, self._check)
        try:
            self._send()
            await self._done
            # An answer may come before all was sent, and then the rest is not to be.
            is_reusable = answering.keeps_alive and not self._unsent
        except BaseException:
            is_reusable = False
            raise
        finally:
            self._end(is_reusable)
        return answering.whole

    def rest(self, seconds: float) -> None:
        """Close by itself unless it is used within `seconds`."""
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self.close)

    def close(self) -> None:
        """At once, whatever is under way: to close in order would be to send the rest."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    async def start_tls(self, context: ssl.SSLContext, host: str, seconds: float) -> None:
        """Over what a proxy has connected. OSError where that has ended."""
        if not self.is_free or self._transport is None:
            raise ConnectionResetError("the connection ended")
        self._transport = await self._loop.start_tls(
            self._transport, self, context, server_hostname=host, ssl_handshake_timeout=seconds
        )

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's are of classes of its own.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(_TLS_PIECE_BYTES)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._stop_timer()
        if self._answering is not None and error is None:
            self._hear(0)
        self._fail(error or ConnectionResetError("the connection ended"))

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        answering = self._answering
        return memoryview(self._spare) if answering is None else answering.room()

    def buffer_updated(self, count: int) -> None:
        if self._answering is None:
            # Nothing was asked for, so nobody can tell what this is.
            self.close()
            return
        self._moved = self._loop.time()
        self._hear(count)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send()

    # The request.

    def _hear(self, count: int) -> None:
        """So many bytes more of the answer; none is its end."""
        assert self._answering is not None
        try:
            if count:
                self._answering.came(count)
            else:
                self._answering.ended()
        except (NoHttpError, StoreError) as error:
            self._fail(error)
            return
        if self._answering.is_whole and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _send(self) -> None:
        """As much as can be sent now; called again when more can."""
        if self._transport is None or not self._unsent:
            return
        if self._transport.get_extra_info("ssl_object") is not None:
            self._send_tls(self._transport)
            return
        try:
            while self._unsent and self._send_some(self._transport):
                pass
        except OSError:
            # Why, an answer may say that came before, or else the end of the connection.
            self._stop_waiting()
            return
        if not self._unsent:
            self._stop_waiting()
        elif self._waited is None:
            self._waited = self._transport.get_extra_info("socket").dup()
            self._loop.add_writer(self._waited, self._send)

    def _send_some(self, transport: asyncio.Transport) -> bool:
        """Whether the socket may take more."""
        parts = self._unsent[:_SEND_PARTS_MAX]
        if len(parts[-1]) > _SEND_BYTES_MAX:
            parts = [*parts[:-1], parts[-1][:_SEND_BYTES_MAX]]
        try:
            sent = os.writev(transport.get_extra_info("socket").fileno(), parts)
        except BlockingIOError:
            return False
        self._moved = self._loop.time()
        is_full = sent < sum(map(len, parts))
        while self._unsent and sent >= len(self._unsent[0]):
            sent -= len(self._unsent.pop(0))
        if self._unsent:
            self._unsent[0] = self._unsent[0][sent:]
        return not is_full

    def _send_tls(self, transport: asyncio.Transport) -> None:
        while self._unsent and not self._is_paused and not transport.is_closing():
            view = self._unsent[0]
            transport.write(view[:_TLS_PIECE_BYTES])
            self._moved = self._loop.time()
            if len(view) > _TLS_PIECE_BYTES:
                self._unsent[0] = view[_TLS_PIECE_BYTES:]
            else:
                self._unsent.pop(0)

    def _check(self) -> None:
        """Instead of a timer that is set anew for every piece."""
        until = self._moved + self._patience
        if self._loop.time() >= until:
            self._fail(StalledError())
        else:
            self._timer = self._loop.call_at(until, self._check)

    def _fail(self, error: Exception) -> None:
        done, answering = self._done, self._answering
        if done is None or answering is None or done.done():
            return
        is_lost = isinstance(error, OSError | NoHttpError) and not answering.is_begun
        if is_lost and self._uses > 1:
            error = StaleError()
        done.set_exception(error)

    def _end(self, is_reusable: bool) -> None:
        """Of a request: from here on its buffers are not touched."""
        self._stop_waiting()
        self._stop_timer()
        self._unsent = []
        if self._answering is not None:
            self._answering.let_go()
        self._answering = self._done = None
        transport = self._transport
        if transport is not None and (not is_reusable or transport.get_write_buffer_size()):
            transport.abort()

    def _stop_waiting(self) -> None:
        waited, self._waited = self._waited, None
        if waited is not None:
            self._loop.remove_writer(waited)
            waited.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
