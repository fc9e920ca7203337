"""What `tiering-bench device` measures, pass by pass; what it says of it is `device_report`'s.

Every way to copy gets the same fragments, in the same order, between places that are neighbours on
no side. A pass is timed by the device, from before the first call to the end of the last copy, so
what submitting costs is in it. Passes of all ways take turns. What was copied is compared.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tiering.device.base import BlockMap, DevicePages, PageRun
from tiering.device.fragments import Fragmenter, Fragments, HostRows
from tiering.device.runtime import DeviceRuntime
from tiering.layout import ShareLayout
from tiering_benchmarks.device_sides import Copies, Memory, Side
from tiering_benchmarks.device_wakeups import ASKING, WAYS, in_loop
from tiering_kernels.devicecalls import (
    CELL_DESCRIPTOR,
    CELL_ENDED_NS,
    CELL_FIELDS,
    Cells,
    device_calls,
)

ByteArray = npt.NDArray[np.uint8]

STORE, LOAD, BOTH = "store", "load", "both"
LARGE, BATCH, LOOP, KERNEL = "one large copy", "batch", "loop", "kernel"
KIB = 1 << 10
SIZES = tuple(KIB << power for power in range(2, 13))
KERNEL_BYTES_MAX = 128 * KIB
CHECKED_BYTES = 16 << 20
LOOP_FRAGMENTS_MAX = 1 << 14
"""Beside these, one call for each would take most of the time that there is."""


class WrongBytes(Exception):
    """A copy ended, and what it copied is not there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`total_bytes` of each pass, `repeats` of each; how many `products`, `futures` and `wakeups`
    are timed, and when no further size is begun."""

    total_bytes: int
    sizes: tuple[int, ...]
    repeats: int
    products: int
    futures: int
    wakeups: int
    seconds_max: float


@dataclass(slots=True)
class Samples:
    """Seconds of each pass, by direction and way; `of_size[0]` has the large copies."""

    plan: Plan
    of_size: dict[int, dict[tuple[str, str], list[float]]] = field(default_factory=dict)
    products: dict[str, list[float]] = field(default_factory=dict)
    latencies: dict[str, list[float]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, size: int, direction: str, way: str, seconds: float) -> None:
        self.of_size.setdefault(size, {}).setdefault((direction, way), []).append(seconds)


class _Places:
    """Fragments of one size: `count` blocks on the device with room between them, as many rows in
    pinned memory, and who belongs to whom by chance."""

    def __init__(
        self, plan: Plan, size: int, device: Memory, host: ByteArray, seed: int = 1
    ) -> None:
        self.size, self.count = size, max(1, plan.total_bytes // size)
        random = np.random.default_rng(seed)
        blocks = random.permutation(self.count).astype(np.int32)
        slots = random.permutation(self.count).astype(np.int32)
        self.blocks = BlockMap(blocks, slots, np.zeros(self.count, np.int32))
        self.share = host[: self.count * size].reshape(self.count, size)
        run = PageRun(device.address, 2 * size, size, self.count)
        self.group = DevicePages([run], ShareLayout((size,), 1))
        rows = HostRows(host.ctypes.data, size, self.count, self.count)
        self.fragments = Fragmenter(self.group, rows).of(self.blocks)
        self._device = device

    def stamp(self, seed: int) -> None:
        """Other bytes on both sides."""
        random = np.random.default_rng(seed)
        words = random.integers(0, 1 << 63, 3 * self.share.nbytes // 8, np.uint64)
        content = words.view(np.uint8)
        self._device.write(content[: 2 * self.share.nbytes])
        self.share.reshape(-1)[:] = content[2 * self.share.nbytes :]

    def check(self, what: str) -> None:
        pages = self._device.read(2 * self.share.nbytes).reshape(self.count, -1)
        copied = pages[self.blocks.blocks, : self.size]
        if not np.array_equal(copied, self.share[self.blocks.slots]):
            raise WrongBytes(f"{what}: what was copied is not what was there")


class Bench:
    """All passes over one side."""

    def __init__(self, side: Side, plan: Plan) -> None:
        self._side, self._plan, self._runtime = side, plan, side.runtime
        self._streams = (side.runtime.create_stream(is_low=True), side.runtime.create_stream())
        self._events = [side.runtime.create_event(is_timed=True) for _ in range(4)]
        self._device = side.memory(2 * plan.total_bytes)
        self._host = side.host(plan.total_bytes)
        self.samples = Samples(plan)

    def run(self) -> Samples:
        """WrongBytes; DeviceCallError."""
        started = time.perf_counter()
        self._measure_large()
        for size in self._plan.sizes:
            if time.perf_counter() - started > self._plan.seconds_max:
                self.samples.left_out.append(f"fragments of {size // KIB} KiB")
                continue
            self._measure_size(size)
        self._measure_product()
        self._measure_latency()
        return self.samples

    def close(self) -> None:
        for event in self._events:
            self._runtime.destroy_event(event)
        for stream in self._streams:
            self._runtime.destroy_stream(stream)

    # Throughput

    def _measure_large(self) -> None:
        places = self._places(self._plan.total_bytes)
        for direction in (STORE, LOAD, BOTH):
            for _ in range(self._plan.repeats + 1):
                seconds = self._timed(direction, places.fragments, places, LOOP)
                self.samples.add(0, direction, LARGE, seconds)
            del self.samples.of_size[0][direction, LARGE][0]  # it warms up

    def _measure_size(self, size: int) -> None:
        places = self._places(size)
        kernel = self._kernel(places)
        ways = [BATCH]
        if len(places.fragments) <= LOOP_FRAGMENTS_MAX:
            ways.append(LOOP)
        if kernel is not None:
            ways.append(KERNEL)
        self._check_size(size, ways)
        for _ in range(self._plan.repeats):
            for direction in (STORE, LOAD, BOTH):
                for way in ways:
                    if direction == BOTH and way == KERNEL:
                        continue
                    seconds = self._timed(direction, places.fragments, places, way, kernel)
                    self.samples.add(size, direction, way, seconds)

    def _check_size(self, size: int, ways: Sequence[str]) -> None:
        """Every way and direction copies the right bytes, of some megabytes."""
        places = self._places(size, min(self._plan.total_bytes, max(size, CHECKED_BYTES)))
        kernel = self._kernel(places)
        for number, way in enumerate(ways):
            for direction in (STORE, LOAD):
                places.stamp(number)
                self._timed(direction, places.fragments, places, way, kernel)
                places.check(f"{direction} of {size} bytes by {way}")

    def _places(self, size: int, total_bytes: int | None = None) -> _Places:
        plan = self._plan if total_bytes is None else replace(self._plan, total_bytes=total_bytes)
        return _Places(plan, size, self._device, self._host)

    def _kernel(self, places: _Places) -> Any:
        if places.size > KERNEL_BYTES_MAX:
            return None
        kernel = self._side.kernel([places.group], places.share)
        told = f"the kernel for small pages: {self._side.why_no_kernel}"
        if kernel is None and told not in self.samples.left_out:
            self.samples.left_out.append(told)
        return kernel

    def _timed(
        self, direction: str, fragments: Fragments, places: _Places, way: str, kernel: Any = None
    ) -> float:
        """Seconds of one pass; of both directions at once, until the last has ended."""
        lanes = [LOAD, STORE] if direction == BOTH else [direction]
        kept = []
        for lane in lanes:
            start, _ = self._lane_events(lane)
            self._runtime.record(start, self._stream(lane))
        for lane in lanes:
            kept.append(self._submit(lane, fragments, places, way, kernel))
            self._runtime.record(self._lane_events(lane)[1], self._stream(lane))
        for lane in lanes:
            self._runtime.synchronize(self._stream(lane))
        first, _ = self._lane_events(lanes[0])
        ends = (self._lane_events(lane)[1] for lane in lanes)
        return max(self._runtime.elapsed_seconds(first, end) for end in ends)

    def _submit(
        self, lane: str, fragments: Fragments, places: _Places, way: str, kernel: Any
    ) -> object:
        stream, is_load = self._stream(lane), lane == LOAD
        target, source = fragments.host, fragments.device
        if is_load:
            target, source = source, target
        if way == KERNEL:
            return kernel.launch(places.blocks, stream, is_load=is_load)
        if way == LOOP:
            self._side.loop(target, source, fragments.sizes, stream)
        else:
            self._runtime.copy(target, source, fragments.sizes, stream, is_source_final=is_load)
        return fragments

    def _stream(self, lane: str) -> int:
        return self._streams[lane == LOAD]

    def _lane_events(self, lane: str) -> tuple[int, int]:
        at = 2 * (lane == LOAD)
        return self._events[at], self._events[at + 1]

    # Interference

    def _measure_product(self) -> None:
        """A matrix product by itself, and beside copies both ways at 512 KiB."""
        multiply = self._side.product()
        if multiply is None:
            self.samples.left_out.append("a matrix product beside copies")
            return
        places = self._places(512 * KIB)
        for _ in range(3):
            self._seconds_of(multiply)  # it warms up
        for _ in range(self._plan.repeats):
            for beside in (False, True):
                stop = threading.Event()
                copying = threading.Thread(target=self._copy_until, args=(places, stop))
                if beside:
                    copying.start()
                seconds = self._seconds_of(multiply)
                stop.set()
                if beside:
                    copying.join()
                name = "beside copies" if beside else "alone"
                self.samples.products.setdefault(name, []).append(seconds)

    def _seconds_of(self, multiply: Callable[[], None]) -> float:
        stream = self._side.server_stream()
        start, end = (self._runtime.create_event(is_timed=True) for _ in range(2))
        self._runtime.record(start, stream)
        for _ in range(self._plan.products):
            multiply()
        self._runtime.record(end, stream)
        self._runtime.synchronize(stream)
        seconds = self._runtime.elapsed_seconds(start, end) / self._plan.products
        self._runtime.destroy_event(start)
        self._runtime.destroy_event(end)
        return seconds

    def _copy_until(self, places: _Places, stop: threading.Event) -> None:
        self._runtime.enter_thread()
        while not stop.is_set():
            self._timed(BOTH, places.fragments, places, BATCH)

    # Futures

    def _measure_latency(self) -> None:
        """From when the device was done until a coroutine goes on, in each way to learn of it."""
        calls = device_calls()
        if calls is None:
            self.samples.left_out.append("latency of futures: the native library is not there")
            return
        size = 64 * KIB
        for way in WAYS:
            places = self._places(size, 16 * size)
            stamping = _Stamping(self._runtime, calls.signal, can_signal=way != ASKING)
            copies = Copies(self._side, [places.group], places.share, runtime=stamping)
            try:
                latencies = asyncio.run(self._await_copies(copies, places, stamping, way))
            finally:
                copies.close()
            self.samples.latencies[way] = latencies[len(latencies) // 10 :]

    async def _await_copies(
        self, copies: Copies, places: _Places, stamping: _Stamping, way: str
    ) -> list[float]:
        latencies = []
        with in_loop(copies.watcher, way):
            for number in range(self._plan.futures):
                give = copies.load if number % 2 else copies.store
                future: Future[None] = give(places.blocks)
                await asyncio.wrap_future(future)
                resumed = time.monotonic_ns()
                latencies.append((resumed - stamping.last_ended_ns()) / 1e9)
        return latencies


class _Stamping:
    """A runtime that has the driver note the time behind every event, for whoever watches it."""

    def __init__(self, runtime: DeviceRuntime, signal: int, *, can_signal: bool) -> None:
        self._runtime, self._signal = runtime, signal
        self.can_signal = can_signal
        self._cells: list[Cells] = []

    def record(self, event: int, stream: int) -> None:
        self._runtime.record(event, stream)
        cell = np.zeros(CELL_FIELDS, np.int64)
        cell[CELL_DESCRIPTOR] = -1  # nobody is rung for
        self._cells.append(cell)
        self._runtime.launch_host_function(self._signal, cell.ctypes.data, stream)

    def last_ended_ns(self) -> int:
        """Of the last event that was recorded; the driver may yet have to note it."""
        cell = self._cells[-1]
        while not cell[CELL_ENDED_NS]:
            time.sleep(0)
        return int(cell[CELL_ENDED_NS])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def fragment_sizes(samples: Samples) -> Iterator[int]:
    """Those that were measured, the smallest first."""
    return (size for size in sorted(samples.of_size) if size)
