"""The fault engine does what its rules say, to the items they hit, and passes on the rest."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiering.testing.examples import CHUNK_BYTES, blank, key_number, payload_of, views
from tiering.testing.faults import OPERATIONS, READS, WRITES, FaultyIo
from tiering_kernels.chunkio import BAD_CHECKSUM, HEADER_BYTES, UNNAMED, ChunkIo
from tiering_kernels.portable import PortableIo

FRAME = HEADER_BYTES + CHUNK_BYTES
PAYLOADS = [payload_of(key_number(i)) for i in range(5)]


class Disk:
    """Five files and five slots under `where`, through a FaultyIo."""

    def __init__(self, where: Path, seed: int = 0) -> None:
        self.io = FaultyIo(PortableIo(), random.Random(seed))
        self.where = where
        self.paths = [str(where / f"{i}.bin") for i in range(5)]
        self.temps = [str(where / f"{i}.tmp") for i in range(5)]
        self.segment = str(where / "segment")
        self.descriptor = os.open(self.segment, os.O_RDWR | os.O_CREAT)
        self.offsets = [i * FRAME for i in range(5)]
        os.truncate(self.segment, 5 * FRAME)

    def run(self, operation: str, payloads: list[memoryview], sync: bool = False) -> list[int]:
        headers = memoryview(bytearray(HEADER_BYTES * len(payloads)))
        descriptors = [self.descriptor] * len(payloads)
        if operation == "sizes":
            return self.io.sizes(self.paths)
        if operation == "read_files":
            return self.io.read_files(self.paths, headers, payloads, False)
        if operation == "write_files":
            reuse = [os.path.exists(temp) for temp in self.temps]
            return self.io.write_files(
                self.temps, self.paths, headers, payloads, reuse, False, sync
            )
        if operation == "read_slots":
            return self.io.read_slots(descriptors, self.offsets, headers, payloads)
        return self.io.write_slots(descriptors, self.offsets, headers, payloads)

    def filled(self) -> Disk:
        for operation in WRITES:
            assert self.run(operation, views(PAYLOADS)) == [FRAME] * 5
        return self

    def close(self) -> None:
        os.close(self.descriptor)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path).filled()
    yield disk
    disk.close()


def test_every_operation_of_an_engine_is_covered() -> None:
    methods = {name for name, value in vars(ChunkIo).items() if callable(value)}
    assert {name for name in methods if not name.startswith("_")} == set(OPERATIONS)
    assert set(OPERATIONS) <= set(vars(FaultyIo))
    assert set(OPERATIONS) == {"sizes", *READS, *WRITES}
    assert FaultyIo(PortableIo()).engine == "portable"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_error_hits_its_items_and_the_others_go_through(disk: Disk, operation: str) -> None:
    disk.io.fail(operation, errno.EIO, after=1, times=2)
    before = disk.io.calls[operation]
    buffers = views(PAYLOADS) if operation in WRITES else blank(5)
    assert disk.run(operation, buffers) == [FRAME, -errno.EIO, -errno.EIO, FRAME, FRAME]
    if operation in READS:
        assert [bytes(b) for b in buffers[3:]] == PAYLOADS[3:]
        assert buffers[1] == blank(1)[0]
    assert disk.run(operation, buffers) == [FRAME] * 5
    assert disk.io.calls[operation] - before == 2
    assert disk.io.items[operation] >= 10


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rule_may_hit_some_places_for_ever_until_it_is_mended(disk: Disk, operation: str) -> None:
    last = f"@{4 * FRAME}" if operation.endswith("slots") else "4.bin"
    rule = disk.io.fail(operation, errno.ESTALE, times=None, where=lambda name: name.endswith(last))
    for _ in range(3):
        assert disk.run(operation, views(PAYLOADS)) == [FRAME] * 4 + [-errno.ESTALE]
    assert rule.hits == 3
    disk.io.mend(rule)
    assert disk.run(operation, views(PAYLOADS)) == [FRAME] * 5


def test_a_rule_for_what_an_operation_cannot_do_is_refused() -> None:
    io = FaultyIo(PortableIo())
    for call in (
        lambda: io.fail("delete", errno.EIO),
        lambda: io.short_read("write_files"),
        lambda: io.short_write("read_slots"),
        lambda: io.flip("sizes"),
    ):
        with pytest.raises(ValueError, match="is none of"):
            call()


@pytest.mark.parametrize("operation", READS)
def test_a_short_read_is_no_whole_frame(disk: Disk, operation: str) -> None:
    disk.io.short_read(operation, after=2)
    buffers = blank(5)
    results = disk.run(operation, buffers)
    assert 0 <= results[2] < FRAME
    assert results[:2] + results[3:] == [FRAME] * 4
    assert buffers[2] != PAYLOADS[2]


@pytest.mark.parametrize("operation", READS)
def test_a_bit_flipped_on_the_way_is_seen_by_the_engine(disk: Disk, operation: str) -> None:
    disk.io.flip(operation)
    assert disk.run(operation, blank(5)) == [BAD_CHECKSUM] + [FRAME] * 4
    assert disk.run(operation, blank(5)) == [FRAME] * 5


@pytest.mark.parametrize("operation", WRITES)
def test_a_bit_flipped_on_the_disk_stays_wrong(disk: Disk, operation: str) -> None:
    disk.io.flip(operation, after=3)
    assert disk.run(operation, views(PAYLOADS)) == [FRAME] * 5
    read = operation.replace("write", "read")
    for _ in range(2):
        assert disk.run(read, blank(5)) == [FRAME] * 3 + [BAD_CHECKSUM, FRAME]


def test_a_short_write_leaves_half_a_temporary_file(disk: Disk) -> None:
    os.unlink(disk.paths[1])
    disk.io.short_write("write_files", errno.ENOSPC, after=1)
    assert disk.run("write_files", views(PAYLOADS))[1] == -errno.ENOSPC
    left = Path(disk.temps[1]).stat().st_size
    assert 0 < left < FRAME
    assert not left % HEADER_BYTES
    assert not os.path.exists(disk.paths[1])


def test_a_short_write_leaves_half_a_slot(disk: Disk) -> None:
    disk.io.short_write("write_slots", after=1)
    changed = views([bytes(reversed(payload)) for payload in PAYLOADS])
    assert disk.run("write_slots", changed) == [FRAME, -errno.EIO, FRAME, FRAME, FRAME]
    assert disk.run("read_slots", blank(5)) == [FRAME, BAD_CHECKSUM, FRAME, FRAME, FRAME]


def test_a_failed_write_leaves_no_temporary_file_to_be_reused(disk: Disk) -> None:
    Path(disk.temps[0]).write_bytes(b"old")
    disk.io.fail("write_files", errno.ENOSPC)
    assert disk.run("write_files", views(PAYLOADS))[0] == -errno.ENOSPC
    assert not os.path.exists(disk.temps[0])


async def test_what_hangs_hangs_in_its_thread_until_it_is_let_go(disk: Disk) -> None:
    disk.io.hang("read_files")
    readings = [asyncio.create_task(asyncio.to_thread(disk.run, "read_files", blank(5)))]
    assert await asyncio.to_thread(disk.io.wait_hung, 1)
    assert disk.run("sizes", blank(5)) == [FRAME] * 5
    readings.append(asyncio.create_task(asyncio.to_thread(disk.run, "read_files", blank(5))))
    assert await asyncio.to_thread(disk.io.wait_hung, 2)
    assert not any(reading.done() for reading in readings)
    disk.io.let_go()
    assert await asyncio.gather(*readings) == [[FRAME] * 5] * 2
    assert disk.run("read_files", blank(5)) == [FRAME] * 5


def test_a_delay_is_for_its_operation_alone() -> None:
    slept: list[float] = []
    io = FaultyIo(PortableIo(), sleep=slept.append)
    io.delay("sizes", 2.5)
    io.sizes([])
    io.read_files([], memoryview(b""), [], False)
    io.delay("sizes", 0)
    io.sizes([])
    assert slept == [2.5]


def rewrite(disk: Disk, sync: bool) -> dict[str, str]:
    """New payloads over the old ones, one file's blocks recycled; then the power is cut."""
    disk.io.lose_writes()
    os.rename(disk.paths[0], disk.temps[1])
    assert disk.run("write_files", views(PAYLOADS[::-1]), sync) == [FRAME] * 5
    assert disk.run("write_slots", views(PAYLOADS[::-1])) == [FRAME] * 5
    if sync:
        disk.io.synced(disk.segment)
    return disk.io.crash()


def test_a_power_cut_undoes_what_was_not_synced_in_every_way(tmp_path: Path) -> None:
    seen: set[tuple[str, bool]] = set()
    for seed in range(40):
        where = tmp_path / str(seed)
        where.mkdir()
        disk = Disk(where, seed).filled()
        fates = rewrite(disk, sync=False)
        assert len(fates) == 10
        buffers = blank(5)
        results = disk.run("read_files", buffers)
        for path, result, buffer, payload in zip(
            disk.paths, results, buffers, reversed(PAYLOADS), strict=True
        ):
            fate = fates[path]
            seen.add((fate, result == FRAME))
            assert fate != "kept" or buffer == payload
            if result == FRAME and fate == "gone":
                assert buffer == PAYLOADS[disk.paths.index(path)]
        seen |= {("slot " + fate, True) for name, fate in fates.items() if "@" in name}
        disk.close()
    assert {fate for fate, _ in seen} == {
        *("kept", "gone", "empty", "cut", "zeros", "old blocks", "torn"),
        *("slot kept", "slot old", "slot torn"),
    }
    # The recycled file holds another chunk, whole: only what its header says tells it apart.
    assert ("old blocks", True) in seen
    assert ("zeros", True) not in seen


def test_a_power_cut_leaves_what_was_synced(disk: Disk) -> None:
    assert rewrite(disk, sync=True) == {}
    for operation in READS:
        buffers = blank(5)
        assert disk.run(operation, buffers) == [FRAME] * 5
        assert [bytes(buffer) for buffer in buffers] == PAYLOADS[::-1]


def test_a_file_that_gets_its_name_later_is_known_by_it(disk: Disk) -> None:
    disk.io.lose_writes()
    deeper = str(disk.where / "deeper" / "file")
    headers, temp = memoryview(bytearray(HEADER_BYTES)), disk.temps[0]
    arguments = ([temp], [deeper], headers, views(PAYLOADS[:1]), [False], False, False)
    assert disk.io.write_files(*arguments) == [UNNAMED]
    os.mkdir(os.path.dirname(deeper))
    os.rename(temp, deeper)
    assert list(disk.io.crash()) == [deeper]


def test_a_power_cut_can_be_done_to_a_copy(disk: Disk, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    disk.io.lose_writes()
    disk.run("write_files", views(PAYLOADS))
    for path in disk.paths:
        os.link(path, copy / os.path.basename(path))
        (copy / os.path.basename(path)).write_bytes(Path(path).read_bytes())
    for path in disk.paths:
        os.unlink(copy / os.path.basename(path))
        (copy / os.path.basename(path)).write_bytes(Path(path).read_bytes())
    fates = disk.io.crash(lambda path: str(copy / os.path.basename(path)))
    assert disk.run("read_files", blank(5)) == [FRAME] * 5
    spoilt = [p for p in disk.paths if fates[p] not in ("kept", "torn", "gone", "old blocks")]
    assert spoilt
    for path in spoilt:
        assert (copy / os.path.basename(path)).read_bytes() != Path(path).read_bytes()


def test_the_same_seed_hits_in_the_same_way(tmp_path: Path) -> None:
    told = []
    for turn in ("a", "b"):
        where = tmp_path / turn
        where.mkdir()
        disk = Disk(where, seed=7).filled()
        disk.io.short_read("read_files", times=3)
        disk.io.flip("write_slots", times=2)
        numbers = disk.run("read_files", blank(5)) + disk.run("write_slots", views(PAYLOADS))
        fates = rewrite(disk, sync=False)
        told.append((numbers, list(fates.values()), Path(disk.segment).read_bytes()))
        disk.close()
    assert told[0] == told[1]
