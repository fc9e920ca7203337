"""A copier over the fake CUDA device, with pages and rows that show what was copied when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from tiering.device.base import BlockMap, DevicePages, PageRun
from tiering.device.cuda import CudaCopier
from tiering.device.futures import Watcher
from tiering.device.pinned import pin
from tiering.device.runtime import KernelUse
from tiering.layout import ShareLayout
from tiering.testing.fakecuda import COMPUTE, FakeCuda

NUM_BLOCKS, ROWS, ROW_BYTES = 8, 6, 4096
LAYOUT = ShareLayout(page_bytes=(96, 32), blocks_per_chunk=2)
SECONDS = 30.0  # far above what anything here takes

ByteArray = npt.NDArray[np.uint8]


def chunk(blocks: Sequence[int], slot: int, group: int = 0) -> BlockMap:
    """The blocks of one chunk, from its first place on."""
    places = np.arange(len(blocks), dtype=np.int32)
    where = np.full(len(blocks), slot, np.int32)
    return BlockMap(np.array(blocks, np.int32), where, places, group)


def stamped(seed: int = 3) -> list[ByteArray]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 256, (NUM_BLOCKS, size), np.uint8) for size in LAYOUT.page_bytes]


def run_of(pages: ByteArray) -> PageRun:
    return PageRun(pages.ctypes.data, pages.strides[0], pages.shape[1], len(pages))


class Scene:
    """`share` is the second of two ranks' shares, strided, with another rank's bytes beside it.
    Nothing happens on the device but what a test lets happen."""

    def __init__(
        self,
        cuda: FakeCuda | None = None,
        *,
        watcher: Watcher | None = None,
        kernel: KernelUse | None = None,
        piece_bytes: int = 2 * ROW_BYTES,
    ) -> None:
        self.cuda = cuda or FakeCuda()
        self.pages = stamped()
        self.rows = np.zeros((ROWS, ROW_BYTES), np.uint8)
        self.share = self.rows[:, LAYOUT.share_bytes : 2 * LAYOUT.share_bytes]
        self.cuda.own(self.rows, *self.pages)
        self.watcher = watcher or Watcher(self.cuda)
        group = DevicePages([run_of(layer) for layer in self.pages], LAYOUT)
        self.pinned = pin(self.cuda, self.rows, piece_bytes)
        self.copier = CudaCopier(
            self.cuda, self.watcher, [group], self.share, self.pinned, lambda: COMPUTE, kernel
        )
        self.loads, self.stores = self.cuda.side_streams

    def wait_given(self, stream: int, names: Sequence[str]) -> None:
        """Until exactly these wait in the stream."""
        self.cuda.wait_until(lambda: self.cuda.pending(stream) == list(names))

    def store(self, blocks: Sequence[int], slot: int) -> Future[None]:
        """Given to the device, all of it."""
        return self._given(self.stores, lambda: self.copier.gather(chunk(blocks, slot)))

    def load(self, blocks: Sequence[int], slot: int) -> Future[None]:
        return self._given(self.loads, lambda: self.copier.scatter(chunk(blocks, slot)))

    def expected(self, blocks: Sequence[int]) -> bytes:
        """What a row has of these blocks."""
        return b"".join(layer[list(blocks)].tobytes() for layer in self.pages)

    def end(self) -> None:
        """Let everything happen, and close; nothing may have been done wrong."""
        self.cuda.run_all()
        self.copier.close()
        assert self.cuda.violations == []

    def _given(self, stream: int, begin: Callable[[], Future[None]]) -> Future[None]:
        last = "host function" if self.cuda.can_signal else "record"
        before = self.cuda.given(stream, last)
        future = begin()
        self.cuda.wait_until(lambda: self.cuda.given(stream, last) > before)
        return future
