"""The files of a segment tier: the lock, growth within bounds, what a restart finds, what a
look from outside sees."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from segment_places import DIGEST, KEYS, SLOT_BYTES, bound, make_files
from tiering.errors import ConfigError
from tiering.testing.examples import CHUNK_BYTES
from tiering.tiers import frame
from tiering.tiers.disk import diskio
from tiering.tiers.disk.diskio import Direct
from tiering.tiers.segments import survey as segment_survey
from tiering.tiers.segments.files import SegmentFiles
from tiering.tiers.segments.survey import frames, geometry_of, survey

BUFFERED = Direct(reads=False, writes=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "org_model.1_0123456789ab_r0.segments"


@pytest.fixture
def files(directory: Path) -> Iterator[SegmentFiles]:
    files = reopened(directory)
    yield files
    files.close()


@pytest.fixture
def quarter_mebibyte(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 256 KiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    # Lazily: a failed test may still have something open there.
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def reopened(directory: Path, slots: int = 8, min_free_bytes: int | None = 0) -> SegmentFiles:
    files = make_files(directory, slots, min_free_bytes)
    files.take_lock()
    files.open(BUFFERED)
    if files.needs_rebuild:
        files.rebuild(files.keys_in(range(files.n_slots)))
    return files


def grow_fully(files: SegmentFiles) -> None:
    while files.grow():
        pass


def put_frame(files: SegmentFiles, slot: int, key: bytes, digest: bytes = DIGEST) -> None:
    """A frame without a record, its payload zeros."""
    header = bytearray(4096)
    frame.pack_header(memoryview(header), key, digest, memoryview(bytes(CHUNK_BYTES)))
    descriptor, offset = files.to_write(slot)
    os.pwrite(descriptor, header + bytes(CHUNK_BYTES), offset)


def total_bytes(directory: Path) -> int:
    return sum(max(p.stat().st_size, p.stat().st_blocks * 512) for p in directory.iterdir())


def segment_sizes(directory: Path) -> list[int]:
    return [p.stat().st_size // SLOT_BYTES for p in sorted(directory.glob("segment-*.kv"))]


def test_it_grows_by_whole_segments_up_to_its_bound(directory: Path, files: SegmentFiles) -> None:
    assert files.slots_max == 8
    assert files.n_slots == 0
    grown = []
    while files.grow():
        grown.append(files.n_slots)
    assert grown == [2, 4, 6, 8]
    assert segment_sizes(directory) == [2, 2, 2, 2]
    assert total_bytes(directory) <= bound(8)


@pytest.mark.parametrize("slots", [1, 2, 3, 9, 11, 50])
def test_it_never_takes_more_than_it_may(directory: Path, slots: int) -> None:
    files = reopened(directory, slots)
    grow_fully(files)
    assert files.n_slots == slots
    assert total_bytes(directory) <= bound(slots)
    files.close()


def test_a_bound_below_one_chunk_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="needs 28840 bytes") as caught:
        SegmentFiles(directory, DIGEST, CHUNK_BYTES, bound(1) - 1, 0)
    assert caught.value.path == "secondary_tiers[].max_bytes"


def test_large_tiers_have_larger_segments_rather_than_more_than_256(directory: Path) -> None:
    files = SegmentFiles(directory, DIGEST, (1 << 20) - 4096, 1 << 50, 0)
    assert -(-files.slots_max // files._usual_slots) == 256
    files = SegmentFiles(directory, DIGEST, (1 << 20) - 4096, 1 << 36, 0)
    assert files._usual_slots == 1024


def test_files_are_their_owners_alone_whatever_the_umask(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    old = os.umask(0)
    try:
        files = reopened(directory)
        grow_fully(files)
        files.close()
    finally:
        os.umask(old)
    names = {"lock", "table", "ticks", *(f"segment-{n:05d}.kv" for n in range(4))}
    assert {path.name for path in directory.iterdir()} == names
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def test_a_second_opener_hears_who_is_there(directory: Path, files: SegmentFiles) -> None:
    other = make_files(directory)
    with pytest.raises(ConfigError) as caught:
        other.take_lock()
    assert f"process {os.getpid()}" in caught.value.reason
    assert caught.value.value == str(directory.parent)
    assert 'layout "files"' in caught.value.remedy
    files.close()
    other.take_lock()
    other.close()


@pytest.mark.slow
def test_a_killed_holders_lock_is_gone(directory: Path) -> None:
    directory.mkdir()
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from tiering.tiers.segments.files import SegmentFiles

        files = SegmentFiles(Path(sys.argv[1]), bytes(32), 8192, 1 << 20, 0)
        files.take_lock()
        print("locked", flush=True)
        sys.stdin.read()
        """
    )
    command = [sys.executable, "-c", script, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match=f"process {child.pid}"):
            make_files(directory).take_lock()
        child.kill()
        child.communicate()
    files = make_files(directory)
    files.take_lock()
    files.close()


def test_it_grows_no_further_into_what_must_stay_free(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = reopened(directory, min_free_bytes=1 << 30)
    free_bytes = (1 << 30) + 3 * (SLOT_BYTES + 168)
    monkeypatch.setattr(diskio, "free_bytes", lambda root: (free_bytes, 1 << 40))
    assert files.grow()
    assert files.n_slots == 2
    free_bytes -= 2 * (SLOT_BYTES + 168)
    assert files.grow()
    assert files.n_slots == 3, "what there is room for, though less than a segment"
    free_bytes -= SLOT_BYTES + 168
    assert not files.grow()
    free_bytes += 1 << 30
    grow_fully(files)
    assert segment_sizes(directory) == [2, 2, 2, 2]
    files.close()


def test_without_a_floor_given_a_share_of_the_disk_stays_free(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = reopened(directory, min_free_bytes=None)
    size_bytes, free_bytes = 100 << 20, (5 << 20) + SLOT_BYTES + 168
    monkeypatch.setattr(diskio, "free_bytes", lambda root: (free_bytes, size_bytes))
    assert files.grow()
    assert files.n_slots == 1
    free_bytes -= 1
    assert not files.grow()
    files.close()


def test_a_full_disk_leaves_no_part_of_a_segment(
    directory: Path, files: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.grow()
    allocate = os.posix_fallocate

    def full(descriptor: int, offset: int, count: int) -> None:
        if count > SLOT_BYTES - 1:
            os.ftruncate(descriptor, offset + count // 2)
            raise OSError(28, os.strerror(28))
        allocate(descriptor, offset, count)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert not files.grow()
    assert segment_sizes(directory) == [2]
    assert (files.n_slots, files.n_segments) == (2, 1)
    grow_fully(files)
    assert segment_sizes(directory) == [2, 2, 2, 2]


def test_of_a_quota_that_nothing_tells_it_takes_what_it_gets(
    directory: Path, files: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def bounded(descriptor: int, offset: int, count: int) -> None:
        if count > SLOT_BYTES:
            raise OSError(122, os.strerror(122))
        allocate(descriptor, offset, count)

    monkeypatch.setattr(os, "posix_fallocate", bounded)
    assert files.grow()
    assert files.n_slots == 1


def test_a_real_full_disk(quarter_mebibyte: Path) -> None:
    """On a tmpfs that is smaller than what the tier may take."""
    room = diskio.free_bytes(quarter_mebibyte)[0] // SLOT_BYTES
    files = reopened(quarter_mebibyte / "r0.segments", slots=2 * room)
    try:
        grow_fully(files)
        assert room - 2 <= files.n_slots <= room
        for slot in range(files.n_slots):
            put_frame(files, slot, KEYS[0])
            files.set_records([slot], [KEYS[0]], [1])
    finally:
        files.close()


def test_a_file_system_that_cannot_allocate_grows_all_the_same(
    directory: Path, files: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, offset: int, count: int) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(os, "posix_fallocate", refused)
    grow_fully(files)
    assert segment_sizes(directory) == [2, 2, 2, 2]


def test_a_restart_finds_keys_and_the_later_ticks(directory: Path, files: SegmentFiles) -> None:
    grow_fully(files)
    files.set_records([0, 1, 5], KEYS[:3], [10, 20, 30])
    files.clear_records([1])
    files.write_ticks([(0, np.array([5, 99, 0, 0, 0, 40], np.int64))])
    files.close()
    again = reopened(directory)
    assert not again.needs_rebuild
    records = again.load()
    again.close()
    assert (records.slots.tolist(), records.keys) == ([0, 5], [KEYS[0], KEYS[2]])
    assert records.ticks.tolist() == [10, 40]
    assert again.n_slots == 8


def test_a_smaller_bound_drops_what_lies_beyond(directory: Path, files: SegmentFiles) -> None:
    grow_fully(files)
    files.set_records(list(range(8)), KEYS[:8], list(range(1, 9)))
    files.close()
    small = reopened(directory, slots=3)
    assert small.load().keys == KEYS[:3]
    assert not small.grow()
    small.close()
    assert segment_sizes(directory) == [2, 1]
    assert total_bytes(directory) <= bound(3)
    large = reopened(directory, slots=20)
    grow_fully(large)
    assert (large.n_slots, large.geometry.slots_per_segment) == (20, 2)
    assert large.load().keys == KEYS[:3], "what was cut off does not come back"
    large.close()


def test_what_follows_a_missing_segment_is_dropped(directory: Path, files: SegmentFiles) -> None:
    grow_fully(files)
    files.set_records([0, 7], KEYS[:2], [1, 2])
    files.close()
    (directory / "segment-00001.kv").unlink()
    again = reopened(directory)
    assert again.n_slots == 2
    assert again.load().keys == KEYS[:1]
    again.close()
    assert segment_sizes(directory) == [2]


GARBAGE = {
    "missing": lambda table: table.unlink(),
    "empty": lambda table: table.write_bytes(b""),
    "short": lambda table: os.truncate(table, 4096 + 3 * 160),
    "garbage": lambda table: table.write_bytes(os.urandom(8192)),
    "bad header": lambda table: table.write_bytes(b"\1" + table.read_bytes()[1:]),
}


@pytest.mark.parametrize("how", GARBAGE)
def test_a_lost_table_is_made_anew_from_the_slots(
    directory: Path, files: SegmentFiles, how: str
) -> None:
    grow_fully(files)
    for slot, key in ((0, KEYS[0]), (2, KEYS[1]), (3, KEYS[0]), (6, KEYS[2])):
        put_frame(files, slot, key)
    put_frame(files, 7, KEYS[3], digest=DIGEST[::-1])
    files.set_records([0, 2, 6], KEYS[:3], [30, 20, 10])
    files.close()
    GARBAGE[how](directory / "table")
    again = make_files(directory)
    again.take_lock()
    again.open(BUFFERED)
    assert again.needs_rebuild
    records = again.rebuild(again.keys_in(range(again.n_slots)))
    assert (records.slots.tolist(), records.keys) == ([2, 3, 6], [KEYS[1], KEYS[0], KEYS[2]])
    assert records.ticks.tolist() == [1, 2, 3], "by slot, as old as can be"
    again.close()
    once_more = reopened(directory)
    assert once_more.load().keys == records.keys
    once_more.close()


def test_a_lost_table_and_another_bound_do_not_move_the_slots(
    directory: Path, files: SegmentFiles
) -> None:
    grow_fully(files)
    put_frame(files, 3, KEYS[3])
    files.close()
    (directory / "table").unlink()
    again = reopened(directory, slots=40)
    assert (again.geometry.slots_per_segment, again.n_slots) == (2, 8)
    assert again.load().keys == [KEYS[3]]
    again.close()


def test_a_table_of_another_namespace_is_not_believed(directory: Path, files: SegmentFiles) -> None:
    grow_fully(files)
    put_frame(files, 1, KEYS[1])
    files.set_records([0], KEYS[:1], [1])
    files.close()
    other = SegmentFiles(directory, DIGEST[::-1], CHUNK_BYTES, bound(8), 0)
    other.take_lock()
    other.open(BUFFERED)
    assert other.needs_rebuild
    assert other.rebuild(other.keys_in(range(other.n_slots))).keys == []
    other.close()


def test_a_rebuild_that_is_cut_short_is_done_again(directory: Path, files: SegmentFiles) -> None:
    grow_fully(files)
    put_frame(files, 1, KEYS[1])
    files.close()
    (directory / "table").unlink()
    for _ in range(2):
        again = make_files(directory)
        again.take_lock()
        again.open(BUFFERED)
        assert again.needs_rebuild
        again.set_records([1], [KEYS[1]], [1])  # all but the header
        again.close()


def test_it_writes_only_where_it_was_opened(
    directory: Path, files: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.grow()
    files.require_place()
    moved = directory.rename(directory.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError):
        files.require_place()
    directory.mkdir()
    with pytest.raises(OSError, match="not what it was at start"):
        files.require_place()
    assert not files.grow()
    assert list(directory.iterdir()) == []
    directory.rmdir()
    moved.rename(directory)
    files.require_place()
    other = namedtuple("other", ["st_dev", "st_ino"])(-1, directory.stat().st_ino)
    monkeypatch.setattr(os, "stat", lambda path: other)
    with pytest.raises(OSError, match="mount it again"):
        files.require_place()


def test_nothing_stays_open(directory: Path) -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for direct in (BUFFERED, Direct(reads=False, writes=True)):
        files = make_files(directory)
        files.take_lock()
        files.open(direct)
        files.rebuild(files.keys_in(range(files.n_slots)))
        grow_fully(files)
        files.close()
        files.close()
        assert set(os.listdir("/proc/self/fd")) == before


def test_a_look_from_outside_needs_no_lock(directory: Path, files: SegmentFiles) -> None:
    grow_fully(files)
    files.set_records([0, 3], KEYS[:2], [10, 20])
    files.write_ticks([(0, np.array([50, 0, 0, 5], np.int64))])
    files.quarantine.mkdir()
    (files.quarantine / "a.bin").touch()
    assert list(frames(directory)) == [
        (KEYS[0], directory / "segment-00000.kv", 0),
        (KEYS[1], directory / "segment-00001.kv", SLOT_BYTES),
    ]
    assert geometry_of(directory) == files.geometry
    assert survey(directory) == segment_survey.SegmentSurvey(
        chunks=2,
        bytes=2 * SLOT_BYTES,
        file_bytes=sum(path.stat().st_size for path in directory.iterdir()),
        oldest_tick=20,
        newest_tick=50,
        temp_files=0,
        quarantined=1,
    )


def test_a_look_from_outside_meets_what_comes_and_goes(
    directory: Path, files: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier that opens makes a file to probe with, and may make its table anew."""
    grow_fully(files)
    files.set_records([0], KEYS[:1], [10])
    children = diskio.children

    def probing(path: Path) -> list[os.DirEntry[str]]:
        probe = path / "probe.tmp"
        probe.touch()
        found = children(path)
        probe.unlink()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(diskio, "children", lambda path: probing(path) if path.exists() else [])
        assert survey(directory).chunks == 1
    fstat = os.fstat

    def emptied(descriptor: int) -> os.stat_result:
        os.truncate(directory / "table", 0)
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", emptied)
    assert survey(directory).chunks == 0


def test_a_look_at_nothing(directory: Path, files: SegmentFiles) -> None:
    assert list(frames(directory)) == []
    (directory / "ticks").unlink()
    found = survey(directory)
    assert (found.chunks, found.oldest_tick, found.quarantined) == (0, None, 0)
    with pytest.raises(ConfigError, match="No such file"):
        survey(directory.parent)
    (directory / "table").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="not a table of slots"):
        list(frames(directory))
