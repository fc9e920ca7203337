"""The devices that `tiering-bench device` measures: a CUDA device, or the fake one.

The fake one shows that the benchmark itself works, from its arguments to its report; it has no
speed. Needs numpy, and for CUDA torch, cuda-bindings and for the kernel Triton, and nothing else of
what this project installs: it runs on machines where nothing can be installed.
"""

from __future__ import annotations

import importlib
import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tiering.device.base import BlockMap, DeviceCopier, DevicePages
from tiering.device.cuda import CudaCopier
from tiering.device.cudart import CudaRuntime, open_cuda
from tiering.device.fragments import Addresses
from tiering.device.futures import Watcher
from tiering.device.pinned import PinnedMemory
from tiering.device.runtime import DeviceRuntime, KernelUse, PageKernel
from tiering.testing.fakecuda import COMPUTE, FakeCuda
from tiering_connectors.vllm.pagekernel import page_kernel

ByteArray = npt.NDArray[np.uint8]

_FAKE_WORK_SECONDS = 0.05
_WORK_CYCLES = 100_000_000


class Memory(Protocol):
    """Bytes of the device."""

    @property
    def address(self) -> int: ...

    def write(self, content: ByteArray) -> None:
        """From the first byte on, and wait until that is done."""
        ...

    def read(self, size_bytes: int | None = None) -> ByteArray:
        """The first so many bytes, or all."""
        ...


class Side(Protocol):
    """A device, and what it can do; `is_real` says whether it has a speed."""

    name: str
    is_real: bool
    runtime: DeviceRuntime
    why_no_kernel: str

    def memory(self, size_bytes: int) -> Memory: ...

    def server_stream(self) -> int:
        """Where `work` goes."""
        ...

    def host(self, size_bytes: int) -> ByteArray:
        """Whole pages, pinned until `close`."""
        ...

    def work_then_fill(self, memory: Memory, value: int) -> None:
        """On the server's stream: something long, then all of `memory` is `value`."""
        ...

    def kernel(self, groups: Sequence[DevicePages], share: ByteArray) -> PageKernel | None:
        """For pages of these groups and rows; None where there is none, and `why_no_kernel`."""
        ...

    def loop(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """One call of the driver for each fragment."""
        ...

    def product(self) -> Callable[[], None] | None:
        """Gives the server's stream a product of two large matrices; None where there is none."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _HostMemory:
    """The device memory of the fake one."""

    array: ByteArray

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    def write(self, content: ByteArray) -> None:
        self.array[: len(content)] = content

    def read(self, size_bytes: int | None = None) -> ByteArray:
        return self.array[:size_bytes].copy()


class _Pinning:
    """Host memory of either side."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._pinned: list[tuple[int, ByteArray]] = []

    def host(self, size_bytes: int) -> ByteArray:
        array = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        array[:] = 0
        self._runtime.register(array.ctypes.data, size_bytes)
        self._pinned.append((array.ctypes.data, array))
        return array

    def close(self) -> None:
        for address, _ in self._pinned:
            self._runtime.unregister(address)
        self._pinned.clear()


class FakeSide:
    name, is_real = "fake", False
    why_no_kernel = "an emulated device runs none"

    def __init__(self) -> None:
        self.fake = FakeCuda(free_running=True)
        self.runtime: DeviceRuntime = self.fake
        self._pinning = _Pinning(self.fake)

    def memory(self, size_bytes: int) -> Memory:
        array = np.zeros(size_bytes, np.uint8)
        self.fake.own(array)
        return _HostMemory(array)

    def server_stream(self) -> int:
        return COMPUTE

    def host(self, size_bytes: int) -> ByteArray:
        array = self._pinning.host(size_bytes)
        self.fake.own(array)
        return array

    def work_then_fill(self, memory: Memory, value: int) -> None:
        assert isinstance(memory, _HostMemory)
        array = memory.array

        def work() -> None:
            time.sleep(_FAKE_WORK_SECONDS)
            array[:] = value

        self.fake.launch(COMPUTE, work)

    def kernel(self, groups: Sequence[DevicePages], share: ByteArray) -> PageKernel | None:
        return None

    def loop(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        self.runtime.copy(targets, sources, sizes, stream, is_source_final=False)

    def product(self) -> Callable[[], None] | None:
        return None

    def close(self) -> None:
        self._pinning.close()
        self.fake.end()


class _TorchMemory:
    def __init__(self, tensor: Any, torch: Any) -> None:
        self.tensor, self._torch = tensor, torch
        self.address = int(tensor.data_ptr())

    def write(self, content: ByteArray) -> None:
        self.tensor[: len(content)].copy_(self._torch.from_numpy(content))
        self._torch.cuda.synchronize()

    def read(self, size_bytes: int | None = None) -> ByteArray:
        self._torch.cuda.synchronize()
        content: ByteArray = self.tensor[:size_bytes].cpu().numpy()
        return content


class CudaSide:
    is_real = True
    why_no_kernel = ""

    def __init__(self) -> None:
        """ConfigError without a device or the bindings, ImportError without torch."""
        self._torch: Any = importlib.import_module("torch")
        self.cuda: CudaRuntime = open_cuda(0)
        self.runtime: DeviceRuntime = self.cuda
        self._torch.cuda.set_device(0)
        self.name = str(self._torch.cuda.get_device_name(0))
        self._pinning = _Pinning(self.runtime)

    def memory(self, size_bytes: int) -> Memory:
        tensor = self._torch.zeros(size_bytes, dtype=self._torch.uint8, device="cuda:0")
        self._torch.cuda.synchronize()
        return _TorchMemory(tensor, self._torch)

    def server_stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def host(self, size_bytes: int) -> ByteArray:
        return self._pinning.host(size_bytes)

    def work_then_fill(self, memory: Memory, value: int) -> None:
        assert isinstance(memory, _TorchMemory)
        self._torch.cuda._sleep(_WORK_CYCLES)
        memory.tensor.fill_(value)

    def kernel(self, groups: Sequence[DevicePages], share: ByteArray) -> PageKernel | None:
        try:
            made = page_kernel(groups, share, "cuda:0")
            made.warm_up()
        except Exception as error:
            # No Triton, or no C compiler for it: engines can be measured all the same.
            self.why_no_kernel = f"{type(error).__name__}: {error}"
            return None
        self._torch.cuda.synchronize()
        return made

    def loop(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        self.cuda.copy_one_by_one(targets, sources, sizes, stream)

    def product(self) -> Callable[[], None] | None:
        torch = self._torch
        left, right = (
            torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda:0") for _ in range(2)
        )
        into = torch.empty_like(left)

        def multiply() -> None:
            torch.mm(left, right, out=into)

        return multiply

    def close(self) -> None:
        self._torch.cuda.synchronize()
        self._pinning.close()


def open_side(name: str) -> Side:
    """`cuda` or `fake`."""
    return CudaSide() if name == "cuda" else FakeSide()


class Copies:
    """A copier over a side, as a worker has it; the rows are pinned already."""

    def __init__(
        self,
        side: Side,
        groups: Sequence[DevicePages],
        share: ByteArray,
        kernel: KernelUse | None = None,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        used = runtime or side.runtime
        pinned = _AlreadyPinned(used, share)
        self.watcher = Watcher(used)
        self._copier: DeviceCopier = CudaCopier(
            used, self.watcher, groups, share, pinned, side.server_stream, kernel
        )

    def store(self, blocks: BlockMap) -> Future[None]:
        return self._copier.gather(blocks)

    def load(self, blocks: BlockMap) -> Future[None]:
        return self._copier.scatter(blocks)

    def close(self) -> None:
        self._copier.close()


class _AlreadyPinned(PinnedMemory):
    is_pinned = True

    def __init__(self, runtime: DeviceRuntime, share: ByteArray) -> None:
        super().__init__(runtime, len(share), len(share))
