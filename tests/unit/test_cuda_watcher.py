"""The watcher of device events: one end for each, its events used again, its thread only while
somebody needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tiering.device import futures
from tiering.device.futures import Watcher
from tiering.errors import DeviceCallError
from tiering.testing.fakecuda import COMPUTE, FakeCuda
from tiering_kernels.devicecalls import device_calls

SECONDS = 30.0


class Ends:
    """What `finish` was called with."""

    def __init__(self) -> None:
        self.told: list[tuple[DeviceCallError | None, float]] = []
        self.happened = threading.Semaphore(0)

    def __call__(self, error: DeviceCallError | None, when: float) -> None:
        self.told.append((error, when))
        self.happened.release()

    def wait(self) -> None:
        assert self.happened.acquire(timeout=SECONDS)


def nobody(is_overdue: bool) -> None:
    """Is not told."""


@pytest.fixture(params=[True, False], ids=["bell", "asking"])
def fake(request: pytest.FixtureRequest) -> FakeCuda:
    if request.param and device_calls() is None:
        pytest.skip("the native library is not there: `python hatch_build.py` builds it")
    return FakeCuda(signals=request.param)


@pytest.fixture
def watcher(fake: FakeCuda) -> Iterator[Watcher]:
    watcher = Watcher(fake)
    watcher.open(nobody)
    yield watcher
    watcher.close(nobody)


def test_its_thread_finishes_what_is_complete_and_nothing_else(
    fake: FakeCuda, watcher: Watcher
) -> None:
    first, second = Ends(), Ends()
    watcher.watch(COMPUTE, first, None)
    watcher.watch(COMPUTE, second, None)
    assert watcher.under_way == 2
    fake.run(COMPUTE, 2 if fake.can_signal else 1)
    first.wait()
    assert second.told == []
    fake.run_all()
    second.wait()
    assert [error for error, _ in first.told + second.told] == [None, None]
    assert first.told[0][1] <= second.told[0][1]


def test_events_are_used_again(fake: FakeCuda, watcher: Watcher) -> None:
    for _ in range(20):
        ends = Ends()
        event = watcher.record(COMPUTE)
        watcher.forget(event)
        watcher.watch(COMPUTE, ends, None)
        fake.run_all()
        ends.wait()
    # A function may be called after its event is complete and its mark wanted again.
    assert fake.events <= 6


def test_streams_do_not_wait_for_one_another(fake: FakeCuda, watcher: Watcher) -> None:
    other = fake.create_stream()
    hung, ended = Ends(), Ends()
    watcher.watch(COMPUTE, hung, None)
    watcher.watch(other, ended, None)
    fake.stall(COMPUTE)
    fake.run_all()
    ended.wait()
    assert hung.told == []


def test_what_cannot_be_recorded_is_not_watched(fake: FakeCuda, watcher: Watcher) -> None:
    fake.fail("record")
    with pytest.raises(DeviceCallError):
        watcher.watch(COMPUTE, Ends(), None)
    fake.fail("record")
    with pytest.raises(DeviceCallError):
        watcher.record(COMPUTE)
    assert watcher.under_way == 0
    assert fake.events == 1, "the event is used again"


def test_a_device_that_cannot_say_ends_it_with_the_error_and_its_memory_is_kept(
    fake: FakeCuda, watcher: Watcher
) -> None:
    ends, kept = Ends(), object()
    watcher.watch(COMPUTE, ends, kept)
    fake.fail("is_complete", at=1, code=700, sticky=True)
    ends.wait()
    ((error, _),) = ends.told
    assert error is not None
    assert error.is_sticky
    assert [watched.kept for watched in watcher._lost] == [kept]


def test_polling_needs_no_thread(fake: FakeCuda) -> None:
    watcher, ends = Watcher(fake), Ends()
    watcher.watch(COMPUTE, ends, None)
    watcher.look()
    assert ends.told == []
    fake.run(COMPUTE)
    watcher.look()
    assert len(ends.told) == 1
    fake.run_all()


def test_its_thread_ends_with_its_last_user(fake: FakeCuda) -> None:
    watcher = Watcher(fake)
    before = threading.active_count()
    watcher.open(nobody)
    watcher.open(nobody)
    assert threading.active_count() == before + 1
    watcher.close(nobody)
    assert threading.active_count() == before + 1
    watcher.close(nobody)
    assert threading.active_count() == before
    ends = Ends()
    watcher.open(nobody)
    watcher.watch(COMPUTE, ends, None)
    fake.run_all()
    ends.wait()
    watcher.close(nobody)
    assert fake.events == 0


def test_a_cell_that_the_driver_has_yet_to_write_to_is_not_used_again() -> None:
    """The event is complete, and the function behind it was not called."""
    fake = FakeCuda()
    if device_calls() is None:
        pytest.skip("the native library is not there: `python hatch_build.py` builds it")
    watcher = Watcher(fake)
    watcher.watch(COMPUTE, Ends(), None)
    fake.run(COMPUTE)
    watcher.look()
    assert watcher.under_way == 0
    watcher.watch(COMPUTE, Ends(), None)
    assert fake.events == 2
    fake.run_all()
    watcher.look()
    for _ in range(2):
        watcher.watch(COMPUTE, Ends(), None)
    assert fake.events == 2
    fake.run_all()


def test_closing_keeps_the_cells_that_the_driver_has_yet_to_write_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(futures, "_KEPT", kept)
    fake = FakeCuda()
    if device_calls() is None:
        pytest.skip("the native library is not there: `python hatch_build.py` builds it")
    watcher, ends = Watcher(fake), Ends()
    watcher.open(nobody)
    watcher.watch(COMPUTE, ends, None)
    fake.run(COMPUTE)
    watcher.look()
    watcher.close(nobody)
    assert len(kept) == 1
    fake.run_all()
