"""What it takes a process to learn that a device's event is complete: the host's half of it.

Another process is in the driver's place, so that nothing of it waits for this one's interpreter:
it takes its time, notes when an event is complete, and rings. Measured are the time from there
until a coroutine goes on, and this process's CPU time; another thread of it may be busy, as that of
a server is which launches kernels. A device's own part of it is not in here.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from tiering.device.futures import Watcher
from tiering.errors import DeviceCallError
from tiering_kernels.devicecalls import CELL_ENDED_NS

IN_LOOP, BELL, ASKING = "a bell in the loop", "a bell", "asking"
WAYS = (IN_LOOP, BELL, ASKING)

_PAGE = 4096
_STREAM = 1
_COMPLETE, _ENDED_NS = 0, 1

# Waits for a line with microseconds, then says that one more event is complete.
_DRIVER = """
import mmap, os, sys, time
import numpy as np
memory, bell, rings = map(int, sys.argv[1:])
shared = np.frombuffer(mmap.mmap(memory, 4096), np.int64)
for line in sys.stdin:
    until = time.monotonic_ns() + int(line) * 1000
    time.sleep(int(line) / 1e6)
    while time.monotonic_ns() < until:
        pass
    shared[1] = time.monotonic_ns()
    shared[0] += 1
    if rings:
        os.eventfd_write(bell, 1)
"""


@dataclass(frozen=True, slots=True)
class WakeUps:
    """Seconds of each, and the CPU seconds of all of them together."""

    latencies: list[float]
    cpu_seconds: float


class _OtherProcess:
    """As much of a `DeviceRuntime` as a watcher uses: one stream, one event under way."""

    name = "a process in the driver's place"

    def __init__(self, *, can_signal: bool) -> None:
        self.can_signal = can_signal
        self._memory = os.memfd_create("wake-ups")
        os.ftruncate(self._memory, _PAGE)
        self._shared = np.frombuffer(mmap.mmap(self._memory, _PAGE), np.int64)
        self._events = 0
        self._cell = 0

    def start(self, bell: int) -> None:
        os.set_inheritable(bell, True)
        arguments = map(str, (self._memory, bell, int(self.can_signal)))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, *arguments],
            stdin=subprocess.PIPE,
            pass_fds=(self._memory, bell),
            text=True,
        )

    def begin(self, microseconds: int) -> None:
        """The event that was recorded last is complete after so long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{microseconds}\n")
        self._process.stdin.flush()

    def ended_ns(self) -> int:
        return int(self._shared[_ENDED_NS])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        os.close(self._memory)

    def enter_thread(self) -> None:
        """Every thread may."""

    def create_event(self, is_timed: bool = False) -> int:
        return 0

    def destroy_event(self, event: int) -> None:
        """Nothing is behind it."""

    def record(self, event: int, stream: int) -> None:
        self._events += 1

    def is_complete(self, event: int) -> bool:
        complete = bool(self._shared[_COMPLETE] >= self._events)
        if complete and self._cell:
            ctypes.c_int64.from_address(self._cell + 8 * CELL_ENDED_NS).value = self.ended_ns()
            self._cell = 0
        return complete

    def launch_host_function(self, function: int, data: int, stream: int) -> None:
        if not self.can_signal:
            raise DeviceCallError("launch_host_function", 801, "it is not there")
        self._cell = data


def in_loop(watcher: Watcher, way: str) -> AbstractContextManager[None]:
    """Within this, the running loop hears the bell, if that is the way."""
    return watcher.heard_by(asyncio.get_running_loop()) if way == IN_LOOP else nullcontext()


def measure(way: str, count: int, is_busy: bool = False) -> WakeUps:
    """`count` events, each complete 1 to 3 ms after it was recorded."""
    runtime = _OtherProcess(can_signal=way != ASKING)
    watcher = Watcher(runtime)  # type: ignore[arg-type]
    runtime.start(watcher._bell)
    watcher.open(_ignored)
    stop = threading.Event()
    worker = threading.Thread(target=_spin, args=(stop,))
    if is_busy:
        worker.start()
    try:
        return asyncio.run(_await_events(runtime, watcher, count, way))
    finally:
        stop.set()
        if is_busy:
            worker.join()
        watcher.close(_ignored)
        runtime.close()


async def _await_events(runtime: _OtherProcess, watcher: Watcher, count: int, way: str) -> WakeUps:
    latencies: list[float] = []
    random = np.random.default_rng(1)
    before = time.process_time()
    with in_loop(watcher, way):
        for microseconds in random.integers(1000, 3000, count + count // 10).tolist():
            future: Future[None] = Future()
            watcher.watch(_STREAM, _resolving(future), None)
            runtime.begin(microseconds)
            await asyncio.wrap_future(future)
            latencies.append((time.monotonic_ns() - runtime.ended_ns()) / 1e9)
    # The first ones find nothing warm.
    return WakeUps(latencies[count // 10 :], time.process_time() - before)


def _resolving(future: Future[None]) -> Callable[[DeviceCallError | None, float], None]:
    return lambda error, when: future.set_result(None)


def _spin(stop: threading.Event) -> None:
    """Python that never waits, as that of a server between two launches."""
    while not stop.is_set():
        sum(range(1000))


def _ignored(is_overdue: bool) -> None:
    """Nobody is told."""
