"""Native code around a device's driver: what it calls back, and loops over its calls.

Without the library there is neither, and whoever wants them does without: `device_calls` is None
then. May be used from any thread; the interpreter lock is let go of while a loop runs.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from tiering_kernels import library
from tiering_kernels.chunkio import EngineUnavailable

Addresses = npt.NDArray[np.uint64]
Cells = npt.NDArray[np.int64]

CELL_DESCRIPTOR, CELL_ENDED_NS = 0, 1
CELL_FIELDS = 2


class DeviceCalls:
    """`signal` is the address of a host function `void (*)(void *)`. It is given the address of a
    cell, `CELL_FIELDS` int64 that nobody moves or uses again until CELL_ENDED_NS is not 0: there
    it puts the monotonic clock's time, and then adds 1 to the eventfd of CELL_DESCRIPTOR."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        self._loop = calls.kvt_copy_loop
        self._loop.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_uint64] + [ctypes.c_void_p] * 2
        self._loop.restype = ctypes.c_int
        self.signal = ctypes.cast(calls.kvt_signal, ctypes.c_void_p).value or 0

    def copy_loop(
        self, copy: int, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int
    ) -> tuple[int, int]:
        """Call the driver's function at address `copy`, `int (*)(uint64 target, uint64 source,
        size_t bytes, void *stream)`, for each fragment; contiguous arrays of one length. What the
        first call that failed returned, and for which: `(0, count)` where none did."""
        failed = ctypes.c_uint64(len(sizes))
        code: int = self._loop(
            copy,
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            stream,
            ctypes.addressof(failed),
        )
        return code, failed.value


@cache
def device_calls() -> DeviceCalls | None:
    """None where the native library cannot be had."""
    try:
        return DeviceCalls(library.load(library.LIBRARY, ctypes.CDLL))
    except EngineUnavailable:
        return None
