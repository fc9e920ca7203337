"""Which chunks lie under a root, by namespace and group, in both layouts. For `tiering events`.

Reads names and tables and changes nothing. Blocking. Other processes may write meanwhile, so what
is told is of no single moment.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiering.errors import ConfigError
from tiering.keys import split_key
from tiering.tiers.segments import survey as segment_survey
from tiering.tiers.upkeep.namespaces import NamespaceDirs, chosen, chunk_files, read_config

_FULL = "full attention"
_PER_CHUNK = re.compile(r"\bblocks_per_chunk=(\d+)")


@dataclass(slots=True)
class StoredGroup:
    """`hashes` of the last block of each chunk; `keeps_all`: of every token before, so that a chunk
    is of use to whoever has those before it."""

    group: int
    keeps_all: bool
    blocks_per_chunk: int
    hashes: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class StoredChunks:
    """Of one namespace. `problems`: what could not be looked into, and why."""

    directory: str
    groups: dict[int, StoredGroup] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def stored_chunks(root: Path, only: Sequence[str]) -> list[StoredChunks]:
    """Of the namespaces under `root`, or of those in `only`; ConfigError where one is missing or
    `root` cannot be read."""
    return [_of_namespace(namespace) for namespace in chosen(root, only)]


def _of_namespace(namespace: NamespaceDirs) -> StoredChunks:
    found = StoredChunks(namespace.directory)
    try:
        config = read_config(namespace.config_path)
    except OSError as error:
        config = {}
        found.problems.append(f"{error.filename}: {error.strerror}")
    for rank_dir in namespace.ranks.values():
        try:
            for key, _ in chunk_files(rank_dir):
                _add(found, key, config)
        except OSError as error:
            found.problems.append(f"{error.filename}: {error.strerror}")
    for segments in namespace.segments.values():
        try:
            for key, _, _ in segment_survey.frames(segments):
                _add(found, key, config)
        except (ConfigError, OSError) as error:
            found.problems.append(str(error))
    return found


def _add(found: StoredChunks, key: bytes, config: dict[str, Any]) -> None:
    block_hash, group = split_key(key)
    if group not in found.groups:
        found.groups[group] = _described(group, config)
    found.groups[group].hashes.add(block_hash)


def _described(group: int, config: dict[str, Any]) -> StoredGroup:
    """What config.json says of a group; the plainest kind where it says nothing."""
    groups, per_chunk, told = config.get("groups"), config.get("blocks_per_chunk"), ""
    if isinstance(groups, list) and group < len(groups):
        told = str(groups[group])
    with contextlib.suppress(TypeError, ValueError):
        own = _PER_CHUNK.search(told)
        blocks = int(own[1]) if own else int(per_chunk or 1)
        return StoredGroup(group, _FULL in told or not told, max(1, blocks))
    return StoredGroup(group, True, 1)
