"""Which directories under a root belong to which namespace, in both layouts. For commands.

    <namespace>/                      config.json, tmp_r<rank>/, quarantine_r<rank>/
    <namespace>_r<rank>/              layout "files": a rank's chunks
    <namespace>_r<rank>.segments/     layout "segments": a rank's chunks
    <namespace>_r<rank>.quarantine/   layout "segments": damaged frames

Reads names and config.json only, follows no link, changes nothing. Blocking.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tiering.errors import ConfigError
from tiering.namespace import Namespace
from tiering.tiers.disk import diskio
from tiering.tiers.disk.paths import CONFIG_NAME, STAGING_NAME, is_shard, key_of, parse_directory
from tiering.tiers.segments.files import QUARANTINE_SUFFIX

SEGMENTS_SUFFIX = ".segments"


@dataclass(slots=True)
class NamespaceDirs:
    """One namespace, called as its directory is. `digest` is the short one of the name; any of
    the directories may be missing."""

    root: Path
    directory: str
    model: str
    digest: str
    ranks: dict[int, Path] = field(default_factory=dict)
    segments: dict[int, Path] = field(default_factory=dict)
    quarantines: list[Path] = field(default_factory=list)

    @property
    def config_dir(self) -> Path:
        return self.root / self.directory

    @property
    def config_path(self) -> Path:
        return self.config_dir / CONFIG_NAME

    @property
    def staging_dirs(self) -> list[Path]:
        children = diskio.children(self.config_dir)
        return [Path(each.path) for each in children if each.name.startswith(STAGING_NAME)]

    @property
    def all_directories(self) -> list[Path]:
        """Those with chunks first, that with config.json last."""
        chunks = [*self.ranks.values(), *self.segments.values()]
        return [*chunks, *self.quarantines, self.config_dir]

    @property
    def layouts(self) -> tuple[str, ...]:
        held = {"files": self.ranks, "segments": self.segments}
        return tuple(layout for layout, directories in held.items() if directories)


def namespaces_under(root: Path) -> list[NamespaceDirs]:
    """By directory name. Raises OSError where `root` cannot be read."""
    found: dict[str, NamespaceDirs] = {}
    with os.scandir(root) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for entry in children:
        stem, suffix = _split(entry.name)
        name = parse_directory(stem)
        if name is None or not entry.is_dir(follow_symlinks=False):
            continue
        if suffix and name.rank is None:
            continue
        namespace = found.setdefault(
            name.namespace, NamespaceDirs(root, name.namespace, name.model, name.digest)
        )
        path = root / entry.name
        if suffix == QUARANTINE_SUFFIX:
            namespace.quarantines.append(path)
        elif suffix and name.rank is not None:
            namespace.segments[name.rank] = path
        elif name.rank is not None:
            namespace.ranks[name.rank] = path
    return list(found.values())


def chosen(root: Path, only: Sequence[str]) -> list[NamespaceDirs]:
    """The namespaces under `root`, or those of them in `only`; ConfigError where one is missing
    or `root` cannot be read."""
    try:
        found = namespaces_under(root)
    except OSError as error:
        remedy = "name the root_dir of an fs tier, as a user who may read it"
        raise ConfigError("root_dir", str(root), str(error.strerror), remedy) from error
    there = {each.directory for each in found}
    for name in only:
        if name not in there:
            told = ", ".join(sorted(there)) or "none"
            remedy = f"name one of those there, without _r<rank>: {told}"
            raise ConfigError("--namespace", name, f"no such namespace under {root}", remedy)
    return [each for each in found if not only or each.directory in only]


def nothing_under(root: Path) -> ConfigError:
    """That `root` holds nothing of ours: a mount that is missing, or another directory."""
    remedy = "name the root_dir of an fs tier, with its file system mounted"
    return ConfigError("root_dir", str(root), "has no namespace in it", remedy)


def read_config(path: Path) -> dict[str, Any]:
    """What config.json says; empty where it is missing or says nothing that can be read."""
    try:
        config = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}
    return config if isinstance(config, dict) else {}


def described(config: dict[str, Any]) -> Namespace | None:
    """The namespace that a config.json describes; None where it is not one of this version."""
    fields = {name: value for name, value in config.items() if name != "digest"}
    try:
        namespace = Namespace(**{**fields, "groups": tuple(fields["groups"])})
        return namespace if namespace.digest.hex() == config["digest"] else None
    except (TypeError, KeyError, AttributeError):
        return None


def chunk_files(rank_dir: Path) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
    """Every chunk's file in layout "files", by name alone. Raises OSError."""
    for shard in diskio.children(rank_dir):
        if is_shard(shard.name) and shard.is_dir(follow_symlinks=False):
            yield from chunk_files_in(Path(shard.path))


def chunk_files_in(shard: Path) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
    for group in diskio.children(shard):
        if not group.is_dir(follow_symlinks=False):
            continue
        for file in diskio.children(group.path):
            key = key_of(shard.name, group.name, file.name)
            if key is not None:
                yield key, file


def _split(name: str) -> tuple[str, str]:
    for suffix in (SEGMENTS_SUFFIX, QUARANTINE_SUFFIX):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return name, ""
