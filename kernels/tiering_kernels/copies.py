"""Copies of rows out of memory that another process writes to, each checked to be of one piece.

A slot's generation is raised before another chunk is written to its row; what was copied is right
if it was the wanted one before and after. Callable from any thread; native code lets go of the
interpreter lock for a whole batch. Owns nothing.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from tiering_kernels import library
from tiering_kernels.chunkio import EngineUnavailable

Rows = npt.NDArray[np.uint8]
Generations = npt.NDArray[np.uint64]

_BYTE = ctypes.c_char


def copy_rows(
    rows: Rows,
    generations: Generations,
    slots: Sequence[int],
    wanted: Sequence[int],
    into: Sequence[memoryview],
) -> list[bool]:
    """Copy row `slots[i]` to `into[i]`; for each, whether its generation was `wanted[i]` before and
    after. `rows` is contiguous, `(rows, row_bytes)`, and may be read-only; `into` are writable,
    contiguous and of row_bytes. A slot that is not there is False. ValueError for other buffers."""
    count, row_bytes = rows.shape
    if not len(slots) == len(wanted) == len(into):
        raise ValueError(f"{len(slots)} slots, {len(wanted)} generations, {len(into)} buffers")
    if any(each.nbytes != row_bytes or each.readonly for each in into):
        raise ValueError(f"buffers are writable and of {row_bytes} bytes")
    if not rows.flags.c_contiguous or generations.shape != (count,):
        raise ValueError("rows are contiguous, with one generation each")
    there = [place for place, slot in enumerate(slots) if 0 <= slot < count]
    results = [False] * len(slots)
    copied = _copier()(
        rows,
        generations,
        [slots[place] for place in there],
        [wanted[place] for place in there],
        [into[place] for place in there],
    )
    for place, is_right in zip(there, copied, strict=True):
        results[place] = bool(is_right)
    return results


_Copier = Callable[
    [Rows, Generations, Sequence[int], Sequence[int], Sequence[memoryview]], Sequence[int]
]


@cache
def _copier() -> _Copier:
    try:
        native = library.load(library.LIBRARY, ctypes.CDLL)
    except EngineUnavailable:
        return portable_copy
    native.kvt_copy_rows.restype = None
    native.kvt_copy_rows.argtypes = (
        ctypes.c_uint32,
        *(ctypes.c_void_p,) * 4,
        ctypes.c_uint64,
        *(ctypes.c_void_p,) * 2,
    )

    def copy(
        rows: Rows,
        generations: Generations,
        slots: Sequence[int],
        wanted: Sequence[int],
        into: Sequence[memoryview],
    ) -> Sequence[int]:
        held = list(map(_BYTE.from_buffer, into))  # the buffers, until the call is over
        addresses = array("Q", map(ctypes.addressof, held))
        numbers, expected = array("Q", slots), array("Q", wanted)
        results = bytearray(len(slots))
        outcome = _BYTE.from_buffer(results) if results else None
        native.kvt_copy_rows(
            len(slots),
            numbers.buffer_info()[0],
            expected.buffer_info()[0],
            rows.ctypes.data,
            generations.ctypes.data,
            rows.shape[1],
            addresses.buffer_info()[0],
            None if outcome is None else ctypes.addressof(outcome),
        )
        del held, outcome
        return results

    return copy


def portable_copy(
    rows: Rows,
    generations: Generations,
    slots: Sequence[int],
    wanted: Sequence[int],
    into: Sequence[memoryview],
) -> list[int]:
    """The same without native code. numpy lets go of the interpreter lock while it copies, and that
    keeps the generation from being read before the last byte on any processor."""
    results = []
    for slot, generation, buffer in zip(slots, wanted, into, strict=True):
        is_right = int(generations[slot]) == generation
        if is_right:
            np.copyto(np.frombuffer(buffer, np.uint8), rows[slot])
            is_right = int(generations[slot]) == generation
        results.append(int(is_right))
    return results
