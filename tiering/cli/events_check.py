"""Whether what was announced for STORAGE is what lies under roots. For `tiering events --check`.

A file or slot names a chunk by its last block; the blocks before that one, as many as the namespace
has in a chunk, are found through the parents that were announced. Blocking while it reads names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiering import maintenance
from tiering.events.blocks import MEDIUM_STORAGE
from tiering.events.mirror import EventMirror, hash_number
from tiering.maintenance import StoredChunks, StoredGroup


@dataclass(slots=True)
class Check:
    """By group: hashes of blocks `missing` from what was announced, or `surplus` there. Of
    `left_out` groups nothing is announced by design: only who has everything before a chunk can
    tell what it is worth. `chunks` and `blocks` were compared."""

    chunks: int = 0
    blocks: int = 0
    missing: dict[int, list[int]] = field(default_factory=dict)
    surplus: dict[int, list[int]] = field(default_factory=dict)
    left_out: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return not (self.missing or self.surplus)

    @property
    def missing_count(self) -> int:
        return sum(map(len, self.missing.values()))

    @property
    def surplus_count(self) -> int:
        return sum(map(len, self.surplus.values()))


def on_disk(roots: Sequence[Path], only: Sequence[str]) -> list[StoredChunks]:
    """What lies there now. ConfigError for what cannot be read at all."""
    return [found for root in roots for found in maintenance.stored_chunks(root, only)]


def compare(mirror: EventMirror, stored: Sequence[StoredChunks]) -> Check:
    check = Check(problems=[problem for each in stored for problem in each.problems])
    by_group: dict[int, list[StoredGroup]] = {}
    for each in stored:
        for number, group in each.groups.items():
            by_group.setdefault(number, []).append(group)
    announced = mirror.groups(MEDIUM_STORAGE)
    for number in sorted(announced | by_group.keys()):
        groups = by_group.get(number, [])
        chunks = sum(len(group.hashes) for group in groups)
        if number not in announced and not any(group.keeps_all for group in groups):
            check.left_out[number] = chunks
            continue
        expected = {
            block
            for group in groups
            for last in map(hash_number, group.hashes)
            for block in mirror.chain(MEDIUM_STORAGE, last, group.blocks_per_chunk, number)
        }
        check.chunks += chunks
        check.blocks += len(expected)
        found = mirror.difference({MEDIUM_STORAGE: expected}, number).get(MEDIUM_STORAGE)
        if found is not None and found.missing:
            check.missing[number] = sorted(found.missing)
        if found is not None and found.surplus:
            check.surplus[number] = sorted(found.surplus)
    return check
