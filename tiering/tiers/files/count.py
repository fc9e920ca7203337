"""Counting what lies under a root, a shard at a time, and making a manifest agree with it.

Blocking, but for `count_all`; works from the files alone. Other processes write meanwhile: a file
that is not booked yet because its writer is about to say so is booked by whoever comes first, and
no chunk is forgotten while its file is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tiering.tiers.disk import diskio
from tiering.tiers.disk.paths import is_shard, key_of, parse_directory, place_of
from tiering.tiers.files.bookings import Booked, There
from tiering.tiers.files.manifest import Manifest

AGAIN_SECONDS = 0.5

Ask = Callable[[Callable[[Manifest], bool]], Awaitable[bool | None]]
"""Has the manifest of now, whichever that is, answer; None where it cannot."""


@dataclass(frozen=True, slots=True)
class Shard:
    """`<root>/<directory>/<name>`: the chunks whose hashes begin with the hex digits `name`."""

    root: Path
    directory: str
    name: str

    def reconcile(self, manifest: Manifest) -> None:
        found = self._found()
        here = {each.key for each in found}
        first = bytes.fromhex((self.name + "0" * 3)[:4])
        last = (int.from_bytes(first, "big") + 0x10).to_bytes(3, "big")[-2:]
        end = last if last > first else b"\xff" * 129
        booked = [
            key
            for key in manifest.booked(self.directory, first, end)
            if key.hex().startswith(self.name)
        ]
        if len(here) > len(booked) or here.difference(booked):
            manifest.adopt(found)
        missing = [key for key in booked if key not in here]
        if missing:
            manifest.forget(self.directory, missing, there_in(self.root / self.directory))

    def _found(self) -> list[Booked]:
        top = self.root / self.directory / self.name
        found = []
        for group in diskio.children(top):
            files = diskio.children(group.path)
            for file in files:
                key = key_of(self.name, group.name, file.name)
                size_and_time = None if key is None else _measured(file)
                if key is not None and size_and_time is not None:
                    found.append(Booked(self.directory, key, *size_and_time))
            if not files:
                with contextlib.suppress(OSError):
                    os.rmdir(group.path)
                    os.rmdir(top)
        return found


def there_in(rank_dir: Path) -> There:
    """Says which keys have a file in `rank_dir`, or may have one."""

    def may_be_there(key: bytes) -> bool:
        try:
            os.lstat(rank_dir / place_of(key))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return True

    return lambda keys: [key for key in keys if may_be_there(key)]


async def count_all(manifest: Manifest, shards: Sequence[Shard], ask: Ask) -> bool:
    """Compare `manifest` with the files, a shard at a time, the least of it while others wait: book
    what is not booked, forget what is not there, remove empty directories; True when all of that
    was done. What `ask` cannot answer now is asked again; where it comes to ask another manifest,
    which was made because this one is lost, whoever made that counts."""

    def count(shard: Shard) -> None:
        with contextlib.suppress(OSError):  # it can be neither read nor written to
            shard.reconcile(manifest)

    async def is_done(step: Callable[[], None]) -> bool:
        def done(asked: Manifest) -> bool:
            if asked is manifest:
                step()
            return asked is manifest

        while True:
            answer = await ask(done)
            if answer is not None:
                return answer
            await asyncio.sleep(AGAIN_SECONDS)

    for shard in shards:
        if not await is_done(partial(count, shard)):
            return False
        await asyncio.sleep(0)
    return await is_done(manifest.counted)


def shards_of(root: Path) -> list[Shard]:
    """Every shard of every rank of every namespace under `root`."""
    return [
        Shard(root, rank.name, shard.name)
        for rank in diskio.children(root)
        if (name := parse_directory(rank.name)) is not None and name.rank is not None
        for shard in diskio.children(rank.path)
        if is_shard(shard.name)
    ]


def _measured(file: os.DirEntry[str]) -> tuple[int, int] | None:
    """Size, and microseconds since 1970 at which it was written or stamped."""
    with contextlib.suppress(OSError):
        found = file.stat(follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            return found.st_size, found.st_mtime_ns // 1000
    return None
