"""What is in a namespace's directories, and whether all of it is ours to remove. For `collect`.

Reads names and times only; changes nothing. Blocking.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tiering.tiers.disk import diskio
from tiering.tiers.disk.database import FILE_ENDINGS
from tiering.tiers.disk.paths import (
    CATALOGUE_NAME,
    CHUNK_SUFFIX,
    CONFIG_NAME,
    QUARANTINE_NAME,
    STAGING_NAME,
    TEMP_SUFFIX,
    is_shard,
    key_of,
)
from tiering.tiers.segments.files import LOCK_NAME, TABLE_NAME, TICKS_NAME
from tiering.tiers.upkeep.namespaces import NamespaceDirs

_GROUP = re.compile(r"[0-9a-f]{0,2}_g\d{1,10}")
_SEGMENT = re.compile(r"segment-\d{5,}\.kv")
_FILES = (CONFIG_NAME, *(CATALOGUE_NAME + end for end in FILE_ENDINGS))
_BESIDE = re.compile(rf"({STAGING_NAME}|{QUARANTINE_NAME})\d+")


@dataclass(slots=True)
class Contents:
    """`chunks` in layout "files" by name; `bytes` of all files; `newest_seconds` since 1970 of
    all that tells of use. `foreign`: what is not recognised."""

    chunks: int = 0
    bytes: int = 0
    newest_seconds: float = 0.0
    opened_seconds: float = 0.0
    foreign: list[str] = field(default_factory=list)
    empty_directories: list[Path] = field(default_factory=list)


def contents_of(dirs: NamespaceDirs) -> Contents:
    """Raises OSError."""
    found = Contents(opened_seconds=opened_seconds(dirs))
    found.newest_seconds = found.opened_seconds
    device = dirs.root.stat().st_dev
    _Walk(found, device).namespace(dirs)
    return found


def opened_seconds(dirs: NamespaceDirs) -> float:
    """When an engine last opened the namespace, at the latest: each makes and removes a file in
    its staging directory then, or writes to its lock."""
    told = [dirs.config_dir, dirs.config_path, *dirs.staging_dirs]
    told += [directory / LOCK_NAME for directory in dirs.segments.values()]
    times = [_mtime(path) for path in told]
    return max(times) or max(map(_mtime, dirs.all_directories))


class _Walk:
    """Through one namespace, adding to `found`. Whatever is on another device than the root is
    not recognised."""

    def __init__(self, found: Contents, device: int) -> None:
        self._found = found
        self._device = device

    def namespace(self, dirs: NamespaceDirs) -> None:
        for child in diskio.children(dirs.config_dir):
            if _BESIDE.fullmatch(child.name):
                is_staging = child.name.startswith(STAGING_NAME)
                for _ in self._directories([child], lambda name: True):
                    self._files(child.path, _is_temp if is_staging else _is_chunk)
            else:
                self._file(child, child.name in _FILES or _is_temp(child.name))
        for rank_dir in dirs.ranks.values():
            for shard in self._directories(diskio.children(rank_dir), is_shard):
                self._shard(shard)
        for directory in dirs.segments.values():
            self._files(directory, _is_of_segments, counts_as_use=True)
        for directory in dirs.quarantines:
            self._files(directory, _is_chunk)

    def _shard(self, shard: os.DirEntry[str]) -> None:
        groups = diskio.children(shard.path)
        n_empty = 0
        for group in self._directories(groups, lambda name: _GROUP.fullmatch(name) is not None):
            files = diskio.children(group.path)
            if not files:
                self._found.empty_directories.append(Path(group.path))
                n_empty += 1
            for file in files:
                is_chunk = key_of(shard.name, group.name, file.name) is not None
                self._found.chunks += is_chunk
                self._file(file, is_chunk, counts_as_use=is_chunk)
        if n_empty == len(groups):
            self._found.empty_directories.append(Path(shard.path))

    def _directories(
        self, entries: list[os.DirEntry[str]], is_known: Callable[[str], bool]
    ) -> Iterator[os.DirEntry[str]]:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_dev == self._device
            if is_ours and is_known(entry.name):
                yield entry
            else:
                self._found.foreign.append(entry.path)

    def _files(
        self,
        directory: str | Path,
        is_known: Callable[[str], bool],
        counts_as_use: bool = False,
    ) -> None:
        for file in diskio.children(directory):
            self._file(file, is_known(file.name), counts_as_use)

    def _file(self, entry: os.DirEntry[str], is_known: bool, counts_as_use: bool = False) -> None:
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        if not is_known or not stat.S_ISREG(found.st_mode):
            self._found.foreign.append(entry.path)
            return
        self._found.bytes += found.st_size
        if counts_as_use:
            self._found.newest_seconds = max(self._found.newest_seconds, found.st_mtime)


def _is_temp(name: str) -> bool:
    return name.endswith(TEMP_SUFFIX)


def _is_chunk(name: str) -> bool:
    return name.endswith(CHUNK_SUFFIX)


def _is_of_segments(name: str) -> bool:
    return (
        name in (LOCK_NAME, TABLE_NAME, TICKS_NAME)
        or _SEGMENT.fullmatch(name) is not None
        or _is_temp(name)
    )


def _mtime(path: Path) -> float:
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0
