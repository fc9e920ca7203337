"""The contract of copies between a worker's device memory and its share of the host tier.

Used by one worker thread. A copier owns the transfers under way and nothing else; which block
goes to which slot is decided by the scheduler side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiering.layout import ShareLayout

ByteArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Which device block belongs to which place in the host tier: three arrays of one length.

    Entry i says that device block `blocks[i]` is block number `positions[i]` of the chunk in
    slot `slots[i]`; all are of KV cache group `group`, by the order that the copier was given.
    """

    blocks: IntArray
    slots: IntArray
    positions: IntArray
    group: int = 0

    def __post_init__(self) -> None:
        if not len(self.blocks) == len(self.slots) == len(self.positions):
            raise ValueError("blocks, slots and positions must have one length")

    def __len__(self) -> int:
        return len(self.blocks)

    def copied(self) -> BlockMap:
        """One of its own, which the caller's arrays do not change any more."""
        blocks, slots, positions = self.blocks.copy(), self.slots.copy(), self.positions.copy()
        return BlockMap(blocks, slots, positions, self.group)


@dataclass(frozen=True)
class HostPages:
    """One KV cache group's blocks: `pages[l]` is its layer l, uint8 of shape `(num_blocks,
    page_bytes[l])`, and `layout` how they lie in a share. ValueError where these do not fit."""

    pages: Sequence[ByteArray]
    layout: ShareLayout

    def __post_init__(self) -> None:
        widths = tuple(layer.shape[1] for layer in self.pages)
        if widths != self.layout.page_bytes:
            raise ValueError(
                f"pages of {widths} bytes, but the layout has {self.layout.page_bytes}"
            )


@dataclass(frozen=True, slots=True)
class PageRun:
    """One layer's pages in device memory: that of block b is `page_bytes` at
    `address + b * stride`, of `blocks` blocks. Sizes in bytes, the address the device's own."""

    address: int
    stride: int
    page_bytes: int
    blocks: int

    @property
    def end(self) -> int:
        """The address behind the last page."""
        return self.address + (self.blocks - 1) * self.stride + self.page_bytes


@dataclass(frozen=True)
class DevicePages:
    """One KV cache group's blocks in device memory: `pages[l]` is its layer l, and `layout` how
    they lie in a share. ValueError where these do not fit."""

    pages: Sequence[PageRun]
    layout: ShareLayout

    def __post_init__(self) -> None:
        widths = tuple(layer.page_bytes for layer in self.pages)
        if widths != self.layout.page_bytes:
            raise ValueError(
                f"pages of {widths} bytes, but the layout has {self.layout.page_bytes}"
            )


class DeviceCopier(ABC):
    """Copies whole blocks, every layer of them, for one rank.

    `gather` and `scatter` return at once with a future that completes when the bytes are in
    place, or fails with CopyError. The future can be polled (`done()`), waited for from a thread
    without an event loop, and awaited through `asyncio.wrap_future`: a worker's hooks have no
    loop, a program's have. Copies given in one direction complete in the order given; there is
    no order between directions. Neither side of a copy may be reused before its future is done.
    """

    @abstractmethod
    def gather(self, blocks: BlockMap) -> Future[None]:
        """Device -> host tier. The source must be final: the forward that wrote it has ended."""

    @abstractmethod
    def scatter(self, blocks: BlockMap) -> Future[None]:
        """Host tier -> device."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, then let go of the host tier's memory. May be called
        twice."""
