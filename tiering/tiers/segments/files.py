"""The files of a segment tier: preallocated segments of fixed slots, their table, the lock.

    <namespace>_r<rank>.segments/   lock   table   ticks   segment-<nnnnn>.kv
    <namespace>_r<rank>.quarantine/ frames that were found damaged

`ticks` has one big-endian int64 a slot, its last use; a table's record has the tick of its write.
Whoever holds the lock is the only writer. Blocking, for the tier's threads; a slot and its record
belong to whom the index gave them, so nothing here is locked. `max_bytes` bounds the first
directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiering.errors import ConfigError
from tiering.tiers import frame
from tiering.tiers.disk import diskio
from tiering.tiers.disk.diskio import Direct
from tiering.tiers.segments import table as segment_table
from tiering.tiers.segments.table import HEADER_BYTES, RECORD_BYTES, TICK_BYTES, Geometry, Records

SEGMENT_BYTES_MAX = 1 << 30
SEGMENTS_MAX = 256
"""Segments are larger than SEGMENT_BYTES_MAX rather than more: each costs descriptors."""

LOCK_NAME = "lock"
LOCK_SECONDS_MAX = 1.0
"""`tiering gc` has the lock for a moment only."""
TABLE_NAME = "table"
TICKS_NAME = "ticks"
QUARANTINE_SUFFIX = ".quarantine"

# The lock, the table's header, and what file systems round up.
_OVERHEAD_BYTES = 4 * HEADER_BYTES
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def segment_name(number: int) -> str:
    return f"segment-{number:05d}.kv"


def slots_in(max_bytes: int, geometry: Geometry) -> int:
    """How many slots, each with its record and tick, fit in `max_bytes`."""
    slot_bytes = geometry.slot_bytes + RECORD_BYTES + TICK_BYTES
    return max(0, max_bytes - _OVERHEAD_BYTES) // slot_bytes


class SegmentFiles:
    """The directory `directory` between `open` and `close`."""

    def __init__(
        self,
        directory: Path,
        digest: bytes,
        payload_bytes: int,
        max_bytes: int,
        min_free_bytes: int | None,
    ) -> None:
        """`digest` names whose chunks these are. Without `min_free_bytes` the floor is that of
        layout "files". ConfigError where `max_bytes` holds no chunk."""
        self.directory = directory
        # How many slots a segment has, `open` decides.
        self.geometry = Geometry(digest, payload_bytes, slots_per_segment=1)
        self.slots_max = slots_in(max_bytes, self.geometry)
        if self.slots_max < 1:
            least = _OVERHEAD_BYTES + self.geometry.slot_bytes + RECORD_BYTES + TICK_BYTES
            raise ConfigError(
                "secondary_tiers[].max_bytes",
                max_bytes,
                f"one chunk with its header and index needs {least} bytes",
                "allow more, as much as the disk can spare",
            )
        usual = min(SEGMENT_BYTES_MAX, max_bytes // 4) // self.geometry.slot_bytes
        at_least = -(-self.slots_max // SEGMENTS_MAX)
        self._usual_slots = min(self.slots_max, max(1, usual, at_least))
        self._min_free_bytes = min_free_bytes
        self.direct = Direct(reads=False, writes=False)
        self._identity = (0, 0)
        self._lock = self._table = self._ticks = -1
        self._read_descriptors: list[int] = []
        self._write_descriptors: list[int] = []
        self.n_slots = 0
        self.needs_rebuild = False

    @property
    def n_segments(self) -> int:
        return len(self._read_descriptors)

    @property
    def quarantine(self) -> Path:
        return self.directory.with_suffix(QUARANTINE_SUFFIX)

    def open(self, direct: Direct) -> None:
        """Open what is there, without what `max_bytes` has no room for any more. REQUIRES: this
        is the lock's holder. With `needs_rebuild`, then, `keys_in` and `rebuild` are next, else
        `load`. Raises OSError."""
        self.direct = direct
        found = os.stat(self.directory)
        self._identity = (found.st_dev, found.st_ino)
        self._table = self._open_or_make(TABLE_NAME)
        self._ticks = self._open_or_make(TICKS_NAME)
        header = os.pread(self._table, HEADER_BYTES, 0)
        geometry = segment_table.geometry_in(header)
        ours = self.geometry
        known = geometry is not None and (geometry.digest, geometry.payload_bytes) == (
            ours.digest,
            ours.payload_bytes,
        )
        per_segment = geometry.slots_per_segment if geometry and known else self._guessed_slots()
        self.geometry = Geometry(ours.digest, ours.payload_bytes, per_segment)
        self._open_segments()
        table_bytes = segment_table.record_at(self.n_slots)
        self.needs_rebuild = not known or os.fstat(self._table).st_size < table_bytes
        os.ftruncate(self._table, 0 if self.needs_rebuild else table_bytes)
        os.ftruncate(self._table, table_bytes)
        os.ftruncate(self._ticks, self.n_slots * TICK_BYTES)

    def take_lock(self) -> None:
        """Be the only one; ConfigError, with the holder's process, where another is, and stays.
        FileNotFoundError where the directory was moved away, as `tiering gc` does."""
        path = self.directory / LOCK_NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            if not diskio.lock(descriptor, LOCK_SECONDS_MAX):
                raise ConfigError(
                    "secondary_tiers[].root_dir",
                    str(self.directory.parent),
                    f"another engine, of process {holder_of(descriptor)}, keeps its segments there",
                    'give each engine its own root_dir, or share one with layout "files"',
                )
            found, named = os.fstat(descriptor), path.lstat()
            if (found.st_dev, found.st_ino) != (named.st_dev, named.st_ino):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        except BaseException:
            os.close(descriptor)
            raise
        self._lock = descriptor
        os.fchmod(descriptor, 0o600)
        with contextlib.suppress(OSError):  # a full disk must not keep a tier from being read
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)

    def load(self) -> Records:
        """What the table says of the slots there are, with the later tick of both files."""
        records = segment_table.read(self._table, self.geometry, self.n_slots)
        used = segment_table.read_ticks(self._ticks, self.n_slots)[records.slots]
        return replace(records, ticks=np.maximum(records.ticks, used))

    def keys_in(self, span: range) -> list[bytes | None]:
        """The keys that the header pages of the slots in `span` name, None where one cannot be
        read or names none."""
        page = diskio.aligned_page()
        return [self._key_in(slot, page) for slot in span]

    def rebuild(self, keys: Sequence[bytes | None]) -> Records:
        """Make the table anew from the `keys` of the slots. Their order is all the recency there
        is; of equal keys the last is kept."""
        slots = sorted({key: slot for slot, key in enumerate(keys) if key is not None}.values())
        kept = [key for slot in slots if (key := keys[slot]) is not None]
        ticks = list(range(1, len(slots) + 1))
        self.set_records(slots, kept, ticks)
        # The header last: half a table is none.
        _write_all(self._table, self.geometry.header, 0)
        self.needs_rebuild = False
        at = np.array(slots, np.int64)
        return Records(at, kept, np.array(ticks, np.int64), at)

    def grow(self) -> bool:
        """Make more slots, up to the end of a segment; False where nothing more can be had."""
        try:
            wanted = self._slots_to_make()
            while wanted >= 1:
                try:
                    self._make_slots(wanted)
                    return True
                except OSError as error:
                    if error.errno not in diskio.NO_SPACE:
                        raise
                    # A quota, or blocks that the file system needs for itself.
                    wanted //= 2
        except OSError:
            # What is there goes on: too many descriptors, a root that is gone.
            return False
        return False

    def set_records(
        self, slots: Sequence[int], keys: Sequence[bytes], ticks: Sequence[int]
    ) -> None:
        """Say in the table what `slots`, ascending, hold from now on."""
        packed = [
            segment_table.pack(self.geometry, *row) for row in zip(slots, keys, ticks, strict=True)
        ]
        for at, count in segment_table.runs(slots):
            data = b"".join(packed[at : at + count])
            _write_all(self._table, data, segment_table.record_at(slots[at]))

    def clear_records(self, slots: Sequence[int]) -> None:
        """Say in the table that `slots`, ascending, hold nothing."""
        for at, count in segment_table.runs(slots):
            offset = segment_table.record_at(slots[at])
            _write_all(self._table, bytes(count * RECORD_BYTES), offset)

    def write_ticks(self, stretches: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> None:
        """Write ticks of neighbouring slots, each stretch from the slot given on."""
        for first, ticks in stretches:
            _write_all(self._ticks, ticks.astype(">i8").tobytes(), first * TICK_BYTES)

    def to_read(self, slot: int) -> tuple[int, int]:
        """The descriptor to read `slot` from, and its offset."""
        segment, offset = self.geometry.place(slot)
        return self._read_descriptors[segment], offset

    def to_write(self, slot: int) -> tuple[int, int]:
        """The descriptor to write `slot` to, and its offset."""
        segment, offset = self.geometry.place(slot)
        return self._write_descriptors[segment], offset

    def where(self, slot: int) -> str:
        """How errors call the place of `slot`."""
        segment, offset = self.geometry.place(slot)
        return f"{self.directory / segment_name(segment)} at {offset}"

    def require_place(self) -> None:
        """Refuse to write where the directory is not the one that was opened: its file system
        is gone, or somebody moved it. What is open can still be read. Raises OSError."""
        found = os.stat(self.directory)
        if (found.st_dev, found.st_ino) != self._identity:
            raise OSError(f"{self.directory} is not what it was at start; mount it again")

    def sync_table(self) -> None:
        os.fdatasync(self._table)

    def sync(self) -> None:
        """Have everything on the disk, names too."""
        for descriptor in (*self._write_descriptors, self._table, self._ticks):
            os.fdatasync(descriptor)
        diskio.sync_directories([str(self.directory)])

    def close(self) -> None:
        """Let go of all descriptors, the lock's last. May be called twice."""
        for descriptor in {*self._read_descriptors, *self._write_descriptors}:
            os.close(descriptor)
        self._read_descriptors, self._write_descriptors = [], []
        for descriptor in (self._table, self._ticks, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._table = self._ticks = self._lock = -1

    # Parts of the above

    def _open_or_make(self, name: str) -> int:
        path = self.directory / name
        try:
            return diskio.create_private(path, os.O_RDWR | os.O_CLOEXEC)
        except FileExistsError:
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _segment_slots(self, number: int) -> int:
        """The slots that there is room for in the file of segment `number`; -1 without one."""
        try:
            found = os.stat(self.directory / segment_name(number), follow_symlinks=False)
        except FileNotFoundError:
            return -1
        return found.st_size // self.geometry.slot_bytes

    def _guessed_slots(self) -> int:
        """Slots in a segment, where no table says it: the first of several segments is full."""
        first = self._segment_slots(0)
        if self._segment_slots(1) >= 0:
            return max(1, first)
        return max(self._usual_slots, first)

    def _open_segments(self) -> None:
        """Open the segments that hold the first slots without a gap; remove what is behind."""
        per_segment = self.geometry.slots_per_segment
        number = self.n_slots = 0
        while self.n_slots == number * per_segment < self.slots_max:
            slots = min(self._segment_slots(number), per_segment, self.slots_max - self.n_slots)
            if slots < 1:
                break
            self._open_segment(number)
            os.ftruncate(self._write_descriptors[number], slots * self.geometry.slot_bytes)
            self.n_slots += slots
            number += 1
        for path in self.directory.glob("segment-*.kv"):
            if path.name not in {segment_name(kept) for kept in range(number)}:
                path.unlink()

    def _open_segment(self, number: int) -> None:
        path = self.directory / segment_name(number)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        direct = {True: os.O_DIRECT, False: 0}
        reads = os.open(path, flags | direct[self.direct.reads])
        writes = reads
        try:
            if self.direct.writes != self.direct.reads:
                writes = os.open(path, flags | direct[self.direct.writes])
        except BaseException:
            os.close(reads)
            raise
        self._read_descriptors.append(reads)
        self._write_descriptors.append(writes)

    def _slots_to_make(self) -> int:
        """How many slots to make next, in one segment."""
        self.require_place()
        per_segment = self.geometry.slots_per_segment
        wanted = min(
            per_segment - self.n_slots % per_segment,
            self.slots_max - self.n_slots,
        )
        spare_bytes = diskio.spare_bytes(self.directory, self._min_free_bytes)
        slot_bytes = self.geometry.slot_bytes + RECORD_BYTES + TICK_BYTES
        return min(wanted, spare_bytes // slot_bytes)

    def _make_slots(self, count: int) -> None:
        segment, offset = self.geometry.place(self.n_slots)
        _allocate(self._table, segment_table.record_at(self.n_slots), count * RECORD_BYTES)
        _allocate(self._ticks, self.n_slots * TICK_BYTES, count * TICK_BYTES)
        path = self.directory / segment_name(segment)
        if offset == 0:
            os.close(diskio.create_private(path, os.O_RDWR))
        try:
            if offset == 0:
                self._open_segment(segment)
            _allocate(self._write_descriptors[segment], offset, count * self.geometry.slot_bytes)
        except OSError:
            if offset == 0:
                self._drop_segment(segment)
            else:
                os.ftruncate(self._write_descriptors[segment], offset)
            raise
        self.n_slots += count

    def _drop_segment(self, number: int) -> None:
        """Undo a segment that could not be allocated: nobody has heard of its slots."""
        (self.directory / segment_name(number)).unlink(missing_ok=True)
        if self.n_segments > number:
            for descriptor in {self._read_descriptors.pop(), self._write_descriptors.pop()}:
                os.close(descriptor)

    def _key_in(self, slot: int, page: memoryview) -> bytes | None:
        descriptor, offset = self.to_read(slot)
        try:
            if os.preadv(descriptor, [page], offset) < len(page):
                return None
        except OSError:
            return None
        return frame.key_in(page, self.geometry.digest, self.geometry.payload_bytes)


def _allocate(descriptor: int, offset: int, count: int) -> None:
    """Have `count` bytes from `offset` on be the file's, so that no write finds the disk full."""
    try:
        os.posix_fallocate(descriptor, offset, count)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(descriptor, offset + count)


def holder_of(descriptor: int) -> str:
    """The process that says, in the open lock file, that it holds it."""
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
