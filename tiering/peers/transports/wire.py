"""A connected socket of a data plane: fills given buffers, in order, and sends given ones.

For what is said before rows move, and between: it can be lent to a thread that moves some. No task
and no buffer of its own: the loop calls when the socket is ready, bytes go straight between it and
the caller's memory, and what has to happen next is a function. A wire on which nothing moves
for `quiet_seconds_max`, while something is to be moved, has failed, whatever TCP thinks of it. Once
a wire is closed it touches no buffer any more.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Sequence

TURN_BYTES = 1 << 20
"""What is moved before the loop looks at anything else."""
Then = Callable[[], None]
Ended = Callable[[str], None]


class Wire:
    """`fill` and `send` one at a time each; `ended` is told once why the wire has failed, and not
    when it is closed by `close`."""

    def __init__(self, of: socket.socket, quiet_seconds_max: float, ended: Ended) -> None:
        """Takes `of`, which is connected, over."""
        self._loop = asyncio.get_running_loop()
        self._socket = of
        self._quiet_seconds_max = quiet_seconds_max
        self._ended = ended
        self._into: list[memoryview] = []
        self._into_bytes = 0
        self._filled: Then | None = None
        self._from: list[memoryview] = []
        self._from_bytes = 0
        self._sent: Then | None = None
        self._granted = array.array("i")
        self._moved_at = 0.0
        self._is_awaited = False
        self._is_lent = self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._reads = self._writes = False
        self.descriptors: list[int] = []
        self.descriptors_max = 0
        of.setblocking(False)
        deadline = struct.pack("ll", int(quiet_seconds_max), int(quiet_seconds_max % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            of.setsockopt(socket.SOL_SOCKET, option, deadline)  # for whom it is lent to

    @property
    def is_closed(self) -> bool:
        return self._is_over

    @property
    def connection(self) -> socket.socket:
        return self._socket

    def fill(
        self,
        views: Sequence[memoryview],
        then: Then,
        *,
        is_awaited: bool = True,
    ) -> None:
        """Fill `views`, a few, and then call `then`. Not `is_awaited`: the other side may be silent
        as long as it likes before the first byte."""
        self._into = list(views)
        self._into_bytes = sum(map(len, views))
        self._filled = then
        self._is_awaited = is_awaited
        if is_awaited:
            self._expect()
        if not self._reads:
            self._reads = True
            self._loop.add_reader(self._socket, self._on_readable)

    def send(
        self,
        views: Sequence[memoryview],
        then: Then,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send `views`, and `descriptors` with the first byte, and then call `then`."""
        self._from = list(views)
        self._from_bytes = sum(map(len, views))
        self._sent = then
        if descriptors:
            self._granted = array.array("i", descriptors)
        self._expect()
        if not self._writes:
            self._writes = True
            self._loop.add_writer(self._socket, self._on_writable)

    def lend(self) -> socket.socket:
        """The socket, for a thread that blocks on it, until `take_back`. REQUIRES: nothing to fill,
        nothing to send. Closed meanwhile, a wire ends what the thread does, and is closed once it
        is taken back: nobody else can get the descriptor before."""
        assert not self._into
        assert not self._from
        for wanted, remove in (
            (self._reads, self._loop.remove_reader),
            (self._writes, self._loop.remove_writer),
        ):
            if wanted:
                remove(self._socket)
        self._reads = self._writes = False
        self._is_lent = True
        self._socket.setblocking(True)
        return self._socket

    def take_back(self) -> bool:
        """Whether the wire can still be used."""
        self._is_lent = False
        if self._is_over:
            self._socket.close()
            return False
        self._socket.setblocking(False)
        return True

    def close(self) -> None:
        """May be called twice, and from within what a wire calls."""
        if self.is_closed:
            return
        self._is_over = True
        if self._reads:
            self._loop.remove_reader(self._socket)
        if self._writes:
            self._loop.remove_writer(self._socket)
        if self._timer is not None:
            self._timer.cancel()
        if self._is_lent:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        else:
            self._socket.close()
        self._into.clear()
        self._from.clear()
        self._filled = self._sent = None

    def fail(self, why: str) -> None:
        if not self.is_closed:
            self.close()
            self._ended(why)

    # What the loop calls

    def _on_readable(self) -> None:
        moved = 0
        while self._into and moved < TURN_BYTES:
            wanted = self._into_bytes
            try:
                got = self._receive()
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.fail(f"the connection broke: {error.strerror or error}")
                return
            if got == 0:
                self.fail("the other side has closed the connection")
                return
            moved += got
            if not self._is_awaited:
                self._is_awaited = True
                self._expect()
            self._take(got)
            if got < wanted:
                break  # that was all there is
        if moved:
            self._moved_at = self._loop.time()
        if not self._into and self._reads and not self.is_closed:
            self._reads = False
            self._loop.remove_reader(self._socket)

    def _receive(self) -> int:
        if self.descriptors_max:
            space = socket.CMSG_SPACE(self.descriptors_max * array.array("i").itemsize)
            got, ancillary, flags, _ = self._socket.recvmsg_into(self._into, space)
            self._grant(ancillary)
            if flags & socket.MSG_CTRUNC:
                raise OSError("more descriptors than were expected")
            return got
        if len(self._into) == 1:
            return self._socket.recv_into(self._into[0])
        return self._socket.recvmsg_into(self._into)[0]

    def _grant(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self.descriptors += numbers

    def _take(self, got: int) -> None:
        self._into_bytes -= got
        self._into = _behind(self._into, got)
        if not self._into and (then := self._filled) is not None:
            self._filled = None
            then()

    def _on_writable(self) -> None:
        moved = 0
        while self._from and moved < TURN_BYTES:
            wanted = self._from_bytes
            try:
                sent = self._socket.sendmsg(self._from, self._ancillary())
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.fail(f"the connection broke: {error.strerror or error}")
                return
            self._granted = array.array("i")
            moved += sent
            self._give(sent)
            if sent < wanted:
                break  # the socket is full
        if moved:
            self._moved_at = self._loop.time()
        if not self._from and self._writes and not self.is_closed:
            self._writes = False
            self._loop.remove_writer(self._socket)

    def _ancillary(self) -> list[tuple[int, int, array.array[int]]]:
        if not self._granted:
            return []
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, self._granted)]

    def _give(self, sent: int) -> None:
        self._from_bytes -= sent
        self._from = _behind(self._from, sent)
        if not self._from and (then := self._sent) is not None:
            self._sent = None
            then()

    # Deadlines

    def _expect(self) -> None:
        self._moved_at = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._quiet_seconds_max, self._look_at_the_clock)

    def _look_at_the_clock(self) -> None:
        self._timer = None
        if not self._from and not (self._into and self._is_awaited):
            return
        left = self._moved_at + self._quiet_seconds_max - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look_at_the_clock)
            return
        self.fail(f"nothing moved for {self._quiet_seconds_max:g} seconds")


def _behind(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of `views` behind their first `moved` bytes."""
    for number, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[number + 1 :]]
        moved -= len(view)
    return []


class Broken(Exception):
    """What a wire has failed with, told to the coroutine that waits for it."""


class Line:
    """A wire for one coroutine at a time. Cancelled, a call closes it: nobody could tell where in
    what is sent or received the next one would begin."""

    def __init__(self, of: socket.socket, quiet_seconds_max: float) -> None:
        """Takes `of`, which is connected, over."""
        self.wire = Wire(of, quiet_seconds_max, self._ended)
        self.why: str | None = None
        self._waiting: asyncio.Future[None] | None = None

    async def fill(self, *views: memoryview) -> None:
        """Raises Broken."""
        await self.until(lambda done: self.wire.fill(views, done))

    async def send(self, *views: memoryview) -> None:
        """Raises Broken."""
        await self.until(lambda done: self.wire.send(views, done))

    async def until(self, begin: Callable[[Then], None]) -> None:
        """Have `begin` start something that calls what it is given at its end. Raises Broken where
        the wire fails before."""
        if self.wire.is_closed:
            raise Broken(self.why or "the connection is closed")
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = waiting
        begin(self._done)
        try:
            await waiting
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._waiting = None

    def close(self, why: str = "the connection is closed") -> None:
        """Whoever waits is told Broken. May be called twice."""
        if not self.wire.is_closed:
            self.wire.close()
            self._ended(why)

    def _done(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _ended(self, why: str) -> None:
        self.why = why
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Broken(why))
