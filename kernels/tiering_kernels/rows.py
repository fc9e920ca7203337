"""Copies of whole pages between a device's per-layer arrays and the rows of the host tier.

Loops over plain numpy arrays in host memory, callable from any thread: they own nothing, check
every index before the first byte moves, and let go of the interpreter lock while bytes move.
Neighbouring blocks are copied as one piece. Source and destination must not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.integer]


def gather_pages(
    pages: Sequence[Bytes],
    blocks: Indices,
    slots: Indices,
    positions: Indices,
    shares: Sequence[Bytes],
) -> None:
    """Copy block `blocks[i]` of every layer to place `positions[i]` of row `slots[i]`.

    `pages[l]` is layer l on the device, uint8 of shape `(num_blocks, page_bytes_l)`; `shares[l]`
    is its part of the rows, uint8 of shape `(rows, blocks_per_chunk, page_bytes_l)`. Both may be
    strided. `blocks`, `slots` and `positions` are of one length. Raises IndexError for an index
    out of bounds and ValueError for shapes that do not match, both before anything is copied.
    """
    pieces = _pieces(pages, blocks, slots, positions, shares)
    for layer, share in zip(pages, shares, strict=True):
        for block, slot, position, count in pieces:
            share[slot, position : position + count] = layer[block : block + count]


def scatter_pages(
    pages: Sequence[Bytes],
    blocks: Indices,
    slots: Indices,
    positions: Indices,
    shares: Sequence[Bytes],
) -> None:
    """The way back of `gather_pages`, with the same arguments: rows -> device."""
    pieces = _pieces(pages, blocks, slots, positions, shares)
    for layer, share in zip(pages, shares, strict=True):
        for block, slot, position, count in pieces:
            layer[block : block + count] = share[slot, position : position + count]


def _pieces(
    pages: Sequence[Bytes],
    blocks: Indices,
    slots: Indices,
    positions: Indices,
    shares: Sequence[Bytes],
) -> list[tuple[int, int, int, int]]:
    """`(block, slot, position, count)` of each run of neighbours, after checking everything."""
    if len(pages) != len(shares):
        raise ValueError(f"{len(pages)} layers of pages, but {len(shares)} of rows")
    for number, (layer, share) in enumerate(zip(pages, shares, strict=True)):
        if not layer.dtype == share.dtype == np.uint8:
            raise ValueError(f"layer {number}: not uint8 but {layer.dtype} and {share.dtype}")
        if layer.ndim != 2 or share.ndim != 3 or layer.shape[1] != share.shape[2]:
            raise ValueError(f"layer {number}: pages {layer.shape} do not fit rows {share.shape}")
    if not len(blocks) == len(slots) == len(positions):
        raise ValueError(f"{len(blocks)} blocks, {len(slots)} slots, {len(positions)} positions")
    if not len(blocks) or not pages:
        return []
    _require_below("block", blocks, min(layer.shape[0] for layer in pages))
    _require_below("slot", slots, min(share.shape[0] for share in shares))
    _require_below("position", positions, min(share.shape[1] for share in shares))
    continues = (np.diff(blocks) == 1) & (np.diff(positions) == 1) & (np.diff(slots) == 0)
    starts = np.concatenate(([0], np.flatnonzero(~continues) + 1))
    counts = np.diff(starts, append=len(blocks))
    return list(
        zip(
            blocks[starts].tolist(),
            slots[starts].tolist(),
            positions[starts].tolist(),
            counts.tolist(),
            strict=True,
        )
    )


def _require_below(what: str, indices: Indices, limit: int) -> None:
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= limit:
        worst = low if low < 0 else high
        raise IndexError(f"{what} {worst} is not one of 0 to {limit - 1}")
