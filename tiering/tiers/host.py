"""The host tier's memory: one region per engine, mapped by its scheduler and its workers.

Owns the mapping and the ranks' records in the header; which chunk is in which row is the core's
business, and the file's life that of `tiers.hostfile`. `Region.open` and `wait_announced` block,
and are for start-up; the rest never waits and may be called from any thread but during `close`.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import weakref
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiering.clock import MonotonicClock
from tiering.errors import ClosedError, RegionError
from tiering.layout import ALIGNMENT, RowLayout
from tiering.tiers.hostfile import (
    POLL_SECONDS,
    Geometry,
    attach,
    geometry_of,
    inode_of,
    is_region_name,
    join,
    region_name,
    sweep,
)

__all__ = ["DIGEST_BYTES", "SHARED_MEMORY", "Geometry", "Region", "region_name", "sweep"]

ByteArray = npt.NDArray[np.uint8]

SHARED_MEMORY = Path("/dev/shm")
DIGEST_BYTES = 32

_RECORD = struct.Struct("<II32s")  # attached, CRC-32 of the digest, the digest
_ATTACHED = 1

_clock = MonotonicClock()


@contextmanager
def _directory_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RegionError(
            f"the host tier's memory {path} cannot be used ({error.strerror}): "
            f"it needs a directory of shared memory that this user can write to"
        ) from error


class Region:
    """A mapped region: a header, then `rows` rows of `row_bytes`, each on a 4 KiB boundary.

    Made by `open` in any number of processes of one engine, in any order. Views that it hands
    out (`row`, `rows_view`, `share`) are writable and shared with the other processes.
    """

    def __init__(self, path: Path, geometry: Geometry, descriptor: int) -> None:
        """For `open`. `descriptor` is of the file, holds the lock, and belongs to the region."""
        self.path = path
        self.geometry = geometry
        self._inode = os.fstat(descriptor).st_ino
        self._descriptor = descriptor
        self._let_go = weakref.finalize(self, os.close, descriptor)
        # The mapping duplicates the descriptor, and so keeps the lock until it is gone.
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, geometry.total_bytes)
        flat = np.frombuffer(self._memory, np.uint8, offset=geometry.header_bytes)
        self._rows: ByteArray = flat.reshape(geometry.rows, geometry.row_bytes)
        # One read per page maps it here and now, so that no transfer pays for page faults.
        self._rows[:, ::ALIGNMENT].max()

    @classmethod
    def open(
        cls,
        name: str,
        layout: RowLayout,
        capacity_bytes: int,
        directory: Path = SHARED_MEMORY,
        deadline_seconds: float = 60.0,
        ranks: int | None = None,
        nodes: Collection[int] = (),
    ) -> Region:
        """Build the region `name` in `directory`, or attach to it if another process did.

        `name` comes from `region_name`, and its token is unique to one start of one engine.
        `capacity_bytes` is `cpu_bytes_to_use`: the limit for header and rows of all ranks
        together. `deadline_seconds` limits the wait for another process that builds the region,
        counted from its last progress. Dead engines' regions are swept first. `ranks` workers
        will announce themselves; left out, one for each share of a row. `nodes`: where its memory
        is taken from, if this process builds it and the machine has several memory nodes.

        Raises ConfigError where not one chunk fits into `capacity_bytes`, and RegionError where
        `directory` has too little space or cannot be used, where the region was made with
        another geometry, and after the deadline. A program without workers calls `unlink` next.
        """
        if not is_region_name(name):
            raise ValueError(f"{name!r} is not a name made by region_name")
        geometry = Geometry.within(capacity_bytes, layout, layout.ranks if ranks is None else ranks)
        path = directory / name
        with _directory_errors(path):
            descriptor = attach(path, geometry, capacity_bytes, deadline_seconds, nodes)
            return cls(path, geometry, descriptor)

    @classmethod
    def join(
        cls, name: str, directory: Path = SHARED_MEMORY, deadline_seconds: float = 60.0
    ) -> Region:
        """Attach to the region `name` that the workers build, whatever its geometry; it waits for
        them. Raises RegionError as `open` does."""
        path = directory / name
        with _directory_errors(path):
            descriptor, geometry = join(path, deadline_seconds)
            return cls(path, geometry, descriptor)

    @classmethod
    def adopt(cls, descriptor: int, path: Path) -> Region:
        """Map a region by what `descriptor` of another process gave, whether or not the file still
        has its name, `path`. The descriptor belongs to the region from then on; RegionError if it
        is of something else, and then it does not."""
        with _directory_errors(path):
            return cls(path, geometry_of(descriptor, path), descriptor)

    def descriptor(self) -> int:
        """Another descriptor of the file, for a process that is to `adopt` it; the caller's to
        close. The file lives, and is locked, for as long as anyone has one."""
        self._mapped()
        return os.dup(self._descriptor)

    @property
    def lent_descriptor(self) -> int:
        """The region's own, good until `close`."""
        self._mapped()
        return self._descriptor

    def announce(self, rank: int, digest: bytes) -> None:
        """Say that `rank` has the region mapped, with a 32-byte `digest` of what it will keep
        there. RegionError if the rank was announced before: two workers would share its rows."""
        at = self.geometry.record_offset(rank)
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
        if self.announced()[rank] is not None:
            raise RegionError(
                f"rank {rank} of {self.path} is announced twice: two workers were given the "
                f"same rank, or two engines the same id"
            )
        record = _RECORD.pack(_ATTACHED, zlib.crc32(digest), digest)
        self._mapped()[at : at + _RECORD.size] = record

    def announced(self) -> list[bytes | None]:
        """Each rank's digest, or None for a rank that has not announced itself."""
        memory = self._mapped()
        digests: list[bytes | None] = []
        for rank in range(self.geometry.ranks):
            attached, crc, digest = _RECORD.unpack_from(memory, self.geometry.record_offset(rank))
            # The CRC tells a record that is only half visible here yet from a whole one.
            whole = attached == _ATTACHED and crc == zlib.crc32(digest)
            digests.append(digest if whole else None)
        return digests

    def wait_announced(self, deadline_seconds: float) -> list[bytes]:
        """Every rank's digest, once all have announced themselves; RegionError after the
        deadline, naming those that have not."""
        give_up = _clock.now() + deadline_seconds
        while None in (digests := self.announced()):
            if _clock.now() >= give_up:
                missing = [str(rank) for rank, digest in enumerate(digests) if digest is None]
                raise RegionError(
                    f"no worker of rank {', '.join(missing)} attached to {self.path} within "
                    f"{deadline_seconds:g} seconds: look for its error in the log"
                )
            time.sleep(POLL_SECONDS)
        return [digest for digest in digests if digest is not None]

    def unlink(self) -> None:
        """Remove the file's name, once every process has the region mapped: from then on it
        vanishes with its last process, however that ends. May be called twice."""
        if inode_of(self.path) == self._inode:
            self.path.unlink(missing_ok=True)

    def row(self, slot: int) -> memoryview:
        """The `row_bytes` writable bytes of row `slot`; IndexError outside the region."""
        self._mapped()
        if not 0 <= slot < self.geometry.rows:
            raise IndexError(f"row {slot} of {self.geometry.rows}")
        return memoryview(self._rows[slot])

    def rows_view(self) -> ByteArray:
        """All rows: uint8, shape `(rows, row_bytes)`."""
        self._mapped()
        return self._rows[:]

    def generations(self) -> npt.NDArray[np.uint64]:
        """Of each row how often it was given to another chunk: shape `(rows,)`. The core raises
        it before a byte of the next chunk is written there; everybody else only reads."""
        count, offset = self.geometry.rows, self.geometry.generations_offset
        return np.frombuffer(self._mapped(), np.uint64, count, offset)

    def share(self, number: int) -> ByteArray:
        """Share `number` of each row: uint8, shape `(rows, share_bytes)`, strided."""
        self._mapped()
        if not 0 <= number < self.geometry.shares:
            raise IndexError(f"share {number} of rows with {self.geometry.shares}")
        start = number * self.geometry.share_bytes
        return self._rows[:, start : start + self.geometry.share_bytes]

    def close(self) -> None:
        """Unmap and let go of the lock; does not remove the name. May be called twice.

        Memory under a view that is still held by somebody cannot be taken away: it stays
        mapped, and the region alive, until the last such view is gone.
        """
        # Nothing else holds the mapping but views, so dropping it is what unmaps it.
        self._rows = np.empty((0, 0), np.uint8)
        self._memory = None
        self._let_go()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._memory is None:
            return f"<Region {self.path} closed>"
        attached = sum(digest is not None for digest in self.announced())
        named = "" if inode_of(self.path) == self._inode else ", unlinked"
        shape = f"{self.geometry.rows} rows of {self.geometry.row_bytes} bytes"
        return f"<Region {self.path}: {shape}, {attached}/{self.geometry.ranks} ranks{named}>"

    def _mapped(self) -> mmap.mmap:
        if self._memory is None:
            raise ClosedError(f"the host tier's region {self.path} is closed")
        return self._memory
