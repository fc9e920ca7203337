"""What a power cut leaves of writes that were not synced, done to real files.

Part of `tiering.testing.faults`; owns what lay there before each write. Whole chunks are kept in
memory for that, so it is for small tests.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Before:
    """What a write of a file is about to change: `blocks`, what lies in the file that is to be
    written over, and `replaced`, what its final name says now. None where there is nothing."""

    blocks: bytes | None
    replaced: bytes | None


@dataclass(frozen=True, slots=True)
class _LostFile:
    inode: int
    before: Before


class PowerCut:
    """Safe in any thread."""

    def __init__(self) -> None:
        self.is_watching = False
        self._lock = threading.Lock()
        self._files: dict[str, _LostFile] = {}
        self._slots: dict[tuple[str, int], bytes] = {}

    def before_file(self, temp: str, final: str) -> Before | None:
        return Before(_content(temp), _content(final)) if self.is_watching else None

    def wrote_file(self, here: str, final: str, before: Before | None, sync: bool) -> None:
        """A whole file lies at `here` and is to be called `final`."""
        if before is None:
            return
        inode = _inode(here)
        with self._lock:
            self._files.pop(final, None)
            if not sync and inode is not None:
                self._files[final] = _LostFile(inode, before)

    def before_slot(self, descriptor: int, offset: int, size: int) -> None:
        if not self.is_watching:
            return
        path = path_of(descriptor)
        with open(path, "rb") as file:
            file.seek(offset)
            content = file.read(size)
        with self._lock:
            self._slots.setdefault((path, offset), content.ljust(size, b"\0"))

    def synced(self, path: str) -> None:
        with self._lock:
            self._files.pop(path, None)
            self._slots = {slot: old for slot, old in self._slots.items() if slot[0] != path}

    def cut(self, chance: random.Random, at: Callable[[str], str]) -> dict[str, str]:
        with self._lock:
            files, self._files = self._files, {}
            slots, self._slots = self._slots, {}
        fates = {}
        for path, lost in files.items():
            if _inode(path) == lost.inode:
                fates[path] = _tear_file(at(path), lost.before, chance)
        for (path, offset), old in slots.items():
            fates[f"{path}@{offset}"] = _tear_slot(at(path), offset, old, chance)
        return fates


def path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def flip_bit(path: str, offset: int, bit: int) -> None:
    """Turn one bit of `path` over, `bit` bits after `offset`, if it is still there."""
    byte, bit_of_byte = divmod(bit, 8)
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        file.seek(offset + byte)
        for value in file.read(1):
            file.seek(offset + byte)
            file.write(bytes([value ^ (1 << bit_of_byte)]))


def leave_half(
    path: str, count: int, header: memoryview, payload: memoryview, offset: int = 0
) -> None:
    """Write the first `count` bytes of a frame to `path`, which is made if it is not there; not
    where its directory is not there."""
    frame = bytes(header) + bytes(payload)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return
    try:
        os.pwrite(descriptor, frame[:count], offset)
    finally:
        os.close(descriptor)


def _tear_file(path: str, before: Before, chance: random.Random) -> str:
    new = _content(path)
    if new is None:
        return "gone"
    fate = chance.choice(("kept", "gone", "empty", "cut", "zeros", "old blocks", "torn"))
    old = (before.blocks or b"").ljust(len(new), b"\0")[: len(new)]
    if fate == "gone" and before.replaced is None:
        os.unlink(path)
    elif fate != "kept":
        left = {
            "gone": before.replaced or b"",
            "empty": b"",
            "cut": new[: chance.randrange(len(new))],
            "zeros": bytes(len(new)),
            "old blocks": old,
            "torn": _torn(new, old, chance),
        }[fate]
        with open(path, "wb") as file:
            file.write(left)
    return fate


def _tear_slot(path: str, offset: int, old: bytes, chance: random.Random) -> str:
    fate = chance.choice(("kept", "old", "torn"))
    if fate == "kept" or _inode(path) is None:
        return fate
    with open(path, "r+b") as file:
        file.seek(offset)
        new = file.read(len(old))
        file.seek(offset)
        file.write((old if fate == "old" else _torn(new, old, chance))[: len(new)])
    return fate


def _torn(new: bytes, old: bytes, chance: random.Random) -> bytes:
    """Each page either new or old."""
    return b"".join(
        (new if chance.random() < 0.5 else old)[at : at + PAGE] for at in range(0, len(new), PAGE)
    )


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def _inode(path: str) -> int | None:
    try:
        return os.stat(path, follow_symlinks=False).st_ino
    except OSError:
        return None
