"""Chunks to and from slots, a span of a batch at a time: the blocking part of a segment tier.

Runs in the pool's threads and keeps no state about chunks; a slot is its caller's alone, or is
only read, while it is worked on. The order of every write: the old record is cleared, the frame
is written, the new record is set. So a record that is there names a frame that was once whole.
Nothing raises for one chunk, or for OSError: there is one verdict for each.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from tiering.keys import split_key
from tiering.tiers import frame
from tiering.tiers.disk import diskio
from tiering.tiers.segments.files import SegmentFiles
from tiering_kernels.chunkio import BAD_CHECKSUM, ChunkIo

QUARANTINED_FILES_MAX = 64


class Kind(Enum):
    """What became of one chunk, and so of its slot and record."""

    DONE = "done"
    STALE = "stale"
    DAMAGED_CHECKSUM = "damaged_checksum"
    DAMAGED_FRAME = "damaged_frame"
    FULL = "full"
    BAD_SLOT = "bad_slot"
    ERROR = "error"


class Verdict(NamedTuple):
    """`reason` is for errors; `is_cleared` says that the table no longer names the slot."""

    kind: Kind
    reason: str = ""
    is_cleared: bool = False


DONE = Verdict(Kind.DONE)
_FREED = (Kind.STALE, Kind.DAMAGED_CHECKSUM, Kind.DAMAGED_FRAME)


class SlotIo:
    """Moves chunks of `files` with the engine `io`; `sync` has each on the disk before it counts
    as written."""

    def __init__(self, files: SegmentFiles, io: ChunkIo, sync: bool) -> None:
        self._files = files
        self._io = io
        self._sync = sync
        self._digest = files.geometry.digest
        self._payload_bytes = files.geometry.payload_bytes
        self._frame_bytes = files.geometry.frame_bytes
        self._pages = diskio.HeaderPages()

    def write(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        ticks: Sequence[int],
        buffers: Sequence[memoryview],
        uncleared: frozenset[int],
    ) -> list[Verdict]:
        """Store `buffers` in `slots`, ascending, and book them."""
        files = self._files
        try:
            files.require_place()
            files.clear_records([slot for slot in slots if slot in uncleared])
        except OSError as error:
            return [_failed(error)] * len(slots)
        headers = self._pages.lease(len(slots))
        for key, header in zip(keys, diskio.pages(headers), strict=True):
            frame.pack_fields(header, key, self._digest, self._payload_bytes)
        descriptors, offsets = _columns(map(files.to_write, slots))
        numbers = self._io.write_slots(descriptors, offsets, headers, buffers)
        whole = [at for at, number in enumerate(numbers) if number == self._frame_bytes]
        verdicts = [self._write_verdict(*pair) for pair in zip(slots, numbers, strict=True)]
        try:
            if self._sync:
                for descriptor in {descriptors[at] for at in whole}:
                    os.fdatasync(descriptor)
            files.set_records(
                [slots[at] for at in whole],
                [keys[at] for at in whole],
                [ticks[at] for at in whole],
            )
            if self._sync:
                files.sync_table()
        except OSError as error:
            for at in whole:
                verdicts[at] = _failed(error)
        return verdicts

    def read(
        self, slots: Sequence[int], keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[Verdict]:
        """Fill `buffers` from `slots`, and believe each only if its frame vouches for it. What
        is not the frame of its key is no longer in the table afterwards."""
        headers = self._pages.lease(len(slots))
        descriptors, offsets = _columns(map(self._files.to_read, slots))
        numbers = self._io.read_slots(descriptors, offsets, headers, buffers)
        return [
            self._read_verdict(*row)
            for row in zip(slots, keys, numbers, diskio.pages(headers), strict=True)
        ]

    def clear(self, slots: Sequence[int]) -> list[Verdict]:
        """Take `slots`, in any order, out of the table."""
        try:
            self._files.clear_records(sorted(slots))
        except OSError as error:
            return [_failed(error)] * len(slots)
        return [Verdict(Kind.DONE, is_cleared=True)] * len(slots)

    def _write_verdict(self, slot: int, number: int) -> Verdict:
        if number == self._frame_bytes:
            return DONE
        if -number in diskio.NO_SPACE:
            return Verdict(Kind.FULL)
        reason = f"{os.strerror(-number)}: {self._files.where(slot)}"
        return Verdict(Kind.BAD_SLOT if -number == errno.EIO else Kind.ERROR, reason)

    def _read_verdict(self, slot: int, key: bytes, number: int, header: memoryview) -> Verdict:
        kind, wrong = self._judge(key, number, header)
        if kind is Kind.DONE:
            return DONE
        where = self._files.where(slot)
        if kind not in _FREED:
            return Verdict(kind, f"{wrong}: {where}")
        if kind is not Kind.STALE:
            self._copy_away(slot, key)
        try:
            self._files.clear_records([slot])
        except OSError as error:
            reason = f"{wrong}; {where} was taken out of use, but only until a restart ({error})"
            return Verdict(kind, reason)
        return Verdict(kind, f"{wrong}; {where} was taken out of use", is_cleared=True)

    def _judge(self, key: bytes, number: int, header: memoryview) -> tuple[Kind, str]:
        if number == self._frame_bytes:
            wrong = frame.check_fields(header, key, self._digest, self._payload_bytes)
            if wrong is None:
                return Kind.DONE, ""
            other = frame.key_in(header, self._digest, self._payload_bytes)
            return Kind.DAMAGED_FRAME if other is None else Kind.STALE, wrong
        if number == BAD_CHECKSUM:
            if not any(header[: frame.FIELDS_BYTES]):
                return Kind.STALE, "never written"
            wrong = frame.check_fields(header, key, self._digest, self._payload_bytes)
            if wrong is None:
                return Kind.DAMAGED_CHECKSUM, "bad checksum"
            return Kind.DAMAGED_FRAME, wrong
        if number >= 0:
            return Kind.DAMAGED_FRAME, f"slot of {number} bytes, not {self._frame_bytes}"
        return Kind.ERROR, os.strerror(-number)

    def _copy_away(self, slot: int, key: bytes) -> None:
        """Keep the damaged frame for whoever looks into it, while there is room and it can be."""
        block_hash, group = split_key(key)
        target = self._files.quarantine / f"{block_hash.hex()[:64]}_g{group}.bin"
        try:
            diskio.make_private_dir(target.parent)
            if len(os.listdir(target.parent)) >= QUARANTINED_FILES_MAX:
                return
            page = mmap.mmap(-1, self._files.geometry.slot_bytes)
            descriptor, offset = self._files.to_read(slot)
            got = os.preadv(descriptor, [page], offset)
            target.unlink(missing_ok=True)
            copy = diskio.create_private(target, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(copy, memoryview(page)[: min(got, self._frame_bytes)])
            finally:
                os.close(copy)
            if len(os.listdir(target.parent)) > QUARANTINED_FILES_MAX:
                target.unlink(missing_ok=True)  # others came at the same time
        except OSError:
            # The damage itself is told and counted; only the evidence is lost.
            return


def _columns(places: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    descriptors, offsets = zip(*places, strict=True)
    return list(descriptors), list(offsets)


def _failed(error: OSError) -> Verdict:
    # Never the error itself: its traceback would keep the caller's buffers alive.
    if error.errno in diskio.NO_SPACE:
        return Verdict(Kind.FULL)
    return Verdict(Kind.ERROR, str(error))
