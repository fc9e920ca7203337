"""The engines that move batches of frames, one contract for all: bytes, and what reads find."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import xxhash

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
from tiering.tiers import frame
from tiering_kernels.chunkio import (
    BAD_CHECKSUM,
    CHECKSUM_AT,
    ENGINES,
    HEADER_BYTES,
    ChunkIo,
)
from tiering_kernels.engines import open_engine

# Bytes

CASES = [
    (0, 4096, True),
    (1, 4095, True),
    (3, 65536, False),
    (3, 389121, False),
    (3, 1048576, True),
    (100, 4096, True),
    (40, 4095, False),
]


def test_all_engines_are_here_and_the_first_is_the_fastest() -> None:
    assert [open_engine(engine).engine for engine in ENGINES] == ["uring", "threads", "portable"]
    assert open_engine().engine == "uring"


@pytest.mark.parametrize(("count", "payload_bytes", "aligned"), CASES)
def test_files_go_round(
    io: ChunkIo, direct: bool, tmp_path: Path, count: int, payload_bytes: int, aligned: bool
) -> None:
    frames = Frames(count, payload_bytes, aligned=aligned).filled()
    payloads = [bytes(payload) for payload in frames.payloads]
    expected = [HEADER_BYTES + payload_bytes] * count
    assert write(io, tmp_path, frames, direct=direct, sync=count < 10) == expected
    assert [bytes(payload) for payload in frames.payloads] == payloads
    finals = names(tmp_path, "final", count)
    assert contents(finals) == frames.whole()
    assert sorted(os.listdir(tmp_path)) == sorted(Path(final).name for final in finals)
    assert io.sizes(finals) == expected
    into = Frames(count, payload_bytes, aligned=aligned)
    assert io.read_files(finals, into.headers, into.payloads, direct) == expected
    assert into.whole() == frames.whole()


@pytest.mark.parametrize(("count", "payload_bytes", "aligned"), CASES)
def test_slots_go_round(
    io: ChunkIo, direct: bool, tmp_path: Path, count: int, payload_bytes: int, aligned: bool
) -> None:
    frames = Frames(count, payload_bytes, aligned=aligned).filled()
    slot_bytes = -(-frames.frame_bytes // 4096) * 4096
    offsets = [slot_bytes * (count - i) for i in range(count)]
    expected = [frames.frame_bytes] * count
    with segment(tmp_path / "segment", direct=direct) as descriptor:
        numbers = [descriptor] * count
        assert io.write_slots(numbers, offsets, frames.headers, frames.payloads) == expected
        into = Frames(count, payload_bytes, aligned=aligned)
        assert io.read_slots(numbers, offsets, into.headers, into.payloads) == expected
    assert into.whole() == frames.whole()
    held = (tmp_path / "segment").read_bytes()
    assert [held[at : at + frames.frame_bytes] for at in offsets] == frames.whole()


@pytest.mark.parametrize(("payload_bytes", "aligned"), [(65536, True), (4095, False)])
def test_what_one_engine_writes_every_other_one_reads(
    tmp_path: Path, direct: bool, payload_bytes: int, aligned: bool
) -> None:
    on_disk = []
    for writer in ENGINES:
        directory = tmp_path / writer
        directory.mkdir()
        frames = Frames(3, payload_bytes, aligned=aligned).filled()
        write(open_engine(writer), directory, frames, direct=direct)
        finals = names(directory, "final", 3)
        on_disk.append(contents(finals))
        for reader in ENGINES:
            into = frames.like()
            results = open_engine(reader).read_files(finals, into.headers, into.payloads, direct)
            assert results == [frames.frame_bytes] * 3
            assert into.whole() == frames.whole()
    assert on_disk[0] == on_disk[1] == on_disk[2]


@pytest.mark.parametrize("payload_bytes", [1, 239, 4095, 65536, 389121])
def test_the_checksum_is_the_frames(io: ChunkIo, tmp_path: Path, payload_bytes: int) -> None:
    frames = Frames(2, payload_bytes).filled()
    keys = [b"first key", b"second key"]
    for i, key in enumerate(keys):
        frame.pack_header(frames.header(i), key, bytes(32), frames.payloads[i])
    vouched = frames.whole()
    for i in range(2):
        frames.header(i)[CHECKSUM_AT:] = bytes(16)
    write(io, tmp_path, frames)
    assert contents(names(tmp_path, "final", 2)) == vouched
    for i, whole in enumerate(vouched):
        covered = whole[:CHECKSUM_AT] + whole[HEADER_BYTES:]
        assert frames.header(i)[CHECKSUM_AT:] == xxhash.xxh3_128_digest(covered)


def test_what_follows_a_slot_of_odd_length_is_the_neighbours(
    io: ChunkIo, direct: bool, tmp_path: Path
) -> None:
    before, frames = Frames(1, 8191).filled(), Frames(1, 4095).filled()
    with segment(tmp_path / "segment", direct=direct) as descriptor:
        (tmp_path / "segment").write_bytes(b"n" * 32768)
        # The longer one first, so that its bytes lie in any memory that is used again.
        io.write_slots([descriptor], [16384], before.headers, before.payloads)
        io.write_slots([descriptor], [4096], frames.headers, frames.payloads)
    filled_up = b"\0" if direct else b"n"
    neighbour = b"n" * 4096
    expected = [neighbour, frames.whole()[0], filled_up, neighbour]
    expected += [before.whole()[0], filled_up, neighbour]
    assert (tmp_path / "segment").read_bytes() == b"".join(expected)


# Reading what is not whole


def test_a_flipped_bit_is_a_bad_checksum(io: ChunkIo, direct: bool, tmp_path: Path) -> None:
    _, paths = written(io, tmp_path)
    for path, at in zip(paths[1:], (0, CHECKSUM_AT, HEADER_BYTES, FRAME_BYTES - 1), strict=True):
        held = bytearray(Path(path).read_bytes())
        held[at] ^= 1
        Path(path).write_bytes(held)
    expected = [FRAME_BYTES, *[BAD_CHECKSUM] * 4]
    assert read(io, paths, direct=direct) == expected
    into = Frames(2, PAYLOAD_BYTES)
    with segment(Path(paths[4]), direct=direct) as damaged, segment(Path(paths[0])) as whole:
        results = io.read_slots([damaged, whole], [0, 0], into.headers, into.payloads)
    assert results == [BAD_CHECKSUM, FRAME_BYTES]


def test_a_damage_that_is_gone_at_the_second_look_is_none(io: ChunkIo, tmp_path: Path) -> None:
    frames = Frames(1, 4096).filled()
    write(io, tmp_path, frames)
    path = tmp_path / "final0"
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    into = Frames(1, 4096)
    with PageGate() as gate:

        def mend() -> None:
            gate.wait()  # the header has been read by now, the payload not yet
            with path.open("r+b") as file:
                file.write(whole[:1])
            gate.open()

        with running(mend):
            results = io.read_files([str(path)], into.headers, [gate.memory], False)
        assert results == [frames.frame_bytes]
        assert bytes(into.headers) + bytes(gate.memory) == whole


def test_a_file_of_another_size_reads_as_that_size(
    io: ChunkIo, direct: bool, tmp_path: Path
) -> None:
    sizes = [FRAME_BYTES, 0, 1, 4096, FRAME_BYTES - 1, FRAME_BYTES + 1, 3 * FRAME_BYTES]
    _, paths = written(io, tmp_path, len(sizes))
    for path, size in zip(paths, sizes, strict=True):
        os.truncate(path, size)
    assert read(io, paths, direct=direct) == sizes
    assert io.sizes(paths) == sizes


def test_a_slot_that_the_file_ends_in_reads_as_what_is_there(
    io: ChunkIo, direct: bool, tmp_path: Path
) -> None:
    (tmp_path / "segment").write_bytes(bytes(3 * 4096))
    into = Frames(2, PAYLOAD_BYTES)
    with segment(tmp_path / "segment", direct=direct) as descriptor:
        results = io.read_slots([descriptor] * 2, [4096, 12288], into.headers, into.payloads)
    assert results == [8192, 0]


def test_what_is_not_there_is_missing_and_its_neighbours_are_read(
    io: ChunkIo, direct: bool, tmp_path: Path
) -> None:
    _, paths = written(io, tmp_path)
    os.unlink(paths[0])
    paths[3] = str(tmp_path / "no" / "such")
    expected = [-errno.ENOENT, FRAME_BYTES, FRAME_BYTES, -errno.ENOENT, FRAME_BYTES]
    assert read(io, paths, direct=direct) == expected
    assert io.sizes(paths) == expected


def test_what_is_no_file_is_an_error_and_holds_up_nobody(
    io: ChunkIo, direct: bool, tmp_path: Path
) -> None:
    _, (whole,) = written(io, tmp_path, 1)
    directory, link, pipe = names(tmp_path, "odd", 3)
    os.mkdir(directory)
    os.symlink(whole, link)
    os.mkfifo(pipe)
    odd = [directory, link, pipe, whole]
    sizes = [-errno.EINVAL] * 3 + [FRAME_BYTES]
    assert io.sizes(odd) == sizes
    assert read(io, odd, direct=direct) == [-errno.EINVAL, -errno.ELOOP, -errno.EINVAL, FRAME_BYTES]
    frames = Frames(3, PAYLOAD_BYTES).filled()
    finals = names(tmp_path, "new", 3)
    results = io.write_files(
        odd[:3], finals, frames.headers, frames.payloads, [True] * 3, direct, False
    )
    assert results == [-errno.EISDIR, -errno.ELOOP, -errno.ENXIO]
    assert [os.path.lexists(path) for path in odd] == [True, False, False, True]
    assert Path(whole).stat().st_size == FRAME_BYTES
    assert not any(map(os.path.exists, finals))


@pytest.mark.parametrize("change", ["none", "moved away", "replaced", "replaced by other bytes"])
def test_a_file_that_changed_its_name_while_it_was_read_is_stale(
    io: ChunkIo, tmp_path: Path, change: str
) -> None:
    # Not with direct I/O: there a file system may have the rename wait for the read.
    frames = Frames(2, 4096).filled()
    write(io, tmp_path, frames)
    path, other = names(tmp_path, "final", 2)
    if change == "replaced by other bytes":
        Path(path).write_bytes(bytes(frames.frame_bytes))  # stale even where it was damaged
    into = Frames(1, 4096)
    with PageGate() as gate:

        def rename() -> None:
            gate.wait()
            if change == "moved away":
                os.rename(path, tmp_path / "elsewhere")
            elif change != "none":
                os.rename(other, path)
            gate.open()

        with running(rename):
            results = io.read_files([path], into.headers, [gate.memory], False)
    assert results == [frames.frame_bytes if change == "none" else -errno.ESTALE]
