"""The kinds of tier that a simulated run can have, each with what bounds it and how it dies.

Part of `tiering.testing.simulation`. Names the concrete disk tiers, as only `wiring` does else: a
run needs their seams for I/O, threads and time.
"""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path

from tiering.testing.faults import READS, WRITES
from tiering.testing.memory import MemoryTier
from tiering.testing.simworld import ROW_BYTES, Kind, Site
from tiering.tiers.base import Tier
from tiering.tiers.disk.paths import CHUNK_SUFFIX, place_of
from tiering.tiers.files.bookings import disk_bytes
from tiering.tiers.files.limits import Limits, max_bytes_for
from tiering.tiers.files.tier import FsTier
from tiering.tiers.segments.tier import SegmentTier
from tiering.tiers.wrappers.guarded import GuardedTier

FRAME_BYTES = 4096 + ROW_BYTES
SEGMENT_OVERHEAD_BYTES = 5 * 4096

_TEMP = re.compile(r"^(\w+-\d+)-\d+(-\d+)$")


def _memory_tier(site: Site) -> Tier:
    return MemoryTier(site.chunks)


def _files_tier(site: Site) -> Tier:
    tier = FsTier(
        site.root,
        site.namespace,
        site.chunk_bytes,
        limits=Limits(max_bytes=site.max_bytes, min_free_bytes=0),
        durability="batch" if site.is_synced else "none",
        read_path="buffered",
        write_path="buffered",
        io=site.io,
        pool=site.pool,
        clock=site.clock,
        stopwatch=site.clock,
    )
    return _guarded(tier, site)


def _segments_tier(site: Site) -> Tier:
    tier = SegmentTier(
        site.root,
        site.namespace,
        site.chunk_bytes,
        max_bytes=site.max_bytes,
        durability="batch" if site.is_synced else "none",
        read_path="buffered",
        write_path="buffered",
        io=site.io,
        pool=site.pool,
        clock=site.clock,
    )
    return _guarded(tier, site)


def _guarded(tier: Tier, site: Site) -> Tier:
    return GuardedTier(tier, site.clock) if site.is_guarded else tier


def _bytes_of_files(root: Path) -> int:
    """As the tier counts them: with the directories that each file may need."""
    sizes = [
        os.stat(os.path.join(directory, name)).st_size
        for directory, _, names in os.walk(root)
        for name in names
        if name.endswith(CHUNK_SUFFIX)
    ]
    return disk_bytes(len(sizes), sum(sizes))


def _unbooked_files(root: Path) -> set[str]:
    """Their room would be given to others, too."""
    manifest = sqlite3.connect(root / ".manifest" / "manifest.sqlite3", isolation_level=None)
    rows = manifest.execute("SELECT directory, key FROM chunk JOIN place ON place = place.id")
    booked = {f"{directory}/{place_of(key)}" for directory, key in rows}
    manifest.close()
    return {str(path.relative_to(root)) for path in root.glob(f"*_r*/*/*/*{CHUNK_SUFFIX}")} - booked


def _bytes_of_segments(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*.segments/*"))


def _bury_files(root: Path) -> None:
    """Temporary files and the manifest name their writer, who is dead now. Here it is this
    process, which is not."""
    for path in sorted(root.rglob("*.tmp")):
        path.rename(path.with_name(_dead(path.stem) + ".tmp"))
    for path in root.glob(".manifest/*.sqlite3"):
        manifest = sqlite3.connect(path, isolation_level=None)
        names = manifest.execute("SELECT name FROM owner ORDER BY id").fetchall()
        manifest.executemany(
            "UPDATE owner SET name = ? WHERE name = ?", [(_dead(name), name) for (name,) in names]
        )
        manifest.close()


def _dead(name: str) -> str:
    return _TEMP.sub(r"\1-0\2", name)


KINDS = {
    "memory": Kind(_memory_tier),
    "files": Kind(
        _files_tier,
        operations=("sizes", "read_files", "write_files"),
        side_files=r"\.sqlite3(-wal)?$",
        max_bytes=lambda chunks: max_bytes_for(chunks, ROW_BYTES),
        used_bytes=_bytes_of_files,
        unbooked=_unbooked_files,
        bury=_bury_files,
    ),
    "segments": Kind(
        _segments_tier,
        operations=(READS[1], WRITES[1]),
        is_shared=False,
        side_files=r"^(table|ticks)$",
        max_bytes=lambda chunks: chunks * (FRAME_BYTES + 512) + SEGMENT_OVERHEAD_BYTES,
        used_bytes=_bytes_of_segments,
    ),
}
