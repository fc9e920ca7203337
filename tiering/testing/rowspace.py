"""An engine's host tier as transports see it: rows and generations in memory that can be mapped.

For tests and benchmarks. What row `slot` holds in generation `generation` is always the same, so
whoever reads it, in whatever process, can tell a right row from any other.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from tiering.peers.messages import Reference
from tiering.peers.transports.base import Served, Space


def content(slot: int, generation: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """The `row_bytes` bytes of a row."""
    bits = np.random.SFC64([slot, generation])
    return np.frombuffer(np.random.Generator(bits).bytes(row_bytes), np.uint8)


class RowSpace:
    """`rows` rows of `row_bytes`, all in generation 1, each filled."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self._descriptors: list[int] = []
        bytes_, words = self._made(rows * row_bytes), self._made(rows * 8)
        self.rows: npt.NDArray[np.uint8] = bytes_.reshape(rows, row_bytes)
        self.generations: npt.NDArray[np.uint64] = words.view(np.uint64)
        self.served = Served(
            self.rows,
            self.generations,
            Space(self._descriptors[0], 0, rows * row_bytes),
            Space(self._descriptors[1], 0, rows * 8),
        )
        for slot in range(rows):
            self.refill(slot)

    def refill(self, slot: int) -> Reference:
        """Give the slot to another chunk; gives where that is, once it is all there."""
        generation = int(self.generations[slot]) + 1
        fresh = content(slot, generation, self.rows.shape[1])
        # In this order: whoever still reads the old chunk sees that it is going.
        self.generations[slot] = generation
        self.rows[slot] = fresh
        return Reference(slot, generation)

    def reference(self, slot: int) -> Reference:
        return Reference(slot, int(self.generations[slot]))

    def close(self) -> None:
        """Let go of the memory, but for what others have of it."""
        self.rows = np.empty((0, 1), np.uint8)
        self.generations = np.empty(0, np.uint64)
        del self.served
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _made(self, size: int) -> npt.NDArray[np.uint8]:
        descriptor = os.memfd_create("kv-tiering-rows", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        os.posix_fallocate(descriptor, 0, size)
        return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


def holds(reference: Reference, buffer: memoryview) -> bool:
    """Whether `buffer` is the row that `reference` names."""
    expected = content(reference.slot, reference.generation, buffer.nbytes)
    return bool(np.array_equal(np.frombuffer(buffer, np.uint8), expected))
