"""The CUDA runtime's calls, as NVIDIA's bindings would get them, and a driver's batch of copies.

There is no driver here, so what stands in for it notes what it is given, in the form in which C
gets it. The bindings themselves are real where they are installed: what they take, and what they
call things.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import shutil
import subprocess
from pathlib import Path
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
        self.launched: list[tuple[int, int, int]] = []
        self._kept = [
            cudart._Batch(self._batch),
            COPY(self._copy),
            cudart._HostFunction(self._launch),
        ]
        self.batch, self.copy, self.launch = (
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

    def _launch(self, stream: int, function: int, data: int) -> int:
        self.launched.append((stream, function, data))
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
    cudaMemcpyKind = enum.IntEnum("Kind", {"cudaMemcpyDefault": 4})

    def __init__(self, driver: Driver, *, has_batch: bool = True, has_launch: bool = True) -> None:
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
            b"cuMemcpyAsync": driver.copy,
            b"cuLaunchHostFunc": driver.launch if has_launch else None,
        }

    def cudaGetDriverEntryPointByVersion(self, symbol: bytes, version: int, flags: int) -> Any:
        of_version = {
            b"cuMemcpyBatchAsync": 12080,
            b"cuMemcpyAsync": 4000,
            b"cuLaunchHostFunc": 10000,
        }
        assert version == of_version[symbol]
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
        ("cudaHostRegister", 4096, 8192, 1),
        ("cudaHostUnregister", 4096),
        ("cudaEventDestroy", 12),
        ("cudaStreamDestroy", 11),
        ("cudaDeviceGetPCIBusId", 32, 3),
    ]


def test_stream_0_is_torchs_default_stream() -> None:
    """With CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=1 the bindings take 0 for the thread's own,
    and a store would not wait for what the server computes."""
    bindings, runtime = opened(Driver())
    del bindings.said[:]
    runtime.record(12, 0)
    runtime.synchronize(0)
    assert bindings.said == [("cudaEventRecord", 12, 1), ("cudaStreamSynchronize", 1)]


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


def test_a_host_function_is_given_to_the_driver_as_it_is() -> None:
    driver = Driver()
    bindings, runtime = opened(driver)
    before = len(bindings.said)
    assert runtime.can_signal
    runtime.launch_host_function(1234, 5678, 11)
    assert driver.launched == [(11, 1234, 5678)]
    assert len(bindings.said) == before
    driver.code = ILLEGAL_ADDRESS
    with pytest.raises(DeviceCallError, match="cuLaunchHostFunc failed with text of ILLEGAL"):
        runtime.launch_host_function(1234, 5678, 11)
    _, without = opened(driver, has_launch=False)
    assert not without.can_signal
    with pytest.raises(DeviceCallError):
        without.launch_host_function(1234, 5678, 11)


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


HEADER = """
#include <cuda.h>
#include <stddef.h>
#include <stdio.h>
int main(void)
{
    CUmemcpyAttributes a;
    printf("%zu %zu %zu %zu %zu ", sizeof a, offsetof(CUmemcpyAttributes, srcAccessOrder),
           offsetof(CUmemcpyAttributes, srcLocHint), offsetof(CUmemcpyAttributes, dstLocHint),
           offsetof(CUmemcpyAttributes, flags));
    printf("%d %d ", CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
    printf("%d %d", CUDA_ERROR_NOT_READY, CUDA_ERROR_ILLEGAL_ADDRESS);
    return 0;
}
"""


def test_what_the_driver_is_given_is_as_its_header_has_it(tmp_path: Path) -> None:
    """Of the driver's header, which Triton carries."""
    triton = importlib.util.find_spec("triton")
    compiler = shutil.which("cc")
    if triton is None or triton.origin is None or compiler is None:
        pytest.skip("needs a C compiler, and Triton for its cuda.h: `make test` installs that")
    include = Path(triton.origin).parent / "backends/nvidia/include"
    source, program = tmp_path / "header.c", tmp_path / "header"
    source.write_text(HEADER)
    command = [compiler, f"-I{include}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    told = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    own = cudart._Attributes
    fields = (own.source_order, own.source_hint, own.target_hint, own.flags)
    expected = [ctypes.sizeof(own), *(field.offset for field in fields)]
    expected += [cudart._ORDER_STREAM, cudart._ORDER_ANY, NOT_READY, ILLEGAL_ADDRESS]
    assert told.split() == [str(number) for number in expected]


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


def test_bindings_that_raise_without_a_driver_are_told_of_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of CUDA 12.8 do."""

    class Raising:
        def __getattr__(self, call: str) -> Any:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(cudart.importlib, "import_module", lambda _: Raising())
    with pytest.raises(ConfigError, match=r"Failed to dlopen.*nvidia-smi"):
        open_cuda(0)


@pytest.fixture
def bindings() -> Any:
    """The real package, which imports without a driver."""
    return pytest.importorskip(
        "cuda.bindings.runtime",
        reason="cuda-bindings is not installed: `make test` installs it, on Linux",
    )


@pytest.fixture
def no_driver(bindings: Any) -> Any:
    if int(bindings.cudaGetDeviceCount()[0]) == 0:
        pytest.skip("there is a CUDA driver here: tests/cuda uses it")
    return bindings


@pytest.mark.usefixtures("no_driver")
def test_where_there_is_no_driver_the_message_says_what_to_look_at() -> None:
    with pytest.raises(ConfigError, match="nvidia-smi"):
        open_cuda(0)


CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("enter_thread", ()),
    ("create_stream", ()),
    ("destroy_stream", (11,)),
    ("synchronize", (0,)),
    ("create_event", (True,)),
    ("destroy_event", (12,)),
    ("record", (12, 0)),
    ("is_complete", (12,)),
    ("elapsed_seconds", (12, 13)),
    ("wait_event", (11, 12)),
    ("copy_one_by_one", (addresses(1 << 63), addresses(4096), addresses(1), 11)),
    ("register", (1 << 47, 1 << 40)),
    ("unregister", (1 << 47,)),
    ("bus_id", ()),
]


@pytest.mark.parametrize(("call", "given"), CALLS, ids=[call for call, _ in CALLS])
def test_the_real_bindings_take_what_they_are_given(
    no_driver: Any, monkeypatch: pytest.MonkeyPatch, call: str, given: tuple[Any, ...]
) -> None:
    """By name, number and kind of what each call gets: they get as far as to miss the driver."""
    monkeypatch.setattr(cudart, "device_calls", lambda: None)
    _, runtime = opened(Driver(), has_batch=False)
    runtime._cuda = no_driver
    with pytest.raises(DeviceCallError, match="driver version is insufficient") as told:
        getattr(runtime, call)(*given)
    assert not told.value.is_sticky


def test_the_real_bindings_find_no_function_without_a_driver(no_driver: Any) -> None:
    _, runtime = opened(Driver())
    runtime._cuda = no_driver
    for symbol in (cudart._DRIVER_BATCH, cudart._DRIVER_COPY, cudart._DRIVER_HOST_FUNCTION):
        assert runtime._entry_point(*symbol) == 0


def test_handles_of_the_real_bindings_are_numbers(bindings: Any) -> None:
    assert int(bindings.cudaStream_t(11)) == 11
    assert int(bindings.cudaEvent_t(12)) == 12
    assert int(bindings.cudaStreamLegacy) == cudart._LEGACY_STREAM
    assert bindings.cudaStreamNonBlocking == cudart._NON_BLOCKING
    assert bindings.cudaEventDisableTiming == cudart._NO_TIMING
    assert bindings.cudaHostRegisterPortable == cudart._PORTABLE
    assert bindings.cudaError_t.cudaErrorNotReady == NOT_READY
    orders = bindings.cudaMemcpySrcAccessOrder
    assert orders.cudaMemcpySrcAccessOrderStream == cudart._ORDER_STREAM
    assert orders.cudaMemcpySrcAccessOrderAny == cudart._ORDER_ANY


def test_every_error_that_ends_a_process_is_known(bindings: Any) -> None:
    """As NVIDIA says of each code whether more can be done after it."""
    ends = {
        int(code) for code in bindings.cudaError_t if "inconsistent state" in (code.__doc__ or "")
    }
    if not ends:
        pytest.skip("these bindings say nothing of their errors: cuda-bindings 13.5 does")
    assert ends <= cudart._STICKY
    assert UNKNOWN_TO_BINDINGS not in set(map(int, bindings.cudaError_t))
