"""Copies by the Triton kernel and by plain loops, compared. Run as a program, in an environment
with TRITON_INTERPRET=1 and no device; prints one line for each case, and fails with an assert."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiering.device.base import BlockMap
from tiering_kernels.rows import gather_pages, scatter_pages
from tiering_kernels.triton_pages import Layer, PageTable, TritonPages

BLOCKS, ROWS = 6, 4


def arrays(random: np.random.Generator, *shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """At an address that 4096 divides."""
    raw = np.zeros(int(np.prod(shape)) + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    whole = raw[start : start + int(np.prod(shape))].reshape(shape)
    whole[:] = random.integers(0, 256, shape, np.uint8)
    return whole


def compare(
    widths: list[int], gap: int, per_chunk: int, count: int, is_load: bool, programs: int = 5
) -> int:
    """`gap` bytes behind each page and before each share; the word that the kernel moves by."""
    random = np.random.default_rng(sum(widths) + gap + count)
    share_bytes = sum(widths) * per_chunk
    device = [arrays(random, BLOCKS, width + gap) for width in widths]
    rows = arrays(random, ROWS, share_bytes + 3 * gap)
    places = random.permutation(ROWS * per_chunk)[:count]
    blocks = BlockMap(
        random.permutation(BLOCKS)[:count].astype(np.int32),
        (places // per_chunk).astype(np.int32),
        (places % per_chunk).astype(np.int32),
    )
    wanted_device, wanted_rows = [layer.copy() for layer in device], rows.copy()
    parts, layers, at = [], [], gap
    for layer, width in zip(device, widths, strict=True):
        part = wanted_rows[:, at : at + width * per_chunk]
        parts.append(part.reshape(ROWS, per_chunk, width))
        layers.append(Layer(layer.ctypes.data, layer.strides[0], width, at))
        at += width * per_chunk
    pages = [layer[:, :width] for layer, width in zip(wanted_device, widths, strict=True)]
    loop = scatter_pages if is_load else gather_pages
    loop(pages, blocks.blocks, blocks.slots, blocks.positions, parts)

    table = PageTable(layers, BLOCKS, per_chunk, ROWS, rows.ctypes.data, rows.strides[0])
    kernel = TritonPages([table], "cpu", programs)
    kernel.warm_up()
    kernel.launch(blocks, 0, is_load=is_load)
    for layer, wanted in zip(device, wanted_device, strict=True):
        np.testing.assert_array_equal(layer, wanted)
    np.testing.assert_array_equal(rows, wanted_rows)
    return table.word_bytes


def out_of_bounds_is_left_out() -> None:
    random = np.random.default_rng(0)
    device, rows = arrays(random, BLOCKS, 64), arrays(random, ROWS, 128)
    table = PageTable(
        [Layer(device.ctypes.data, 64, 64, 0)], BLOCKS, 2, ROWS, rows.ctypes.data, 128
    )
    wanted = rows.copy()
    wanted[1, 64:] = device[5]
    bad = [(-1, 0, 0), (BLOCKS, 0, 0), (0, -1, 0), (0, ROWS, 0), (0, 0, -1), (0, 0, 2), (5, 1, 1)]
    blocks = BlockMap(*np.array(bad, np.int32).T.copy())
    TritonPages([table], "cpu").launch(blocks, 0, is_load=False)
    np.testing.assert_array_equal(rows, wanted)


def main() -> None:
    for is_load in (False, True):
        # 16-byte accesses, then words of each size, by what the gap leaves of the alignment.
        for gap, word in ((0, 16), (16, 16), (8, 8), (4, 4), (2, 2), (1, 1)):
            assert compare([64, 32], gap, 2, 5, is_load) == word, (gap, word)
            print(f"words of {word} bytes, gap {gap}, load {is_load}")
        for width, word in ((48, 16), (40, 8), (36, 4), (34, 2), (33, 1)):
            assert compare([width], 0, 1, 3, is_load) == (16 if width == 48 else word)
            print(f"pages of {width} bytes, load {is_load}")
        compare([16], 0, 2, 0, is_load)
        compare([3 * 8192 + 48], 0, 1, 2, is_load)
        compare([64, 4096, 16], 0, 3, 6, is_load, programs=1)
        print(f"nothing, several steps, one program, load {is_load}")
    out_of_bounds_is_left_out()
    print("all as the plain loops")


if __name__ == "__main__":
    main()
