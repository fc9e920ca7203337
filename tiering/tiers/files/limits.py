"""What a bound on the disk allows: how much for chunks, how much is kept for other things.

Plain values and arithmetic, safe in any thread; nothing here asks a disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiering.tiers.files.bookings import DIRECTORY_BYTES, disk_bytes
from tiering_kernels.chunkio import HEADER_BYTES

QUARANTINED_FILES_MAX = 64
EMPTIED_MIN = 64
# Of `max_bytes`, for damaged chunks and for directories that evictions have left empty.
_QUARANTINE_PART = 64
_EMPTIED_PART = 100
_BYTES_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_bytes` of disk for all under the root, None for no such limit; `min_free_bytes` to be
    left free on its file system, None for what `diskio` says. Above `high_watermark` of what
    these allow, chunks are evicted until `low_watermark` of it."""

    max_bytes: int | None = None
    min_free_bytes: int | None = None
    high_watermark: float = 1.0
    low_watermark: float = 1.0

    def quarantined_max(self, file_bytes: int) -> int:
        """Damaged files of `file_bytes` to be kept aside: few, and a small part of the tier."""
        if self.max_bytes is None:
            return QUARANTINED_FILES_MAX
        return min(QUARANTINED_FILES_MAX, self.max_bytes // _QUARANTINE_PART // file_bytes)

    @property
    def emptied_max(self) -> int:
        """Empty directories that may stay for a while, since a chunk to come may want one."""
        return max(EMPTIED_MIN, (self.max_bytes or 0) // _EMPTIED_PART // DIRECTORY_BYTES)

    def for_chunks(self, file_bytes: int, held_bytes: int, spare_bytes: int) -> tuple[int, int]:
        """Bytes of disk that chunks may take, and down to which to evict, with `held_bytes` of
        chunks there and `spare_bytes` free over what is to be left free."""
        # What is held lies on that disk already, so only what is added takes of what is free.
        allowed = held_bytes + spare_bytes
        if self.max_bytes is not None:
            aside = self.quarantined_max(file_bytes) * file_bytes
            allowed = min(allowed, self.max_bytes - aside - self.max_bytes // _EMPTIED_PART)
        allowed = min(max(0, allowed), _BYTES_MAX)
        return int(allowed * self.high_watermark), int(allowed * self.low_watermark)


def max_bytes_for(chunks: int, chunk_bytes: int) -> int:
    """The smallest `max_bytes` that holds so many chunks of `chunk_bytes`."""
    file_bytes = HEADER_BYTES + chunk_bytes
    wanted = low = disk_bytes(chunks, chunks * file_bytes)
    high = 2 * wanted
    while low < high:
        middle = (low + high) // 2
        if Limits(middle).for_chunks(file_bytes, 0, _BYTES_MAX)[0] >= wanted:
            high = middle
        else:
            low = middle + 1
    return low
