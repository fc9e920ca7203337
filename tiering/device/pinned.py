"""Host memory pinned for a device, in pieces, and let go of in the right order.

Owns what was registered with the driver, and nothing of the memory itself: whoever owns that closes
this first. Pinning is for speed alone. Where it cannot be had nothing is pinned, one warning says
so, and copies go through memory of the driver's.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from tiering.clock import Clock, MonotonicClock
from tiering.device.runtime import DeviceRuntime
from tiering.errors import DeviceCallError

log = logging.getLogger("tiering")

ByteArray = npt.NDArray[np.uint8]

PIECE_BYTES = 1 << 30
"""The driver holds a lock while it pins, about 0.1 seconds a GiB, and whole terabytes fail."""

_TELL_SECONDS = 10.0
_GB = 1e9


class PinnedMemory:
    """`rows_per_piece` rows are pinned at a time; no copy may reach from one piece into the next.
    Where `is_pinned` is false, copies may lie anywhere."""

    def __init__(self, runtime: DeviceRuntime, rows: int, rows_per_piece: int) -> None:
        """For `pin`."""
        self._runtime = runtime
        self._addresses: list[int] = []
        self.rows_per_piece = rows_per_piece
        self._rows = rows

    @property
    def is_pinned(self) -> bool:
        return bool(self._addresses)

    def close(self) -> None:
        """Unregister all of it, whatever fails; nothing of the device's may be reading it. May be
        called twice."""
        addresses, self._addresses = self._addresses, []
        failures = []
        for address in reversed(addresses):
            try:
                self._runtime.unregister(address)
            except DeviceCallError as error:
                failures.append(error)
        if failures:
            log.warning(
                "%d of %d pieces of the host tier were not unpinned: %s",
                len(failures),
                len(addresses),
                failures[0],
            )

    def __repr__(self) -> str:
        state = f"{len(self._addresses)} pieces" if self._addresses else "not pinned"
        return f"<PinnedMemory of {self._rows} rows, {state}>"


def pin(
    runtime: DeviceRuntime,
    memory: ByteArray,
    piece_bytes: int = PIECE_BYTES,
    clock: Clock | None = None,
) -> PinnedMemory:
    """Pin `memory`, contiguous rows of whole pages: uint8, shape `(rows, row_bytes)`. Blocks for
    about 0.1 seconds a GiB, and tells how far it is. All of it is pinned then, or nothing."""
    clock = clock or MonotonicClock()
    rows, row_bytes = memory.shape
    rows_per_piece = max(1, piece_bytes // row_bytes)
    pinned = PinnedMemory(runtime, rows, rows_per_piece)
    began = told = clock.now()
    for first in range(0, rows, rows_per_piece):
        piece = memory[first : first + rows_per_piece]
        address = piece.ctypes.data
        try:
            runtime.register(address, piece.nbytes)
        except DeviceCallError as error:
            log.warning(
                "the host tier is not pinned, so copies to and from the device are slower: %s, at "
                "%.1f of %.1f GB. Raise the limit of locked memory (ulimit -l unlimited; in a "
                "container docker's --ulimit memlock=-1), or lower cpu_bytes_to_use",
                error,
                first * row_bytes / _GB,
                memory.nbytes / _GB,
            )
            pinned.close()
            return pinned
        pinned._addresses.append(address)
        if clock.now() - told >= _TELL_SECONDS:
            told = clock.now()
            done_bytes = (first + len(piece)) * row_bytes
            log.info("host tier: %.0f of %.0f GB pinned", done_bytes / _GB, memory.nbytes / _GB)
    log.info("host tier: %.1f GB pinned in %.1f s", memory.nbytes / _GB, clock.now() - began)
    return pinned
