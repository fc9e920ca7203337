"""The copier for CUDA over the fake device: which bytes, in which order, what waits for what."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from cuda_scene import LAYOUT, ROWS, SECONDS, Scene, chunk, run_of, stamped
from tiering.device import cuda as cuda_module
from tiering.device.base import BlockMap, DevicePages
from tiering.device.cuda import UNDER_WAY_MAX, CudaCopier
from tiering.device.runtime import KernelUse
from tiering.errors import ClosedError, DeviceCallError
from tiering.layout import ShareLayout
from tiering.testing.fakecuda import COMPUTE, FakeCuda
from tiering_kernels.rows import gather_pages, scatter_pages


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.end()


def test_a_round_trip_through_the_rows(scene: Scene) -> None:
    original = stamped()
    stored = scene.store([5, 2], slot=3)
    assert not stored.done()
    scene.cuda.run_all()
    assert stored.result(SECONDS) is None
    assert scene.share[3].tobytes() == scene.expected([5, 2])
    assert not scene.rows[:3].any()
    assert not scene.rows[3, : LAYOUT.share_bytes].any()
    assert not scene.rows[3, 2 * LAYOUT.share_bytes :].any()

    for layer in scene.pages:
        layer[:] = 0
    loaded = scene.load([0, 7], slot=3)
    scene.cuda.run_all()
    loaded.result(SECONDS)
    for layer, source in zip(scene.pages, original, strict=True):
        assert (layer[[0, 7]] == source[[5, 2]]).all()
        assert not layer[1:7].any()


def test_a_store_given_before_computing_has_ended_reads_what_it_computed(scene: Scene) -> None:
    """W01: the copy engine must not read a block that the model is still writing to."""

    def compute() -> None:
        for layer in scene.pages:
            layer[4] = 99

    scene.cuda.launch(COMPUTE, compute)
    stored = scene.store([4, 5], slot=1)
    assert not scene.cuda.step(scene.stores), "its turn comes after the model's"
    assert not scene.share[1].any()
    scene.cuda.run_all()
    stored.result(SECONDS)
    assert (scene.share[1, :96] == 99).all()


def test_a_load_given_before_computing_has_ended_is_not_overwritten_by_it(scene: Scene) -> None:
    """Such as the clearing of a block that was allocated for it."""
    scene.rows[:] = 7

    def clear() -> None:
        for layer in scene.pages:
            layer[2] = 0

    scene.cuda.launch(COMPUTE, clear)
    loaded = scene.load([2, 3], slot=1)
    assert not scene.cuda.step(scene.loads)
    scene.cuda.run_all()
    loaded.result(SECONDS)
    assert all((layer[2] == 7).all() for layer in scene.pages)


def test_computing_that_comes_later_is_not_waited_for(scene: Scene) -> None:
    stored = scene.store([4, 5], slot=1)
    scene.cuda.run_all()
    again = scene.store([6, 7], slot=2)
    scene.cuda.run(COMPUTE)
    scene.cuda.stall(COMPUTE)
    scene.cuda.launch(COMPUTE, lambda: None)
    scene.cuda.run_all()
    assert stored.done()
    again.result(SECONDS)
    scene.cuda.go_on(COMPUTE)


def test_a_source_that_is_reused_before_the_future_is_done_is_copied_as_it_is_then(
    scene: Scene,
) -> None:
    """W02: the device reads late, so whoever reuses a block waits for the future first."""
    early, late = scene.store([1, 2], slot=0), scene.store([3, 4], slot=1)
    wanted = scene.expected([3, 4])
    scene.cuda.run(COMPUTE, 2)
    for layer in scene.pages:
        layer[[1, 2]] = 0
    waiting = threading.Thread(target=late.result, args=(SECONDS,))
    waiting.start()
    scene.cuda.run_all()
    waiting.join(SECONDS)
    for layer in scene.pages:
        layer[[3, 4]] = 0
    assert early.done()
    assert not scene.share[0].any(), "the fake reads its sources when their turn comes"
    assert scene.share[1].tobytes() == wanted


def test_copies_of_one_direction_end_in_their_order(scene: Scene) -> None:
    ended: list[int] = []
    futures = [scene.store([slot, slot + 1], slot) for slot in range(3)]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: ended.append(number))
    scene.cuda.run_all()
    futures[-1].result(SECONDS)
    assert ended == [0, 1, 2]


@pytest.mark.parametrize("is_load_first", [True, False])
def test_there_is_no_order_between_directions(scene: Scene, is_load_first: bool) -> None:
    """A load and a store of one slot: what comes first decides, and a real device may read what it
    loads before its turn. So whoever wants the store's bytes waits for it."""
    scene.rows[:] = 7
    stored, loaded = scene.store([1, 2], slot=0), scene.load([5, 6], slot=0)
    scene.cuda.run(COMPUTE, 2)
    order = [scene.loads, scene.stores]
    for stream in order if is_load_first else reversed(order):
        while scene.cuda.step(stream):
            pass
    loaded.result(SECONDS)
    stored.result(SECONDS)
    assert scene.share[0].tobytes() == scene.expected([1, 2])
    assert (scene.pages[0][5] == 7).all() == is_load_first
    told = [] if is_load_first else ["a source that was said to be final was written to"]
    assert scene.cuda.violations == told
    scene.cuda.violations.clear()


def test_loads_go_before_stores_while_both_wait(scene: Scene) -> None:
    given: list[str] = []
    give, reached, opened = scene.copier._give, threading.Event(), threading.Event()

    def held(lane: object, *rest: object) -> None:
        given.append(lane.name)  # type: ignore[attr-defined]
        reached.set()
        assert opened.wait(SECONDS)
        give(lane, *rest)  # type: ignore[arg-type]

    scene.copier._give = held  # type: ignore[method-assign, assignment]
    futures = [scene.copier.gather(chunk([0], 0))]
    assert reached.wait(SECONDS)
    futures += [scene.copier.gather(chunk([1], 1)), scene.copier.gather(chunk([2], 2))]
    futures += [scene.copier.scatter(chunk([3], 3)), scene.copier.scatter(chunk([4], 4))]
    told = "2 loads waiting and 0 under way, 2 stores waiting and 1 under way"
    assert repr(scene.copier) == f"<CudaCopier of fake CUDA open, {told}>"
    opened.set()
    scene.cuda.wait_until(lambda: scene.cuda.given(scene.stores, "host function") == 3)
    scene.cuda.run_all()
    for future in futures:
        future.result(SECONDS)
    assert given == ["store", "load", "load", "store", "store"]


def test_the_device_has_a_few_copies_of_a_direction_at_a_time(scene: Scene) -> None:
    """What a driver does not take makes the caller wait, so it is not given too much."""
    stores = [scene.store([slot], slot % (ROWS - 1)) for slot in range(UNDER_WAY_MAX)]
    more = scene.copier.gather(chunk([1], 0))
    scene.load([1], ROWS - 1)
    assert scene.cuda.given(scene.stores, "copy") == UNDER_WAY_MAX
    assert "1 stores waiting" in repr(scene.copier)
    scene.cuda.run_all()
    stores[0].result(SECONDS)
    scene.cuda.wait_until(lambda: scene.cuda.given(scene.stores, "host function") > UNDER_WAY_MAX)
    scene.cuda.run_all()
    more.result(SECONDS)


def test_stores_go_to_a_stream_of_the_lowest_priority(scene: Scene) -> None:
    assert scene.cuda.is_low(scene.stores)
    assert not scene.cuda.is_low(scene.loads)


def test_the_callers_arrays_can_be_reused_at_once(scene: Scene) -> None:
    """W20: neither the caller's arrays nor those that the device reads are used again early."""
    reused = chunk([1, 2], slot=1)
    future = scene.copier.gather(reused)
    reused.blocks[:] = 7
    reused.slots[:] = 2
    reused.positions[:] = 0
    scene.wait_given(scene.stores, ["wait", "copy", "record", "host function"])
    scene.cuda.run_all()
    future.result(SECONDS)
    assert scene.share[1].tobytes() == scene.expected([1, 2])
    assert not scene.share[2].any()


@pytest.mark.slow
def test_what_the_device_reads_lives_though_nobody_wants_the_future(scene: Scene) -> None:
    for slot in range(3):
        scene.store([slot, slot + 1], slot)
    gc.collect()
    scene.cuda.run_all()
    for slot in range(3):
        assert scene.share[slot].tobytes() == scene.expected([slot, slot + 1])
    assert scene.cuda.violations == []


@pytest.mark.slow
def test_a_batch_whose_addresses_are_gone_is_found_out() -> None:
    """That the test above can fail."""
    fake, memory = FakeCuda(), np.zeros(16, np.uint8)
    fake.own(memory)
    address = np.array([memory.ctypes.data], np.uint64)
    fake.copy(address, address, np.array([8], np.uint64), COMPUTE, is_source_final=False)
    gc.collect()
    fake.run_all()
    assert fake.violations == ["the addresses of a copy were let go of before it happened"]


def test_a_copy_that_was_not_begun_can_be_cancelled(scene: Scene) -> None:
    begun = [scene.store([slot], slot % 4) for slot in range(UNDER_WAY_MAX)]
    unwanted = scene.copier.gather(chunk([3, 4], slot=5))
    assert unwanted.cancel()
    scene.cuda.run_all()
    for future in begun:
        future.result(SECONDS)
    scene.copier.close()
    assert not scene.share[5].any()


def test_a_copy_that_was_begun_goes_on(scene: Scene) -> None:
    begun = scene.store([3, 4], slot=5)
    assert not begun.cancel()
    scene.cuda.run_all()
    begun.result(SECONDS)
    assert scene.share[5].tobytes() == scene.expected([3, 4])


@pytest.mark.slow
async def test_an_awaiting_task_can_be_cancelled_while_the_device_reads(scene: Scene) -> None:
    begun = scene.store([3, 4], slot=5)
    task = asyncio.create_task(asyncio.wait_for(asyncio.wrap_future(begun), SECONDS))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    scene.cuda.run_all()
    await asyncio.wait_for(asyncio.wrap_future(begun), SECONDS)
    assert scene.share[5].tobytes() == scene.expected([3, 4])


@pytest.mark.parametrize("signals", [True, False])
async def test_a_copy_can_be_awaited_and_polled(signals: bool) -> None:
    """With a bell, and without one."""
    scene = Scene(FakeCuda(signals=signals))
    awaited, polled = scene.store([1, 2], slot=0), scene.load([3, 4], slot=1)
    assert not awaited.done()
    scene.cuda.run_all()
    await asyncio.wait_for(asyncio.wrap_future(awaited), SECONDS)
    assert scene.share[0].tobytes() == scene.expected([1, 2])
    await asyncio.wait_for(asyncio.wrap_future(polled), SECONDS)
    scene.end()


def test_an_empty_copy_completes_in_its_turn(scene: Scene) -> None:
    first, empty = scene.store([1, 2], slot=0), scene.store([], slot=0)
    assert not empty.done()
    scene.cuda.run_all()
    empty.result(SECONDS)
    assert first.done()


def test_neighbours_are_copied_as_one_and_pieces_are_not_crossed() -> None:
    """One layer that fills its rows: blocks that follow one another are one fragment, up to where
    the next piece of pinned memory begins."""
    layout = ShareLayout((2048,), 2)
    fake, rows = FakeCuda(), np.zeros((4, 4096), np.uint8)
    pages = np.arange(16 * 512, dtype=np.uint32).view(np.uint8).reshape(16, 2048)
    fake.own(rows, pages)
    scene = Scene()
    pinned = cuda_module.PinnedMemory(fake, 4, 2)
    for first in (0, 2):
        fake.register(rows[first:].ctypes.data, 2 * 4096)
    group = DevicePages([run_of(pages)], layout)
    watcher = type(scene.watcher)(fake)
    copier = CudaCopier(fake, watcher, [group], rows, pinned, lambda: COMPUTE)
    moved: list[list[int]] = []
    copy = fake.copy

    def noting(targets: object, sources: object, sizes: object, *rest: object, **how: bool) -> None:
        moved.append(sizes.tolist())  # type: ignore[attr-defined]
        copy(targets, sources, sizes, *rest, **how)  # type: ignore[arg-type]

    fake.copy = noting  # type: ignore[method-assign, assignment]
    blocks = chunk(range(8), 0)
    whole = replace(blocks, slots=np.repeat(np.arange(4, dtype=np.int32), 2))
    future = copier.gather(replace(whole, positions=np.tile(np.arange(2, dtype=np.int32), 4)))
    fake.wait_until(lambda: fake.given(fake.side_streams[1], "host function") == 1)
    fake.run_all()
    future.result(SECONDS)
    assert moved == [[4 * 2048, 4 * 2048]]
    assert (rows.reshape(8, 2048) == pages[:8]).all()
    copier.close()
    scene.end()


class Kernel:
    """`PageKernel` by the plain loops, on the fake device's stream, in its turn."""

    def __init__(self) -> None:
        self.scene: Scene | None = None
        self.launched: list[tuple[bool, int]] = []
        self.fails = False

    def can_copy(self, group: int) -> bool:
        return True

    def launch(self, blocks: BlockMap, stream: int, *, is_load: bool) -> object:
        if self.fails:
            raise DeviceCallError("launch", -1, "it does not compile")
        scene, kept = self.scene, bytearray(64)
        assert scene is not None
        alive = weakref.ref(kept_in := _Kept(kept))
        self.launched.append((is_load, len(blocks)))
        parts = []
        for at, width in zip(LAYOUT.layer_offsets, LAYOUT.page_bytes, strict=True):
            parts.append(scene.share[:, at : at + 2 * width].reshape(ROWS, 2, width))
        loop = scatter_pages if is_load else gather_pages

        def run() -> None:
            assert alive() is not None, "let go of before the kernel ran"
            loop(scene.pages, blocks.blocks, blocks.slots, blocks.positions, parts)

        scene.cuda.launch(stream, run)
        return kept_in


class _Kept:
    def __init__(self, memory: bytearray) -> None:
        self.memory = memory


def whole_rows(slots: int) -> BlockMap:
    """Eight blocks, so that there are 16 fragments: of two layers, none beside another."""
    blocks = np.array([0, 2, 4, 6, 1, 3, 5, 7], np.int32)[: 2 * slots]
    where = np.repeat(np.arange(slots, dtype=np.int32), 2)
    return BlockMap(blocks, where, np.tile(np.arange(2, dtype=np.int32), slots))


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def with_kernel(kernel: Kernel, loads_below: int = 1000, stores_below: int = 0) -> Scene:
    scene = kernel.scene = Scene(kernel=KernelUse(kernel, loads_below, stores_below))
    return scene


def done(scene: Scene, stream: int, future: Future[None]) -> None:
    while not Future.done(future):
        scene.cuda.run_all()
    future.result(SECONDS)


def test_loads_of_small_fragments_are_for_the_kernel(kernel: Kernel) -> None:
    scene = with_kernel(kernel)
    done(scene, scene.stores, scene.copier.gather(whole_rows(4)))
    wanted = [layer.copy() for layer in scene.pages]
    for layer in scene.pages:
        layer[:] = 0
    done(scene, scene.loads, scene.copier.scatter(whole_rows(4)))
    gc.collect()
    assert kernel.launched == [(True, 8)]
    for layer, before in zip(scene.pages, wanted, strict=True):
        assert (layer == before).all()
    scene.end()


@pytest.mark.parametrize(
    ("loads_below", "slots", "is_pinned"),
    [(64, 4, True), (1000, 3, True), (1000, 4, False)],
    ids=["fragments are larger", "too few", "not pinned"],
)
def test_else_loads_are_for_the_copy_engines(
    kernel: Kernel, loads_below: int, slots: int, is_pinned: bool
) -> None:
    scene = with_kernel(kernel, loads_below)
    if not is_pinned:
        scene.pinned.close()
    done(scene, scene.loads, scene.copier.scatter(whole_rows(slots)))
    assert kernel.launched == []
    assert scene.cuda.given(scene.loads, "copy") == 1
    scene.end()


def test_stores_are_for_the_kernel_where_it_is_said_so(kernel: Kernel) -> None:
    scene = with_kernel(kernel, 0, 1000)
    done(scene, scene.stores, scene.copier.gather(whole_rows(4)))
    done(scene, scene.loads, scene.copier.scatter(whole_rows(4)))
    assert kernel.launched == [(False, 8)]
    assert scene.share[0].tobytes() == scene.expected([0, 2])
    scene.end()


def test_a_kernel_that_cannot_be_launched_is_left_alone(
    kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    scene = with_kernel(kernel)
    scene.rows[:] = 5
    kernel.fails = True
    for _ in range(2):
        done(scene, scene.loads, scene.copier.scatter(whole_rows(4)))
    assert all((layer == 5).all() for layer in scene.pages)
    (warning,) = caplog.records
    assert "by the copy engines from now on" in warning.getMessage()
    scene.end()


def test_close_finishes_what_was_given_and_lets_go(scene: Scene) -> None:
    futures = [scene.copier.gather(chunk([1, 2], slot % ROWS)) for slot in range(12)]
    closing = threading.Thread(target=scene.copier.close)
    closing.start()
    while closing.is_alive():
        scene.cuda.run_all()
    assert all(Future.done(future) for future in futures)
    assert scene.share.all()
    assert scene.cuda.pinned == {}
    assert scene.cuda.side_streams == []
    assert scene.cuda.events == 0
    for submit in (scene.copier.gather, scene.copier.scatter):
        with pytest.raises(ClosedError):
            submit(chunk([0], slot=0))


def test_a_share_that_is_too_small_is_refused(scene: Scene) -> None:
    group = DevicePages([run_of(layer) for layer in scene.pages], LAYOUT)
    with pytest.raises(ValueError, match="a share of 255 bytes"):
        CudaCopier(
            *(scene.cuda, scene.watcher, [group], scene.share[:, :-1]),
            *(scene.pinned, lambda: COMPUTE),
        )
    with pytest.raises(ValueError, match="pages of"):
        DevicePages(group.pages[::-1], LAYOUT)
