"""The fs tier when reads and writes fail, stop halfway, or cannot be direct."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fs_places import KEYS, file_of, files, opened
from tiering.errors import TierError
from tiering.testing.examples import blank, payload_of, stored, views
from tiering.tiers.base import Failed, Read, Write
from tiering_kernels.portable import PortableIo

# I/O that fails


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT]
)
async def test_a_read_that_fails_never_removes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async with opened(tmp_path, io=PortableIo()) as tier:
        await stored(tier, KEYS)
        preadv, broken = os.preadv, file_of(tmp_path, KEYS[4]).stat().st_ino

        def failing(descriptor: int, *rest: Any) -> int:
            if os.fstat(descriptor).st_ino == broken:
                raise OSError(code, os.strerror(code))
            return preadv(descriptor, *rest)

        monkeypatch.setattr(os, "preadv", failing)
        outcomes = await tier.read(KEYS, blank(20))
        failed = outcomes.pop(4)
        if code == errno.ESTALE:
            assert failed is Read.MISS, "as a file that was moved away while it was read"
        else:
            assert isinstance(failed, Failed)
            assert type(failed.error) is TierError
            assert os.strerror(code) in failed.error.reason
        assert outcomes == [Read.HIT] * 19
        monkeypatch.undo()
        assert await tier.read(KEYS, blank(20)) == [Read.HIT] * 20


async def test_without_a_free_descriptor_nothing_is_lost(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with opened(tmp_path) as tier:
        await stored(tier, KEYS[:5])
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            outcomes = [
                *(await tier.read(KEYS[:5], blank(5))),
                *(await tier.write(KEYS[5:7], views([payload_of(key) for key in KEYS[5:7]]))),
            ]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for outcome in outcomes:
            assert isinstance(outcome, Failed)
            assert type(outcome.error) is TierError
            assert "Too many open files" in outcome.error.reason
        assert await tier.contains(KEYS[:7]) == [Read.HIT] * 5 + [Read.MISS] * 2
        assert await tier.read(KEYS[:5], blank(5)) == [Read.HIT] * 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_a_write_that_fails_halfway_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """One of twenty fails after half of its bytes; the others are as if nothing had happened."""
    pwritev, target = os.pwritev, payload_of(KEYS[11])

    def failing(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(code, os.strerror(code))
        if bytes(parts[-1]) == target:
            return pwritev(descriptor, parts[:1], 0)
        return pwritev(descriptor, parts, offset)

    async with opened(tmp_path, io=PortableIo()) as tier:
        monkeypatch.setattr(os, "pwritev", failing)
        outcomes = await tier.write(KEYS, views([payload_of(key) for key in KEYS]))
        failed = outcomes.pop(11)
        if code == errno.EIO:
            assert isinstance(failed, Failed)
            assert failed.error.key == KEYS[11]
        else:
            assert failed is Write.FULL
        assert outcomes == [Write.STORED] * 19
        assert await tier.contains([KEYS[11]]) == [Read.MISS]
        assert files(tmp_path, "*.tmp") == []
        # A full disk costs the least recently used chunk, for a second try.
        assert len(files(tmp_path, "*.bin")) == (19 if code == errno.EIO else 18)
        monkeypatch.undo()
        outcomes = await tier.write(KEYS, views([payload_of(key) for key in KEYS]))
        assert set(outcomes) == {Write.STORED, Write.ALREADY_THERE}
        assert await tier.read(KEYS, blank(20)) == [Read.HIT] * 20


async def test_a_write_the_kernel_stops_halfway_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with opened(tmp_path) as tier:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        try:
            outcomes = await tier.write(KEYS, views([payload_of(key) for key in KEYS]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for outcome in outcomes:
            # The manifest may be stopped before the first chunk is.
            refused = outcome is Write.REFUSED
            assert refused or (isinstance(outcome, Failed) and "too large" in outcome.error.reason)
        assert files(tmp_path, "*.tmp") == files(tmp_path, "*.bin") == []


async def test_a_damaged_file_that_cannot_be_removed_is_not_called_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async with opened(tmp_path, io=PortableIo()) as tier:
        await stored(tier, KEYS[:1])
        content = bytearray(file_of(tmp_path, KEYS[0]).read_bytes())
        content[5000] ^= 1
        file_of(tmp_path, KEYS[0]).write_bytes(content)
        for name in ("rename", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, refused)
        (outcome,) = await tier.read(KEYS[:1], blank(1))
        monkeypatch.undo()
    assert isinstance(outcome, Failed)
    assert type(outcome.error) is TierError
    assert "bad checksum" in outcome.error.reason
    assert "cannot be removed: Read-only file system" in outcome.error.reason


# Direct I/O


@pytest.mark.parametrize("chunk_bytes", [1, 4095, 4096, 8192, 389121])
@pytest.mark.parametrize("offset", [0, 1, 512])
async def test_any_size_and_alignment_works(tmp_path: Path, chunk_bytes: int, offset: int) -> None:
    memory = memoryview(bytearray(offset + 2 * chunk_bytes))
    memory[:] = os.urandom(len(memory))
    content = [memory[offset:][i * chunk_bytes :][:chunk_bytes] for i in range(2)]
    found = [memoryview(bytearray(offset + chunk_bytes))[offset:] for _ in range(2)]
    async with opened(tmp_path, chunk_bytes=chunk_bytes) as tier:
        assert await tier.write(KEYS[:2], content) == [Write.STORED] * 2
        assert await tier.read(KEYS[:2], found) == [Read.HIT] * 2
    assert found == content


async def test_a_root_without_direct_io_is_served_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, seen = os.open, list[int]()

    def refusing(path: Any, flags: int, *rest: Any, **kwargs: Any) -> int:
        seen.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return opening(path, flags, *rest, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    async with opened(tmp_path, io=PortableIo()) as tier:
        assert str(tier.direct) == "buffered"
        assert "buffered" in repr(tier)
        seen.clear()
        await stored(tier, KEYS)
        assert await tier.read(KEYS, blank(20)) == [Read.HIT] * 20
    assert not any(flags & os.O_DIRECT for flags in seen)


@pytest.mark.parametrize("refused", ["open", "transfer"])
async def test_direct_io_refused_for_one_operation_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    opening, preadv, pwritev = os.open, os.preadv, os.pwritev
    refusals = []

    def refuse(direct: int) -> None:
        if direct & os.O_DIRECT:
            refusals.append(direct)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def open_(path: Any, flags: int, *rest: Any, **kwargs: Any) -> int:
        refuse(flags)
        return opening(path, flags, *rest, **kwargs)

    def transfer(original: Callable[..., int]) -> Callable[..., int]:
        def wrapped(descriptor: int, *rest: Any) -> int:
            refuse(fcntl.fcntl(descriptor, fcntl.F_GETFL))
            return original(descriptor, *rest)

        return wrapped

    async with opened(tmp_path, io=PortableIo()) as tier:
        if str(tier.direct) != "direct":
            pytest.skip("the temp directory's file system has no direct I/O to refuse")
        if refused == "open":
            monkeypatch.setattr(os, "open", open_)
        else:
            monkeypatch.setattr(os, "preadv", transfer(preadv))
            monkeypatch.setattr(os, "pwritev", transfer(pwritev))
        await stored(tier, KEYS)
        buffers = blank(20)
        assert await tier.read(KEYS, buffers) == [Read.HIT] * 20
    assert len(refusals) == 40
    assert [bytes(buffer) for buffer in buffers] == [payload_of(key) for key in KEYS]


async def test_short_transfers_are_carried_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwritev = os.preadv, os.pwritev

    def short(parts: list[memoryview]) -> list[memoryview]:
        return [parts[0].cast("B")[:1000]]

    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, short(parts), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, short(parts), at))
    async with opened(tmp_path, io=PortableIo()) as tier:
        await stored(tier, KEYS[:3])
        buffers = blank(3)
        assert await tier.read(KEYS[:3], buffers) == [Read.HIT] * 3
    assert [bytes(buffer) for buffer in buffers] == [payload_of(key) for key in KEYS[:3]]
