"""The copier for host tensors: bytes, order, isolation of failures, and letting go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tiering.device import host
from tiering.device.base import BlockMap, HostPages
from tiering.device.host import HostCopier
from tiering.errors import ClosedError, CopyError
from tiering.layout import RowLayout, ShareLayout
from tiering.tiers.host import Region, region_name, sweep
from tiering_kernels import rows

NUM_BLOCKS, ROWS = 8, 4
LAYOUT = ShareLayout(page_bytes=(100, 36), blocks_per_chunk=2)
SECONDS = 30.0  # far above what any copy here takes

ByteArray = npt.NDArray[np.uint8]


def chunk(blocks: tuple[int, ...], slot: int) -> BlockMap:
    places = np.arange(len(blocks), dtype=np.int32)
    return BlockMap(np.array(blocks, np.int32), np.full(len(blocks), slot, np.int32), places)


def stamped_pages() -> list[ByteArray]:
    random = np.random.default_rng(3)
    return [random.integers(1, 256, (NUM_BLOCKS, size), np.uint8) for size in LAYOUT.page_bytes]


@pytest.fixture
def pages() -> list[ByteArray]:
    return stamped_pages()


@pytest.fixture
def share() -> ByteArray:
    """The second of two ranks' shares: strided, with another rank's bytes on both sides."""
    rows = np.zeros((ROWS, 4096), np.uint8)
    return rows[:, LAYOUT.share_bytes : 2 * LAYOUT.share_bytes]


@pytest.fixture
def copier(pages: list[ByteArray], share: ByteArray) -> Iterator[HostCopier]:
    copier = HostCopier([HostPages(pages, LAYOUT)], share)
    yield copier
    copier.close()


class Gate:
    """Stands in for a kernel: says when it is reached, then waits until it is opened."""

    def __init__(self, kernel: Callable[..., None], order: list[tuple[str, int]]) -> None:
        self.kernel, self.order = kernel, order
        self.__name__ = kernel.__name__
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, pages: object, blocks: npt.NDArray[np.int32], *rest: object) -> None:
        self.reached.set()
        assert self.opened.wait(SECONDS)
        self.order.append((self.kernel.__name__, int(blocks[0])))
        self.kernel(pages, blocks, *rest)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds every gather; scatters are only noted in the same `order`."""
    order: list[tuple[str, int]] = []
    gather, scatter = Gate(rows.gather_pages, order), Gate(rows.scatter_pages, order)
    scatter.opened.set()
    monkeypatch.setattr(host, "gather_pages", gather)
    monkeypatch.setattr(host, "scatter_pages", scatter)
    yield gather
    gather.opened.set()


def test_a_round_trip_through_the_rows(
    copier: HostCopier, pages: list[ByteArray], share: ByteArray
) -> None:
    original = stamped_pages()

    copier.gather(chunk((5, 2), slot=3)).result(SECONDS)
    layer_0, layer_1 = share[3, :200].reshape(2, 100), share[3, 200:].reshape(2, 36)
    for layer, part in zip(original, (layer_0, layer_1), strict=True):
        np.testing.assert_array_equal(part, layer[[5, 2]])
    assert not share[:3].any()
    assert share.base is not None
    assert not share.base[:, : LAYOUT.share_bytes].any()
    assert not share.base[:, 2 * LAYOUT.share_bytes :].any()

    for layer in pages:
        layer[:] = 0
    copier.scatter(chunk((0, 7), slot=3)).result(SECONDS)
    for layer, source in zip(pages, original, strict=True):
        np.testing.assert_array_equal(layer[[0, 7]], source[[5, 2]])
        assert not layer[1:7].any()


def test_an_empty_copy_completes(copier: HostCopier) -> None:
    assert copier.gather(chunk((), slot=0)).result(SECONDS) is None


async def test_a_copy_can_be_awaited(copier: HostCopier, share: ByteArray) -> None:
    await asyncio.wait_for(asyncio.wrap_future(copier.gather(chunk((1, 2), slot=0))), SECONDS)
    assert share[0].all()


def test_loads_go_before_stores_and_each_in_order(gate: Gate, copier: HostCopier) -> None:
    copier.gather(chunk((0,), slot=0))
    assert gate.reached.wait(SECONDS)
    queued = [
        copier.gather(chunk((1,), slot=1)),
        copier.gather(chunk((2,), slot=2)),
        copier.scatter(chunk((3,), slot=0)),
        copier.scatter(chunk((4,), slot=0)),
    ]
    assert repr(copier) == "<HostCopier open, 2 loads and 2 stores queued>"

    gate.opened.set()
    for future in queued:
        future.result(SECONDS)
    assert gate.order == [
        ("gather_pages", 0),
        ("scatter_pages", 3),
        ("scatter_pages", 4),
        ("gather_pages", 1),
        ("gather_pages", 2),
    ]


def test_the_callers_arrays_can_be_reused_at_once(
    gate: Gate, copier: HostCopier, share: ByteArray
) -> None:
    """W20: a queued copy must not read a buffer that the next step has overwritten."""
    copier.gather(chunk((0,), slot=0))
    assert gate.reached.wait(SECONDS)
    reused = chunk((1, 2), slot=1)
    queued = copier.gather(reused)
    reused.blocks[:] = 7
    reused.slots[:] = 2
    reused.positions[:] = 0

    gate.opened.set()
    queued.result(SECONDS)
    layer_0 = stamped_pages()[0]
    np.testing.assert_array_equal(share[1, :200].reshape(2, 100), layer_0[[1, 2]])
    assert not share[2].any()


def test_a_failed_copy_fails_alone(copier: HostCopier, share: ByteArray) -> None:
    bad, good = copier.gather(chunk((99,), slot=0)), copier.gather(chunk((1, 2), slot=1))

    with pytest.raises(CopyError, match="gather_pages, 1 blocks: block 99") as caught:
        bad.result(SECONDS)
    assert isinstance(caught.value.__cause__, IndexError)
    good.result(SECONDS)
    assert share[1].all()


def test_a_cancelled_copy_is_not_carried_out(
    gate: Gate, copier: HostCopier, share: ByteArray
) -> None:
    copier.gather(chunk((0,), slot=0))
    assert gate.reached.wait(SECONDS)
    unwanted, after = copier.gather(chunk((1, 2), slot=1)), copier.gather(chunk((3,), slot=2))
    assert unwanted.cancel()

    gate.opened.set()
    after.result(SECONDS)
    assert not share[1].any()


def test_close_finishes_what_is_queued(gate: Gate, copier: HostCopier, share: ByteArray) -> None:
    futures = [copier.gather(chunk((1, 2), slot=slot)) for slot in range(ROWS)]
    closing = threading.Thread(target=copier.close)
    closing.start()
    gate.opened.set()
    closing.join(SECONDS)

    assert not closing.is_alive()
    assert all(future.done() for future in futures)
    assert share.all()
    copier.close()
    for submit in (copier.gather, copier.scatter):
        with pytest.raises(ClosedError):
            submit(chunk((0,), slot=0))


def test_close_lets_go_of_the_region(tmp_path: Path) -> None:
    """Also while a failed copy's future is still held by somebody."""
    name = region_name("close_lets_go")
    region = Region.open(name, RowLayout(LAYOUT.share_bytes), 64 << 10, tmp_path)
    copier = HostCopier([HostPages(stamped_pages(), LAYOUT)], region.share(0))
    failed = copier.gather(chunk((99,), slot=0))
    assert isinstance(failed.exception(SECONDS), CopyError)
    region.close()
    assert sweep(tmp_path) == []

    copier.close()
    assert sweep(tmp_path) == [name]


def test_arrays_that_do_not_fit_the_layout_are_refused(
    pages: list[ByteArray], share: ByteArray
) -> None:
    with pytest.raises(ValueError, match="pages of"):
        HostPages(pages[::-1], LAYOUT)
    with pytest.raises(ValueError, match="pages of"):
        HostPages(pages[:1], LAYOUT)
    with pytest.raises(ValueError, match="a share of 271 bytes"):
        HostCopier([HostPages(pages, LAYOUT)], share[:, :-1])


def test_each_group_has_pages_and_a_layout_of_its_own(
    pages: list[ByteArray], share: ByteArray
) -> None:
    """The second group has one layer, and chunks of one block: less than the share has room for."""
    small = HostPages([pages[1]], ShareLayout((36,), blocks_per_chunk=1))
    copier = HostCopier([HostPages(pages, LAYOUT), small], share)
    wanted = pages[1][5].copy()
    copier.gather(replace(chunk((5,), slot=2), group=1)).result(SECONDS)
    copier.gather(chunk((3, 4), slot=1)).result(SECONDS)
    assert (share[2, :36] == wanted).all()
    assert not share[2, 36:].any()
    pages[1][5] = 0
    copier.scatter(replace(chunk((5,), slot=2), group=1)).result(SECONDS)
    assert (pages[1][5] == wanted).all()
    with pytest.raises(CopyError):
        copier.gather(replace(chunk((5,), slot=2), group=2)).result(SECONDS)
    copier.close()
