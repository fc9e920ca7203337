"""The emulated CUDA device keeps the real one's rules of order, and promises nothing beyond."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from tiering.errors import DeviceCallError
from tiering.testing.fakecuda import COMPUTE, FakeCuda

ByteArray = npt.NDArray[np.uint8]


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    yield fake
    assert fake.violations == []


class Copy:
    """From one array to another, of 8 bytes; keeps its arrays of addresses."""

    def __init__(self, fake: FakeCuda, stream: int) -> None:
        self.source, self.target = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
        fake.own(self.source, self.target)
        self.arrays = [
            np.array([value], np.uint64)
            for value in (self.target.ctypes.data, self.source.ctypes.data, 8)
        ]
        fake.copy(*self.arrays, stream, is_source_final=False)


def test_a_stream_keeps_its_order_and_two_keep_none(fake: FakeCuda) -> None:
    order: list[str] = []
    other = fake.create_stream()
    for name in ("a", "b"):
        fake.launch(COMPUTE, lambda name=name: order.append(name))  # type: ignore[misc]
        fake.launch(other, lambda name=name: order.append(f"other {name}"))  # type: ignore[misc]
    fake.run(other, 2)
    fake.run(COMPUTE, 2)
    assert order == ["other a", "other b", "a", "b"]


def test_sources_and_addresses_are_read_when_the_turn_comes(fake: FakeCuda) -> None:
    copy = Copy(fake, COMPUTE)
    copy.source[:] = 7
    elsewhere = np.zeros(8, np.uint8)
    fake.own(elsewhere)
    copy.arrays[0][0] = elsewhere.ctypes.data
    fake.run(COMPUTE)
    assert (elsewhere == 7).all()
    assert not copy.target.any()


def test_an_event_is_complete_when_all_before_it_in_its_stream_is(fake: FakeCuda) -> None:
    event = fake.create_event()
    assert fake.is_complete(event), "it was never recorded"
    fake.launch(COMPUTE, lambda: None)
    fake.record(event, COMPUTE)
    fake.launch(COMPUTE, lambda: None)
    assert not fake.is_complete(event)
    fake.run(COMPUTE)
    assert not fake.is_complete(event)
    fake.run(COMPUTE)
    assert fake.is_complete(event)
    fake.record(event, COMPUTE)
    assert not fake.is_complete(event), "it is its last record that counts"
    fake.run_all()


def test_a_wait_is_for_the_last_record_when_it_was_given(fake: FakeCuda) -> None:
    other, event, done = fake.create_stream(), fake.create_event(), []
    fake.wait_event(other, event)
    fake.run(other)
    fake.record(event, COMPUTE)
    fake.wait_event(other, event)
    fake.launch(other, lambda: done.append(True))
    fake.launch(COMPUTE, lambda: None)
    fake.record(event, COMPUTE)
    assert not fake.step(other)
    fake.run(COMPUTE)
    fake.run(other, 2)
    assert done == [True]
    fake.run_all()


def test_a_host_function_is_called_in_its_turn_with_its_data(fake: FakeCuda) -> None:
    called: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    fake.launch(COMPUTE, lambda: called.append(1))
    fake.launch_host_function(address, 1234, COMPUTE)
    fake.run_all()
    assert called == [1, 1234]


def test_the_kth_call_fails_and_no_other(fake: FakeCuda) -> None:
    fake.create_event()
    fake.fail("create_event", at=2, code=2)
    fake.create_event()
    with pytest.raises(DeviceCallError, match=r"create_event failed .*\(2\)") as told:
        fake.create_event()
    assert not told.value.is_sticky
    fake.create_event()
    assert fake.events == 3


def test_after_a_sticky_failure_every_call_fails_and_nothing_happens(fake: FakeCuda) -> None:
    done: list[bool] = []
    event = fake.create_event()
    fake.launch(COMPUTE, lambda: done.append(True))
    fake.fail("record", code=700, sticky=True)
    for _ in range(2):
        with pytest.raises(DeviceCallError) as told:
            fake.record(event, COMPUTE)
        assert told.value.is_sticky
    with pytest.raises(DeviceCallError):
        fake.synchronize(COMPUTE)
    fake.run_all()
    assert done == []


def test_memory_that_is_not_its_own_is_a_fault(fake: FakeCuda) -> None:
    copy = Copy(fake, COMPUTE)
    copy.arrays[2][0] = 9
    fake.run_all()
    assert not copy.target.any()
    with pytest.raises(DeviceCallError, match="700"):
        fake.create_event()


def test_a_copy_across_two_registrations_is_refused(fake: FakeCuda) -> None:
    memory = np.zeros(16, np.uint8)
    fake.own(memory)
    start = memory.ctypes.data
    fake.register(start, 8)
    fake.register(start + 8, 8)
    across, whole, size = (np.array([v], np.uint64) for v in (start + 4, start, 8))
    with pytest.raises(DeviceCallError, match="two registrations"):
        fake.copy(whole, across, size, COMPUTE, is_source_final=True)
    with pytest.raises(DeviceCallError, match="registered already"):
        fake.register(start, 8)
    with pytest.raises(DeviceCallError, match="empty"):
        fake.copy(whole[:0], whole[:0], size[:0], COMPUTE, is_source_final=True)


def test_a_stalled_stream_does_nothing_until_it_goes_on(fake: FakeCuda) -> None:
    fake.launch(COMPUTE, lambda: None)
    fake.stall(COMPUTE)
    fake.run_all()
    assert fake.pending(COMPUTE) == ["kernel"]
    fake.go_on(COMPUTE)
    fake.run_all()
    assert fake.pending(COMPUTE) == []


def test_work_that_is_thrown_away_is_a_violation() -> None:
    fake = FakeCuda()
    stream, event = fake.create_stream(), fake.create_event()
    fake.record(event, stream)
    fake.destroy_event(event)
    fake.destroy_stream(stream)
    assert len(fake.violations) == 2


def test_it_can_run_by_itself() -> None:
    fake = FakeCuda(free_running=True)
    stream, event = fake.create_stream(), fake.create_event()
    copy = Copy(fake, stream)
    fake.record(event, stream)
    fake.synchronize(stream)
    assert fake.is_complete(event)
    assert copy.arrays
    fake.end()
