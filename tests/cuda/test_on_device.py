"""Copies on a real CUDA device: stamped blocks through its streams, its kernel, its pinned memory.

Needs numpy, pytest, torch's CUDA build and cuda-bindings, and nothing else of what `make test`
installs: `benchmarks/device_check.sh` runs this file by itself. With KV_TIERING_DEVICE=fake it
runs on the emulated device, to see that the file itself is right.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tiering.device.base import BlockMap, DevicePages, PageRun
from tiering.device.cuda import CudaCopier
from tiering.device.cudart import has_bindings
from tiering.device.fragments import Fragmenter, HostRows
from tiering.device.futures import Watcher
from tiering.device.pinned import PinnedMemory, pin
from tiering.device.runtime import KernelUse, PageKernel
from tiering.errors import CopyError, DeviceCallError
from tiering.layout import ShareLayout
from tiering_benchmarks.device_sides import CudaSide, FakeSide, Memory, Side, open_side

WANTED = os.environ.get("KV_TIERING_DEVICE", "cuda")
SECONDS = 60.0
BLOCKS, ROWS, PER_CHUNK = 64, 24, 2


def why_not() -> str | None:
    if WANTED == "fake":
        return None
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if not has_bindings():
        return "cuda-bindings is not installed"
    import torch

    return None if torch.cuda.is_available() else "there is no CUDA device"


pytestmark = pytest.mark.cuda

ByteArray = npt.NDArray[np.uint8]


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    """Looked for when these tests run, and not when any are collected: torch takes seconds."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.fixture
def side() -> Iterator[Side]:
    side = open_side(WANTED)
    yield side
    if isinstance(side, FakeSide):
        assert side.fake.violations == []
    side.close()


def random_map(seed: int, count: int) -> BlockMap:
    random = np.random.default_rng(seed)
    places = random.permutation(ROWS * PER_CHUNK)[:count]
    return BlockMap(
        random.permutation(BLOCKS)[:count].astype(np.int32),
        (places // PER_CHUNK).astype(np.int32),
        (places % PER_CHUNK).astype(np.int32),
    )


class Rank:
    """Layers of these page sizes in device memory, with a gap behind each page, and pinned rows."""

    def __init__(self, side: Side, widths: list[int], gap: int = 0, **how: Any) -> None:
        self.side = side
        self.layout = ShareLayout(tuple(widths), PER_CHUNK)
        self.memories: list[Memory] = []
        self.widths, self.gap = widths, gap
        random = np.random.default_rng(7)
        self.content = []
        runs = []
        for width in widths:
            memory = side.memory(BLOCKS * (width + gap))
            content = random.integers(0, 256, BLOCKS * (width + gap), np.uint8)
            memory.write(content)
            self.memories.append(memory)
            self.content.append(content.reshape(BLOCKS, width + gap)[:, :width].copy())
            runs.append(PageRun(memory.address, width + gap, width, BLOCKS))
        self.group = DevicePages(runs, self.layout)
        row_bytes = -(-self.layout.share_bytes // 4096) * 4096
        raw = np.zeros(ROWS * row_bytes + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        self.rows = raw[start : start + ROWS * row_bytes].reshape(ROWS, row_bytes)
        if isinstance(side, FakeSide):
            side.fake.own(self.rows)
        self.pinned: PinnedMemory = pin(side.runtime, self.rows, piece_bytes=5 * row_bytes)
        self.watcher = Watcher(side.runtime)
        self.share = self.rows[:, : self.layout.share_bytes]
        kernel: PageKernel | None = side.kernel([self.group], self.share) if how else None
        use = KernelUse(kernel, **how) if kernel is not None else None
        self.copier = CudaCopier(
            *(side.runtime, self.watcher, [self.group], self.share, self.pinned),
            *(side.server_stream, use),
        )

    def pages(self, layer: int) -> ByteArray:
        whole = self.memories[layer].read().reshape(BLOCKS, -1)
        return whole[:, : self.widths[layer]]

    def stored(self, blocks: BlockMap, layer: int) -> ByteArray:
        """What the rows have of the blocks' pages in a layer."""
        at, width = self.layout.layer_offsets[layer], self.widths[layer]
        part = self.share[:, at : at + width * PER_CHUNK].reshape(ROWS, PER_CHUNK, width)
        found: ByteArray = part[blocks.slots, blocks.positions]
        return found

    def clear(self) -> None:
        for memory in self.memories:
            memory.write(np.zeros(len(memory.read()), np.uint8))

    def close(self) -> None:
        self.copier.close()


SHAPES = [([4096, 512], 0), ([65536], 0), ([1000, 24], 8), ([33], 1), ([65536 * 4] * 3, 4096)]


@pytest.mark.parametrize(("widths", "gap"), SHAPES)
def test_stamped_blocks_come_back(side: Side, widths: list[int], gap: int) -> None:
    rank = Rank(side, widths, gap)
    assert rank.pinned.is_pinned
    there = random_map(1, 40)
    rank.copier.gather(there).result(SECONDS)
    for layer, content in enumerate(rank.content):
        assert np.array_equal(rank.stored(there, layer), content[there.blocks])
    rank.clear()
    back = replace(there, blocks=np.random.default_rng(2).permutation(there.blocks))
    rank.copier.scatter(back).result(SECONDS)
    for layer, content in enumerate(rank.content):
        pages = rank.pages(layer)
        assert np.array_equal(pages[back.blocks], content[there.blocks])
        others = np.setdiff1d(np.arange(BLOCKS), back.blocks)
        assert not pages[others].any()
    rank.close()


def test_many_copies_both_ways_at_once(side: Side) -> None:
    rank = Rank(side, [16384, 16384])
    first = random_map(3, 30)
    rank.copier.gather(first).result(SECONDS)
    futures = []
    free = np.setdiff1d(np.arange(BLOCKS), first.blocks).astype(np.int32)[:30]
    for _ in range(20):
        futures.append(rank.copier.scatter(replace(first, blocks=free)))
        futures.append(rank.copier.gather(first))
    for future in futures:
        future.result(SECONDS)
    for layer, content in enumerate(rank.content):
        assert np.array_equal(rank.pages(layer)[free], content[first.blocks])
        assert np.array_equal(rank.stored(first, layer), content[first.blocks])
    rank.close()


def test_a_store_waits_for_what_the_server_computes(side: Side) -> None:
    """W01, with a device that is really late."""
    rank = Rank(side, [4096])
    blocks = random_map(4, 20)
    side.work_then_fill(rank.memories[0], 77)
    future = rank.copier.gather(blocks)
    future.result(SECONDS)
    assert (rank.stored(blocks, 0) == 77).all()
    rank.close()


def test_a_load_waits_for_what_the_server_computes(side: Side) -> None:
    rank = Rank(side, [4096])
    blocks = random_map(4, 20)
    rank.copier.gather(blocks).result(SECONDS)
    side.work_then_fill(rank.memories[0], 77)
    rank.copier.scatter(blocks).result(SECONDS)
    assert np.array_equal(rank.pages(0)[blocks.blocks], rank.content[0][blocks.blocks])
    rank.close()


def test_copies_can_be_awaited(side: Side) -> None:
    rank = Rank(side, [4096])

    async def run() -> None:
        with rank.watcher.heard_by(asyncio.get_running_loop()):
            for seed in range(20):
                blocks = random_map(seed, 20)
                copy = asyncio.wrap_future(rank.copier.gather(blocks))
                await asyncio.wait_for(copy, SECONDS)
                assert np.array_equal(rank.stored(blocks, 0), rank.content[0][blocks.blocks])

    asyncio.run(run())
    rank.close()


@pytest.mark.parametrize(("widths", "gap"), [([4096, 512], 0), ([1000, 24], 8), ([64, 16], 16)])
def test_the_kernel_copies_what_the_engines_copy(side: Side, widths: list[int], gap: int) -> None:
    rank = Rank(side, widths, gap, loads_below_bytes=1 << 20, stores_below_bytes=1 << 20)
    if side.is_real:
        assert rank.copier._kernel is not None, "there is no Triton here"
    blocks = random_map(5, 40)
    rank.copier.gather(blocks).result(SECONDS)
    for layer, content in enumerate(rank.content):
        assert np.array_equal(rank.stored(blocks, layer), content[blocks.blocks])
    rank.clear()
    rank.copier.scatter(blocks).result(SECONDS)
    for layer, content in enumerate(rank.content):
        assert np.array_equal(rank.pages(layer)[blocks.blocks], content[blocks.blocks])
    if side.is_real:
        assert rank.copier._kernel is not None, "the kernel could not be launched"
    rank.close()


def test_one_call_for_each_copies_what_a_batch_copies(side: Side) -> None:
    rank = Rank(side, [8192])
    blocks = random_map(6, 30)
    rows = HostRows(rank.share.ctypes.data, rank.rows.shape[1], ROWS, rank.pinned.rows_per_piece)
    fragments = Fragmenter(rank.group, rows).of(blocks)
    stream = side.runtime.create_stream()
    side.loop(fragments.host, fragments.device, fragments.sizes, stream)
    side.runtime.synchronize(stream)
    assert np.array_equal(rank.stored(blocks, 0), rank.content[0][blocks.blocks])
    side.runtime.destroy_stream(stream)
    rank.close()


def test_an_error_of_the_drivers_is_told_and_does_not_stay(side: Side) -> None:
    rank = Rank(side, [4096])
    with pytest.raises(DeviceCallError) as told:
        side.runtime.register(rank.rows.ctypes.data, 4096)
    assert not told.value.is_sticky
    with pytest.raises(CopyError, match="block 64"):
        rank.copier.gather(replace(random_map(1, 1), blocks=np.array([64], np.int32))).result(
            SECONDS
        )
    blocks = random_map(8, 20)
    rank.copier.gather(blocks).result(SECONDS)
    assert np.array_equal(rank.stored(blocks, 0), rank.content[0][blocks.blocks])
    rank.close()


def test_memory_that_is_not_pinned_is_copied_too(side: Side) -> None:
    rank = Rank(side, [4096, 64])
    rank.pinned.close()
    blocks = random_map(9, 30)
    rank.copier.gather(blocks).result(SECONDS)
    rank.clear()
    rank.copier.scatter(blocks).result(SECONDS)
    for layer, content in enumerate(rank.content):
        assert np.array_equal(rank.pages(layer)[blocks.blocks], content[blocks.blocks])
    rank.close()


def test_memory_can_be_pinned_again_after_close(side: Side) -> None:
    rank = Rank(side, [4096])
    rank.close()
    again = pin(side.runtime, rank.rows)
    assert again.is_pinned
    again.close()


def test_a_driver_of_12_8_or_newer_copies_in_batches(side: Side) -> None:
    if not isinstance(side, CudaSide):
        pytest.skip("the emulated device has no driver")
    assert side.cuda.copies_in_batches, "an older driver: copies are made one by one"


def test_shared_memory_can_be_pinned(side: Side) -> None:
    """As the host tier is: a mapping of a file in /dev/shm."""
    import mmap

    path = Path(f"/dev/shm/kvtier-on-device-{os.getpid()}")
    with path.open("w+b") as file:
        path.unlink()
        file.truncate(1 << 20)
        rows = np.frombuffer(mmap.mmap(file.fileno(), 1 << 20), np.uint8).reshape(16, -1)
        pinned = pin(side.runtime, rows)
        assert pinned.is_pinned
        pinned.close()
