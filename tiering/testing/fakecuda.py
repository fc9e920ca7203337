"""A CUDA device without one: streams, events and copies that happen when a test says so.

It keeps the real one's rules of order and no others: a stream's work in its order, that of two
streams in any, sources and arrays of addresses read when a copy's turn comes. Sources that are said
to be final, which a real one may read at any time, must be the same from when they are given until
then. Memory is the process's own, at its own addresses; what is not given to `own` is not the
device's to touch, and touching it is the fault that it is on a real one.

Nothing happens but in `run`, `run_all` and `step`, in the thread that calls them; or with
`free_running` in a thread for each stream, at once. All else may be called from any thread.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tiering.clock import MonotonicClock
from tiering.device.fragments import Addresses
from tiering.errors import DeviceCallError

ByteArray = npt.NDArray[np.uint8]

INVALID_VALUE, ILLEGAL_ADDRESS, NOT_SUPPORTED = 1, 700, 801
COMPUTE = 7
"""The stream that stands for the server's own; it is there from the start."""

WAIT_SECONDS = 30.0
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(slots=True)
class _Work:
    """One thing in a stream. `is_ready`: whether its turn has come, once it is the first."""

    name: str
    happen: Callable[[], None]
    is_ready: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class _Stream:
    is_low: bool = False
    work: deque[_Work] = field(default_factory=deque)
    given: Counter[str] = field(default_factory=Counter)
    is_stalled: bool = False
    is_gone: bool = False
    # The first of `work` is happening.
    is_busy: bool = False


@dataclass(slots=True)
class _Event:
    """How often it was recorded, and the last of these records that is complete."""

    recorded: int = 0
    complete: int = 0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Failure:
    code: int
    is_sticky: bool


class FakeCuda:
    """`DeviceRuntime`; see the module's docstring. `violations` are what no program may do, and
    what a real device would answer with wrong bytes: empty at the end of each test."""

    name = "fake CUDA"

    def __init__(self, *, free_running: bool = False, signals: bool = True) -> None:
        self._clock = MonotonicClock()
        self._changed = threading.Condition()
        self._streams: dict[int, _Stream] = {COMPUTE: _Stream()}
        self._events: dict[int, _Event] = {}
        self._numbers = 1000
        self._owned: list[tuple[int, int]] = []
        self._pinned: dict[int, int] = {}
        self._failures: dict[tuple[str, int], _Failure] = {}
        self._dead: _Failure | None = None
        self._signals = signals
        self._free_running = free_running
        self._threads: list[threading.Thread] = []
        self._ends = False
        self.calls: Counter[str] = Counter()
        self.violations: list[str] = []
        if free_running:
            self._start_thread(COMPUTE)

    # What a test says

    def own(self, *memory: ByteArray) -> None:
        """The device may touch it: its own memory, and the host's that it copies from and to."""
        for each in memory:
            spans = [(n - 1) * stride for n, stride in zip(each.shape, each.strides, strict=True)]
            self._owned.append((each.ctypes.data, each.ctypes.data + sum(spans) + each.itemsize))

    def fail(self, call: str, at: int = 1, code: int = INVALID_VALUE, sticky: bool = False) -> None:
        """The `at`-th call of that name from now on fails; if `sticky`, every one after it, too."""
        with self._changed:
            self._failures[call, self.calls[call] + at] = _Failure(code, sticky)

    def stall(self, stream: int) -> None:
        """Nothing more happens in it, and its events never complete; until `go_on`."""
        self._set_stalled(stream, True)

    def go_on(self, stream: int) -> None:
        self._set_stalled(stream, False)

    def launch(self, stream: int, kernel: Callable[[], None]) -> None:
        """Give a program to a stream, to happen in its turn."""
        self._give("launch", stream, _Work("kernel", kernel))

    def pending(self, stream: int) -> list[str]:
        """What was given to it and has not happened."""
        with self._changed:
            return [work.name for work in self._streams[stream].work]

    def given(self, stream: int, name: str) -> int:
        """How many `wait`, `copy`, `record`, `kernel` or `host function` it ever got."""
        with self._changed:
            return self._streams[stream].given[name]

    @property
    def side_streams(self) -> list[int]:
        """Streams that somebody made, the oldest first, and has not destroyed."""
        return [n for n, stream in self._streams.items() if n != COMPUTE and not stream.is_gone]

    def is_low(self, stream: int) -> bool:
        """Whether it was made with the lowest priority."""
        return self._streams[stream].is_low

    @property
    def pinned(self) -> dict[int, int]:
        """Sizes of what is registered, by address."""
        return dict(self._pinned)

    @property
    def events(self) -> int:
        """How many there are that nobody destroyed."""
        return len(self._events)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Until what other threads give makes it so; AssertionError where it never does."""
        with self._changed:
            assert self._changed.wait_for(is_so, WAIT_SECONDS), "nobody gave what was waited for"

    def run(self, stream: int, count: int = 1) -> None:
        """The next `count` things of a stream happen; AssertionError where one's turn has not
        come."""
        for _ in range(count):
            assert self.step(stream), f"it is not the turn of {self.pending(stream)[:1]}"

    def step(self, stream: int) -> bool:
        """The next thing of a stream happens, if there is one and its turn has come."""
        with self._changed:
            lane = self._streams[stream]
            if lane.is_stalled or lane.is_busy or not lane.work or not lane.work[0].is_ready():
                return False
            work = lane.work[0]
            lane.is_busy = True
        if self._dead is None:
            work.happen()
        with self._changed:
            lane.is_busy = False
            lane.work.popleft()
            self._changed.notify_all()
        return True

    def run_all(self) -> None:
        """Everything happens whose turn comes."""
        while any([self.step(stream) for stream in list(self._streams)]):
            pass

    def end(self) -> None:
        """Of a free-running one: its threads end. Nobody may use it any more."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)

    # DeviceRuntime

    def enter_thread(self) -> None:
        self._called("enter_thread")

    def create_stream(self, *, is_low: bool = False) -> int:
        with self._changed:
            self._called("create_stream")
            number = self._next_number()
            self._streams[number] = _Stream(is_low)
        if self._free_running:
            self._start_thread(number)
        return number

    def destroy_stream(self, stream: int) -> None:
        with self._changed:
            self._called("destroy_stream")
            if self._streams[stream].work:
                self.violations.append(f"stream {stream} was destroyed with work in it")
            self._streams[stream].is_gone = True
            self._changed.notify_all()

    def synchronize(self, stream: int) -> None:
        with self._changed:
            self._called("synchronize")
            self._changed.wait_for(lambda: not self._streams[stream].work or self._dead is not None)
            self._check_alive("synchronize")

    def create_event(self, is_timed: bool = False) -> int:
        with self._changed:
            self._called("create_event")
            number = self._next_number()
            self._events[number] = _Event()
            return number

    def destroy_event(self, event: int) -> None:
        with self._changed:
            self._called("destroy_event")
            gone = self._events.pop(event)
            if gone.complete < gone.recorded and self._dead is None:
                self.violations.append(f"event {event} was destroyed before it was complete")

    def record(self, event: int, stream: int) -> None:
        with self._changed:
            self._called("record")
            its = self._events[event]
            its.recorded += 1
            number = its.recorded

            def happen() -> None:
                its.complete, its.at = number, self._clock.now()

            self._append(stream, _Work("record", happen))

    def is_complete(self, event: int) -> bool:
        with self._changed:
            self._called("is_complete")
            its = self._events[event]
            return its.complete >= its.recorded

    def elapsed_seconds(self, start: int, end: int) -> float:
        with self._changed:
            return self._events[end].at - self._events[start].at

    def wait_event(self, stream: int, event: int) -> None:
        with self._changed:
            self._called("wait_event")
            its = self._events[event]
            number = its.recorded
            waits = _Work("wait", lambda: None, lambda: its.complete >= number)
            self._append(stream, waits)

    def copy(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        stream: int,
        *,
        is_source_final: bool,
    ) -> None:
        with self._changed:
            self._called("copy")
            if not len(sizes):
                raise DeviceCallError("copy", INVALID_VALUE, "an empty batch")
            for addresses in (targets, sources):
                self._refuse_straddling(addresses, sizes)
            # By reference only, so that it shows when nobody keeps them until it happens.
            arrays = [weakref.ref(array) for array in (targets, sources, sizes)]
            early = self._content(sources, sizes) if is_source_final else None
            self._append(stream, _Work("copy", lambda: self._move(arrays, early)))

    @property
    def can_signal(self) -> bool:
        return self._signals

    def launch_host_function(self, function: int, data: int, stream: int) -> None:
        if not self._signals:
            raise DeviceCallError("launch_host_function", NOT_SUPPORTED, "it is not there")
        self._give(
            "launch_host_function",
            stream,
            _Work("host function", lambda: _HOST_FUNCTION(function)(data)),
        )

    def register(self, address: int, size_bytes: int) -> None:
        with self._changed:
            self._called("register")
            if address in self._pinned:
                raise DeviceCallError("register", 712, "it is registered already")
            self._pinned[address] = size_bytes

    def unregister(self, address: int) -> None:
        with self._changed:
            self._called("unregister")
            del self._pinned[address]

    def bus_id(self) -> str | None:
        return None

    def __repr__(self) -> str:
        with self._changed:
            waiting = {n: len(stream.work) for n, stream in self._streams.items()}
        return f"<FakeCuda {waiting}>"

    # Inside; all with the lock held, but for what happens

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _called(self, call: str) -> None:
        with self._changed:
            self.calls[call] += 1
            failure = self._failures.pop((call, self.calls[call]), None)
            if failure is not None and failure.is_sticky:
                self._die(failure)
            self._check_alive(call)
            if failure is not None:
                raise DeviceCallError(call, failure.code, "what a test asked for")

    def _check_alive(self, call: str) -> None:
        if self._dead is not None:
            raise DeviceCallError(call, self._dead.code, "a fault of the device", is_sticky=True)

    def _die(self, failure: _Failure) -> None:
        with self._changed:
            self._dead = failure
            self._changed.notify_all()

    def _give(self, call: str, stream: int, work: _Work) -> None:
        with self._changed:
            self._called(call)
            self._append(stream, work)

    def _append(self, stream: int, work: _Work) -> None:
        lane = self._streams[stream]
        assert not lane.is_gone, f"stream {stream} was destroyed"
        lane.work.append(work)
        lane.given[work.name] += 1
        self._changed.notify_all()

    def _set_stalled(self, stream: int, is_stalled: bool) -> None:
        with self._changed:
            self._streams[stream].is_stalled = is_stalled
            self._changed.notify_all()

    def _refuse_straddling(self, addresses: Addresses, sizes: Addresses) -> None:
        """A copy from or to pinned memory lies in one of the pieces that were pinned."""
        for low, pinned_bytes in self._pinned.items():
            ends = addresses + sizes
            inside = (addresses >= low) & (addresses < low + pinned_bytes)
            if (inside & (ends > low + pinned_bytes)).any():
                raise DeviceCallError("copy", INVALID_VALUE, "it lies in two registrations")

    def _content(self, sources: Addresses, sizes: Addresses) -> list[bytes]:
        """What is there now; of what is not the device's, nothing."""
        return [
            ctypes.string_at(source, size) if self._is_owned(source, size) else b""
            for source, size in zip(sources.tolist(), sizes.tolist(), strict=True)
        ]

    def _move(self, arrays: list[weakref.ref[Addresses]], early: list[bytes] | None) -> None:
        found = [array() for array in arrays]
        kept = [array for array in found if array is not None]
        if len(kept) < len(found):
            self.violations.append("the addresses of a copy were let go of before it happened")
            return
        if early is not None and early != self._content(kept[1], kept[2]):
            self.violations.append("a source that was said to be final was written to")
        for target, source, size in zip(*(array.tolist() for array in kept), strict=True):
            if not (self._is_owned(target, size) and self._is_owned(source, size)):
                self._die(_Failure(ILLEGAL_ADDRESS, True))
                return
            ctypes.memmove(target, source, size)

    def _is_owned(self, address: int, size: int) -> bool:
        return any(low <= address and address + size <= high for low, high in self._owned)

    def _start_thread(self, stream: int) -> None:
        thread = threading.Thread(
            target=self._run_freely, args=(stream,), name=f"tiering-fake-cuda-{stream}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _run_freely(self, stream: int) -> None:
        lane = self._streams[stream]

        def may_go_on() -> bool:
            return bool(lane.work) and not lane.is_stalled and lane.work[0].is_ready()

        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ends or lane.is_gone or may_go_on())
                if self._ends or lane.is_gone:
                    return
            self.step(stream)
