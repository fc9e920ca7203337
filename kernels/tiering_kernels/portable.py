"""The engine without native code: the same batches over `os`, one item after the other.

`os` lets go of the interpreter lock in each call, so several threads do overlap; what it costs
over the native engines is Python between the calls. Also the reference that those are tested
against.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import numpy as np
import xxhash

from tiering_kernels.chunkio import (
    BAD_CHECKSUM,
    CHECKSUM_AT,
    HEADER_BYTES,
    UNNAMED,
    Engine,
    check_batch,
)


class PortableIo:
    """See `tiering_kernels.chunkio.ChunkIo`."""

    engine: Engine = "portable"

    def __init__(self) -> None:
        self._local = threading.local()

    def sizes(self, paths: Sequence[str]) -> list[int]:
        return [_size(path) for path in paths]

    def read_files(
        self,
        paths: Sequence[str],
        headers: memoryview,
        payloads: Sequence[memoryview],
        direct: bool,
    ) -> list[int]:
        check_batch(headers, payloads, len(paths), fills=True)
        return list(map(self._read_file, paths, _pages(headers), payloads, repeat(direct)))

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
        check_batch(headers, payloads, len(temps), len(finals), len(reuse), fills=False)
        pages = _pages(headers)
        same = repeat(direct), repeat(sync)
        return list(map(self._write_file, temps, finals, pages, payloads, reuse, *same))

    def read_slots(
        self,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        headers: memoryview,
        payloads: Sequence[memoryview],
    ) -> list[int]:
        check_batch(headers, payloads, len(descriptors), len(offsets), fills=True)
        return list(map(self._read_slot, descriptors, offsets, _pages(headers), payloads))

    def write_slots(
        self,
        descriptors: Sequence[int],
        offsets: Sequence[int],
        headers: memoryview,
        payloads: Sequence[memoryview],
    ) -> list[int]:
        check_batch(headers, payloads, len(descriptors), len(offsets), fills=False)
        return list(map(self._write_slot, descriptors, offsets, _pages(headers), payloads))

    def _read_file(self, path: str, header: memoryview, payload: memoryview, direct: bool) -> int:
        try:
            # O_NONBLOCK: a pipe that lies there instead must not hold up the thread.
            descriptor = _open(path, os.O_RDONLY | os.O_NONBLOCK, direct)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    return -errno.EINVAL
                got = found.st_size
                if got == HEADER_BYTES + payload.nbytes:
                    got = self._read_twice(descriptor, 0, header, payload, own=True)
                return got if _names(path, found) else -errno.ESTALE
            finally:
                os.close(descriptor)
        except OSError as error:
            return _number(error)

    def _read_slot(
        self, descriptor: int, offset: int, header: memoryview, payload: memoryview
    ) -> int:
        try:
            return self._read_twice(descriptor, offset, header, payload, own=False)
        except OSError as error:
            return _number(error)

    def _read_twice(
        self, descriptor: int, offset: int, header: memoryview, payload: memoryview, own: bool
    ) -> int:
        """Bytes had; BAD_CHECKSUM where they were all had twice and were wrong twice."""
        total = HEADER_BYTES + payload.nbytes
        body = self._body(descriptor, payload)
        for _ in range(2):
            # What the body is rounded up by may lie behind the end of the file.
            got = _move(os.preadv, descriptor, [header, body], offset, total, own)
            if got < total:
                return got
            if body is not payload:
                payload.cast("B")[:] = body[: payload.nbytes]
            if header[CHECKSUM_AT:] == _checksum(header, payload):
                return total
        return BAD_CHECKSUM

    def _write_file(
        self,
        temp: str,
        final: str,
        header: memoryview,
        payload: memoryview,
        reused: bool,
        direct: bool,
        sync: bool,
    ) -> int:
        flags = os.O_WRONLY | (os.O_NONBLOCK if reused else os.O_CREAT | os.O_EXCL)
        try:
            descriptor = _open(temp, flags, direct)
        except OSError as error:
            if reused:
                _unlink(temp)
            return _number(error)
        try:
            try:
                if not reused:
                    os.fchmod(descriptor, 0o600)  # the umask may have taken the owner's own rights
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                total = self._write(descriptor, 0, header, payload, own=True)
                if os.fstat(descriptor).st_size != total:
                    os.ftruncate(descriptor, total)
                if sync:
                    os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            return _named(temp, final, found, total)
        except OSError as error:
            _unlink(temp)
            return _number(error)

    def _write_slot(
        self, descriptor: int, offset: int, header: memoryview, payload: memoryview
    ) -> int:
        try:
            return self._write(descriptor, offset, header, payload, own=False)
        except OSError as error:
            return _number(error)

    def _write(
        self, descriptor: int, offset: int, header: memoryview, payload: memoryview, own: bool
    ) -> int:
        header[CHECKSUM_AT:] = _checksum(header, payload)
        body = self._body(descriptor, payload)
        if body is not payload:
            body[: payload.nbytes] = payload.cast("B")
            body[payload.nbytes :] = bytes(body.nbytes - payload.nbytes)
        wanted = HEADER_BYTES + body.nbytes
        if _move(os.pwritev, descriptor, [header, body], offset, wanted, own) < wanted:
            # A file system that takes no bytes of a write does not say why.
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return HEADER_BYTES + payload.nbytes

    def _body(self, descriptor: int, payload: memoryview) -> memoryview:
        """`payload`, or memory of this thread's that direct I/O can use in its place."""
        if _is_aligned(payload) or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return payload
        needed = -(-payload.nbytes // HEADER_BYTES) * HEADER_BYTES
        kept: mmap.mmap | None = getattr(self._local, "memory", None)
        if kept is None or len(kept) < needed:
            kept = self._local.memory = mmap.mmap(-1, needed)
        return memoryview(kept)[:needed]


def _size(path: str) -> int:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError as error:
        return _number(error)
    return found.st_size if stat.S_ISREG(found.st_mode) else -errno.EINVAL


def _open(path: str, flags: int, direct: bool) -> int:
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if flags & os.O_CREAT:
                _unlink(path)  # some file systems make the file before they refuse the flag
    return os.open(path, flags, 0o600)


def _names(path: str, found: os.stat_result) -> bool:
    """Whether `path` names the file that `found` was said of."""
    try:
        now = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (now.st_ino, now.st_dev) == (found.st_ino, found.st_dev)


def _named(temp: str, final: str, found: os.stat_result, total: int) -> int:
    try:
        os.rename(temp, final)
    except FileNotFoundError:
        # This may also be said of a temporary file that somebody removed.
        if not _names(temp, found):
            raise
        return UNNAMED
    return total


def _move(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    parts: Sequence[memoryview],
    offset: int,
    wanted: int,
    own: bool,
) -> int:
    """Have `call`, preadv or pwritev, move `parts`, `wanted` bytes at least; the bytes it moved
    before it gave none. Direct I/O that is refused is given up for a descriptor of our own."""
    done = 0
    while done < wanted:
        try:
            moved = call(descriptor, _after(parts, done), offset + done)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if not own or error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if moved == 0:
            break
        done += moved
    return done


def _after(parts: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What is left of `parts` after their first `done` bytes."""
    if done == 0:
        return parts
    left = []
    for part in parts:
        if done < part.nbytes:
            left.append(part.cast("B")[done:])
        done = max(0, done - part.nbytes)
    return left


def _is_aligned(payload: memoryview) -> bool:
    address: int = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
    return (address | payload.nbytes) % HEADER_BYTES == 0


def _pages(headers: memoryview) -> Iterator[memoryview]:
    for start in range(0, headers.nbytes, HEADER_BYTES):
        yield headers[start : start + HEADER_BYTES]


def _checksum(header: memoryview, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(header[:CHECKSUM_AT])
    digest.update(payload)
    return digest.digest()


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def _number(error: OSError) -> int:
    return -(error.errno or errno.EIO)
