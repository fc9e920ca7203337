"""The copier for CUDA when the device fails, dies or hangs: one end for each copy, nothing freed
that may still be read, and a server that goes on."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from cuda_scene import LAYOUT, SECONDS, Scene, chunk
from tiering.device import cuda as cuda_module
from tiering.device.base import BlockMap
from tiering.device.fragments import Fragmenter, Fragments
from tiering.device.futures import OVERDUE_SECONDS, Watcher
from tiering.errors import CopyError, DeviceCallError, DeviceLostError
from tiering.testing.clocks import ManualClock
from tiering.testing.fakecuda import COMPUTE, FakeCuda


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.end()


# What a copy asks of the device, in this order; `record` first behind the server's work.
FAILING = [("record", 1), ("wait_event", 1), ("copy", 1), ("record", 2)]


@pytest.mark.parametrize(("call", "at"), FAILING)
@pytest.mark.parametrize("which", [1, 2, 3])
def test_an_error_at_the_kth_copy_fails_that_one_alone(
    scene: Scene, call: str, at: int, which: int
) -> None:
    per_copy = 2 if call == "record" else 1
    scene.cuda.fail(call, at=(which - 1) * per_copy + at)
    stores = []
    for slot in range(4):
        stores.append(scene.copier.gather(chunk([slot, slot + 1], slot)))
        while not Future.done(stores[-1]):
            scene.cuda.run_all()
    failure = stores[which - 1].exception(SECONDS)
    assert isinstance(failure, CopyError)
    assert not isinstance(failure, DeviceLostError)
    assert isinstance(failure.__cause__, DeviceCallError)
    assert f"store of 2 blocks: {call} failed" in str(failure)
    assert failure.slots == (which - 1,)
    for slot, future in enumerate(stores):
        if slot != which - 1:
            future.result(SECONDS)
            assert scene.share[slot].tobytes() == scene.expected([slot, slot + 1])


def test_a_failed_copy_ends_when_the_device_is_done_with_what_it_was_given(scene: Scene) -> None:
    """Half of a batch may be under way: until it has ended, its slots are not for others."""
    before = scene.store([0, 1], 0)
    scene.cuda.fail("copy")
    failed = scene.copier.gather(chunk([2, 3], 1))
    scene.cuda.wait_until(lambda: scene.cuda.given(scene.stores, "host function") == 2)
    assert not failed.done()
    scene.cuda.run_all()
    assert isinstance(failed.exception(SECONDS), CopyError)
    before.result(SECONDS)


def test_an_index_out_of_bounds_fails_alone_and_touches_nothing(scene: Scene) -> None:
    bad, good = scene.store([99], 0), scene.store([1, 2], 1)
    negative = scene.load([1], -1)
    scene.cuda.run_all()
    with pytest.raises(CopyError, match="store of 1 blocks: block 99 is not one of 0 to 7"):
        bad.result(SECONDS)
    with pytest.raises(CopyError, match="slot -1"):
        negative.result(SECONDS)
    good.result(SECONDS)
    assert not scene.share[0].any()


def test_whatever_else_is_raised_fails_its_copy_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as no memory for the addresses: the thread that gives copies to the device goes on."""
    fragmenter = scene.copier._fragmenters[0]

    def full(blocks: BlockMap) -> Fragments:
        if blocks.slots[0] == 0:
            raise MemoryError("no room for 3 arrays")
        return Fragmenter.of(fragmenter, blocks)

    monkeypatch.setattr(fragmenter, "of", full)
    failed, good = scene.store([1, 2], 0), scene.store([3, 4], 1)
    scene.cuda.run_all()
    with pytest.raises(CopyError, match="store of 2 blocks: no room for 3 arrays"):
        failed.result(SECONDS)
    good.result(SECONDS)


def test_a_driver_that_calls_nothing_back_is_asked(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scene.cuda.fail("launch_host_function")
    stored = scene.copier.gather(chunk([1, 2], 1))
    scene.cuda.wait_until(lambda: scene.cuda.given(scene.stores, "record") == 1)
    scene.cuda.run_all()
    stored.result(SECONDS)
    assert "asked instead" in caplog.text
    assert "asking" in repr(scene.watcher)


@pytest.mark.parametrize("call", ["record", "wait_event", "copy", "is_complete"])
def test_a_sticky_failure_takes_the_device_out_of_service_and_is_told_once(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene()
    scene.cuda.fail(call, code=700, sticky=True)
    first = scene.copier.gather(chunk([1, 2], 0))
    assert isinstance(first.exception(SECONDS), CopyError)
    for submit in (scene.copier.scatter, scene.copier.gather):
        later = submit(chunk([3, 4], 1))
        with pytest.raises(DeviceLostError, match=r"takes no copies any more: .*700"):
            later.result(SECONDS)
    assert [r.levelname for r in caplog.records].count("ERROR") == 1
    assert "Loads are computed, stores are dropped" in caplog.text
    assert "out of service" in repr(scene.copier)
    scene.copier.close()


def test_copies_that_are_under_way_fail_when_the_device_dies() -> None:
    scene = Scene()
    futures = [scene.store([1, 2], 0), scene.load([3, 4], 1), scene.store([5, 6], 2)]
    scene.cuda.launch(COMPUTE, lambda: scene.cuda.fail("is_complete", code=700, sticky=True))
    scene.cuda.run(COMPUTE, 4)
    for future in futures:
        assert isinstance(future.exception(SECONDS), CopyError)
    scene.copier.close()


def test_memory_that_is_not_the_devices_is_a_fault_of_the_device() -> None:
    """That the fake would find a wrong address."""
    scene = Scene()
    scene.cuda._owned.pop()
    stored = scene.store([1, 2], 0)
    scene.cuda.run_all()
    assert isinstance(stored.exception(SECONDS), CopyError)
    scene.copier.close()


class HungScene(Scene):
    """A store that never ends, and a clock to say how long that has been."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        cuda = FakeCuda()
        super().__init__(cuda, watcher=Watcher(cuda, self.clock))
        self.cuda.stall(self.stores)
        self.hung = self.store([1, 2], 0)
        self.cuda.run_all()

    def wait_out_of_service(self, is_so: bool) -> None:
        def matches() -> bool:
            return ("out of service" in repr(self.copier)) == is_so

        pause = threading.Event()
        for _ in range(1000):
            if matches():
                return
            pause.wait(0.03)
        raise AssertionError(repr(self.copier))


def test_a_copy_that_hangs_takes_the_device_out_of_service_until_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = HungScene()
    scene.clock.advance(OVERDUE_SECONDS - 1)
    loaded = scene.load([3, 4], 1)
    scene.cuda.run_all()
    loaded.result(SECONDS)
    scene.clock.advance(2)
    scene.wait_out_of_service(True)
    with pytest.raises(DeviceLostError, match="while one of them hangs"):
        scene.copier.scatter(chunk([3, 4], 1)).result(SECONDS)
    assert not scene.hung.done(), "what it writes to is not for others"

    scene.cuda.go_on(scene.stores)
    scene.cuda.run_all()
    scene.hung.result(SECONDS)
    scene.wait_out_of_service(False)
    again = scene.load([3, 4], 0)
    scene.cuda.run_all()
    again.result(SECONDS)
    assert [r.levelname for r in caplog.records] == ["ERROR", "WARNING"]
    scene.end()


def test_memory_that_a_hung_copy_may_write_to_stays_pinned_and_mapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(cuda_module, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(cuda_module, "_KEPT", kept)
    scene = HungScene()
    waiting = [scene.copier.gather(chunk([slot % 8], 1 + slot % 4)) for slot in range(20)]
    scene.copier.close()
    scene.copier.close()
    assert "stays pinned and mapped" in caplog.text
    assert kept == [scene.copier]
    assert scene.cuda.pinned
    held = weakref.ref(scene.share.base)
    with pytest.raises(CopyError, match="the copies before it hang"):
        waiting[-1].result(SECONDS)
    cuda, pages, hung = scene.cuda, scene.pages, scene.hung
    watcher, told = scene.watcher, scene.copier._tell_overdue
    wanted = scene.expected([1, 2])
    stream = scene.stores
    del scene, waiting
    gc.collect()
    rows = held()
    assert rows is not None
    cuda.go_on(stream)
    while not Future.done(hung):
        cuda.run_all()
    first = rows[0, LAYOUT.share_bytes : 2 * LAYOUT.share_bytes]
    assert first.tobytes() == wanted
    assert pages
    assert cuda.violations == []
    # Which is watched until the process ends.
    watcher.close(told)


def test_closing_lets_go_of_the_memory_though_a_failed_future_is_held() -> None:
    scene = Scene()
    failed = scene.store([99], 0)
    scene.cuda.run_all()
    assert isinstance(failed.exception(SECONDS), CopyError)
    share = scene.share
    scene.end()
    held = [each for each in gc.get_referrers(share) if isinstance(each, cuda_module.CudaCopier)]
    assert held == []
    assert np.array_equal(share, np.zeros_like(share))


def test_closing_a_device_that_died_unpins_as_far_as_it_can() -> None:
    scene = Scene()
    scene.cuda.fail("unregister", at=2)
    scene.end()
    assert len(scene.cuda.pinned) == 1
