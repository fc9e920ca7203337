"""A device's driver through torch's calls, and vLLM's for a batch of copies: ROCm, and CUDA where
NVIDIA's bindings are not installed.

Owns the torch objects behind the numbers that a `DeviceRuntime` deals in. Torch calls nothing back,
so who waits for an event asks for it. Needs a build of torch and of vLLM for the device.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NoReturn

import numpy as np

from tiering.device.fragments import Addresses
from tiering.errors import DeviceCallError

_PORTABLE = 1

# Of torch's errors that have a code, those after which the process's context still works:
# a wrong value, no memory, memory that is registered already or not at all, not supported.
_PASSING = {1, 2, 712, 713, 801}


class TorchRuntime:
    """`DeviceRuntime` for torch's device `cuda:<ordinal>`, which on ROCm is called so, too."""

    name = "torch"
    can_signal = False

    def __init__(
        self, ordinal: int, torch: Any = None, copy_batch: Callable[..., None] | None = None
    ) -> None:
        """`torch` is the module, and `copy_batch` vLLM's `swap_blocks_batch`; left out, they are
        imported."""
        self._torch: Any = torch or importlib.import_module("torch")
        self._device = self._torch.device("cuda", ordinal)
        self._ordinal = ordinal
        self._copy_batch = copy_batch or _copy_batch_of_vllm()
        self._numbers = count(1)
        self._events: dict[int, Any] = {}
        self._streams: dict[int, Any] = {}
        self._lock = threading.Lock()
        self.enter_thread()

    def enter_thread(self) -> None:
        with _translated("set_device"):
            self._torch.cuda.set_device(self._device)

    # Streams and events

    def create_stream(self, *, is_low: bool = False) -> int:
        # What torch calls 0 is the lowest, and what every stream has.
        with _translated("Stream"):
            stream = self._torch.cuda.Stream(self._device, priority=0)
        with self._lock:
            self._streams[int(stream.cuda_stream)] = stream
        return int(stream.cuda_stream)

    def destroy_stream(self, stream: int) -> None:
        """It goes back to torch's pool."""
        with self._lock:
            del self._streams[stream]

    def synchronize(self, stream: int) -> None:
        with _translated("Stream.synchronize"):
            self._stream(stream).synchronize()

    def create_event(self, is_timed: bool = False) -> int:
        with _translated("Event"):
            event = self._torch.cuda.Event(enable_timing=is_timed)
        number = next(self._numbers)
        with self._lock:
            self._events[number] = event
        return number

    def destroy_event(self, event: int) -> None:
        with self._lock:
            del self._events[event]

    def record(self, event: int, stream: int) -> None:
        with _translated("Event.record"):
            self._events[event].record(self._stream(stream))

    def is_complete(self, event: int) -> bool:
        with _translated("Event.query"):
            return bool(self._events[event].query())

    def elapsed_seconds(self, start: int, end: int) -> float:
        with _translated("Event.elapsed_time"):
            return float(self._events[start].elapsed_time(self._events[end])) / 1e3

    def wait_event(self, stream: int, event: int) -> None:
        with _translated("Stream.wait_event"):
            self._stream(stream).wait_event(self._events[event])

    def launch_host_function(self, function: int, data: int, stream: int) -> None:
        raise DeviceCallError("launch_host_function", 801, "torch has no such call")

    # Copies and memory

    def copy(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        stream: int,
        *,
        is_source_final: bool,
    ) -> None:
        source, target, size = (
            self._torch.from_numpy(array.view(np.int64)) for array in (sources, targets, sizes)
        )
        with _translated("swap_blocks_batch"), self._torch.cuda.stream(self._stream(stream)):
            self._copy_batch(source, target, size, is_src_access_order_any=is_source_final)

    def register(self, address: int, size_bytes: int) -> None:
        self._check("cudaHostRegister", address, size_bytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", address)

    def bus_id(self) -> str | None:
        return None

    def __repr__(self) -> str:
        return f"<TorchRuntime device {self._ordinal}, copies by vLLM's swap_blocks_batch>"

    def _check(self, call: str, *arguments: int) -> None:
        with _translated(call):
            code = int(getattr(self._torch.cuda.cudart(), call)(*arguments))
        if code != 0:
            _fail(call, code, "an error of the driver's")

    def _stream(self, stream: int) -> Any:
        """Ours, or the server's by its number; 0 is the default stream."""
        own = self._streams.get(stream)
        if own is not None:
            return own
        if stream == 0:
            return self._torch.cuda.default_stream(self._device)
        return self._torch.cuda.ExternalStream(stream, device=self._device)


def _copy_batch_of_vllm() -> Callable[..., None]:
    from vllm import _custom_ops

    batch: Callable[..., None] | None = getattr(_custom_ops, "swap_blocks_batch", None)
    if batch is None:
        raise DeviceCallError(
            "swap_blocks_batch",
            801,
            "this version of vLLM has no batch of copies; with CUDA, install the package "
            "cuda-bindings",
        )
    return batch


@contextmanager
def _translated(call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        code = getattr(error, "error_code", None)
        # Torch clears the driver's last error when it raises.
        _fail(call, code if isinstance(code, int) else None, str(error).partition("\n")[0], error)


def _fail(call: str, code: int | None, reason: str, cause: Exception | None = None) -> NoReturn:
    """Where torch does not say what it was, the device is not trusted any more."""
    is_sticky = code not in _PASSING
    raise DeviceCallError(call, -1 if code is None else code, reason, is_sticky) from cause
