"""Which bytes a copy moves: the fragments of a block map, neighbours joined to one.

Pure arithmetic over addresses, with numpy for a whole copy at a time. A fragment is a run of bytes
that lie together on the device and in the host tier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiering.device.base import BlockMap, DevicePages

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class HostRows:
    """A rank's share of the host tier: of row r, what begins at `address + r * stride`. No
    fragment lies in two of the pieces of `rows_per_piece` rows that were pinned one by one."""

    address: int
    stride: int
    rows: int
    rows_per_piece: int


@dataclass(frozen=True, slots=True)
class Fragments:
    """`sizes[i]` bytes at `device[i]` and at `host[i]`: uint64, contiguous, of one length."""

    device: Addresses
    host: Addresses
    sizes: Addresses

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def mean_bytes(self) -> float:
        """0 where there are none."""
        return self.total_bytes / len(self) if len(self) else 0.0


class Fragmenter:
    """For one KV cache group's pages, and a rank's share of the rows."""

    def __init__(self, group: DevicePages, rows: HostRows) -> None:
        layout = group.layout
        self._rows = rows
        self._per_chunk = layout.blocks_per_chunk
        self._blocks = min((layer.blocks for layer in group.pages), default=0)
        self._device = _column([layer.address for layer in group.pages])
        self._strides = _column([layer.stride for layer in group.pages])
        self._host = _column([rows.address + at for at in layout.layer_offsets])
        self._sizes = _column(list(layout.page_bytes))

    def of(self, blocks: BlockMap) -> Fragments:
        """Layer by layer, each in the order of `blocks`; IndexError for an index out of bounds.
        None where the rank has no layer of the group."""
        if not len(self._sizes):
            return Fragments(*[np.empty(0, np.uint64)] * 3)
        _require_below("block", blocks.blocks, self._blocks)
        _require_below("slot", blocks.slots, self._rows.rows)
        _require_below("position", blocks.positions, self._per_chunk)
        numbers, slots, positions = (
            array.astype(np.uint64) for array in (blocks.blocks, blocks.slots, blocks.positions)
        )
        device = (self._device + numbers * self._strides).ravel()
        host = (self._host + slots * np.uint64(self._rows.stride)) + positions * self._sizes
        sizes = np.broadcast_to(self._sizes, host.shape).ravel()
        piece = np.broadcast_to(slots // np.uint64(self._rows.rows_per_piece), host.shape).ravel()
        return _joined(device, host.ravel(), sizes, piece)


def _column(values: list[int]) -> Addresses:
    return np.array(values, np.uint64).reshape(-1, 1)


def _joined(device: Addresses, host: Addresses, sizes: Addresses, piece: Addresses) -> Fragments:
    if not len(sizes):
        return Fragments(device, host, sizes)
    follows = device[:-1] + sizes[:-1] == device[1:]
    follows &= host[:-1] + sizes[:-1] == host[1:]
    follows &= piece[:-1] == piece[1:]
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return Fragments(device[starts], host[starts], np.add.reduceat(sizes, starts))


def _require_below(what: str, indices: npt.NDArray[np.int32], limit: int) -> None:
    if not len(indices):
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= limit:
        worst = low if low < 0 else high
        raise IndexError(f"{what} {worst} is not one of 0 to {limit - 1}")
