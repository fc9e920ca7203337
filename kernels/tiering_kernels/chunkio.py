"""Batches of framed chunks to and from files: what an engine does, and which engines there are.

A frame is one header page and a payload, `HEADER_BYTES + payload` bytes; the last `CHECKSUM_BYTES`
of the header are XXH3-128 (canonical form) over everything before them and then the payload.
An engine moves whole frames and computes that checksum on the way; what the rest of the header
says is the caller's business. Calls block, may come from any thread at once, let go of the
interpreter lock while they work, keep no reference to a buffer, and never raise for one item:
each gets a number.

Numbers: the bytes of the frame where all went well; for a read, any other number >= 0 is the
size of what lies there instead, and nothing was filled that may be used; -errno for an error;
and the two values below. One item's trouble is not its neighbours'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

HEADER_BYTES = 4096
CHECKSUM_BYTES = 16
CHECKSUM_AT = HEADER_BYTES - CHECKSUM_BYTES

BAD_CHECKSUM = -100_001
"""A read: a whole frame of the right size whose checksum is wrong, both times it was read."""

UNNAMED = -100_002
"""A write: whole under its temporary name; the directory of its final name does not exist."""

Engine = Literal["uring", "threads", "portable"]
ENGINES: tuple[Engine, ...] = ("uring", "threads", "portable")


class ChunkIo(Protocol):
    """`headers` is one writable buffer of HEADER_BYTES for each item, aligned to 4096 for direct
    I/O; `payloads[i]` are C-contiguous, of one length for the whole batch and not empty. Payloads
    whose address or length is no multiple of 4096 are copied through memory that is, where
    `direct` or a descriptor's O_DIRECT asks for it. ValueError where a batch does not fit together
    or a buffer to fill is read-only."""

    @property
    def engine(self) -> Engine: ...

    def sizes(self, paths: Sequence[str]) -> list[int]:
        """The size of each regular file, without following a link; -errno, -ENOENT where there
        is none, -EINVAL where it is something else."""
        ...

    def read_files(
        self,
        paths: Sequence[str],
        headers: memoryview,
        payloads: Sequence[memoryview],
        direct: bool,
    ) -> list[int]:
        """Fill header and payload i from `paths[i]`. A file that was moved away or replaced while
        it was read is -ESTALE, whatever was read. A checksum is called bad after reading twice.
        Where the kernel refuses direct I/O for a file (EINVAL), that file is read without."""
        ...

    def write_files(
        self,
        temps: Sequence[str],
        finals: Sequence[str],
        headers: memoryview,
        payloads: Sequence[memoryview],
        reuse: Sequence[bool],
        direct: bool,
        sync: bool,
    ) -> list[int]:
        """Fill in the checksum of each header, write the frame as `temps[i]`, rename it to
        `finals[i]`. With `reuse[i]` the file `temps[i]` is there already, is overwritten in place
        and cut to size; else it is made, mode 0600 whatever the umask, and must not exist. With
        `sync` its data is on the disk before it gets its name. On any error the temporary file is
        gone; not for UNNAMED."""
        ...

    def read_slots(
        self,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        headers: memoryview,
        payloads: Sequence[memoryview],
    ) -> list[int]:
        """Fill header and payload i from the frame at `offsets[i]` of `descriptors[i]`, whose
        flags stay as they are: what direct I/O refuses is -EINVAL."""
        ...

    def write_slots(
        self,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        headers: memoryview,
        payloads: Sequence[memoryview],
    ) -> list[int]:
        """Fill in the checksum of each header and write the frame to its place. With O_DIRECT a
        slot is as long as the frame rounded up to 4096, and the rest of it is zeroed."""
        ...


def check_batch(
    headers: memoryview, payloads: Sequence[memoryview], *lengths: int, fills: bool
) -> bool:
    """Whether all payloads can be written to; ValueError where these, and whatever has `lengths`,
    are no batch, or none to fill. For engines."""
    count = len(payloads)
    for length in lengths:
        if length != count:
            raise ValueError(f"{count} payloads with {length} of something else")
    if headers.nbytes != count * HEADER_BYTES:
        raise ValueError(f"{count} payloads with headers of {headers.nbytes} bytes")
    kinds = {(payload.nbytes, payload.readonly) for payload in payloads}
    sizes = {size for size, _ in kinds}
    if len(sizes) > 1 or 0 in sizes:
        told = ", ".join(map(str, sorted(sizes)))
        raise ValueError(f"payloads of a batch are not empty and of one length, not {told}")
    writable = not any(readonly for _, readonly in kinds)
    if headers.readonly or (fills and not writable):
        raise ValueError("a buffer to fill is read-only")
    return writable


class EngineUnavailable(RuntimeError):
    """The engine that was asked for cannot work here; says why."""
