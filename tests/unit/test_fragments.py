"""Fragments of a copy: the bytes that the plain loops copy, in as few pieces as there can be."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.device.base import BlockMap, DevicePages, PageRun
from tiering.device.fragments import Fragmenter, HostRows
from tiering.layout import ShareLayout
from tiering_kernels.rows import gather_pages, scatter_pages

BLOCKS, ROWS = 9, 5


def block_map(places: list[tuple[int, int, int]]) -> BlockMap:
    block, slot, position = np.array(places, np.int32).reshape(-1, 3).T.copy()
    return BlockMap(block, slot, position)


def copied(
    widths: list[int], gap: int, per_chunk: int, places: list[tuple[int, int, int]], is_load: bool
) -> int:
    """Carry a copy out by its fragments and by the plain loops; how many fragments it took."""
    layout = ShareLayout(tuple(widths), per_chunk)
    random = np.random.default_rng(1)
    device = [random.integers(0, 256, (BLOCKS, width + gap), np.uint8) for width in widths]
    row = random.integers(0, 256, (ROWS, layout.share_bytes + 2 * gap), np.uint8)
    wanted_device, wanted_row = [layer.copy() for layer in device], row.copy()
    share, wanted_share = (each[:, gap : gap + layout.share_bytes] for each in (row, wanted_row))
    blocks = block_map(places)
    parts, at = [], 0
    for width in widths:
        part = wanted_share[:, at : at + width * per_chunk]
        parts.append(part.reshape(ROWS, per_chunk, width))
        at += width * per_chunk
    loop = scatter_pages if is_load else gather_pages
    pages = [layer[:, :width] for layer, width in zip(wanted_device, widths, strict=True)]
    loop(pages, blocks.blocks, blocks.slots, blocks.positions, parts)

    group = DevicePages(
        [
            PageRun(layer.ctypes.data, layer.strides[0], width, BLOCKS)
            for layer, width in zip(device, widths, strict=True)
        ],
        layout,
    )
    rows = HostRows(share.ctypes.data, share.strides[0], ROWS, 2)
    fragments = Fragmenter(group, rows).of(blocks)
    for at_device, at_host, size in zip(
        fragments.device.tolist(), fragments.host.tolist(), fragments.sizes.tolist(), strict=True
    ):
        target, source = (at_device, at_host) if is_load else (at_host, at_device)
        ctypes.memmove(target, source, size)
    for layer, wanted in zip(device, wanted_device, strict=True):
        assert (layer == wanted).all()
    assert (row == wanted_row).all()
    assert fragments.total_bytes == sum(widths) * len(places)
    return len(fragments)


@pytest.mark.slow
@given(
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    gap=st.integers(0, 7),
    per_chunk=st.integers(1, 4),
    data=st.data(),
    is_load=st.booleans(),
)
def test_fragments_are_what_the_plain_loops_copy(
    widths: list[int], gap: int, per_chunk: int, data: st.DataObject, is_load: bool
) -> None:
    count = data.draw(st.integers(0, min(BLOCKS, ROWS * per_chunk)))
    blocks = data.draw(st.permutations(range(BLOCKS)))[:count]
    places = data.draw(st.permutations([(s, p) for s in range(ROWS) for p in range(per_chunk)]))
    copied(
        widths, gap, per_chunk, [(b, *at) for b, at in zip(blocks, places, strict=False)], is_load
    )


# Blocks 0 to 5 into the chunks of slots 0, 1 and 2, in order.
IN_ORDER = [(block, block // 2, block % 2) for block in range(6)]


def test_the_blocks_of_a_chunk_that_follow_one_another_are_one_fragment_a_layer() -> None:
    assert copied([32, 16], 0, 2, IN_ORDER, is_load=False) == 2 * 3
    assert copied([32, 16], 4, 2, IN_ORDER, is_load=False) == 2 * 6


def test_a_layer_that_fills_its_rows_is_one_fragment_up_to_the_next_piece() -> None:
    """Pieces have two rows here."""
    assert copied([32], 0, 2, IN_ORDER, is_load=True) == 2
    assert copied([32], 0, 2, IN_ORDER[::-1], is_load=True) == 6


def test_nothing_to_copy_is_no_fragment() -> None:
    assert copied([32, 16], 0, 2, [], is_load=False) == 0


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ((BLOCKS, 0, 0), "block 9 is not one of 0 to 8"),
        ((-1, 0, 0), "block -1"),
        ((0, ROWS, 0), "slot 5 is not one of 0 to 4"),
        ((0, 0, 2), "position 2 is not one of 0 to 1"),
    ],
)
def test_an_index_out_of_bounds_is_refused(place: tuple[int, int, int], told: str) -> None:
    group = DevicePages([PageRun(1000, 8, 8, BLOCKS)], ShareLayout((8,), 2))
    fragmenter = Fragmenter(group, HostRows(5000, 16, ROWS, 2))
    with pytest.raises(IndexError, match=told):
        fragmenter.of(block_map([(0, 0, 0), place]))


def test_a_rank_without_a_layer_of_a_group_copies_nothing() -> None:
    fragmenter = Fragmenter(DevicePages([], ShareLayout((), 2)), HostRows(5000, 16, ROWS, 2))
    assert len(fragmenter.of(block_map(IN_ORDER))) == 0
