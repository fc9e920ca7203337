"""A kernel for pages that are too small for a device's copy engines: many at a time, by Triton.

It reads and writes the host tier from the device, so that must be pinned, and at the same address
for both. Needs torch and triton, which are imported with this module. Nothing here waits; what
`launch` returns must be kept until the device is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

PROGRAMS = 12
"""So few fill the bus, and leave the other processors of the device to the model."""

WORDS_MAX = 1024
"""Of one step of one program. With 8 bytes each and 128 threads, four accesses of 16 bytes."""

_TABLE_FIELDS = 4

Indices = npt.NDArray[np.int32]


class Blocks(Protocol):
    """Block `blocks[i]` of group `group` belongs to place `positions[i]` of row `slots[i]`."""

    @property
    def blocks(self) -> Indices: ...

    @property
    def slots(self) -> Indices: ...

    @property
    def positions(self) -> Indices: ...

    @property
    def group(self) -> int: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Page b is `page_bytes` at `address + b * stride` on the device; the pages of a chunk's
    blocks lie one after another from `offset` of its row on. Bytes."""

    address: int
    stride: int
    page_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """One KV cache group: its layers, each of `blocks` pages, in chunks of `per_chunk`; and the
    rows, of which row r begins at `row_address + r * row_stride`."""

    layers: Sequence[Layer]
    blocks: int
    per_chunk: int
    rows: int
    row_address: int
    row_stride: int

    @property
    def word_bytes(self) -> int:
        """The largest power of two, of 16 at most, at which everything begins and ends."""
        everything = self.row_address | self.row_stride | 16
        for layer in self.layers:
            everything |= layer.address | layer.stride | layer.page_bytes | layer.offset
        return everything & -everything


# Of what differs from launch to launch: whatever its value, the code is that of `warm_up`.
@triton.jit(do_not_specialize=["count"])
def _copy_pages(
    table,
    indices,
    count,
    layers,
    blocks,
    rows,
    per_chunk,
    row_address,
    row_stride,
    IS_LOAD: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    # A program takes every n-th page. What is out of bounds is left out, whatever the host checked.
    lane = tl.arange(0, WORDS)
    # Where 16 bytes divide everything, two words of 8 that one thread takes at once.
    size: tl.constexpr = 8 if WORD == 16 else WORD
    kind: tl.constexpr = (
        tl.int64 if size == 8 else (tl.int32 if size == 4 else (tl.int16 if size == 2 else tl.int8))
    )
    at = tl.program_id(0)
    while at < count * layers:
        entry = table + (at // count) * FIELDS
        which = at % count
        block = tl.load(indices + which).to(tl.int64)
        slot = tl.load(indices + count + which).to(tl.int64)
        position = tl.load(indices + 2 * count + which).to(tl.int64)
        is_inside = (block >= 0) & (block < blocks) & (slot >= 0) & (slot < rows)
        is_inside = is_inside & (position >= 0) & (position < per_chunk)
        page_bytes = tl.load(entry + 2)
        device = tl.load(entry) + block * tl.load(entry + 1)
        host = row_address + slot * row_stride + tl.load(entry + 3) + position * page_bytes
        words = tl.where(is_inside, page_bytes // size, 0)
        if IS_LOAD:
            source = host.to(tl.pointer_type(kind))
            target = device.to(tl.pointer_type(kind))
        else:
            source = device.to(tl.pointer_type(kind))
            target = host.to(tl.pointer_type(kind))
        if WORD == 16:
            source = tl.multiple_of(source, 16)
            target = tl.multiple_of(target, 16)
            words = tl.multiple_of(words, 2)
        for start in range(0, words, WORDS):
            word = start + lane
            is_in_page = word < words
            tl.store(target + word, tl.load(source + word, mask=is_in_page), mask=is_in_page)
        at += tl.num_programs(0)


class TritonPages:
    """For one rank's groups; `device` is where tables and indices go, such as `cuda:0`."""

    def __init__(self, tables: Sequence[PageTable], device: str, programs: int = PROGRAMS) -> None:
        self._tables = list(tables)
        self._device = torch.device(device)
        self._programs = programs
        self._layers = [
            torch.tensor(
                [
                    field
                    for layer in table.layers
                    for field in (layer.address, layer.stride, layer.page_bytes, layer.offset)
                ],
                dtype=torch.int64,
                device=self._device,
            )
            for table in tables
        ]

    def can_copy(self, group: int) -> bool:
        """Where 8 bytes do not divide everything, copy engines are no slower."""
        table = self._tables[group]
        return bool(table.layers) and table.word_bytes >= 8

    def warm_up(self) -> None:
        """Compile what every group needs, which takes seconds, and copy nothing."""
        nothing = torch.zeros(1, dtype=torch.int32, device=self._device)
        for group, table in enumerate(self._tables):
            if table.layers:
                for is_load in (True, False):
                    self._start(group, nothing, 0, is_load)

    def launch(self, blocks: Blocks, stream: int, *, is_load: bool) -> object:
        """Copy what `blocks` says: rows to device, or back. What this returns must be kept until
        the stream has come to its end."""
        if not len(blocks) or not self._tables[blocks.group].layers:
            return None
        given = torch.from_numpy(
            np.concatenate([blocks.blocks, blocks.slots, blocks.positions]).astype(np.int32)
        )
        if self._device.type != "cuda":
            self._start(blocks.group, given, len(blocks), is_load)
            return given
        cuda: Any = torch.cuda
        external = cuda.ExternalStream(stream, device=self._device)
        with cuda.device(self._device), cuda.stream(external):
            pinned = given.pin_memory()
            indices = pinned.to(self._device, non_blocking=True)
            self._start(blocks.group, indices, len(blocks), is_load)
            return pinned, indices

    def _start(self, group: int, indices: torch.Tensor, count: int, is_load: bool) -> None:
        table = self._tables[group]
        word = table.word_bytes
        largest = max(layer.page_bytes for layer in table.layers) // min(word, 8)
        grid = (max(1, min(self._programs, count * len(table.layers))),)
        kernel: Any = _copy_pages
        kernel[grid](
            self._layers[group],
            indices,
            count,
            len(table.layers),
            table.blocks,
            table.rows,
            table.per_chunk,
            table.row_address,
            table.row_stride,
            IS_LOAD=is_load,
            WORD=word,
            WORDS=min(triton.next_power_of_2(largest), WORDS_MAX),
            FIELDS=_TABLE_FIELDS,
        )
