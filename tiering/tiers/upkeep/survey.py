"""What lies under a root: its namespaces, chunks, bytes, ages, left-overs. For `tiering stat`.

Works from files alone and changes none; needs no open tier. Blocking. Other processes may write
meanwhile, so the numbers are of no single moment.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiering.errors import ConfigError
from tiering.tiers.disk import diskio
from tiering.tiers.disk.paths import QUARANTINE_NAME, STAGING_NAME, TEMP_SUFFIX
from tiering.tiers.segments import survey as segment_survey
from tiering.tiers.upkeep.namespaces import (
    NamespaceDirs,
    chunk_files,
    namespaces_under,
    read_config,
)

_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class NamespaceSurvey:
    """One namespace, all of its ranks together. `digest` is the directory's short one; `bytes`
    are those of the chunks, headers included, `disk_bytes` what its files take on the disk. In
    layout "files" the times are those of the files, in "segments" those of use; None without
    chunks. Of a bucket, the layout is "objects" and `disk_bytes` are those of all its objects.
    `problems`: what could not be looked into, and why."""

    directory: str
    model: str
    digest: str
    config: dict[str, Any]
    layouts: tuple[str, ...]
    ranks: tuple[int, ...]
    chunks: int
    bytes: int
    disk_bytes: int
    oldest_mtime_seconds: float | None
    newest_mtime_seconds: float | None
    temp_files: int
    quarantined: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BucketSurvey:
    """What lies in a bucket under a prefix. `objects` and `object_bytes` are all that is there;
    `others` and `other_bytes` of them belong to no namespace."""

    namespaces: list[NamespaceSurvey]
    objects: int
    object_bytes: int
    others: int
    other_bytes: int


@dataclass(slots=True)
class _Tally:
    chunks: int = 0
    bytes: int = 0
    disk_bytes: int = 0
    oldest: float | None = None
    newest: float | None = None
    temp_files: int = 0
    quarantined: int = 0
    problems: list[str] = field(default_factory=list)

    def seen_at(self, *seconds: float) -> None:
        self.oldest = min(seconds) if self.oldest is None else min(self.oldest, *seconds)
        self.newest = max(seconds) if self.newest is None else max(self.newest, *seconds)


def survey(root_dir: Path) -> list[NamespaceSurvey]:
    """The namespaces directly under `root_dir`, by directory name.

    ConfigError where `root_dir` is no directory or may not be read.
    """
    try:
        return [survey_of(namespace) for namespace in namespaces_under(root_dir)]
    except OSError as error:
        raise ConfigError(
            "root_dir",
            str(root_dir),
            f"{error.strerror}: {error.filename}",
            "name the root_dir of an fs tier, as a user who may read it",
        ) from error


def survey_of(namespace: NamespaceDirs) -> NamespaceSurvey:
    """Raises OSError."""
    config = read_config(namespace.config_path)
    tally = _Tally()
    _count_beside(namespace, tally)
    for rank_dir in namespace.ranks.values():
        _count_rank(rank_dir, tally)
    for directory in namespace.segments.values():
        _count_segments(directory, tally)
    return NamespaceSurvey(
        directory=namespace.directory,
        model=str(config.get("model", namespace.model)),
        digest=namespace.digest,
        config=config,
        layouts=namespace.layouts,
        ranks=tuple(sorted({*namespace.ranks, *namespace.segments})),
        chunks=tally.chunks,
        bytes=tally.bytes,
        disk_bytes=tally.disk_bytes,
        oldest_mtime_seconds=tally.oldest,
        newest_mtime_seconds=tally.newest,
        temp_files=tally.temp_files,
        quarantined=tally.quarantined,
        problems=tuple(tally.problems),
    )


def _count_beside(namespace: NamespaceDirs, tally: _Tally) -> None:
    """What a namespace has besides its chunks."""
    config_dir = namespace.config_dir
    for child in diskio.children(config_dir):
        if child.name.startswith(STAGING_NAME):
            tally.temp_files += _temp_files(child.path)
        elif child.name.startswith(QUARANTINE_NAME):
            tally.quarantined += _count_files(child.path, tally)
    tally.temp_files += _temp_files(config_dir)
    for directory in namespace.quarantines:
        tally.quarantined += _count_files(directory, tally)


def _count_rank(rank_dir: Path, tally: _Tally) -> None:
    for _, file in chunk_files(rank_dir):
        if (found := _regular(file)) is not None:
            tally.chunks += 1
            tally.bytes += found.st_size
            tally.disk_bytes += found.st_blocks * _BLOCK_BYTES
            tally.seen_at(found.st_mtime, found.st_mtime)


def _count_segments(directory: Path, tally: _Tally) -> None:
    tally.temp_files += _temp_files(directory)
    _count_files(directory, tally)
    try:
        found = segment_survey.survey(directory)
    except ConfigError as error:
        tally.problems.append(f"{directory}: {error.reason}")
        return
    tally.chunks += found.chunks
    tally.bytes += found.bytes
    if found.oldest_tick is not None and found.newest_tick is not None:
        tally.seen_at(found.oldest_tick / 1e6, found.newest_tick / 1e6)


def _temp_files(directory: str | Path) -> int:
    return sum(file.name.endswith(TEMP_SUFFIX) for file in diskio.children(directory))


def _count_files(directory: str | Path, tally: _Tally) -> int:
    """How many files lie directly in `directory`; what they take on the disk is added."""
    found = [each for file in diskio.children(directory) if (each := _regular(file)) is not None]
    tally.disk_bytes += sum(each.st_blocks for each in found) * _BLOCK_BYTES
    return len(found)


def _regular(file: os.DirEntry[str]) -> os.stat_result | None:
    try:
        found = file.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None
