"""The CUDA runtime's calls, as NVIDIA's bindings would get them, and a driver's batch of copies.

There is no driver here, so what stands in for it notes what it is given, in the form in which C
gets it.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.util
from typing import Any

import numpy as np
import pytest

from tiering.device import cudart
from tiering.device.cudart import CudaRuntime, open_cuda
from tiering.errors import ConfigError, DeviceCallError

NOT_READY, INVALID_VALUE, ILLEGAL_ADDRESS, UNKNOWN_TO_BINDINGS = 600, 1, 700, 4242


class Code(enum.IntEnum):
    SUCCESS = 0
    INVALID = INVALID_VALUE
    NOT_READY = NOT_READY
    ILLEGAL = ILLEGAL_ADDRESS


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


class Driver:
    """Functions of a driver's, at addresses; each fails with `code` at its copy number `at`."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.copies: list[tuple[int, ...]] = []
        self.code, self.at = 0, 0
        self._kept = [cudart._Batch(self._batch), COPY(self._copy)]
        self.batch, self.copy = (
            ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._kept
        )

    def _batch(self, targets: int, sources: int, sizes: int, count: int, *rest: int) -> int:
        attributes, first, attribute_count, failed, stream = rest
        self.batches.append(
            {
                "targets": words(targets, count),
                "sources": words(sources, count),
                "sizes": words(sizes, count),
                "attributes": list((ctypes.c_int32 * 6).from_address(attributes)),
                "first": words(first, attribute_count),
                "stream": stream,
            }
        )
        ctypes.c_size_t.from_address(failed).value = self.at
        return self.code

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        self.copies.append((target, source, size, stream))
        return self.code if len(self.copies) == self.at else 0


COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)


class Bindings:
    """As `cuda.bindings.runtime`: each call gives a tuple that begins with a code."""

    cudaError_t = Code
    cudaHostFn_t = int
    cudaMemcpyKind = enum.IntEnum("Kind", {"cudaMemcpyDefault": 4})

    def __init__(self, driver: Driver, *, has_batch: bool = True, has_copy: bool = True) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.answers: dict[str, tuple[Any, ...]] = {
            "cudaDeviceGetStreamPriorityRange": (Code.SUCCESS, 2, -5),
            "cudaStreamCreateWithPriority": (Code.SUCCESS, 11),
            "cudaEventCreateWithFlags": (Code.SUCCESS, 12),
            "cudaEventElapsedTime": (Code.SUCCESS, 1500.0),
            "cudaDeviceGetPCIBusId": (Code.SUCCESS, b"0000:3B:00.0\0\0"),
        }
        self.entries = {
            b"cuMemcpyBatchAsync": driver.batch if has_batch else None,
            b"cuMemcpyAsync": driver.copy if has_copy else None,
        }

    def cudaGetDriverEntryPointByVersion(self, symbol: bytes, version: int, flags: int) -> Any:
        assert version == {b"cuMemcpyBatchAsync": 12080, b"cuMemcpyAsync": 4000}[symbol]
        found = self.entries[symbol]
        return Code.SUCCESS, found, 0 if found else 1

    def cudaGetErrorString(self, code: Code) -> tuple[Code, bytes]:
        return Code.SUCCESS, f"text of {code.name}".encode()

    def __getattr__(self, call: str) -> Any:
        if not call.startswith("cuda"):
            raise AttributeError(call)

        def answer(*arguments: Any) -> tuple[Any, ...]:
            self.said.append((call, *arguments))
            return self.answers.get(call, (Code.SUCCESS,))

        return answer


def addresses(*values: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def opened(driver: Driver, **how: bool) -> tuple[Bindings, CudaRuntime]:
    bindings = Bindings(driver, **how)
    return bindings, CudaRuntime(bindings, 3)


def test_streams_events_and_memory() -> None:
    bindings, runtime = opened(Driver())
    assert bindings.said[0] == ("cudaSetDevice", 3)
    del bindings.said[:]
    assert runtime.create_stream(is_low=True) == runtime.create_stream() == 11
    assert runtime.create_event() == runtime.create_event(is_timed=True) == 12
    runtime.record(12, 11)
    runtime.wait_event(11, 12)
    runtime.synchronize(11)
    assert runtime.elapsed_seconds(12, 12) == 1.5
    runtime.launch_host_function(1234, 5678, 11)
    runtime.register(4096, 8192)
    runtime.unregister(4096)
    runtime.destroy_event(12)
    runtime.destroy_stream(11)
    assert runtime.bus_id() == "0000:3b:00.0"
    assert bindings.said == [
        ("cudaStreamCreateWithPriority", 1, 2),
        ("cudaStreamCreateWithPriority", 1, 0),
        ("cudaEventCreateWithFlags", 2),
        ("cudaEventCreateWithFlags", 0),
        ("cudaEventRecord", 12, 11),
        ("cudaStreamWaitEvent", 11, 12, 0),
        ("cudaStreamSynchronize", 11),
        ("cudaEventElapsedTime", 12, 12),
        ("cudaLaunchHostFunc", 11, 1234, 5678),
        ("cudaHostRegister", 4096, 8192, 1),
        ("cudaHostUnregister", 4096),
        ("cudaEventDestroy", 12),
        ("cudaStreamDestroy", 11),
        ("cudaDeviceGetPCIBusId", 32, 3),
    ]


def test_an_event_is_complete_or_not_or_fails() -> None:
    bindings, runtime = opened(Driver())
    assert runtime.is_complete(12)
    bindings.answers["cudaEventQuery"] = (Code.NOT_READY,)
    assert not runtime.is_complete(12)
    bindings.answers["cudaEventQuery"] = (Code.ILLEGAL,)
    with pytest.raises(DeviceCallError, match="cudaEventQuery failed with text of ILLEGAL") as told:
        runtime.is_complete(12)
    assert told.value.is_sticky
    assert told.value.code == ILLEGAL_ADDRESS


def test_a_failure_does_not_stay_the_threads_last_one() -> None:
    """C08: whoever asks next would take it for theirs."""
    bindings, runtime = opened(Driver())
    bindings.answers["cudaHostRegister"] = (Code.INVALID,)
    with pytest.raises(DeviceCallError) as told:
        runtime.register(0, 1)
    assert not told.value.is_sticky
    assert bindings.said[-1] == ("cudaGetLastError",)


@pytest.mark.parametrize(("is_source_final", "order"), [(True, 3), (False, 1)])
def test_a_batch_is_one_call_with_the_arrays_as_they_are(is_source_final: bool, order: int) -> None:
    driver = Driver()
    bindings, runtime = opened(driver)
    before = len(bindings.said)
    runtime.copy(
        *(addresses(1, 2, 3), addresses(4, 5, 6), addresses(7, 8, 9), 11),
        is_source_final=is_source_final,
    )
    (batch,) = driver.batches
    assert batch == {
        "targets": [1, 2, 3],
        "sources": [4, 5, 6],
        "sizes": [7, 8, 9],
        "attributes": [order, 0, 0, 0, 0, 0],
        "first": [0],
        "stream": 11,
    }
    assert len(bindings.said) == before
    assert "in batches" in repr(runtime)


def test_a_batch_that_fails_says_at_which_copy() -> None:
    driver = Driver()
    _, runtime = opened(driver)
    driver.code, driver.at = INVALID_VALUE, 1
    arrays = (addresses(1, 2), addresses(3, 4), addresses(5, 6))
    with pytest.raises(DeviceCallError, match="text of INVALID, copy 2 of 2") as told:
        runtime.copy(*arrays, 11, is_source_final=True)
    assert not told.value.is_sticky
    driver.code, driver.at = UNKNOWN_TO_BINDINGS, 2**64 - 1
    with pytest.raises(DeviceCallError, match=r"do not know, 2 copies \(4242\)"):
        runtime.copy(*arrays, 11, is_source_final=True)


def test_an_older_driver_is_given_one_copy_after_another() -> None:
    driver = Driver()
    bindings, runtime = opened(driver, has_batch=False)
    before = len(bindings.said)
    runtime.copy(addresses(1, 2), addresses(3, 4), addresses(5, 6), 11, is_source_final=True)
    assert driver.copies == [(1, 3, 5, 11), (2, 4, 6, 11)]
    assert len(bindings.said) == before, "no call of Python's for each"
    driver.code, driver.at = ILLEGAL_ADDRESS, 4
    with pytest.raises(DeviceCallError, match=r"cuMemcpyAsync .*copy 2 of 3") as told:
        runtime.copy_one_by_one(addresses(1, 2, 3), addresses(1, 2, 3), addresses(1, 2, 3), 11)
    assert told.value.is_sticky
    assert len(driver.copies) == 4, "nothing after the failure"


def test_without_native_code_the_bindings_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudart, "device_calls", lambda: None)
    bindings, runtime = opened(Driver(), has_batch=False)
    runtime.copy(addresses(1, 2), addresses(3, 4), addresses(5, 6), 11, is_source_final=True)
    assert bindings.said[-2:] == [
        ("cudaMemcpyAsync", 1, 3, 5, 4, 11),
        ("cudaMemcpyAsync", 2, 4, 6, 4, 11),
    ]


def test_where_the_package_is_not_there_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cudart, "BINDINGS", "tiering_no_such_package")
    with pytest.raises(ConfigError, match=r"pip install kv-tiering\[cuda\]"):
        open_cuda(0)


def test_where_there_is_no_driver_the_message_says_what_to_look_at() -> None:
    """With the real package, if it is installed: it imports without a driver."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("the package cuda-bindings is not installed: pip install kv-tiering[cuda]")
    from cuda.bindings import runtime as bindings

    if int(bindings.cudaGetDeviceCount()[0]) == 0:
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigError, match="nvidia-smi"):
        open_cuda(0)
