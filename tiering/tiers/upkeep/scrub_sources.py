"""What a scrubber reads: the chunks of one rank in either layout, in batches of one size.

A source lists chunks on the scrubber's own thread and reads them in any; it trusts nothing that
it has not seen twice, since an engine may replace a chunk while it is looked at. Blocking.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from tiering.errors import ConfigError
from tiering.keys import split_key
from tiering.tiers import frame
from tiering.tiers.disk import diskio
from tiering.tiers.disk.paths import FsPaths, is_shard
from tiering.tiers.files.chunks import GONE
from tiering.tiers.files.limits import QUARANTINED_FILES_MAX
from tiering.tiers.segments import survey as segment_survey
from tiering.tiers.segments import table as segment_table
from tiering.tiers.segments.files import TABLE_NAME
from tiering.tiers.segments.table import RECORD_BYTES
from tiering.tiers.upkeep.namespaces import chunk_files_in
from tiering_kernels.chunkio import BAD_CHECKSUM, HEADER_BYTES, ChunkIo

_LISTED_AT_ONCE = 512


class Verdict(Enum):
    """What a scrubber finds. `VANISHED`: evicted or replaced meanwhile. `STALE`: a slot whose
    table names a chunk that never came to the disk, so a miss and no damage."""

    GOOD = "good"
    VANISHED = "vanished"
    STALE = "stale"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"


class Place(NamedTuple):
    """Where a chunk lies: a file, or a segment and its offset there. `size`: as for
    `ChunkIo.sizes`, of the whole frame."""

    key: bytes
    path: str
    offset: int
    size: int


class Source(ABC):
    """The chunks of one rank, between construction and `close`."""

    @abstractmethod
    def count(self) -> int:
        """How many chunks there are, as far as that can be told at once."""

    @abstractmethod
    def places(self) -> Iterator[list[Place]]:
        """All chunks, some at a time. Raises OSError."""

    @abstractmethod
    def read(
        self, places: Sequence[Place], headers: memoryview, payloads: Sequence[memoryview]
    ) -> list[int]:
        """As `ChunkIo` reads. `places` are of one size, `payloads` as long as that says."""

    @abstractmethod
    def judge(self, place: Place, number: int, header: memoryview) -> tuple[Verdict, str]:
        """What `number` and `header`, which a read gave, say of the chunk; why."""

    @abstractmethod
    def identity(self, place: Place) -> object:
        """Equal, and not None, as long as the chunk there has not been replaced."""

    @abstractmethod
    def refreshed(self, place: Place) -> Place:
        """`place` with the size that it has now."""

    @abstractmethod
    def where(self, place: Place) -> str:
        """How a report calls `place`."""

    @abstractmethod
    def put_aside(self, place: Place) -> bool:
        """Move a damaged chunk out of reach; False where it stays. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Let go of descriptors."""


class FileSource(Source):
    """Layout "files": `paths.rank_dir`; `digest` is what its frames must name."""

    def __init__(self, paths: FsPaths, digest: bytes, io: ChunkIo) -> None:
        self.paths = paths
        self._digest = digest
        self._io = io

    def count(self) -> int:
        with contextlib.suppress(OSError):
            return sum(1 for shard in self._shards() for _ in chunk_files_in(shard))
        return 0

    def places(self) -> Iterator[list[Place]]:
        for shard in self._shards():
            found = [(key, file.path) for key, file in chunk_files_in(shard)]
            for first in range(0, len(found), _LISTED_AT_ONCE):
                some = found[first : first + _LISTED_AT_ONCE]
                sizes = self._io.sizes([path for _, path in some])
                yield [
                    Place(key, path, 0, size) for (key, path), size in zip(some, sizes, strict=True)
                ]

    def read(
        self, places: Sequence[Place], headers: memoryview, payloads: Sequence[memoryview]
    ) -> list[int]:
        return self._io.read_files([place.path for place in places], headers, payloads, direct=True)

    def judge(self, place: Place, number: int, header: memoryview) -> tuple[Verdict, str]:
        if 0 <= number != place.size or 0 <= number <= HEADER_BYTES:
            return Verdict.DAMAGED, f"a file of {number} bytes is no chunk"
        if number >= 0 or number == BAD_CHECKSUM:
            wrong = frame.check_fields(header, place.key, self._digest, place.size - HEADER_BYTES)
            if number == BAD_CHECKSUM:
                wrong = wrong or "bad checksum"
            return (Verdict.GOOD, "") if wrong is None else (Verdict.DAMAGED, wrong)
        return _without_bytes(number)

    def identity(self, place: Place) -> object:
        try:
            found = os.stat(place.path, follow_symlinks=False)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def refreshed(self, place: Place) -> Place:
        return place._replace(size=self._io.sizes([place.path])[0])

    def where(self, place: Place) -> str:
        return place.path

    def put_aside(self, place: Place) -> bool:
        target = self.paths.condemned(place.key)
        diskio.make_private_dirs(self.paths.root, target.parent)
        os.rename(place.path, target)
        if len(os.listdir(target.parent)) > QUARANTINED_FILES_MAX:
            target.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        pass

    def _shards(self) -> Iterator[Path]:
        for shard in diskio.children(self.paths.rank_dir):
            if is_shard(shard.name) and shard.is_dir(follow_symlinks=False):
                yield Path(shard.path)


class SegmentSource(Source):
    """Layout "segments": the slots that the table in `directory` names. ConfigError where there
    is no table to go by, or one of another namespace."""

    def __init__(self, directory: Path, digest: bytes, io: ChunkIo) -> None:
        self._directory = directory
        self._io = io
        self._geometry = segment_survey.geometry_of(directory)
        if self._geometry.digest != digest:
            raise ConfigError(
                "directory",
                str(directory),
                "its table is of another namespace",
                "start its engine, which makes the table anew",
            )
        self._descriptors: dict[str, int] = {}

    def count(self) -> int:
        with contextlib.suppress(OSError, ConfigError):
            return segment_survey.survey(self._directory).chunks
        return 0

    def places(self) -> Iterator[list[Place]]:
        some: list[Place] = []
        for key, path, offset in segment_survey.frames(self._directory):
            some.append(Place(key, str(path), offset, self._geometry.frame_bytes))
            if len(some) == _LISTED_AT_ONCE:
                yield some
                some = []
        yield some

    def read(
        self, places: Sequence[Place], headers: memoryview, payloads: Sequence[memoryview]
    ) -> list[int]:
        try:
            descriptors = [self._descriptor(place.path) for place in places]
        except OSError as error:
            return [-(error.errno or errno.EIO)] * len(places)
        offsets = [place.offset for place in places]
        numbers = self._io.read_slots(descriptors, offsets, headers, payloads)
        if -errno.EINVAL in numbers:
            # Some file systems open a file for direct I/O and then refuse it.
            for descriptor in set(descriptors):
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            numbers = self._io.read_slots(descriptors, offsets, headers, payloads)
        return numbers

    def judge(self, place: Place, number: int, header: memoryview) -> tuple[Verdict, str]:
        geometry = self._geometry
        if number not in (geometry.frame_bytes, BAD_CHECKSUM):
            if number >= 0:
                return Verdict.DAMAGED, f"a slot of {number} bytes, not {geometry.frame_bytes}"
            return _without_bytes(number)
        wrong = frame.check_fields(header, place.key, geometry.digest, geometry.payload_bytes)
        if number == BAD_CHECKSUM:
            if not any(header[: frame.FIELDS_BYTES]):
                return Verdict.STALE, "never written"
            return Verdict.DAMAGED, wrong or "bad checksum"
        if wrong is None:
            return Verdict.GOOD, ""
        other = frame.key_in(header, geometry.digest, geometry.payload_bytes)
        return (Verdict.DAMAGED if other is None else Verdict.STALE), wrong

    def identity(self, place: Place) -> object:
        """The slot's record, as long as it names the chunk."""
        number = int(Path(place.path).stem.rpartition("-")[2])
        slot = number * self._geometry.slots_per_segment + place.offset // self._geometry.slot_bytes
        with contextlib.suppress(OSError):
            table = os.open(self._directory / TABLE_NAME, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                block = os.pread(table, RECORD_BYTES, segment_table.record_at(slot))
            finally:
                os.close(table)
            if segment_table.unpack(self._geometry, block, slot).keys == [place.key]:
                return block
        return None

    def refreshed(self, place: Place) -> Place:
        return place

    def where(self, place: Place) -> str:
        return f"{place.path} at {place.offset} ({split_key(place.key)[0].hex()[:16]})"

    def put_aside(self, place: Place) -> bool:
        return False  # the slots are their engine's, which clears them when it reads them

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _descriptor(self, path: str) -> int:
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            descriptor = _open_around_the_cache(path)
            # Two threads may open one at a time; the later one is kept for all.
            kept = self._descriptors.setdefault(path, descriptor)
            if kept != descriptor:
                os.close(descriptor)
                descriptor = kept
        return descriptor


def _open_around_the_cache(path: str) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)


def _without_bytes(number: int) -> tuple[Verdict, str]:
    if number in GONE:
        return Verdict.VANISHED, ""
    if number == -errno.EINVAL:
        return Verdict.UNREADABLE, "not a regular file"
    return Verdict.UNREADABLE, os.strerror(-number)
