"""The manifest of a root as a command sees it, which is no engine: who has it open, what was used.

Never makes a manifest: an empty one would tell the next engine that there is nothing. Blocking.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tiering.clock import Clock
from tiering.tiers.disk import temps
from tiering.tiers.disk.paths import MANIFEST_NAME
from tiering.tiers.files.bookings import ManifestBroken, ManifestBusy, ManifestFull
from tiering.tiers.files.manifest import Manifest

T = TypeVar("T")

UNAVAILABLE = (ManifestBroken, ManifestBusy, ManifestFull)


@dataclass(frozen=True, slots=True)
class Engine:
    """A tier that is open, and when its process started. `pid` is None where it means nothing
    here: that of another container."""

    pid: int | None
    started_seconds: float

    def __str__(self) -> str:
        return "a process of another container" if self.pid is None else f"process {self.pid}"


def ask(root: Path, clock: Clock, question: Callable[[Manifest], T]) -> T | None:
    """`question` of the manifest under `root`; None where there is none. `clock` counts from
    1970. Raises one of UNAVAILABLE where there is one that cannot answer, and OSError."""
    path = root / MANIFEST_NAME / "manifest.sqlite3"
    try:
        if path.stat().st_size == 0:
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = Manifest(path, temps.owner_name(), clock.now())
    try:
        answer = question(manifest)
        manifest.leave()
        return answer
    finally:
        manifest.close()


def engines(root: Path, clock: Clock) -> list[Engine]:
    """The tiers in layout "files" that have `root` open, as far as the manifest knows. Raises as
    `ask`."""
    now = clock.now()
    owners = ask(root, clock, lambda manifest: manifest.others()) or []
    return [_engine(name) for name, beat in owners if not temps.is_gone(name, now - beat)]


def _engine(owner: str) -> Engine:
    space, pid, start_ticks, _ = owner.split("-")
    own_space = temps.owner_name().split("-")[0]
    return Engine(
        pid=int(pid) if space == own_space else None,
        started_seconds=_booted_seconds() + int(start_ticks) / os.sysconf("SC_CLK_TCK"),
    )


def _booted_seconds() -> float:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
