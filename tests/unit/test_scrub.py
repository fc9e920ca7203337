"""The scrubber: it finds every kind of damage, and nothing else, also while engines run."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import fs_places
import segment_places
from fs_places import KEYS, NAMESPACE, file_of
from tiering.errors import ConfigError
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import CHUNK_BYTES, blank, key_number, payload_of, stored, views
from tiering.tiers.disk.paths import FsPaths
from tiering.tiers.files.limits import Limits
from tiering.tiers.files.manifest import Manifest
from tiering.tiers.segments.table import record_at
from tiering.tiers.upkeep.ratelimit import RateLimit
from tiering.tiers.upkeep.scrub import EXAMPLES_MAX, Scrub, ScrubReport
from tiering_kernels.engines import open_engine
from tiering_kernels.portable import PortableIo

FRAME_BYTES = 4096 + CHUNK_BYTES
MANY = [key_number(number) for number in range(150)]


def scrub_of(root: Path, **settings: Any) -> Scrub:
    clock = ManualClock()
    settings = {"io": open_engine(), "sleep": clock.advance, **settings}
    io, sleep = settings.pop("io"), settings.pop("sleep")
    return Scrub(root, io, settings.pop("clock", clock), ManualClock(), sleep, **settings)


def scrubbed(root: Path, **settings: Any) -> ScrubReport:
    scrub = scrub_of(root, **settings)
    scrub.count()
    scrub.run(lambda report: None)
    return scrub.report


async def fill_files(root: Path, keys: Sequence[bytes] = KEYS, **settings: Any) -> None:
    async with fs_places.opened(root, **settings) as tier:
        await stored(tier, keys)


async def fill_segments(root: Path, count: int = 6) -> Path:
    async with segment_places.opened(root, slots=8) as tier:
        await stored(tier, segment_places.KEYS[:count])
    return segment_places.segments_of(root)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def tree(root: Path) -> list[tuple[str, int, int]]:
    return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in root.rglob("*"))


async def test_whole_chunks_of_both_layouts_are_good(tmp_path: Path) -> None:
    await fill_files(tmp_path, MANY)
    await fill_files(tmp_path, KEYS, rank=1)
    await fill_segments(tmp_path)
    report = scrubbed(tmp_path)
    count = len(MANY) + len(KEYS) + 6
    assert (report.total, report.checked, report.good) == (count, count, count)
    assert report.checked_bytes == count * FRAME_BYTES
    assert not report.damaged
    assert not report.troubles


async def test_payloads_that_are_no_whole_pages_are_checked_too(tmp_path: Path) -> None:
    async with fs_places.opened(tmp_path, chunk_bytes=5000) as tier:
        await tier.write(KEYS, views([payload_of(key)[:5000] for key in KEYS]))
    flip(file_of(tmp_path, KEYS[3]), 4096 + 4999)
    report = scrubbed(tmp_path)
    assert (report.good, dict(report.damaged)) == (len(KEYS) - 1, {"checksum": 1})


def _of_another_rank(path: Path) -> None:
    root = path.parents[3]
    asyncio.run(fill_files(root / "other", KEYS[:1], rank=1))
    shutil.copyfile(file_of(root / "other", KEYS[0], rank=1), path)
    shutil.rmtree(root / "other")


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a flipped bit": ("checksum", lambda path: flip(path, 4096 + 17)),
    "a flipped bit in the checksum": ("checksum", lambda path: flip(path, 4090)),
    "a flipped bit in the header's zeros": ("checksum", lambda path: flip(path, 1000)),
    "no frame": ("magic", lambda path: path.write_bytes(bytes(FRAME_BYTES)) and None),
    "another version": ("version", lambda path: flip(path, 11)),
    "another key": (
        "key",
        lambda path: shutil.copyfile(file_of(path.parents[3], KEYS[1]), path) and None,
    ),
    "another rank": ("namespace", _of_another_rank),
    "cut": ("size", lambda path: os.truncate(path, FRAME_BYTES - 1)),
    "cut in the header": ("size", lambda path: os.truncate(path, 100)),
    "empty": ("size", lambda path: os.truncate(path, 0)),
    "too long": ("size", lambda path: os.truncate(path, FRAME_BYTES + 4096)),
}


@pytest.mark.parametrize(("cause", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_each_damage_has_the_cause_that_the_tier_counts(
    cause: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    asyncio.run(fill_files(tmp_path))
    path = file_of(tmp_path, KEYS[0])
    damage(path)
    report = scrubbed(tmp_path)
    assert dict(report.damaged) == {cause: 1}
    assert report.good == len(KEYS) - 1
    assert [finding.where for finding in report.findings] == [str(path)]

    async def counted() -> dict[str, int]:
        async with fs_places.opened(tmp_path) as tier:
            await tier.read(KEYS[:1], blank(1))
            return tier.stats()

    assert asyncio.run(counted())[f"damaged_{cause}"] == 1


async def test_only_reporting_changes_nothing(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    directory = await fill_segments(tmp_path)
    flip(file_of(tmp_path, KEYS[0]), 5000)
    flip(directory / "segment-00000.kv", 5000)
    before = tree(tmp_path)
    assert scrubbed(tmp_path).damaged.total() == 2
    assert tree(tmp_path) == before


async def test_quarantine_moves_damaged_files_as_the_tier_does(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    flip(file_of(tmp_path, KEYS[0]), 5000)
    report = scrubbed(tmp_path, quarantine=True)
    assert report.quarantined == 1
    assert not file_of(tmp_path, KEYS[0]).exists()
    target = FsPaths(tmp_path, NAMESPACE.directory, 0).condemned(KEYS[0])
    assert fs_places.quarantined(tmp_path) == [target]
    manifest = Manifest(tmp_path / ".manifest" / "manifest.sqlite3", "test", 0.0)
    try:
        assert manifest.totals().chunks == len(KEYS) - 1
        assert [name for name, _ in manifest.others()] == []
    finally:
        manifest.close()


async def test_what_an_engine_stores_again_meanwhile_stays_booked(tmp_path: Path) -> None:
    """A scrub takes hours, and tells the manifest at its end what it has put aside."""
    await fill_files(tmp_path)
    flip(file_of(tmp_path, KEYS[3]), 5000)
    scrub = scrub_of(tmp_path, quarantine=True)
    forget = scrub._forget

    def late(*told: Any) -> None:
        thread = threading.Thread(target=lambda: asyncio.run(fill_files(tmp_path, KEYS[3:4])))
        thread.start()
        thread.join()
        forget(*told)

    scrub._forget = late  # type: ignore[method-assign]
    scrub.run(lambda report: None)
    assert scrub.report.quarantined == 1
    assert file_of(tmp_path, KEYS[3]).exists()
    manifest = Manifest(tmp_path / ".manifest" / "manifest.sqlite3", "test", 0.0)
    assert manifest.totals().chunks == len(KEYS)
    manifest.close()


async def test_the_quarantine_is_bounded(tmp_path: Path) -> None:
    await fill_files(tmp_path, MANY)
    for key in MANY[:70]:
        os.truncate(file_of(tmp_path, key), 10)
    report = scrubbed(tmp_path, quarantine=True)
    assert report.damaged == {"size": 70}
    assert len(fs_places.quarantined(tmp_path)) == 64
    assert len(report.findings) == EXAMPLES_MAX
    assert all(not file_of(tmp_path, key).exists() for key in MANY[:70])


async def test_damage_in_segments_is_found_and_stays(tmp_path: Path) -> None:
    directory = await fill_segments(tmp_path)
    path = directory / "segment-00000.kv"
    slot_bytes = segment_places.SLOT_BYTES
    flip(path, 4096 + 5)
    flip(path, slot_bytes)
    before = tree(tmp_path)
    report = scrubbed(tmp_path, quarantine=True)
    assert dict(report.damaged) == {"checksum": 1, "magic": 1}
    assert (report.good, report.quarantined) == (4, 0)
    assert f"{path} at 0 " in report.findings[0].where
    assert tree(tmp_path) == before


async def test_a_slot_that_was_never_written_is_stale_and_no_damage(tmp_path: Path) -> None:
    directory = await fill_segments(tmp_path)
    path = directory / "segment-00000.kv"
    slot_bytes = segment_places.SLOT_BYTES
    with path.open("r+b") as file:
        other = file.read(slot_bytes)
        file.seek(slot_bytes)
        file.write(bytes(slot_bytes))
        file.seek(2 * slot_bytes if path.stat().st_size > 2 * slot_bytes else 0)
        file.write(other)
    report = scrubbed(tmp_path)
    assert report.stale >= 1
    assert not report.damaged
    assert report.good + report.stale == 6


async def test_segments_without_their_table_are_left_out_and_told(tmp_path: Path) -> None:
    directory = await fill_segments(tmp_path)
    (directory / "table").unlink()
    report = scrubbed(tmp_path)
    assert (report.checked, report.skipped) == (0, 1)
    assert str(directory) in report.troubles[0].where
    assert "opening its tier makes the table anew" in report.troubles[0].reason


@pytest.mark.parametrize("text", [None, b"{}", b'{"digest": "00"}', b"garbage"])
async def test_a_namespace_that_nothing_describes_is_left_out_and_told(
    text: bytes | None, tmp_path: Path
) -> None:
    await fill_files(tmp_path)
    path = tmp_path / NAMESPACE.directory / "config.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text)
    report = scrubbed(tmp_path)
    assert (report.checked, report.skipped) == (0, 1)
    assert report.troubles[0].where == str(path)


async def test_only_the_namespaces_that_are_named_are_checked(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    await fill_files(tmp_path, KEYS[:3], model="other")
    other = next(path.name for path in tmp_path.iterdir() if path.name.startswith("other_"))
    report = scrubbed(tmp_path, only=[other.removesuffix("_r0")])
    assert (report.total, report.good) == (3, 3)
    with pytest.raises(ConfigError, match=r"no such namespace.*name one of those there.*other_"):
        scrub_of(tmp_path, only=["nothing_0123456789ab"])


async def test_what_is_no_file_is_unreadable_and_stays(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    link, directory = file_of(tmp_path, KEYS[0]), file_of(tmp_path, KEYS[1])
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    directory.unlink()
    directory.mkdir()
    report = scrubbed(tmp_path, quarantine=True)
    assert (report.good, report.unreadable) == (len(KEYS) - 2, 2)
    assert not report.damaged
    assert link.is_symlink()
    assert directory.is_dir()


class Scripted(PortableIo):
    """Does something of its own before and after each batch of files that is read."""

    def __init__(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        super().__init__()
        self._before = before
        self._after = after
        self._calls = 0

    def read_files(self, *arguments: Any, **named: Any) -> list[int]:
        call, self._calls = self._calls, self._calls + 1
        self._before(call)
        numbers = super().read_files(*arguments, **named)
        self._after(call)
        return numbers


def nothing(call: int) -> None:
    pass


def meet(others: threading.Barrier) -> None:
    others.wait()


async def test_an_error_of_the_disk_is_no_damage(tmp_path: Path) -> None:
    await fill_files(tmp_path)

    class Sick(PortableIo):
        def read_files(self, paths: Sequence[str], *_: Any, **named: Any) -> list[int]:
            return [-errno.EIO] * len(paths)

    report = scrubbed(tmp_path, io=Sick(), quarantine=True)
    assert (report.unreadable, report.good) == (len(KEYS), 0)
    assert "Input/output error" in report.troubles[0].reason
    assert len(list(tmp_path.glob("*_r0/*/*/*.bin"))) == len(KEYS)


async def test_a_chunk_that_is_evicted_while_it_is_listed_has_vanished(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    gone = file_of(tmp_path, KEYS[0])
    io = Scripted(lambda call: gone.unlink(missing_ok=True), nothing)
    report = scrubbed(tmp_path, io=io)
    assert (report.vanished, report.good) == (1, len(KEYS) - 1)


async def test_a_chunk_that_is_good_the_second_time_is_good(tmp_path: Path) -> None:
    await fill_files(tmp_path)
    path, aside = file_of(tmp_path, KEYS[0]), tmp_path / "aside"
    shutil.copyfile(path, aside)
    flip(path, 5000)
    io = Scripted(nothing, lambda call: os.replace(aside, path) if aside.exists() else None)
    report = scrubbed(tmp_path, io=io, quarantine=True)
    assert report.good == len(KEYS)
    assert path.exists()


async def test_a_chunk_that_is_replaced_while_it_is_read_again_is_not_damage(
    tmp_path: Path,
) -> None:
    await fill_files(tmp_path)
    path = file_of(tmp_path, KEYS[0])
    flip(path, 5000)

    def replace(call: int) -> None:
        if call == 1:
            # As after the checks that the engine itself makes.
            other = tmp_path / "other"
            other.write_bytes(path.read_bytes())
            os.replace(other, path)

    report = scrubbed(tmp_path, io=Scripted(nothing, replace), quarantine=True)
    assert not report.damaged
    assert (report.vanished, report.quarantined) == (1, 0)
    assert path.exists()


async def test_a_slot_that_is_recycled_while_it_is_read_has_vanished(tmp_path: Path) -> None:
    directory = await fill_segments(tmp_path)
    flip(directory / "segment-00000.kv", 5000)

    class Recycled(PortableIo):
        def read_slots(self, *arguments: Any) -> list[int]:
            numbers = super().read_slots(*arguments)
            with (directory / "table").open("r+b") as table:
                table.seek(record_at(0))
                table.write(bytes(160))
            return numbers

    report = scrubbed(tmp_path, io=Recycled())
    assert (report.vanished, report.good) == (1, 5)
    assert not report.damaged


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["files", "segments"])
async def test_an_engine_that_evicts_meanwhile_is_not_taken_for_damage(
    layout: str, tmp_path: Path
) -> None:
    reports: list[ScrubReport] = []
    begun, halfway, ended = threading.Event(), threading.Event(), threading.Event()

    class Late(PortableIo):
        """Reads what it was told of when all of that has long made way for others."""

        def read_files(self, *arguments: Any, **named: Any) -> list[int]:
            begun.set()
            halfway.wait(timeout=30)
            return super().read_files(*arguments, **named)

        def read_slots(self, *arguments: Any) -> list[int]:
            begun.set()
            halfway.wait(timeout=30)
            return super().read_slots(*arguments)

    def scrub_on() -> None:
        while not ended.is_set() or not reports:
            reports.append(scrubbed(tmp_path, io=Late(), quarantine=True))

    room = 60 * (FRAME_BYTES + 8192)
    opened = (
        fs_places.opened(tmp_path, limits=Limits(max_bytes=room, min_free_bytes=0))
        if layout == "files"
        else segment_places.opened(tmp_path, slots=30)
    )
    async with opened as tier:
        await tier.write(MANY[:20], views([payload_of(key) for key in MANY[:20]]))
        scrubber = asyncio.get_running_loop().run_in_executor(None, scrub_on)
        try:
            await asyncio.to_thread(begun.wait, 30)
            for first in range(0, 600, 10):
                keys = [key_number(number) for number in range(first, first + 10)]
                await tier.write(keys, views([payload_of(key) for key in keys]))
                if first == 300:
                    halfway.set()
        finally:
            halfway.set()
            ended.set()
            await scrubber
        assert tier.stats()["evicted"] > 400
    assert sum(report.checked for report in reports) > 0
    assert sum(report.damaged.total() + report.stale for report in reports) == 0
    assert sum(report.vanished for report in reports) > 0
    assert [trouble for report in reports for trouble in report.troubles] == []


@pytest.mark.slow
async def test_batches_are_read_at_the_same_time(tmp_path: Path) -> None:
    await fill_files(tmp_path, MANY)
    both = threading.Barrier(2, timeout=60)
    io = Scripted(lambda call: meet(both) if call < 2 else None, nothing)
    assert scrubbed(tmp_path, io=io).good == len(MANY)
    assert not both.broken


async def test_it_reads_no_faster_than_it_is_told(tmp_path: Path) -> None:
    await fill_files(tmp_path, MANY)
    clock = ManualClock()
    rate = 10 * FRAME_BYTES
    report = scrubbed(tmp_path, clock=clock, sleep=clock.advance, bytes_per_second=rate)
    assert report.good == len(MANY)
    # All but the last batch has been paid for.
    assert len(MANY) / 10 - 0.5 <= clock.now() <= len(MANY) / 10


async def test_without_a_limit_it_never_waits(tmp_path: Path) -> None:
    await fill_files(tmp_path, MANY)
    clock = ManualClock()
    scrubbed(tmp_path, clock=clock, sleep=clock.advance)
    assert clock.now() == 0


def test_what_was_left_unused_is_kept_for_a_second_only() -> None:
    clock = ManualClock()
    limit = RateLimit(100, clock)
    assert limit.take(100) == 0
    assert limit.take(100) == pytest.approx(1)
    clock.advance(60)
    assert limit.take(100) == 0
    assert limit.take(100) == 0
    assert limit.take(100) == pytest.approx(1)


async def test_an_interruption_keeps_what_was_found(tmp_path: Path) -> None:
    await fill_files(tmp_path, MANY)
    both = threading.Barrier(2, timeout=60)
    begun: list[int] = []

    class Counting(PortableIo):
        def read_files(self, paths: Sequence[str], *rest: Any, **named: Any) -> list[int]:
            begun.append(len(paths))
            if len(begun) <= 2:
                both.wait()
            return super().read_files(paths, *rest, **named)

    scrub = scrub_of(tmp_path, io=Counting())

    def interrupt(report: ScrubReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scrub.run(interrupt)
    assert len(begun) >= 2
    assert scrub.report.good == scrub.report.checked == sum(begun)
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("tiering-scrub")
    ]
