"""The fs tier's directory belongs to others too: ranks, cleaners, mounts, and the survey."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fs_places import KEYS, NAMESPACE, children, file_of, make_tier, opened, write_when_counted
from tiering.testing.examples import CHUNK_BYTES, blank, stored, views
from tiering.tiers.base import Failed, Read, Write
from tiering.tiers.upkeep.survey import survey
from tiering_kernels.chunkio import ChunkIo
from tiering_kernels.engines import open_engine
from tiering_kernels.portable import PortableIo


async def test_ranks_that_share_a_root_each_read_their_own(tmp_path: Path) -> None:
    tiers = [make_tier(tmp_path, rank=rank) for rank in range(8)]
    for _ in range(2):
        await asyncio.gather(*(tier.open() for tier in tiers))
        for rank, tier in enumerate(tiers):
            mine = views([bytes([rank]) * CHUNK_BYTES] * 5)
            outcomes = await tier.write(KEYS[:5], mine)
            assert set(outcomes) <= {Write.STORED, Write.ALREADY_THERE}
        for rank, tier in enumerate(tiers):
            buffers = blank(5)
            assert await tier.read(KEYS[:5], buffers) == [Read.HIT] * 5
            assert all(buffer == bytes([rank]) * CHUNK_BYTES for buffer in buffers)
        await asyncio.gather(*(tier.close() for tier in tiers))


async def test_a_cleaner_that_removes_everything_below_the_root_does_no_harm(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS)
        for key in KEYS[:10]:
            file_of(tmp_path, key).unlink()
        assert await tier.read(KEYS, blank(20)) == [Read.MISS] * 10 + [Read.HIT] * 10
        for directory in children(tmp_path):
            shutil.rmtree(directory)
        assert await tier.contains(KEYS) == [Read.MISS] * 20
        assert await tier.read(KEYS, blank(20)) == [Read.MISS] * 20
        assert [batch async for batch in tier.scan()] == []
        # What is there now is counted before anything is added to it.
        assert set(await write_when_counted(tier, KEYS)) == {Write.STORED}
        assert await tier.read(KEYS, blank(20)) == [Read.HIT] * 20


class Prunes:
    """Cleaners that come by as soon as a directory has been made, `times` for each, and take it
    and what is above it, as far as they are empty."""

    def __init__(self, times: int, below: Path) -> None:
        self._times = times
        self._below = below
        self._came = Counter[str]()
        self._mkdir = os.mkdir

    def __call__(self, path: str | Path, mode: int = 0o777) -> None:
        self._mkdir(path, mode)
        made = Path(path)
        if self._below in made.parents and self._came[str(path)] < self._times:
            self._came[str(path)] += 1
            with contextlib.suppress(OSError):
                made.rmdir()
                if made.parent != self._below:
                    made.parent.rmdir()


@pytest.mark.parametrize("engine", [PortableIo, open_engine])
async def test_a_directory_that_cleaners_take_before_its_first_file_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Callable[[], ChunkIo]
) -> None:
    """A tier that opens and one that evicts remove empty directories, also those that another
    process has made for a file which it is about to rename."""
    async with opened(tmp_path, io=engine()) as tier:
        prunes = Prunes(8, tmp_path / f"{NAMESPACE.directory}_r0")
        monkeypatch.setattr(os, "mkdir", prunes)
        await stored(tier, KEYS)
        monkeypatch.undo()
        assert await tier.read(KEYS, blank(20)) == [Read.HIT] * 20
        assert list(tmp_path.rglob("*.tmp")) == []


async def test_a_root_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    async with opened(root) as tier:
        await stored(tier, KEYS[:1])
        root.rename(tmp_path / "away")
        assert await tier.read(KEYS[:1], blank(1)) == [Read.MISS]
        (outcome,) = await tier.write(KEYS[1:2], blank(1))
        assert isinstance(outcome, Failed)
        assert str(root) in outcome.error.reason
        assert not root.exists()
        (tmp_path / "away").rename(root)
        assert await tier.read(KEYS[:1], blank(1)) == [Read.HIT]
        await stored(tier, KEYS[1:2])


async def test_another_file_system_in_the_roots_place_is_not_written_to(tmp_path: Path) -> None:
    """As when a mount goes away and its mount point's own directory shows."""
    root = tmp_path / "kv"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("/dev/shm is on the temp directory's file system")
        async with opened(root) as tier:
            root.rename(tmp_path / "away")
            root.symlink_to(elsewhere)
            (outcome,) = await tier.write(KEYS[:1], blank(1))
        assert isinstance(outcome, Failed)
        assert f"{root} is on another file system than at start" in outcome.error.reason
        assert os.listdir(elsewhere) == []


# The survey


async def test_the_survey_tells_what_lies_there(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier, opened(tmp_path, rank=3) as other:
        await stored(tier, KEYS)
        await stored(other, KEYS[:5])
        os.truncate(file_of(tmp_path, KEYS[0]), 5000)
        await tier.read(KEYS[:1], blank(1))
    async with opened(tmp_path, model="another/one") as another:
        pass
    (tmp_path / NAMESPACE.directory / "tmp_r0" / "left.tmp").touch()
    (tmp_path / "unrelated").mkdir()
    os.utime(file_of(tmp_path, KEYS[1]), (1000, 1000))
    os.utime(file_of(tmp_path, KEYS[2]), (2_000_000_000, 2_000_000_000))
    first, second = survey(tmp_path)
    assert first.model == "another/one"
    assert (first.chunks, first.bytes, first.oldest_mtime_seconds) == (0, 0, None)
    assert (second.directory, second.model) == (NAMESPACE.directory, "org/model")
    assert second.digest == NAMESPACE.digest.hex()[:12]
    assert second.config == NAMESPACE.describe()
    assert second.ranks == (0, 3)
    assert (second.chunks, second.bytes) == (24, 24 * (4096 + CHUNK_BYTES))
    assert (second.oldest_mtime_seconds, second.newest_mtime_seconds) == (1000, 2_000_000_000)
    assert (second.temp_files, second.quarantined) == (1, 1)
    assert another.name == f"fs:{tmp_path}"


async def test_the_survey_does_without_a_config(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS[:2])
    (tmp_path / NAMESPACE.directory / "config.json").write_bytes(b"{")
    (found,) = survey(tmp_path)
    assert (found.model, found.config, found.chunks) == ("org_model", {}, 2)
    shutil.rmtree(tmp_path / NAMESPACE.directory)
    (found,) = survey(tmp_path)
    assert (found.model, found.config, found.chunks) == ("org_model", {}, 2)
