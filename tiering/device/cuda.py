"""Copies by a device's own engines: CUDA, and whatever else has a `DeviceRuntime`.

Owns a thread that submits, two streams of the device's, and the copies that wait. A copy waits for
what the server's stream had when it was given; loads go before stores while both wait here, and
on the device the two run beside each other. Within a direction the order is the one given. Each
copy takes its own copy of its block map. What the device may read is kept by the watcher until the
device is done, whatever becomes of the future.

A copy that fails does not touch the others, and its future fails only when the device has done with
the rest of it. After a sticky failure, or while a copy hangs, the device takes none: they fail at
once with DeviceLostError, and one line in the log says why.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tiering.clock import Clock, MonotonicClock
from tiering.device.base import BlockMap, ByteArray, DeviceCopier, DevicePages
from tiering.device.fragments import Fragmenter, HostRows
from tiering.device.futures import OVERDUE_SECONDS, CudaEventFuture, Watcher
from tiering.device.pinned import PinnedMemory
from tiering.device.runtime import DeviceRuntime, KernelUse
from tiering.errors import ClosedError, CopyError, DeviceCallError, DeviceLostError

log = logging.getLogger("tiering")

KERNEL_FRAGMENTS_MIN = 16
"""Fewer are not worth a kernel's launch."""

UNDER_WAY_MAX = 8
"""Copies of one direction that the device has at a time; the others wait here."""

CLOSE_SECONDS = 30.0

_KEPT: list[object] = []
"""Copiers whose device never said that it is done: what it may write to stays mapped."""


@dataclass(slots=True)
class _Copy:
    """`ready`: the watcher's event behind what the copy waits for, on the server's stream."""

    blocks: BlockMap
    future: CudaEventFuture
    ready: int


@dataclass(slots=True)
class _Lane:
    """One direction."""

    is_load: bool
    stream: int
    waiting: deque[_Copy] = field(default_factory=deque)
    under_way: int = 0

    @property
    def name(self) -> str:
        return "load" if self.is_load else "store"


class CudaCopier(DeviceCopier):
    """One rank's copies between device memory and its share of the rows. May be called from any
    thread that has the device; `close` from any but a future's callback."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        watcher: Watcher,
        groups: Sequence[DevicePages],
        share: ByteArray,
        pinned: PinnedMemory,
        server_stream: Callable[[], int],
        kernel: KernelUse | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`groups` in the order that block maps number them. `share` is this rank's part of the
        host tier: uint8, shape `(rows, share_bytes)`, rows may be strided; ValueError where the
        largest group does not fit. It is part of what is `pinned`, which is closed with this.
        `server_stream` gives the stream on which the server is computing. DeviceCallError.
        """
        need = max(group.layout.share_bytes for group in groups)
        if share.shape[1] < need:
            raise ValueError(f"a share of {share.shape[1]} bytes, but the layout has {need}")
        self._runtime = runtime
        self._watcher = watcher
        self._clock = clock or MonotonicClock()
        self._server_stream = server_stream
        self._kernel = kernel
        self._pinned = pinned
        # Keeps the region mapped.
        self._share: ByteArray | None = share
        where = HostRows(share.ctypes.data, share.strides[0], len(share), pinned.rows_per_piece)
        self._fragmenters = [Fragmenter(group, where) for group in groups]
        self._loads = _Lane(True, runtime.create_stream())
        self._stores = _Lane(False, runtime.create_stream(is_low=True))
        self._lanes = (self._loads, self._stores)
        self._closing = False
        self._is_abandoned = False
        self._fault: DeviceCallError | None = None
        self._overdue = 0
        self._changed = threading.Condition()
        watcher.open(self._tell_overdue)
        self._thread = threading.Thread(target=self._run, name="tiering-copier", daemon=True)
        self._thread.start()

    def gather(self, blocks: BlockMap) -> Future[None]:
        return self._submit(self._stores, blocks)

    def scatter(self, blocks: BlockMap) -> Future[None]:
        return self._submit(self._loads, blocks)

    def close(self) -> None:
        """As the base class says; a device that is not done within CLOSE_SECONDS keeps the host
        tier, pinned and mapped, until the process ends."""
        with self._changed:
            if self._share is None or self._is_abandoned:
                return
            self._closing = True
            self._changed.notify_all()
            is_done = self._changed.wait_for(self._is_idle, CLOSE_SECONDS)
        if not is_done:
            self._abandon()
            return
        self._thread.join()
        self._share = None
        for lane in self._lanes:
            try:
                # All copies are done, but for what the driver calls back behind them.
                self._runtime.synchronize(lane.stream)
                self._runtime.destroy_stream(lane.stream)
            except DeviceCallError as error:
                log.debug("the stream of %ss: %s", lane.name, error)
        self._watcher.close(self._tell_overdue)
        self._pinned.close()

    def __repr__(self) -> str:
        with self._changed:
            state = "closed" if self._closing else "open"
            if self._fault is not None or self._overdue:
                state += ", out of service"
            lanes = [
                f"{len(lane.waiting)} {lane.name}s waiting and {lane.under_way} under way"
                for lane in self._lanes
            ]
        return f"<CudaCopier of {self._runtime.name} {state}, {', '.join(lanes)}>"

    # The caller's thread

    def _submit(self, lane: _Lane, blocks: BlockMap) -> Future[None]:
        kept = blocks.copied()
        future = CudaEventFuture(self._watcher.look)
        with self._changed:
            if self._closing:
                raise ClosedError("the copier is closed")
            lost = self._lost()
        if lost is not None:
            future.set_exception(lost)
            return future
        try:
            ready = self._watcher.record(self._server_stream())
        except DeviceCallError as error:
            self._note_fault(error)
            future.set_exception(_failure(lane, kept, error))
            return future
        with self._changed:
            lane.waiting.append(_Copy(kept, future, ready))
            self._changed.notify_all()
        return future

    def _lost(self) -> DeviceLostError | None:
        """What a copy fails with while the device takes none; with the lock held."""
        if self._fault is not None:
            return DeviceLostError(f"the device takes no copies any more: {self._fault}")
        if self._overdue:
            return DeviceLostError("the device takes no copies while one of them hangs")
        return None

    # The copier's thread

    def _run(self) -> None:
        try:
            self._runtime.enter_thread()
        except DeviceCallError as error:
            self._note_fault(error)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next() is not None or self._is_over())
                lane = self._next()
                if lane is None:
                    return
                copy = lane.waiting.popleft()
                lane.under_way += 1
                lost = self._lost()
            self._carry_out(lane, copy, lost)

    def _next(self) -> _Lane | None:
        """Where the next copy is that may begin."""
        for lane in self._lanes:
            if lane.waiting and (lane.under_way < UNDER_WAY_MAX or self._lost() is not None):
                return lane
        return None

    def _is_over(self) -> bool:
        return self._closing and not self._loads.waiting and not self._stores.waiting

    def _is_idle(self) -> bool:
        return self._is_over() and not self._loads.under_way and not self._stores.under_way

    def _carry_out(self, lane: _Lane, copy: _Copy, lost: DeviceLostError | None) -> None:
        if not copy.future.set_running_or_notify_cancel():
            self._watcher.forget(copy.ready)
            self._leave(lane)
            return
        if lost is not None:
            self._watcher.forget(copy.ready)
            self._end(lane, copy, lost, self._clock.now())
            return
        kept: list[object] = []
        failure: CopyError | None = None
        try:
            self._give(lane, copy, kept)
        except DeviceCallError as error:
            self._note_fault(error)
            failure = _failure(lane, copy.blocks, error)
        except Exception as error:
            # An index out of bounds or whatever: those behind it must not wait for ever.
            failure = _failure(lane, copy.blocks, error)
        self._watch(lane, copy, kept, failure)

    def _give(self, lane: _Lane, copy: _Copy, kept: list[object]) -> None:
        """Everything that the device must do, to the stream; what it will read, to `kept`."""
        try:
            self._runtime.wait_event(lane.stream, copy.ready)
        finally:
            self._watcher.forget(copy.ready)
        fragments = self._fragmenters[copy.blocks.group].of(copy.blocks)
        if not len(fragments):
            return
        kept.append(fragments)
        if self._is_for_kernel(lane, copy.blocks.group, fragments.mean_bytes, len(fragments)):
            kept.append(copy.blocks)
            if self._launch(lane, copy.blocks, kept):
                return
        target, source = fragments.host, fragments.device
        if lane.is_load:
            target, source = source, target
        self._runtime.copy(
            target, source, fragments.sizes, lane.stream, is_source_final=lane.is_load
        )

    def _launch(self, lane: _Lane, blocks: BlockMap, kept: list[object]) -> bool:
        """Whether the kernel takes it; one that cannot be launched is not tried again."""
        assert self._kernel is not None
        try:
            kept.append(self._kernel.kernel.launch(blocks, lane.stream, is_load=lane.is_load))
        except DeviceCallError as error:
            if error.is_sticky:
                raise
            log.warning("small pages are copied by the copy engines from now on: %s", error)
            self._kernel = None
            return False
        return True

    def _is_for_kernel(self, lane: _Lane, group: int, mean_bytes: float, fragments: int) -> bool:
        use = self._kernel
        if use is None or not self._pinned.is_pinned or fragments < KERNEL_FRAGMENTS_MIN:
            return False
        below = use.loads_below_bytes if lane.is_load else use.stores_below_bytes
        return mean_bytes < below and use.kernel.can_copy(group)

    def _watch(
        self, lane: _Lane, copy: _Copy, kept: list[object], failure: CopyError | None
    ) -> None:
        """End the copy when the device is done with it, or with what it got of one that failed."""

        def finish(error: DeviceCallError | None, when: float) -> None:
            if error is not None:
                self._note_fault(error)
                self._end(lane, copy, _failure(lane, copy.blocks, error), when)
            else:
                self._end(lane, copy, failure, when)

        try:
            self._watcher.watch(lane.stream, finish, kept)
            return
        except DeviceCallError as error:
            self._note_fault(error)
            failure = failure or _failure(lane, copy.blocks, error)
        try:
            self._runtime.synchronize(lane.stream)
        except DeviceCallError as error:
            # It may be reading for all we know.
            _KEPT.append(kept)
            self._note_fault(error)
        self._end(lane, copy, failure, self._clock.now())

    # Ends, on any thread

    def _end(self, lane: _Lane, copy: _Copy, failure: CopyError | None, when: float) -> None:
        copy.future.ended_at = when
        if failure is None:
            copy.future.set_result(None)
        else:
            copy.future.set_exception(failure)
        # Last, so that nobody finds this idle while a future is not done.
        self._leave(lane)

    def _leave(self, lane: _Lane) -> None:
        with self._changed:
            lane.under_way -= 1
            self._changed.notify_all()

    def _note_fault(self, error: DeviceCallError) -> None:
        with self._changed:
            if not error.is_sticky or self._fault is not None:
                return
            self._fault = error
            self._changed.notify_all()
        log.error(
            "%s: nothing is copied to or from the host tier any more. Loads are computed, stores "
            "are dropped and counted; restart the server to have the tiers again",
            error,
        )

    def _tell_overdue(self, is_so: bool) -> None:
        with self._changed:
            self._overdue += 1 if is_so else -1
            self._changed.notify_all()
        if is_so:
            log.error(
                "a copy of %s has not ended within %g seconds: until it does, loads are computed "
                "and stores are dropped",
                self._runtime.name,
                OVERDUE_SECONDS,
            )
        else:
            log.warning("the copy that hung has ended: the tiers are used again")

    def _abandon(self) -> None:
        _KEPT.append(self)
        with self._changed:
            self._is_abandoned = True
            waiting = [(lane, copy) for lane in self._lanes for copy in lane.waiting]
            for lane in self._lanes:
                lane.waiting.clear()
        for lane, copy in waiting:
            if copy.future.set_running_or_notify_cancel():
                copy.future.set_exception(
                    _failure(lane, copy.blocks, ClosedError("the copies before it hang"))
                )
        log.error(
            "a copy of %s has not ended within %g seconds of the end: the host tier stays pinned "
            "and mapped until the process ends",
            self._runtime.name,
            CLOSE_SECONDS,
        )


def _failure(lane: _Lane, blocks: BlockMap, error: Exception) -> CopyError:
    slots = tuple(dict.fromkeys(blocks.slots.tolist()))
    failure = CopyError(f"{lane.name} of {len(blocks)} blocks: {error}", slots)
    # Without its traceback, whose frames would keep the region mapped.
    failure.__cause__ = error.with_traceback(None)
    return failure
