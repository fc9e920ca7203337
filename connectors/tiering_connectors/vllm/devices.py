"""Which device a worker's KV cache is on, and what copies between it and the host tier.

Owns the choice, by vLLM's platform, and how a device's driver is reached: NVIDIA's bindings for
CUDA, torch's calls for CUDA without them and for ROCm. The same behind both doors. Blocks, and is
for start only.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Protocol

from tiering.config import ConnectorConfig
from tiering.device.base import DeviceCopier, DevicePages, HostPages
from tiering.device.cudart import has_bindings, open_cuda
from tiering.device.runtime import DeviceRuntime, KernelUse
from tiering.errors import ConfigError, DeviceCallError, TieringError
from tiering.tiers.host import Region
from tiering.wiring import build_device_copier, build_host_copier
from tiering_connectors.vllm.pagekernel import page_kernel
from tiering_connectors.vllm.torch_runtime import TorchRuntime
from tiering_kernels import numa

log = logging.getLogger("tiering")


class Device(Protocol):
    """The device of this worker's KV cache."""

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's own, and pages of it are arrays."""
        ...

    def nodes(self) -> Collection[int]:
        """The memory nodes that the host tier should be on; none where it does not matter."""
        ...

    def open_copier(
        self, groups: Sequence[Any], region: Region, share: int, config: ConnectorConfig
    ) -> DeviceCopier:
        """`groups` are HostPages if `is_host`, else DevicePages; `share` is which of each row."""
        ...


class HostDevice:
    """vLLM's CPU backend."""

    is_host = True

    def nodes(self) -> Collection[int]:
        return ()

    def open_copier(
        self, groups: Sequence[HostPages], region: Region, share: int, config: ConnectorConfig
    ) -> DeviceCopier:
        return build_host_copier(groups, region.share(share))


class GpuDevice:
    """CUDA's or ROCm's current device. `runtimes` opens the driver of one by its number; `cuda` is
    `torch.cuda`, which is imported if left out."""

    is_host = False

    def __init__(
        self, runtimes: Callable[[int], DeviceRuntime], *, has_kernel: bool, cuda: Any = None
    ) -> None:
        self._cuda = cuda or importlib.import_module("torch").cuda
        self._runtimes = runtimes
        self._has_kernel = has_kernel

    def nodes(self) -> Collection[int]:
        """Of all devices that this process sees: the first worker builds memory for every rank."""
        found = set()
        for ordinal in range(self._cuda.device_count()):
            bus_id = _bus_id(self._cuda.get_device_properties(ordinal))
            node = numa.node_of_device(bus_id) if bus_id is not None else None
            if node is not None:
                found.add(node)
        return found

    def open_copier(
        self, groups: Sequence[DevicePages], region: Region, share: int, config: ConnectorConfig
    ) -> DeviceCopier:
        runtime = self._runtimes(self._cuda.current_device())
        own, memory = region.share(share), region.rows_view()
        try:
            kernel = self._kernel(groups, own, config) if self._has_kernel else None
            copier = build_device_copier(runtime, groups, memory, own, self._server_stream, kernel)
        except DeviceCallError as error:
            raise ConfigError(
                "--device",
                self._cuda.current_device(),
                str(error),
                "look for what the driver says (dmesg), or start without the connector",
            ) from error
        below = kernel.loads_below_bytes if kernel is not None else 0
        also = f"; loads of fragments below {below} bytes by a kernel" if below else ""
        log.info("the device's copies: %r%s", runtime, also)
        return copier

    def _server_stream(self) -> int:
        """vLLM runs its model on torch's current stream of the worker's main thread."""
        return int(self._cuda.current_stream().cuda_stream)

    def _kernel(
        self, groups: Sequence[DevicePages], share: Any, config: ConnectorConfig
    ) -> KernelUse | None:
        """None where it is not wanted, not of use, or not to be had: then engines copy all."""
        below = config.kernel_below_bytes
        smallest = min((run.page_bytes for group in groups for run in group.pages), default=below)
        if smallest >= below:
            return None
        try:
            made = page_kernel(groups, share, f"cuda:{self._cuda.current_device()}")
            made.warm_up()
        except Exception as error:
            log.info("small pages are copied by the copy engines: %s", error)
            return None
        return KernelUse(made, loads_below_bytes=below)


def device_for(kind: str) -> Device:
    """The device of tensors of that kind; ConfigError for one that is not served."""
    if kind == "cpu":
        return HostDevice()
    if kind == "cuda":
        from vllm.platforms import current_platform

        # Where ROCm maps host memory, a kernel cannot count on finding it at the same address.
        is_rocm = current_platform.is_rocm()
        return GpuDevice(_torch_runtime if is_rocm else _cuda_runtime, has_kernel=not is_rocm)
    raise ConfigError(
        "--device",
        kind,
        "this version copies to and from CUDA and ROCm devices and the memory of vLLM's CPU "
        "backend, and has no way to a device of this kind",
        "run without this connector, or with vLLM's own OffloadingConnector and its "
        "CPUOffloadingSpec",
    )


@cache
def _cuda_runtime(ordinal: int) -> DeviceRuntime:
    if not has_bindings():
        log.info(
            "the package cuda-bindings is not installed: copies are made through torch, and the "
            "device is asked for their end (pip install kv-tiering[cuda])"
        )
        return _torch_runtime(ordinal)
    return open_cuda(ordinal)


@cache
def _torch_runtime(ordinal: int) -> DeviceRuntime:
    try:
        return TorchRuntime(ordinal)
    except TieringError as error:
        raise ConfigError(
            "--device", f"cuda:{ordinal}", str(error), "look for what the driver says (dmesg)"
        ) from error


def _bus_id(properties: Any) -> str | None:
    """Where the device is on the PCI bus, as /sys has it; None where torch does not say."""
    try:
        domain, bus, device = (
            properties.pci_domain_id,
            properties.pci_bus_id,
            properties.pci_device_id,
        )
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
