"""The engines that move batches of frames: writes, refused direct I/O, callers' mistakes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from frame_batches import (
    FRAME_BYTES,
    PAYLOAD_BYTES,
    Frames,
    contents,
    names,
    read,
    running,
    segment,
    write,
    written,
)
from page_gate import PageGate
from tiering_kernels.chunkio import HEADER_BYTES, UNNAMED, ChunkIo, Engine
from tiering_kernels.engines import open_engine


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system, until the test is over."""
    mounted: list[Path] = []

    def mount(kind: str, *options: str) -> Path:
        directory = tmp_path / kind
        directory.mkdir()
        command = ["mount", "-t", kind, *options, "none", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a {kind} cannot be mounted here: {done.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        # Lazily: the kernel may still hold what io_uring has just closed.
        subprocess.run(["umount", "-l", str(directory)], check=True)


# Writing


def test_a_temporary_file_that_is_there_is_left_alone(
    io: ChunkIo, direct: bool, tmp_path: Path
) -> None:
    frames = Frames(3, PAYLOAD_BYTES).filled()
    (tmp_path / "temp1").write_bytes(b"of another")
    assert write(io, tmp_path, frames, direct=direct) == [FRAME_BYTES, -errno.EEXIST, FRAME_BYTES]
    assert (tmp_path / "temp1").read_bytes() == b"of another"
    assert not (tmp_path / "final1").exists()


@pytest.mark.parametrize("payload_bytes", [PAYLOAD_BYTES, PAYLOAD_BYTES - 1])
def test_a_file_is_overwritten_in_place_and_cut(
    io: ChunkIo, direct: bool, tmp_path: Path, payload_bytes: int
) -> None:
    sizes = [0, 100, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 10 * FRAME_BYTES]
    frames = Frames(len(sizes) + 1, payload_bytes).filled()
    inodes = []
    for temp, size in zip(names(tmp_path, "temp", len(sizes)), sizes, strict=True):
        Path(temp).write_bytes(b"x" * size)
        inodes.append(os.stat(temp).st_ino)
    results = write(io, tmp_path, frames, reuse=True, direct=direct, sync=True)
    assert results == [frames.frame_bytes] * len(sizes) + [-errno.ENOENT]
    finals = names(tmp_path, "final", len(sizes))
    assert contents(finals) == frames.whole()[:-1]
    assert [os.stat(final).st_ino for final in finals] == inodes
    assert len(os.listdir(tmp_path)) == len(sizes)


def test_where_the_final_directory_is_gone_the_frame_waits_under_its_temporary_name(
    io: ChunkIo, tmp_path: Path
) -> None:
    frames = Frames(3, PAYLOAD_BYTES).filled()
    temps = names(tmp_path, "temp", 3)
    (tmp_path / "file").touch()
    finals = [str(tmp_path / "final"), str(tmp_path / "gone/final"), str(tmp_path / "file/final")]
    results = io.write_files(
        temps, finals, frames.headers, frames.payloads, [False] * 3, False, False
    )
    assert results == [FRAME_BYTES, UNNAMED, -errno.ENOTDIR]
    assert Path(temps[1]).read_bytes() == frames.whole()[1]
    assert not os.path.exists(temps[2])


# The portable engine keeps the interpreter lock while it reads so few bytes: nobody could open.
@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_a_temporary_file_that_somebody_took_away_has_no_name_to_wait_under(
    engine: Engine, tmp_path: Path
) -> None:
    frames = Frames(1, 4096)
    with PageGate() as gate:

        def take_away() -> None:
            gate.wait()
            os.unlink(tmp_path / "temp0")
            gate.open()

        frames.payloads = [gate.memory]
        with running(take_away):
            assert write(open_engine(engine), tmp_path, frames) == [-errno.ENOENT]


@pytest.mark.parametrize("umask", [0o777, 0])
def test_a_new_file_is_its_owners_alone_whatever_the_umask(
    io: ChunkIo, direct: bool, tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        write(io, tmp_path, Frames(1, PAYLOAD_BYTES).filled(), direct=direct)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "final0").stat().st_mode) == 0o600


def test_a_full_disk_is_that_items_error_alone(
    io: ChunkIo, direct: bool, mount: Callable[..., Path]
) -> None:
    place = mount("tmpfs", "-o", f"size={6 * FRAME_BYTES}")
    for temp in names(place, "temp", 4):
        Path(temp).write_bytes(bytes(FRAME_BYTES))
    os.rename(place / "temp2", place / "elsewhere")
    (place / "filler").write_bytes(bytes(FRAME_BYTES + PAYLOAD_BYTES))
    frames = Frames(4, PAYLOAD_BYTES).filled()
    temps, finals = names(place, "temp", 4), names(place, "final", 4)
    reuse = [True, True, False, True]
    results = io.write_files(temps, finals, frames.headers, frames.payloads, reuse, direct, False)
    assert results == [FRAME_BYTES, FRAME_BYTES, -errno.ENOSPC, FRAME_BYTES]
    assert sorted(os.listdir(place)) == ["elsewhere", "filler", "final0", "final1", "final3"]
    assert contents([finals[3]]) == frames.whole()[3:]


def test_a_slot_without_room_is_that_items_error_alone(
    io: ChunkIo, direct: bool, mount: Callable[..., Path]
) -> None:
    place = mount("tmpfs", "-o", f"size={3 * FRAME_BYTES}")
    frames = Frames(3, PAYLOAD_BYTES).filled()
    offsets = [0, FRAME_BYTES, 2 * FRAME_BYTES]
    with segment(place / "segment", direct=direct) as descriptor:
        for at in (offsets[0], offsets[2]):
            os.posix_fallocate(descriptor, at, FRAME_BYTES)
        (place / "filler").write_bytes(bytes(PAYLOAD_BYTES))
        results = io.write_slots([descriptor] * 3, offsets, frames.headers, frames.payloads)
    assert results == [FRAME_BYTES, -errno.ENOSPC, FRAME_BYTES]


# Direct I/O that is refused


def test_a_file_system_without_direct_io_is_used_without(
    io: ChunkIo, mount: Callable[..., Path]
) -> None:
    place = mount("ramfs")
    with pytest.raises(OSError, match="Invalid argument"), segment(place / "probe", direct=True):
        pass
    for reuse in (False, True):
        frames = Frames(3, PAYLOAD_BYTES).filled()
        assert write(io, place, frames, reuse=reuse, direct=True) == [FRAME_BYTES] * 3
        assert read(io, names(place, "final", 3), direct=True) == [FRAME_BYTES] * 3
        for i in range(3):
            os.rename(place / f"final{i}", place / f"temp{i}")


def test_direct_io_that_is_refused_for_a_file_is_given_up_for_it(
    io: ChunkIo, tmp_path: Path
) -> None:
    frames = Frames(2, PAYLOAD_BYTES).filled()
    headers = memoryview(bytearray(2 * HEADER_BYTES + 2))
    address = headers[1:-1] if is_aligned_to_two(headers) else headers[:-2]
    address[:] = frames.headers
    temps, finals = names(tmp_path, "temp", 2), names(tmp_path, "final", 2)
    results = io.write_files(temps, finals, address, frames.payloads, [False] * 2, True, False)
    assert results == [FRAME_BYTES] * 2
    assert contents(finals) == [
        bytes(address[i * HEADER_BYTES :][:HEADER_BYTES]) + bytes(frames.payloads[i])
        for i in range(2)
    ]
    assert io.read_files(finals, address, frames.payloads, True) == [FRAME_BYTES] * 2
    with segment(tmp_path / "segment", direct=True) as descriptor:
        slots = ([descriptor] * 2, [0, 2 * FRAME_BYTES], address, frames.payloads)
        assert io.write_slots(*slots) == [-errno.EINVAL] * 2
        assert io.read_slots(*slots) != [FRAME_BYTES] * 2
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT


def is_aligned_to_two(memory: memoryview) -> bool:
    import numpy as np

    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address % 2 == 0


# Callers' mistakes


def test_batches_that_do_not_fit_together_are_refused(io: ChunkIo, tmp_path: Path) -> None:
    frames, paths = written(io, tmp_path, 2)
    headers, payloads = frames.headers, frames.payloads
    with pytest.raises(ValueError, match="2 payloads with 1 of something else"):
        io.read_files(paths[:1], headers, payloads, False)
    with pytest.raises(ValueError, match="2 payloads with 1 of something else"):
        io.write_files(paths, paths, headers, payloads, [False], False, False)
    with pytest.raises(ValueError, match="2 payloads with 1 of something else"):
        io.read_slots([0, 0], [0], headers, payloads)
    with pytest.raises(ValueError, match="2 payloads with headers of 4096 bytes"):
        io.read_files(paths, headers[:HEADER_BYTES], payloads, False)
    mixed = [payloads[0], payloads[1][:4096]]
    with pytest.raises(ValueError, match="of one length, not 4096, 8192"):
        io.read_files(paths, headers, mixed, False)
    with pytest.raises(ValueError, match="of one length, not 0"):
        io.read_files(paths[:1], headers[:HEADER_BYTES], [payloads[0][:0]], False)
    with pytest.raises(ValueError, match="null"):
        io.sizes(["a\0b"])
    assert io.read_files(paths, headers, payloads, False) == [FRAME_BYTES] * 2


def test_read_only_payloads_are_written_and_never_filled(io: ChunkIo, tmp_path: Path) -> None:
    frames, paths = written(io, tmp_path, 2)
    frozen = [payload.toreadonly() for payload in frames.payloads]
    temps = names(tmp_path, "temp", 2)
    results = io.write_files(temps, paths, frames.headers, frozen, [False] * 2, False, False)
    assert results == [FRAME_BYTES] * 2
    assert contents(paths) == frames.whole()
    with pytest.raises(ValueError, match="read-only"):
        io.read_files(paths, frames.headers, frozen, False)


def test_no_buffer_is_held_after_the_call(io: ChunkIo, direct: bool, tmp_path: Path) -> None:
    memories = [bytearray(PAYLOAD_BYTES) for _ in range(3)]
    headers = bytearray(3 * HEADER_BYTES)
    for freeze in (False, True):
        frames = Frames(3, PAYLOAD_BYTES)
        frames.payloads = [memoryview(memory) for memory in memories]
        if freeze:
            frames.payloads = [payload.toreadonly() for payload in frames.payloads]
        frames.headers = memoryview(headers)
        assert write(io, tmp_path, frames, direct=direct) == [FRAME_BYTES] * 3
        del frames
        for memory in (*memories, headers):
            memory.append(0)  # BufferError where somebody still looks at it
            memory.pop()
