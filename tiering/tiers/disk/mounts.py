"""Which kind of file system a directory is on, from Linux's own table of mounts. Blocking."""

from __future__ import annotations

import re
from pathlib import Path

# Where locks and shared memory maps work between the processes that see the files: one machine.
_LOCAL = frozenset(
    {
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs"),
        *("tmpfs", "ramfs", "overlay"),
    }
)


def kind_of(directory: Path) -> str:
    """The type, such as "ext4" or "nfs4"; "" where the table does not say."""
    try:
        table = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return ""
    here, best, kind = str(directory.resolve()), "", ""
    for line in table.splitlines():
        fields, _, source = line.partition(" - ")
        point = _unescaped(fields.split(" ")[4])
        inside = here == point or here.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount covers an earlier one
            best, kind = point, source.split(" ")[0]
    return kind


def is_local(directory: Path) -> bool:
    """Whether only this machine writes there, so that its locks can be trusted."""
    return kind_of(directory) in _LOCAL


def _unescaped(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)
