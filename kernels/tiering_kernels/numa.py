"""On which of a machine's memory nodes memory lies: the kernel's calls, for Linux.

Nothing raises for what a kernel does not offer or allow; it is said in the return value. Nodes are
those under /sys/devices/system/node.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection
from pathlib import Path

SYSFS = Path("/sys")

_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}  # mbind, get_mempolicy
_PREFERRED, _INTERLEAVE = 1, 3
_NODE_OF_ADDRESS = 3  # MPOL_F_NODE | MPOL_F_ADDR
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_NODES_MAX = 1024


def node_of_device(bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """The node that a PCI device is at, such as `0000:3b:00.0`; None where it is not known, or the
    machine has one node only."""
    if len(nodes(sysfs)) < 2:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node in nodes(sysfs) else None


def nodes(sysfs: Path = SYSFS) -> set[int]:
    """The nodes that have memory; none where the kernel does not say."""
    try:
        text = (sysfs / "devices/system/node/has_memory").read_text()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def place(address: int, size_bytes: int, wanted: Collection[int]) -> str | None:
    """Have pages that are not there yet taken from the node `wanted`, as long as it has any; from
    several nodes in turn. `address` is of a page. None, or why it could not be done.

    Of a file in memory it holds for the file, whoever maps it.
    """
    calls = _CALLS.get(platform.machine())
    if calls is None or not wanted:
        return "no node is known" if not wanted else f"not for {platform.machine()}"
    mask = (ctypes.c_ulong * (_NODES_MAX // _BITS))()
    for node in wanted:
        mask[node // _BITS] |= 1 << node % _BITS
    mode = _PREFERRED if len(wanted) == 1 else _INTERLEAVE
    done = _libc().syscall(
        *map(ctypes.c_long, (calls[0], address, size_bytes, mode)),
        mask,
        *map(ctypes.c_long, (_NODES_MAX, 0)),
    )
    return None if done == 0 else os.strerror(ctypes.get_errno())


def node_of(address: int) -> int | None:
    """The node of a page that is there; None where the kernel does not say."""
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return None
    found = ctypes.c_int(-1)
    done = _libc().syscall(
        ctypes.c_long(calls[1]),
        ctypes.byref(found),
        *map(ctypes.c_long, (0, 0, address, _NODE_OF_ADDRESS)),
    )
    return found.value if done == 0 else None


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
