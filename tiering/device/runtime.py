"""What a copier asks of a device's driver: streams, events, copies, pinned memory.

A runtime is for one device. Streams, events and addresses are plain numbers, as the driver has
them, so nothing here or above knows which library calls it. Every call raises DeviceCallError, and
may be made from any thread that has called `enter_thread`. Nothing waits but `synchronize` and
what is copied to or from memory that is not pinned.

The order of things is the driver's: what is given to one stream happens in that order, what is
given to two in any. A copy reads its source, and may read its arrays of addresses, when its turn
comes and not when it is given; both must stay as they are until an event behind it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tiering.device.base import BlockMap
from tiering.device.fragments import Addresses

KERNEL_BELOW_BYTES = 28 << 10
"""Smaller fragments, on average, are for a kernel when they are loaded; vLLM measured it on an
H100. When they are stored the copy engines were faster at all sizes."""


class DeviceRuntime(Protocol):
    """One device's driver; see the module's docstring. `name` is for messages."""

    name: str

    def enter_thread(self) -> None:
        """Make the device the calling thread's. Without it, a thread would wake device 0."""
        ...

    def create_stream(self, *, is_low: bool = False) -> int:
        """Of its own, not ordered with the driver's default stream; `is_low`: of the lowest
        priority, where that is lower than what a server's stream has."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def synchronize(self, stream: int) -> None:
        """Wait until everything that was given to the stream has happened."""
        ...

    def create_event(self, is_timed: bool = False) -> int:
        """`is_timed`: `elapsed_seconds` may be asked for."""
        ...

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """It is complete when everything before it in the stream is. Recording it anew does not
        change what waits for it already."""
        ...

    def is_complete(self, event: int) -> bool:
        """Of its last record; one that was never recorded is complete."""
        ...

    def elapsed_seconds(self, start: int, end: int) -> float:
        """Between two timed events that are complete."""
        ...

    def wait_event(self, stream: int, event: int) -> None:
        """What is given to the stream from here on happens after the event's last record."""
        ...

    def copy(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        stream: int,
        *,
        is_source_final: bool,
    ) -> None:
        """`sizes[i]` bytes from `sources[i]` to `targets[i]`, for each i, as one batch: contiguous
        arrays of one length, at least 1. `is_source_final`: nobody writes to the sources any more,
        so they may be read at once rather than when the stream comes to it. If it fails, some of
        it may happen all the same."""
        ...

    @property
    def can_signal(self) -> bool:
        """Whether there is `launch_host_function`."""
        ...

    def launch_host_function(self, function: int, data: int, stream: int) -> None:
        """Call the C function at address `function`, `void (*)(void *)`, with `data`, when the
        stream comes to it; what is behind it waits. It never comes to that after a sticky
        failure."""
        ...

    def register(self, address: int, size_bytes: int) -> None:
        """Pin host memory, whole pages, for this device."""
        ...

    def unregister(self, address: int) -> None: ...

    def bus_id(self) -> str | None:
        """Where the device is on the PCI bus, such as `0000:3b:00.0`; None where it is on none."""
        ...


class PageKernel(Protocol):
    """A program on the device that copies pages, for those that are too small for its copy
    engines; made for a rank's groups and its share of the host tier, which must be pinned."""

    def can_copy(self, group: int) -> bool:
        """Whether the group's pages are of such sizes and at such places."""
        ...

    def launch(self, blocks: BlockMap, stream: int, *, is_load: bool) -> object:
        """Copy what `blocks` says, whose indices the caller has checked: host tier to device, or
        back. What this returns must be kept until an event behind it is complete."""
        ...


@dataclass(frozen=True, slots=True)
class KernelUse:
    """`kernel` copies fragments that are smaller than these, on average over a copy; 0: none."""

    kernel: PageKernel
    loads_below_bytes: int = KERNEL_BELOW_BYTES
    stores_below_bytes: int = 0
