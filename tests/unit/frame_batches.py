"""For tests of the batch I/O engines: frames in memory, made from a seed, and files of them."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tiering_kernels.chunkio import CHECKSUM_AT, HEADER_BYTES, ChunkIo

PAYLOAD_BYTES = 8192
FRAME_BYTES = HEADER_BYTES + PAYLOAD_BYTES


class Frames:
    """`count` frames in memory of their own: headers without checksums, and payloads.

    Not `aligned`, the payloads begin at odd addresses.
    """

    def __init__(self, count: int, payload_bytes: int, *, aligned: bool = True) -> None:
        self.count = count
        self.payload_bytes = payload_bytes
        self.frame_bytes = HEADER_BYTES + payload_bytes
        self.headers = _memory(count * HEADER_BYTES)
        stride = -(-payload_bytes // HEADER_BYTES) * HEADER_BYTES + HEADER_BYTES
        begin = 0 if aligned else 1
        memory = _memory(count * stride)
        starts = [i * stride + begin for i in range(count)]
        self.payloads = [memory[start : start + payload_bytes] for start in starts]

    def filled(self, seed: int = 0) -> Frames:
        """With other bytes for each item; headers up to the checksum, as a caller packs them."""
        random = Random(seed)
        for i, payload in enumerate(self.payloads):
            payload[:] = random.randbytes(self.payload_bytes)
            start = i * HEADER_BYTES
            self.headers[start : start + CHECKSUM_AT] = random.randbytes(CHECKSUM_AT)
        return self

    def header(self, i: int) -> memoryview:
        return self.headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES]

    def whole(self) -> list[bytes]:
        """The frames as they are in memory."""
        return [bytes(self.header(i)) + bytes(self.payloads[i]) for i in range(self.count)]

    def like(self) -> Frames:
        """As many of the same size, empty."""
        return Frames(self.count, self.payload_bytes)


def names(directory: Path, stem: str, count: int) -> list[str]:
    return [str(directory / f"{stem}{i}") for i in range(count)]


def contents(paths: Sequence[str]) -> list[bytes]:
    return [Path(path).read_bytes() for path in paths]


@contextmanager
def segment(path: Path, *, direct: bool = False) -> Iterator[int]:
    """A descriptor of a file for slots; direct, where its file system can do that."""
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write(
    io: ChunkIo,
    directory: Path,
    frames: Frames,
    *,
    reuse: bool = False,
    direct: bool = True,
    sync: bool = False,
) -> list[int]:
    temps, finals = names(directory, "temp", frames.count), names(directory, "final", frames.count)
    return io.write_files(
        temps,
        finals,
        frames.headers,
        frames.payloads,
        [reuse] * frames.count,
        direct,
        sync,
    )


def read_back(io: ChunkIo, directory: Path, into: Frames) -> list[int]:
    """Fills `into` with what `write` wrote."""
    paths = names(directory, "final", into.count)
    return io.read_files(paths, into.headers, into.payloads, True)


def written(io: ChunkIo, directory: Path, count: int = 5) -> tuple[Frames, list[str]]:
    """Frames and the files that hold them."""
    frames = Frames(count, PAYLOAD_BYTES).filled()
    assert write(io, directory, frames) == [FRAME_BYTES] * count
    return frames, names(directory, "final", count)


def read(io: ChunkIo, paths: list[str], *, direct: bool = True) -> list[int]:
    into = Frames(len(paths), PAYLOAD_BYTES)
    return io.read_files(paths, into.headers, into.payloads, direct)


class running:
    """A thread that runs `work` while the block does."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


def _memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]
