"""What lies in a rank's segments, for whoever looks without being their tier.

Reads files and changes none; needs no lock. Blocking. A tier may be at work meanwhile, so the
numbers are of no single moment, and a frame may have made way for another one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiering.errors import ConfigError
from tiering.tiers.disk import diskio
from tiering.tiers.segments import table as segment_table
from tiering.tiers.segments.files import (
    QUARANTINE_SUFFIX,
    TABLE_NAME,
    TICKS_NAME,
    segment_name,
)
from tiering.tiers.segments.table import HEADER_BYTES, RECORD_BYTES, Geometry


@dataclass(frozen=True, slots=True)
class SegmentSurvey:
    """One rank's segments. `bytes` are those of the chunks' frames, `file_bytes` those of all
    files. Ticks are microseconds since 1970, None without chunks. There are no temp files."""

    chunks: int
    bytes: int
    file_bytes: int
    oldest_tick: int | None
    newest_tick: int | None
    temp_files: int
    quarantined: int


def frames(directory: Path) -> Iterator[tuple[bytes, Path, int]]:
    """Key, file and offset of each frame in the segments at `directory`, as the table has them.

    ConfigError where there is no table to go by.
    """
    with _opened(directory) as (table, geometry, n_slots):
        for records in segment_table.stretches(table, geometry, n_slots):
            for key, slot in zip(records.keys, records.slots.tolist(), strict=True):
                segment, offset = geometry.place(slot)
                yield key, directory / segment_name(segment), offset


def geometry_of(directory: Path) -> Geometry:
    """Whose frames are in `directory`, and how long they are. ConfigError as `frames`."""
    with _opened(directory) as (_, geometry, _):
        return geometry


def survey(directory: Path) -> SegmentSurvey:
    """The segments at `directory` in numbers. ConfigError as `frames`."""
    with _opened(directory) as (table, geometry, n_slots):
        records = segment_table.read(table, geometry, n_slots)
    ticks = np.maximum(records.ticks, _used(directory, n_slots)[records.slots])
    chunks = len(records.keys)
    return SegmentSurvey(
        chunks=chunks,
        bytes=chunks * geometry.frame_bytes,
        file_bytes=sum(map(_size, diskio.children(directory))),
        oldest_tick=int(ticks.min()) if chunks else None,
        newest_tick=int(ticks.max()) if chunks else None,
        temp_files=0,
        quarantined=len(diskio.children(directory.with_suffix(QUARANTINE_SUFFIX))),
    )


@contextmanager
def _opened(directory: Path) -> Iterator[tuple[int, Geometry, int]]:
    """The table's descriptor, what it is of, and the slots it has records for."""
    path = directory / TABLE_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _no_table(path, error.strerror) from error
    try:
        geometry = segment_table.geometry_in(os.pread(descriptor, HEADER_BYTES, 0))
        if geometry is None:
            raise _no_table(path, "not a table of slots")
        # A tier that makes it anew has it shorter than its header for a moment.
        n_slots = max(0, os.fstat(descriptor).st_size - HEADER_BYTES) // RECORD_BYTES
        yield descriptor, geometry, n_slots
    finally:
        os.close(descriptor)


def _used(directory: Path, n_slots: int) -> segment_table.Slots:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(directory / TICKS_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return segment_table.read_ticks(descriptor, n_slots)
        finally:
            os.close(descriptor)
    return np.zeros(n_slots, np.int64)


def _size(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(FileNotFoundError):
        return entry.stat().st_size
    return 0


def _no_table(path: Path, reason: str | None) -> ConfigError:
    remedy = "name a directory <namespace>_r<rank>.segments; opening its tier makes the table anew"
    return ConfigError("directory", str(path.parent), f"{reason}: {path}", remedy)
