"""The CUDA runtime, through NVIDIA's own bindings (the package cuda-bindings).

Owns nothing but how calls are made and how their failures are told. The bindings are imported when
a runtime is opened, never with this module. Two calls go around them, to functions of the driver's.
A batch of copies is one call with arrays that nobody walks: the bindings take lists, with an object
for each address. And what the driver calls back is called as it is: bindings may put a function of
theirs before it, which waits for the interpreter lock on the driver's thread.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, NoReturn

from tiering.device.fragments import Addresses
from tiering.errors import ConfigError, DeviceCallError
from tiering_kernels.devicecalls import device_calls

BINDINGS = "cuda.bindings.runtime"

_LEGACY_STREAM = 1  # torch's default one; what 0 is to the bindings, the environment says
_NON_BLOCKING = 1  # a stream that does not wait for the legacy default stream
_NO_TIMING = 2  # an event that is cheaper for it
_PORTABLE = 1  # pinned for every context
_NOT_READY = 600
_BUS_ID_BYTES = 32
_DRIVER_BATCH = (b"cuMemcpyBatchAsync", 12080)  # of this version, whatever the driver's own is
_DRIVER_COPY = (b"cuMemcpyAsync", 4000)
_DRIVER_HOST_FUNCTION = (b"cuLaunchHostFunc", 10000)

# Of cuMemcpyBatchAsync.
_ORDER_STREAM, _ORDER_ANY = 1, 3

# What leaves the process without a context that works: every later call fails with it. The driver
# going down at the end of the process, memory or NVLink that cannot be mended, a fault that the GPU
# contained, a kernel's faults, another device's.
_STICKY = {4, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 911, 999}


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 12.8: the hints of where the memory is are left at none."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_Batch = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *[ctypes.c_void_p] * 3,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
)

_HostFunction = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)


class CudaRuntime:
    """`DeviceRuntime` for CUDA's device `ordinal`, as this process numbers them."""

    name = "CUDA"

    def __init__(self, bindings: Any, ordinal: int) -> None:
        """For `open_cuda`; `bindings` is the module, or what stands in for it."""
        self._cuda = bindings
        self._ordinal = ordinal
        self.enter_thread()
        # The lowest has the largest number.
        self._lowest_priority, _ = map(int, self._call("cudaDeviceGetStreamPriorityRange"))
        batch = self._entry_point(*_DRIVER_BATCH)
        self._batch = _Batch(batch) if batch else None
        self._copy = self._entry_point(*_DRIVER_COPY)
        host_function = self._entry_point(*_DRIVER_HOST_FUNCTION)
        self._host_function = _HostFunction(host_function) if host_function else None
        self._calls = device_calls()

    def enter_thread(self) -> None:
        self._call("cudaSetDevice", self._ordinal)

    # Streams and events

    def create_stream(self, *, is_low: bool = False) -> int:
        priority = self._lowest_priority if is_low else 0
        return int(self._call("cudaStreamCreateWithPriority", _NON_BLOCKING, priority))

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", stream or _LEGACY_STREAM)

    def create_event(self, is_timed: bool = False) -> int:
        return int(self._call("cudaEventCreateWithFlags", 0 if is_timed else _NO_TIMING))

    def destroy_event(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream or _LEGACY_STREAM)

    def is_complete(self, event: int) -> bool:
        (code,) = self._cuda.cudaEventQuery(event)
        if int(code) == _NOT_READY:
            return False
        self._check("cudaEventQuery", code)
        return True

    def elapsed_seconds(self, start: int, end: int) -> float:
        return float(self._call("cudaEventElapsedTime", start, end)) / 1e3

    def wait_event(self, stream: int, event: int) -> None:
        self._call("cudaStreamWaitEvent", stream, event, 0)

    # Copies

    @property
    def copies_in_batches(self) -> bool:
        """Whether the driver has a call for a whole batch; a loop over each copy serves, too."""
        return self._batch is not None

    def copy(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        stream: int,
        *,
        is_source_final: bool,
    ) -> None:
        if self._batch is not None:
            self._copy_batch(targets, sources, sizes, stream, is_source_final)
        else:
            self.copy_one_by_one(targets, sources, sizes, stream)

    def _copy_batch(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        stream: int,
        is_source_final: bool,
    ) -> None:
        assert self._batch is not None
        attributes = _Attributes(source_order=_ORDER_ANY if is_source_final else _ORDER_STREAM)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if code != 0:
            self._fail("cuMemcpyBatchAsync", code, _where(failed.value, len(sizes)))

    def copy_one_by_one(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int
    ) -> None:
        """`copy` by a call for each fragment, also where a batch could be had."""
        if self._calls is not None and self._copy:
            code, failed = self._calls.copy_loop(self._copy, targets, sources, sizes, stream)
            if code != 0:
                self._fail("cuMemcpyAsync", code, _where(failed, len(sizes)))
            return
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            self._call("cudaMemcpyAsync", target, source, size, kind, stream)

    # Signals and memory

    @property
    def can_signal(self) -> bool:
        return self._host_function is not None

    def launch_host_function(self, function: int, data: int, stream: int) -> None:
        if self._host_function is None:
            raise DeviceCallError("cuLaunchHostFunc", -1, "a driver that does not have it")
        code = self._host_function(stream, function, data)
        if code != 0:
            self._fail("cuLaunchHostFunc", code, "")

    def register(self, address: int, size_bytes: int) -> None:
        self._call("cudaHostRegister", address, size_bytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def bus_id(self) -> str | None:
        found = self._call("cudaDeviceGetPCIBusId", _BUS_ID_BYTES, self._ordinal)
        return bytes(found).split(b"\0")[0].decode("ascii").lower() or None

    def __repr__(self) -> str:
        how = "in batches" if self._batch is not None else "one by one"
        return f"<CudaRuntime device {self._ordinal}, copies {how}>"

    # Calls

    def _call(self, call: str, *arguments: Any) -> Any:
        """What the call returns beside its code: nothing, one thing, or a tuple."""
        code, *rest = getattr(self._cuda, call)(*arguments)
        self._check(call, code)
        return rest[0] if len(rest) == 1 else tuple(rest)

    def _check(self, call: str, code: Any) -> None:
        if int(code) == 0:
            return
        # The failure stays the thread's last one, and whoever asks next would take it for theirs.
        self._cuda.cudaGetLastError()
        raise DeviceCallError(call, int(code), self._text_of(code), int(code) in _STICKY)

    def _fail(self, call: str, code: int, where: str) -> NoReturn:
        """For the driver's codes, which are the runtime's for all that such a call fails with."""
        raise DeviceCallError(call, code, self._text_of(code) + where, code in _STICKY)

    def _text_of(self, code: Any) -> str:
        try:
            told, text = self._cuda.cudaGetErrorString(self._cuda.cudaError_t(code))
        except ValueError:  # younger than the bindings
            return "an error that the bindings do not know"
        return text.decode() if int(told) == 0 and text else "an unknown error"

    def _entry_point(self, symbol: bytes, version: int) -> int:
        """The address of a function of the driver's as that version of CUDA has it, or 0."""
        code, address, status = self._cuda.cudaGetDriverEntryPointByVersion(symbol, version, 0)
        if int(code) != 0 or int(status) != 0 or not address:
            self._cuda.cudaGetLastError()
            return 0
        return int(address)


def _where(failed: int, count: int) -> str:
    return f", copy {failed + 1} of {count}" if failed < count else f", {count} copies"


def has_bindings() -> bool:
    """Whether the package is installed."""
    try:
        importlib.import_module(BINDINGS)
    except ImportError:
        return False
    return True


def open_cuda(ordinal: int) -> CudaRuntime:
    """The runtime of CUDA's device `ordinal`; ConfigError where the package or the driver is not
    there, or too old."""
    try:
        bindings = importlib.import_module(BINDINGS)
    except ImportError as error:
        raise ConfigError(
            "--device",
            "cuda",
            f"NVIDIA's bindings cannot be imported ({error})",
            "install the extra: pip install kv-tiering[cuda]",
        ) from error
    try:
        return CudaRuntime(bindings, ordinal)
    # Bindings of CUDA 12.8 raise RuntimeError where they find no driver, or none with the function.
    except (DeviceCallError, RuntimeError) as error:
        raise ConfigError(
            "--device",
            f"cuda:{ordinal}",
            str(error),
            "check with nvidia-smi that the driver runs and is not older than the package "
            "cuda-bindings; for a driver of CUDA 12: pip install 'cuda-bindings<13'",
        ) from error
