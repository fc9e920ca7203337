"""Futures that complete when an event of the device has, and the one watcher that sees to it.

The watcher owns the events and, until each is complete, everything that the device may still read
because of it. A copy's future may be cancelled, waited for or forgotten; what the device reads is
let go of when the device is done with it, and never before.

How it learns of an event: behind each one the driver calls a native function that notes the time
and rings a bell, an eventfd, which the watcher's thread waits for; whether the event is complete,
the event says. Where the driver has no such call, or nobody compiled the function, the thread asks
again and again, less and less often. Whoever polls a future asks the event as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from tiering.clock import Clock, MonotonicClock
from tiering.device.runtime import DeviceRuntime
from tiering.errors import DeviceCallError
from tiering_kernels.devicecalls import (
    CELL_DESCRIPTOR,
    CELL_ENDED_NS,
    CELL_FIELDS,
    Cells,
    device_calls,
)

log = logging.getLogger("tiering")

OVERDUE_SECONDS = 30.0
"""An event that takes longer, with nothing before it, is one of a device that hangs."""

_PAUSE_SECONDS_MIN = 20e-6
_PAUSE_SECONDS_MAX = 1e-3
_SHARE_OF_AGE = 1 / 8
_UNHEARD_SECONDS = 0.05
"""How long the watcher waits for the bell at most. A device that died rings no more."""


_KEPT: list[object] = []
"""What the driver may still write to though nobody watches any more."""


class CudaEventFuture(Future[None]):
    """A `Future` whose `done()` asks the device itself. `ended_at`: when the device was done, by
    the monotonic clock, once it is. Cancelling it keeps a copy that was not begun from happening;
    one that was begun goes on, and `cancel()` says False."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look
        self.ended_at: float | None = None

    def done(self) -> bool:
        if not super().done():
            self._look()
        return super().done()


@dataclass(slots=True)
class _Mark:
    """An event, and the cell where its host function notes the time."""

    event: int
    cell: Cells
    is_signalled: bool = False

    @property
    def is_in_use(self) -> bool:
        """The driver has yet to call the function, and will write to the cell."""
        return self.is_signalled and not self.cell[CELL_ENDED_NS]


@dataclass(slots=True)
class _Watched:
    mark: _Mark
    finish: Callable[[DeviceCallError | None, float], None]
    kept: object
    since: float
    is_overdue: bool = False


@dataclass(slots=True)
class _Users:
    count: int = 0
    thread: threading.Thread | None = None
    overdue: list[Callable[[bool], None]] = field(default_factory=list)


class Watcher:
    """One for each device of a process; copiers share it. Its thread runs while it has users.

    `open` and `close` as often as each other. Calls from any thread; `finish` functions run on the
    watcher's thread or on that of whoever polls, and must neither wait nor raise.
    """

    def __init__(self, runtime: DeviceRuntime, clock: Clock | None = None) -> None:
        self._runtime = runtime
        self._clock = clock or MonotonicClock()
        calls = device_calls()
        self._signal = calls.signal if calls is not None and runtime.can_signal else 0
        # Rung by the driver, and by others to have the thread look after itself. Never closed: the
        # driver may be about to write to it.
        self._bell, self._nudge = (
            os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        # Whoever has it finishes events; who wants them finished meanwhile says so and goes.
        self._looking = threading.Lock()
        self._is_wanted = False
        self._users = _Users()
        self._lanes: dict[int, deque[_Watched]] = {}
        self._free: list[_Mark] = []
        self._waited_for: dict[int, _Mark] = {}
        # Complete, but the driver has yet to call their function.
        self._late: deque[_Mark] = deque()
        # Of a device that died: it said of nothing that it is done with it.
        self._lost: list[_Watched] = []

    def open(self, overdue: Callable[[bool], None]) -> None:
        """`overdue(True)` is called when something takes too long, and `overdue(False)` when what
        did has ended after all."""
        with self._changed:
            self._users.count += 1
            self._users.overdue.append(overdue)
            if self._users.thread is None:
                thread = threading.Thread(target=self._run, name="tiering-device", daemon=True)
                self._users.thread = thread
                thread.start()

    def close(self, overdue: Callable[[bool], None]) -> None:
        """With the last user its thread ends, and the events go; those under way stay."""
        with self._changed:
            self._users.count -= 1
            self._users.overdue.remove(overdue)
            if self._users.count:
                return
            thread, self._users.thread = self._users.thread, None
        self._ring()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._changed:
            free, self._free = self._free, []
            _KEPT.extend(mark for mark in self._late if mark.is_in_use)
        for mark in free:
            self._destroy(mark)

    # Events

    def record(self, stream: int) -> int:
        """An event behind what the stream has by now, for another stream to wait for; hand it
        back to `forget` once that was told to. DeviceCallError."""
        mark = self._recorded(stream)
        with self._changed:
            self._waited_for[mark.event] = mark
        return mark.event

    def forget(self, event: int) -> None:
        """What was told to wait for it goes on doing so."""
        with self._changed:
            mark = self._waited_for.pop(event)
        self._give_back(mark)

    def watch(
        self,
        stream: int,
        finish: Callable[[DeviceCallError | None, float], None],
        kept: object,
    ) -> None:
        """Call `finish(None, when)` when all that the stream has by now has happened, and let go
        of `kept` then; `finish(error, when)` if the device cannot say any more. DeviceCallError
        where the event cannot be recorded: then nothing is called, and nothing kept."""
        mark = self._recorded(stream)
        if self._signal:
            mark.cell[CELL_ENDED_NS] = 0
            try:
                self._runtime.launch_host_function(self._signal, mark.cell.ctypes.data, stream)
                mark.is_signalled = True
            except DeviceCallError as error:
                # The event is there, and asking it is enough.
                log.info("the device calls nothing back (%s); it is asked instead", error)
                self._signal = 0
        with self._changed:
            was_idle = not any(self._lanes.values())
            watched = _Watched(mark, finish, kept, self._clock.now())
            self._lanes.setdefault(stream, deque()).append(watched)
        if was_idle:
            self._ring()

    @contextmanager
    def heard_by(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Within this, `loop` hears the bell itself, in its own thread: one wake-up less for a
        coroutine that awaits a copy. For the loop's thread; one loop at a time."""
        self._loop = loop
        loop.add_reader(self._bell, self._hear)
        self._ring()
        try:
            yield
        finally:
            loop.remove_reader(self._bell)
            self._loop = None
            self._ring()

    def look(self) -> None:
        """Finish whatever is complete, in the order of each stream. If another thread is at it,
        that one looks again, so that nothing is missed and nothing is out of order."""
        self._is_wanted = True
        while self._is_wanted and self._looking.acquire(blocking=False):
            try:
                self._is_wanted = False
                for watched, error in self._take_complete():
                    self._end(watched, error)
            finally:
                self._looking.release()

    @property
    def under_way(self) -> int:
        """How many events are watched that are not complete, as far as anybody has looked."""
        with self._changed:
            return sum(map(len, self._lanes.values()))

    def __repr__(self) -> str:
        how = "rung for" if self._signal else "asking"
        return f"<Watcher of {self._runtime.name}: {self.under_way} events under way, {how}>"

    # The thread

    def _run(self) -> None:
        try:
            self._runtime.enter_thread()
        except DeviceCallError as error:
            log.warning("the watcher of device events: %s", error)
        heard, nudged = select.poll(), select.poll()
        for each in (self._bell, self._nudge):
            heard.register(each, select.POLLIN)
        nudged.register(self._nudge, select.POLLIN)
        me = threading.current_thread()
        while True:
            with self._changed:
                if self._users.thread is not me:
                    return
                oldest = min((lane[0].since for lane in self._lanes.values() if lane), default=None)
            self._wait(heard if self._loop is None else nudged, oldest)
            self.look()
            self._tell_overdue()

    def _wait(self, bell: select.poll, oldest: float | None) -> None:
        """Until the bell is rung, or it is time to ask."""
        if oldest is None:
            rung = bell.poll()
        elif self._signal:
            rung = bell.poll(_UNHEARD_SECONDS * 1000)
        else:
            age = self._clock.now() - oldest
            time.sleep(min(max(age * _SHARE_OF_AGE, _PAUSE_SECONDS_MIN), _PAUSE_SECONDS_MAX))
            rung = bell.poll(0)
        for each, _ in rung:
            with suppress(BlockingIOError):
                os.eventfd_read(each)

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self.look()

    def _tell_overdue(self) -> None:
        late_since = self._clock.now() - OVERDUE_SECONDS
        with self._changed:
            heads = [lane[0] for lane in self._lanes.values() if lane]
            overdue = [w for w in heads if w.since < late_since and not w.is_overdue]
            for watched in overdue:
                watched.is_overdue = True
            told = list(self._users.overdue) if overdue else []
        for tell in told:
            tell(True)

    # Inside

    def _take_complete(self) -> list[tuple[_Watched, DeviceCallError | None]]:
        with self._changed:
            lanes = list(self._lanes.values())
        ended: list[tuple[_Watched, DeviceCallError | None]] = []
        for lane in lanes:
            while lane:
                error = None
                try:
                    if not self._runtime.is_complete(lane[0].mark.event):
                        break
                except DeviceCallError as failure:
                    error = failure
                with self._changed:
                    ended.append((lane.popleft(), error))
                    if lane:
                        lane[0].since = self._clock.now()
        return ended

    def _end(self, watched: _Watched, error: DeviceCallError | None) -> None:
        noted = int(watched.mark.cell[CELL_ENDED_NS]) if watched.mark.is_signalled else 0
        when = noted / 1e9 if noted else self._clock.now()
        if error is None:
            self._give_back(watched.mark)
            watched.kept = None
        else:
            self._lost.append(watched)
        if watched.is_overdue:
            with self._changed:
                told = list(self._users.overdue)
            for tell in told:
                tell(False)
        watched.finish(error, when)

    def _recorded(self, stream: int) -> _Mark:
        """One behind what the stream has by now."""
        mark = self._take()
        try:
            self._runtime.record(mark.event, stream)
        except DeviceCallError:
            self._give_back(mark)
            raise
        return mark

    def _take(self) -> _Mark:
        """One that nobody uses, made if there is none."""
        with self._changed:
            while self._late and not self._late[0].is_in_use:
                self._free.append(self._late.popleft())
            if self._free:
                mark = self._free.pop()
                mark.is_signalled = False
                return mark
        cell = np.zeros(CELL_FIELDS, np.int64)
        cell[CELL_DESCRIPTOR] = self._bell
        return _Mark(self._runtime.create_event(), cell)

    def _give_back(self, mark: _Mark) -> None:
        with self._changed:
            (self._late if mark.is_in_use else self._free).append(mark)

    def _destroy(self, mark: _Mark) -> None:
        try:
            self._runtime.destroy_event(mark.event)
        except DeviceCallError as error:
            log.debug("an event of a device that died: %s", error)

    def _ring(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_write(self._nudge, 1)
