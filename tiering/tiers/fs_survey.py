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

import orjson

from tiering.errors import ConfigError
from tiering.tiers.fs_paths import (
    CONFIG_NAME,
    QUARANTINE_NAME,
    STAGING_NAME,
    TEMP_SUFFIX,
    NamespaceName,
    is_shard,
    key_of,
    parse_directory,
)


@dataclass(frozen=True, slots=True)
class NamespaceSurvey:
    """One namespace, all of its ranks together. `digest` is the directory's short one; `bytes`
    are file sizes, headers included; mtimes are seconds since the epoch, None without chunks."""

    directory: str
    model: str
    digest: str
    config: dict[str, Any]
    ranks: tuple[int, ...]
    chunks: int
    bytes: int
    oldest_mtime_seconds: float | None
    newest_mtime_seconds: float | None
    temp_files: int
    quarantined: int


@dataclass(slots=True)
class _Tally:
    ranks: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    mtimes: list[float] = field(default_factory=list)
    temp_files: int = 0
    quarantined: int = 0


def survey(root_dir: Path) -> list[NamespaceSurvey]:
    """The namespaces directly under `root_dir`, by directory name.

    ConfigError where `root_dir` is no directory or may not be read.
    """
    tallies: dict[NamespaceName, _Tally] = {}
    try:
        for entry in sorted(os.scandir(root_dir), key=lambda entry: entry.name):
            name = parse_directory(entry.name)
            if name is None or not entry.is_dir(follow_symlinks=False):
                continue
            namespace = NamespaceName(name.namespace, name.model, name.digest, None)
            tally = tallies.setdefault(namespace, _Tally())
            if name.rank is None:
                tally.temp_files += _temp_files(Path(entry.path))
            else:
                tally.ranks.append(name.rank)
                _count_rank(Path(entry.path), tally)
        return [_survey_of(Path(root_dir), name, tally) for name, tally in tallies.items()]
    except OSError as error:
        raise ConfigError(
            "root_dir",
            str(root_dir),
            f"{error.strerror}: {error.filename}",
            "name the root_dir of an fs tier, as a user who may read it",
        ) from error


def _survey_of(root: Path, name: NamespaceName, tally: _Tally) -> NamespaceSurvey:
    config = _config(root / name.namespace / CONFIG_NAME)
    return NamespaceSurvey(
        directory=name.namespace,
        model=str(config.get("model", name.model)),
        digest=name.digest,
        config=config,
        ranks=tuple(sorted(tally.ranks)),
        chunks=len(tally.sizes),
        bytes=sum(tally.sizes),
        oldest_mtime_seconds=min(tally.mtimes, default=None),
        newest_mtime_seconds=max(tally.mtimes, default=None),
        temp_files=tally.temp_files,
        quarantined=tally.quarantined,
    )


def _count_rank(rank_dir: Path, tally: _Tally) -> None:
    tally.temp_files += _temp_files(rank_dir / STAGING_NAME)
    tally.quarantined += len(_names(rank_dir / QUARANTINE_NAME))
    for shard in filter(is_shard, _names(rank_dir)):
        for group in _names(rank_dir / shard):
            directory = rank_dir / shard / group
            for file in _names(directory):
                if key_of(shard, group, file) is not None:
                    _count_chunk(directory / file, tally)


def _count_chunk(path: Path, tally: _Tally) -> None:
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode):
        tally.sizes.append(found.st_size)
        tally.mtimes.append(found.st_mtime)


def _temp_files(directory: Path) -> int:
    return sum(name.endswith(TEMP_SUFFIX) for name in _names(directory))


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _config(path: Path) -> dict[str, Any]:
    """What config.json says; empty where it is missing or says nothing that can be read."""
    try:
        config = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    return config if isinstance(config, dict) else {}
