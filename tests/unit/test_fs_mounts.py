"""The fs tier on real mounts that fill up, go away, come back, and turn read-only."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import pytest

from fs_places import files
from tiering.testing.examples import example_namespace, key_number
from tiering.tiers.base import Failed, Read, Write, WriteOutcome
from tiering.tiers.files.limits import Limits
from tiering.tiers.files.tier import FsTier

CHUNK_BYTES = 64 << 10
KEYS = [key_number(i) for i in range(200)]


def payload_of(key: bytes) -> bytes:
    return (key * (CHUNK_BYTES // len(key) + 1))[:CHUNK_BYTES]


def mount(*arguments: str | Path) -> None:
    command = ["mount", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


def unmount(directory: Path) -> None:
    # Lazily, as when a server goes away under those who have files open.
    subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m", "none", directory)
    yield directory
    unmount(directory)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A mount point; whatever is mounted there at the end is unmounted."""
    directory = tmp_path / "root"
    directory.mkdir()
    yield directory
    while directory.is_mount():
        unmount(directory)


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[FsTier]:
    tier = FsTier(
        root,
        example_namespace(),
        CHUNK_BYTES,
        limits=Limits(min_free_bytes=0),
        read_path="buffered",
        write_path="buffered",
        n_read_threads=2,
        n_write_threads=2,
    )
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


async def write(tier: FsTier, keys: list[bytes]) -> list[WriteOutcome]:
    return await tier.write(keys, [memoryview(payload_of(key)) for key in keys])


async def read(tier: FsTier, keys: list[bytes]) -> list[object]:
    """What reading `keys` gives; every HIT has its own bytes."""
    buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in keys]
    outcomes = await tier.read(keys, buffers)
    for key, outcome, buffer in zip(keys, outcomes, buffers, strict=True):
        assert outcome is not Read.HIT or buffer == payload_of(key)
    return list(outcomes)


async def test_a_disk_smaller_than_what_is_written_keeps_the_latest(disk: Path) -> None:
    async with opened(disk / "kv") as tier:
        for start in range(0, len(KEYS), 10):
            outcomes = await write(tier, KEYS[start : start + 10])
            assert set(outcomes) <= {Write.STORED, Write.FULL}
            assert outcomes.count(Write.STORED) >= 5
        assert tier.stats()["evicted"] > 50
        assert (await read(tier, KEYS[-40:])).count(Read.HIT) >= 35
        assert files(disk, "tmp_r*/*") == []


async def test_a_disk_that_others_fill_is_read_until_there_is_room_again(disk: Path) -> None:
    async with opened(disk / "kv") as tier:
        assert await write(tier, KEYS[:20]) == [Write.STORED] * 20
        ballast = disk / "ballast"
        fill(ballast)
        outcomes = await write(tier, KEYS[20:30])
        assert set(outcomes) <= {Write.STORED, Write.FULL, Write.REFUSED}
        # All the room there is is the tier's own, and it gives up the tail of its oldest.
        found = await read(tier, KEYS[:20])
        kept = found.count(Read.HIT)
        assert kept > 0
        assert found == [Read.HIT] * kept + [Read.MISS] * (20 - kept)
        assert files(disk, "tmp_r*/*") == []
        ballast.unlink()
        await write(tier, KEYS[:30])
        assert await read(tier, KEYS[:30]) == [Read.HIT] * 30


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write_for_ever(file)


def write_for_ever(file: IO[bytes]) -> None:
    while True:
        file.write(bytes(4096))


Change = Callable[[Path, Path], None]


def unmounted(root: Path, disk: Path) -> None:
    unmount(root)


def covered(root: Path, disk: Path) -> None:
    mount("-t", "tmpfs", "-o", "size=1m", "none", root)


@pytest.mark.parametrize("change", [unmounted, covered])
async def test_a_root_whose_mount_goes_away_is_not_written_to_and_comes_back(
    disk: Path, root: Path, change: Change
) -> None:
    mount("--bind", disk, root)
    async with opened(root) as tier:
        assert await write(tier, KEYS[:5]) == [Write.STORED] * 5
        change(root, disk)
        outcomes = await write(tier, KEYS[5:8])
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        assert "another file system" in str(outcomes[0])
        assert await read(tier, KEYS[:5]) == [Read.MISS] * 5
        assert await tier.contains(KEYS[:5]) == [Read.MISS] * 5
        assert list(root.iterdir()) == []
        if change is covered:
            unmount(root)
        else:
            mount("--bind", disk, root)
        assert await read(tier, KEYS[:5]) == [Read.HIT] * 5
        assert await write(tier, KEYS[5:8]) == [Write.STORED] * 3
    # At close, too.
    assert is_empty(root)


def is_empty(root: Path) -> bool:
    """Whether the mount point's own directory is."""
    while root.is_mount():
        unmount(root)
    return list(root.iterdir()) == []


async def test_a_root_that_turns_read_only_is_read_and_written_again_later(
    disk: Path, root: Path
) -> None:
    mount("--bind", disk, root)
    async with opened(root) as tier:
        assert await write(tier, KEYS[:5]) == [Write.STORED] * 5
        unmount(root)
        mount("--bind", disk, root)
        mount("-o", "remount,ro,bind", root)
        outcomes = await write(tier, KEYS[5:8])
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        assert await read(tier, KEYS[:5]) == [Read.HIT] * 5
        assert [type(outcome) for outcome in await tier.delete(KEYS[:1])] == [Failed]
        mount("-o", "remount,rw,bind", root)
        assert await write(tier, KEYS[5:8]) == [Write.STORED] * 3
        assert await read(tier, KEYS[:8]) == [Read.HIT] * 8
