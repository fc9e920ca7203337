"""The fs tier's names and modes, and what it does about damaged files."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from fs_places import KEYS, NAMESPACE, children, file_of, files, opened, quarantined
from tiering.errors import DamagedChunk
from tiering.keys import chunk_key
from tiering.testing.examples import CHUNK_BYTES, blank, key_number, payload_of, stored, views
from tiering.tiers.base import Delete, Failed, Read, Write
from tiering.tiers.files.limits import QUARANTINED_FILES_MAX


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


# Names and modes


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o377])
async def test_modes_are_the_owners_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    root = tmp_path / "kv"
    with umask(mask):
        async with opened(root) as tier:
            await stored(tier, KEYS[:3])
            file_of(root, KEYS[0]).write_bytes(b"x" * (CHUNK_BYTES + 4096))
            await tier.read(KEYS[:1], blank(1))
    found = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
    assert found == {0o600}
    dirs = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in dirs} == {0o700}
    assert len(quarantined(root)) == 1


async def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    key = chunk_key(bytes.fromhex("abcdef0123"), 7)
    async with opened(root) as tier:
        await stored(tier, [key])
    short = NAMESPACE.digest.hex()[:12]
    assert [str(path.relative_to(root)) for path in files(root, "*") if path.is_file()] == [
        ".manifest/manifest.sqlite3",
        f"org_model_{short}/config.json",
        f"org_model_{short}_r0/abc/de_g7/abcdef0123.bin",
    ]
    config = orjson.loads((root / f"org_model_{short}" / "config.json").read_bytes())
    assert config == NAMESPACE.describe()


@pytest.mark.parametrize("model", ["../../out", "/etc/out", "..", "a\0b", "x" * 5000])
@pytest.mark.parametrize(
    "block_hash", [b"../../../out", b"/abs/out", b"\0" * 5, b"q", b"\xff" * 124]
)
async def test_nothing_given_from_outside_leaves_the_root(
    tmp_path: Path, model: str, block_hash: bytes
) -> None:
    root = tmp_path / "kv"
    key = chunk_key(block_hash, (1 << 32) - 1)
    async with opened(root, model=model) as tier:
        await stored(tier, [key])
        (buffer,) = blank(1)
        assert await tier.read([key], [buffer]) == [Read.HIT]
        assert [batch async for batch in tier.scan()] == [[key]]
        (chunk,) = files(root, "*.bin")
        chunk.write_bytes(b"damage")
        (outcome,) = await tier.read([key], [buffer])
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, DamagedChunk)
    assert children(tmp_path) == [root]
    assert len(children(root)) == 3


@pytest.mark.parametrize("key", [b"", b"\0\0\0\1", b"x" * 129])
async def test_a_key_that_cannot_be_one_fails_alone(tmp_path: Path, key: bytes) -> None:
    async with opened(tmp_path) as tier:
        good = KEYS[0]
        for outcomes in (
            await tier.write([key, good], views([payload_of(good)] * 2)),
            await tier.contains([key, good]),
            await tier.read([key, good], blank(2)),
            await tier.delete([key, good]),
        ):
            assert isinstance(outcomes[0], Failed)
            assert f"not {len(key)}" in outcomes[0].error.reason
            assert outcomes[1] in (Write.STORED, Read.HIT, Delete.DELETED)


async def test_buffers_of_another_size_or_number_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        with pytest.raises(ValueError, match="a buffer of 5 bytes, not 8192"):
            await tier.read(KEYS[:1], [memoryview(bytearray(5))])
        with pytest.raises(ValueError, match="2 keys with 1 buffers"):
            await tier.write(KEYS[:2], blank(1))


# Damage


def flip(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 0x40
        path.write_bytes(content)

    return damage


def resize(delta: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size + delta)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip(0), "bad magic"),
        (flip(9), "format version"),
        (flip(60), "holds another key"),
        (flip(3000), "bad checksum"),
        (flip(4090), "bad checksum"),
        (flip(4096), "bad checksum"),
        (flip(4096 + CHUNK_BYTES - 1), "bad checksum"),
        (resize(-1), "file of 12287 bytes, not 12288"),
        (resize(-CHUNK_BYTES), "file of 4096 bytes"),
        (resize(-CHUNK_BYTES - 4096), "file of 0 bytes"),
        (resize(1), "file of 12289 bytes"),
    ],
)
async def test_a_damaged_file_is_named_kept_aside_and_replaced(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS)
        damage(file_of(tmp_path, KEYS[3]))
        content = file_of(tmp_path, KEYS[3]).read_bytes()
        buffers = blank(20)
        outcomes = await tier.read(KEYS, buffers)
        failed = outcomes.pop(3)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, DamagedChunk)
        assert reason in failed.error.reason
        assert outcomes == [Read.HIT] * 19
        assert [path.read_bytes() for path in quarantined(tmp_path)] == [content]
        assert await tier.contains([KEYS[3]]) == [Read.MISS]
        assert await tier.read([KEYS[3]], blank(1)) == [Read.MISS]
        await stored(tier, [KEYS[3]])
        assert await tier.read([KEYS[3]], [buffers[3]]) == [Read.HIT]
    assert [bytes(buffer) for buffer in buffers] == [payload_of(key) for key in KEYS]


async def test_two_files_that_changed_names_are_both_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS[:2])
        one, two = (file_of(tmp_path, key) for key in KEYS[:2])
        one.rename(tmp_path / "aside")
        two.rename(one)
        (tmp_path / "aside").rename(two)
        for outcome in await tier.read(KEYS[:2], blank(2)):
            assert isinstance(outcome, Failed)
            assert "holds another key" in outcome.error.reason
        assert await tier.contains(KEYS[:2]) == [Read.MISS] * 2


@pytest.mark.parametrize("change", [{"rank": 1}, {"revision": "other"}])
async def test_a_file_from_another_rank_or_namespace_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    key = KEYS[0]
    async with opened(tmp_path, **change) as foreign, opened(tmp_path) as tier:
        await stored(foreign, [key])
        assert await tier.read([key], blank(1)) == [Read.MISS]
        (chunk,) = files(tmp_path, "*.bin")
        file_of(tmp_path, key).parent.mkdir(parents=True)
        shutil.copy(chunk, file_of(tmp_path, key))
        (outcome,) = await tier.read([key], blank(1))
        assert isinstance(outcome, Failed)
        assert "another namespace" in outcome.error.reason


async def test_a_file_of_the_wrong_size_is_no_hit_and_is_written_anew(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS[:1])
        os.truncate(file_of(tmp_path, KEYS[0]), 0)  # what a power cut can leave
        assert await tier.contains(KEYS[:1]) == [Read.MISS]
        await stored(tier, KEYS[:1])
        assert await tier.read(KEYS[:1], blank(1)) == [Read.HIT]


async def test_the_quarantine_does_not_grow_for_ever(tmp_path: Path) -> None:
    keys = [key_number(i) for i in range(QUARANTINED_FILES_MAX + 30)]
    async with opened(tmp_path) as tier:
        await stored(tier, keys)
        for key in keys:
            os.truncate(file_of(tmp_path, key), 5)
        outcomes = await tier.read(keys, blank(len(keys)))
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        assert await tier.contains(keys) == [Read.MISS] * len(keys)
    assert 1 < len(quarantined(tmp_path)) <= QUARANTINED_FILES_MAX
    assert files(tmp_path, "*/*_g0/*.bin") == []
