"""Memory nodes: which one a device is at, and where the host tier's pages come from."""

from __future__ import annotations

import logging
import mmap
from ctypes import addressof, c_char
from pathlib import Path

import pytest

from regions import CAPACITY, open_here
from tiering.testing.clocks import ManualClock
from tiering.tiers import hostfile
from tiering.tiers.host import SHARED_MEMORY, region_name
from tiering_kernels import numa

BUS_ID = "0000:3b:00.0"
ONLINE = sorted(numa.nodes())
needs_nodes = pytest.mark.skipif(not ONLINE, reason="this kernel has no memory nodes")


def machine(root: Path, nodes: str, of_device: str | None) -> Path:
    node = root / "devices/system/node"
    node.mkdir(parents=True)
    (node / "has_memory").write_text(nodes)
    device = root / "bus/pci/devices" / BUS_ID
    device.mkdir(parents=True)
    if of_device is not None:
        (device / "numa_node").write_text(of_device)
    return root


@pytest.mark.parametrize(
    ("nodes", "of_device", "found"),
    [
        ("0-1\n", "1\n", 1),
        ("0,2-3\n", "2\n", 2),
        ("0\n", "0\n", None),  # nothing to choose
        ("0-1\n", "-1\n", None),  # the firmware does not say
        ("0-1\n", "5\n", None),  # a node without memory
        ("0-1\n", "", None),
        ("\n", "0\n", None),
        ("0-1\n", None, None),
    ],
)
def test_the_node_of_a_device(
    tmp_path: Path, nodes: str, of_device: str | None, found: int | None
) -> None:
    assert numa.node_of_device(BUS_ID, machine(tmp_path, nodes, of_device)) == found


def test_no_node_is_known_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path) == set()
    assert numa.node_of_device(BUS_ID, tmp_path) is None


@needs_nodes
def test_pages_come_from_the_node_that_was_asked_for() -> None:
    """Asked of the kernel, page by page."""
    with mmap.mmap(-1, 8 * mmap.PAGESIZE) as memory:
        start = c_char.from_buffer(memory)
        address = addressof(start)
        assert numa.place(address, len(memory), [ONLINE[-1]]) is None
        memory[:] = bytes(len(memory))
        pages = range(address, address + len(memory), mmap.PAGESIZE)
        assert {numa.node_of(page) for page in pages} == {ONLINE[-1]}
        assert numa.place(address, len(memory), [1000]) == "Invalid argument"
        assert numa.place(address, len(memory), []) == "no node is known"
        del start


@needs_nodes
def test_the_region_is_put_where_the_devices_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    name = region_name(f"numa {caplog}")
    with open_here(SHARED_MEMORY, name=name, nodes=ONLINE) as region:
        region.unlink()
        assert numa.node_of(region.rows_view().ctypes.data) in ONLINE
        assert not region.rows_view().any()
        assert region.geometry.total_bytes == CAPACITY
    assert any("on memory node" in record.getMessage() for record in caplog.records)


def test_a_region_that_cannot_be_put_there_is_built_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = region_name(f"nowhere {caplog}")
    with open_here(SHARED_MEMORY, name=name, nodes=[1000]) as region:
        region.unlink()
        assert region.rows_view().nbytes == 3 * 4096
    (warning,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "cannot be put on memory node 1000" in warning.getMessage()


def test_a_large_region_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    monkeypatch.setattr(hostfile, "_clock", clock)
    monkeypatch.setattr(hostfile, "_BUILD_STEP_BYTES", 4096)
    with (tmp_path / "file").open("w+b") as file:
        now = clock.now

        def later() -> float:
            clock.advance(4)
            return now()

        monkeypatch.setattr(clock, "now", later)
        hostfile._fill(file.fileno(), 9 * 4096 + 1)
        assert file.seek(0, 2) == 9 * 4096 + 1
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert all(line.endswith("GB ready") for line in told)
