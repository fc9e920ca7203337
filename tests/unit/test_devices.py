"""Which copier a worker gets for its device, and what it does through a whole worker half."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mini_groups as mini
from cuda_scene import SECONDS
from tiering.clock import MonotonicClock
from tiering.config import ConnectorConfig
from tiering.device.base import BlockMap
from tiering.device.host import HostCopier
from tiering.errors import ConfigError
from tiering.testing.fakecuda import COMPUTE, FakeCuda
from tiering.tiers.host import Region, region_name
from tiering_connectors.vllm import devices
from tiering_connectors.vllm.devices import GpuDevice, HostDevice, device_for
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.geometry import Region as Place
from tiering_connectors.vllm.orders import CopyJob, StepOrders
from tiering_connectors.vllm.worker import Loaded, WorkerHalf

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: `make test` installs it"
)

BLOCKS, PAGE, LAYERS = 6, 512, 3
CONFIG = ConnectorConfig(cpu_bytes_to_use=1 << 20)


class TorchCuda:
    """What is used of `torch.cuda`."""

    def __init__(self, *buses: int) -> None:
        self._buses = buses

    def device_count(self) -> int:
        return len(self._buses)

    def get_device_properties(self, ordinal: int) -> Any:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=self._buses[ordinal], pci_device_id=0)

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> Any:
        return SimpleNamespace(cuda_stream=COMPUTE)


@pytest.fixture
def torch() -> Any:
    """Imported for those tests only that use it: it takes seconds."""
    return pytest.importorskip("torch", reason="needs torch: `make test` installs it")


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    fake = FakeCuda(free_running=True)
    yield fake
    assert fake.violations == []
    fake.end()


def gpu(fake: FakeCuda) -> GpuDevice:
    return GpuDevice(lambda _: fake, has_kernel=True, cuda=TorchCuda(0x3B))


def geometry(places: tuple[Place, ...], per_chunk: int = 2) -> Geometry:
    groups = mini.numbered([mini.full(16, per_chunk)])
    made = Geometry(groups, (places,), 16, BLOCKS, world=1, share_bytes=0)
    return replace(made, share_bytes=made.shares[0].share_bytes)


LAYOUTS = {
    "layers outermost": tuple(Place(i * PAGE * BLOCKS, PAGE, PAGE) for i in range(LAYERS)),
    "blocks outermost": (Place(0, PAGE * LAYERS, PAGE * LAYERS),),
    "padded": tuple(Place(i * PAGE, PAGE * LAYERS, PAGE - 16) for i in range(LAYERS)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_half_over_a_device(
    fake: FakeCuda, tmp_path: Path, layout: str, torch: Any
) -> None:
    """vLLM's layouts for CUDA, pages taken from tensors, a region's share, stores and loads."""
    made = geometry(LAYOUTS[layout])
    tensor = torch.arange(BLOCKS * LAYERS * PAGE).to(torch.uint8)
    original = tensor.clone()
    groups = made.device_pages({"layer": tensor})
    with Region.open(region_name(layout), made.row, 64 << 10, tmp_path) as region:
        fake.own(tensor.numpy(), region.rows_view())
        copier = gpu(fake).open_copier(groups, region, 0, CONFIG)
        half = WorkerHalf(copier, made.block_bytes, MonotonicClock())
        where = [np.array(a, np.int32) for a in ([4, 1, 3], [2, 2, 0], [0, 1, 1])]
        part = BlockMap(*where)
        half.start_stores(StepOrders(stores=[CopyJob(1, (part,))]))
        half.fence(StepOrders(fence=[1]))
        told = half.take_acknowledgements()
        assert told is not None
        assert (told.ended, told.failed) == ({1: 1}, set())
        tensor[:] = 0
        half.start_loads(StepOrders(loads=[CopyJob(2, (part,), "r")]))
        for future in half._loads[2].futures:
            future.result(SECONDS)
        assert half.take_loaded() == Loaded({"r"})
        expected = torch.zeros_like(tensor)
        for place in LAYOUTS[layout]:
            for block in (4, 1, 3):
                at = place.offset + block * place.stride
                expected[at : at + place.page_bytes] = original[at : at + place.page_bytes]
        assert torch.equal(tensor, expected)
        assert fake.pinned == {region.rows_view().ctypes.data: region.rows_view().nbytes}
        half.close()
    assert fake.pinned == {}


@pytest.mark.slow
@needs_vllm
def test_pages_of_vllms_own_offloading_are_found(fake: FakeCuda, torch: Any) -> None:
    from tiering_connectors.vllm.offloading.facts import device_pages_of

    """Views of several tensors with strides of their own, and references to them by group."""
    backing = torch.zeros(BLOCKS, 4 * PAGE, dtype=torch.int8)
    tensors = [
        SimpleNamespace(tensor=backing[:, :PAGE]),
        SimpleNamespace(tensor=backing[:, PAGE:]),
    ]
    refs = [
        [SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE - 8)],
        [SimpleNamespace(tensor_idx=at, page_size_bytes=PAGE) for at in (1, 0)],
    ]
    caches: Any = SimpleNamespace(tensors=tensors, group_data_refs=refs)
    first, second = device_pages_of(caches, 3)
    start = backing.data_ptr()
    assert [(run.address, run.stride, run.page_bytes, run.blocks) for run in first.pages] == [
        (start, 4 * PAGE, PAGE - 8, BLOCKS)
    ]
    assert [run.address - start for run in second.pages] == [PAGE, 0]
    assert second.layout.blocks_per_chunk == 3


def test_memory_smaller_than_described_is_refused(torch: Any) -> None:
    made = geometry(LAYOUTS["layers outermost"])
    short = torch.zeros(BLOCKS * LAYERS * PAGE - 1, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="less than it described"):
        made.device_pages({"layer": short})


def test_a_device_that_cannot_be_used_is_said_at_start(
    fake: FakeCuda, tmp_path: Path, torch: Any
) -> None:
    made = geometry(LAYOUTS["blocks outermost"])
    groups = made.device_pages({"layer": torch.zeros(BLOCKS * LAYERS * PAGE, dtype=torch.uint8)})
    with Region.open(region_name("unusable"), made.row, 64 << 10, tmp_path) as region:
        fake.fail("create_stream")
        with pytest.raises(ConfigError, match="create_stream failed"):
            gpu(fake).open_copier(groups, region, 0, CONFIG)
    assert fake.pinned == {}


def test_further_copiers_of_a_device_take_no_further_descriptors(
    fake: FakeCuda, tmp_path: Path, torch: Any
) -> None:
    """They share the first one's watcher, whose bell is never closed."""
    made = geometry(LAYOUTS["blocks outermost"])
    groups = made.device_pages({"layer": torch.zeros(BLOCKS * LAYERS * PAGE, dtype=torch.uint8)})
    config = CONFIG.model_copy(update={"kernel_below_bytes": 0})
    with Region.open(region_name("again"), made.row, 64 << 10, tmp_path) as region:
        gpu(fake).open_copier(groups, region, 0, config).close()
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            gpu(fake).open_copier(groups, region, 0, config).close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_device_for_it_small_pages_are_copied_by_the_engines(
    fake: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture, torch: Any
) -> None:
    """Triton is here, and no device that it could compile for."""
    caplog.set_level("INFO")
    made = geometry(LAYOUTS["blocks outermost"])
    groups = made.device_pages({"layer": torch.zeros(BLOCKS * LAYERS * PAGE, dtype=torch.uint8)})
    with Region.open(region_name("no kernel"), made.row, 64 << 10, tmp_path) as region:
        gpu(fake).open_copier(groups, region, 0, CONFIG).close()
        assert "small pages are copied by the copy engines" in caplog.text
        caplog.clear()
        none = CONFIG.model_copy(update={"kernel_below_bytes": 0})
        gpu(fake).open_copier(groups, region, 0, none).close()
        assert "small pages" not in caplog.text


def test_the_host_tier_goes_where_the_devices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"0000:3b:00.0": 0, "0000:af:00.0": 1, "0000:d8:00.0": None}
    monkeypatch.setattr(devices.numa, "node_of_device", nodes.__getitem__)

    def nodes_of(*buses: int) -> Any:
        return GpuDevice(lambda _: FakeCuda(), has_kernel=False, cuda=TorchCuda(*buses)).nodes()

    assert nodes_of(0x3B) == {0}
    assert nodes_of(0x3B, 0xAF, 0xD8) == {0, 1}
    assert nodes_of(0xD8) == set()
    unknown = GpuDevice(
        lambda _: FakeCuda(),
        has_kernel=False,
        cuda=SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda _: object()),
    )
    assert unknown.nodes() == set()


def test_the_cpu_backend_copies_as_ever(tmp_path: Path, torch: Any) -> None:
    device = device_for("cpu")
    assert isinstance(device, HostDevice)
    assert device.nodes() == ()
    made = geometry(LAYOUTS["layers outermost"])
    pages = made.pages({"layer": torch.zeros(BLOCKS * LAYERS * PAGE, dtype=torch.uint8)})
    with Region.open(region_name("cpu"), made.row, 64 << 10, tmp_path) as region:
        copier = device.open_copier(pages, region, 0, CONFIG)
        assert isinstance(copier, HostCopier)
        copier.close()


@pytest.mark.parametrize("kind", ["xpu", "hpu"])
def test_other_devices_are_refused_with_a_way_out(kind: str) -> None:
    with pytest.raises(ConfigError) as refused:
        device_for(kind)
    assert f"--device = '{kind}'" in str(refused.value)
    assert "CPUOffloadingSpec" in refused.value.remedy


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("is_rocm", [True, False])
def test_cuda_and_rocm_have_a_runtime_each(monkeypatch: pytest.MonkeyPatch, is_rocm: bool) -> None:
    platforms = pytest.importorskip("vllm.platforms")
    monkeypatch.setattr(
        platforms, "current_platform", SimpleNamespace(is_rocm=lambda: is_rocm), raising=False
    )
    device = device_for("cuda")
    assert isinstance(device, GpuDevice)
    wanted = devices._torch_runtime if is_rocm else devices._cuda_runtime
    assert device._runtimes is wanted
    assert device._has_kernel == (not is_rocm)


def test_without_nvidias_bindings_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_bindings", lambda: False)
    monkeypatch.setattr(devices, "_torch_runtime", lambda ordinal: f"torch {ordinal}")
    assert devices._cuda_runtime.__wrapped__(3) == "torch 3"
