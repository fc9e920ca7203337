"""Page copies against a plain loop, over odd sizes, strides, runs and every bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from tiering_kernels import rows
from tiering_kernels.rows import gather_pages, scatter_pages

Arrays = list[npt.NDArray[np.uint8]]
Index = npt.NDArray[np.int32]

NUM_BLOCKS, ROWS, PER_CHUNK = 13, 5, 3
PAGE_BYTES = (1, 96, 4097)


def stamped(seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def pages_and_shares(strided: bool) -> tuple[Arrays, Arrays]:
    """Random bytes everywhere, so that a copy to or from a wrong place shows."""
    gap = 7 if strided else 0
    pages = [stamped(i, (NUM_BLOCKS, size + gap))[:, :size] for i, size in enumerate(PAGE_BYTES)]
    row = stamped(9, (ROWS, sum(PAGE_BYTES) * PER_CHUNK + gap))
    shares, at = [], 0
    for size in PAGE_BYTES:
        part = row[:, at : at + size * PER_CHUNK]
        shares.append(part.reshape(ROWS, PER_CHUNK, size))
        at += size * PER_CHUNK
    return pages, shares


def index(*values: int) -> Index:
    return np.array(values, np.int32)


def block_maps() -> Iterator[tuple[Index, Index, Index]]:
    """Empty, single, one run, runs broken in each way, and shuffled whole chunks."""
    yield index(), index(), index()
    yield index(12), index(4), index(2)
    yield index(3, 4, 5), index(1, 1, 1), index(0, 1, 2)
    yield index(3, 4, 6, 7), index(1, 1, 1, 2), index(0, 1, 2, 0)  # blocks break, slot breaks
    yield index(3, 4, 5), index(0, 1, 2), index(0, 1, 2)  # only the slot breaks
    yield index(3, 4), index(2, 2), index(0, 2)  # only the position breaks
    yield index(5, 4, 3), index(1, 1, 1), index(0, 1, 2)
    chunks = np.random.default_rng(5).permutation(NUM_BLOCKS)[:12].astype(np.int32)
    yield chunks, np.repeat(index(4, 0, 3, 1), 3), np.tile(index(0, 1, 2), 4)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("mapping", list(block_maps()), ids=lambda m: str(m[0].tolist()))
def test_gather_moves_exactly_these_pages(
    mapping: tuple[Index, Index, Index], strided: bool
) -> None:
    pages, shares = pages_and_shares(strided)
    before, expected = [p.copy() for p in pages], [s.copy() for s in shares]
    for layer, share in zip(pages, expected, strict=True):
        for block, slot, position in zip(*mapping, strict=True):
            share[slot, position] = layer[block]

    gather_pages(pages, *mapping, shares)

    for share, wanted in zip(shares, expected, strict=True):
        np.testing.assert_array_equal(share, wanted)
    for layer, untouched in zip(pages, before, strict=True):
        np.testing.assert_array_equal(layer, untouched)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("mapping", list(block_maps()), ids=lambda m: str(m[0].tolist()))
def test_scatter_moves_exactly_these_pages(
    mapping: tuple[Index, Index, Index], strided: bool
) -> None:
    pages, shares = pages_and_shares(strided)
    before, expected = [s.copy() for s in shares], [p.copy() for p in pages]
    for layer, share in zip(expected, shares, strict=True):
        for block, slot, position in zip(*mapping, strict=True):
            layer[block] = share[slot, position]

    scatter_pages(pages, *mapping, shares)

    for layer, wanted in zip(pages, expected, strict=True):
        np.testing.assert_array_equal(layer, wanted)
    for share, untouched in zip(shares, before, strict=True):
        np.testing.assert_array_equal(share, untouched)


def test_neighbours_are_one_copy() -> None:
    pages, shares = pages_and_shares(strided=False)
    run = index(3, 4, 5, 8, 9), index(1, 1, 1, 2, 2), index(0, 1, 2, 1, 2)

    assert rows._pieces(pages, *run, shares) == [(3, 1, 0, 3), (8, 2, 1, 2)]


@pytest.mark.parametrize("copy", [gather_pages, scatter_pages])
@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ((index(0, -1), index(0, 0), index(0, 1)), "block -1 is not one of 0 to 12"),
        ((index(0, 13), index(0, 0), index(0, 1)), "block 13 is not one of 0 to 12"),
        ((index(0, 1), index(0, -1), index(0, 1)), "slot -1 is not one of 0 to 4"),
        ((index(0, 1), index(0, 5), index(0, 1)), "slot 5 is not one of 0 to 4"),
        ((index(0, 1), index(0, 0), index(0, -1)), "position -1 is not one of 0 to 2"),
        ((index(0, 1), index(0, 0), index(0, 3)), "position 3 is not one of 0 to 2"),
    ],
)
def test_out_of_bounds_moves_nothing(
    copy: Callable[..., None], mapping: tuple[Index, Index, Index], said: str
) -> None:
    pages, shares = pages_and_shares(strided=False)
    before = [array.copy() for array in (*pages, *shares)]

    with pytest.raises(IndexError, match=said):
        copy(pages, *mapping, shares)

    for array, untouched in zip((*pages, *shares), before, strict=True):
        np.testing.assert_array_equal(array, untouched)


def test_the_smallest_layer_bounds_all() -> None:
    pages, shares = pages_and_shares(strided=False)
    pages[1] = pages[1][:-1]

    with pytest.raises(IndexError, match="block 12"):
        gather_pages(pages, index(12), index(0), index(0), shares)


def test_shapes_that_do_not_match_are_refused() -> None:
    pages, shares = pages_and_shares(strided=False)
    one = index(0), index(0), index(0)

    with pytest.raises(ValueError, match="3 layers of pages, but 2 of rows"):
        gather_pages(pages, *one, shares[:-1])
    with pytest.raises(ValueError, match="layer 0: pages"):
        gather_pages(pages, *one, shares[::-1])
    with pytest.raises(ValueError, match="layer 1: not uint8"):
        gather_pages([pages[0], pages[1].view(np.int8), pages[2]], *one, shares)
    with pytest.raises(ValueError, match="1 blocks, 2 slots, 1 positions"):
        gather_pages(pages, index(0), index(0, 1), index(0), shares)
