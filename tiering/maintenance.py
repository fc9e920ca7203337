"""What a command may ask of an fs tier's root: survey, verify, collect, and how I/O works there;
and of a bucket: survey.

The one place beside `wiring` that names concrete backends; for commands, not for engines. Blocking.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiering.clock import MonotonicClock, UnixClock
from tiering.errors import TieringError
from tiering.tiers.disk import diskio, mounts
from tiering.tiers.disk.diskio import Direct
from tiering.tiers.upkeep.collect import Candidate, Collector, Plan
from tiering.tiers.upkeep.scrub import Finding, Scrub, ScrubReport
from tiering.tiers.upkeep.stored import StoredChunks, StoredGroup, stored_chunks
from tiering.tiers.upkeep.survey import BucketSurvey, NamespaceSurvey, survey
from tiering_kernels.chunkio import ENGINES, EngineUnavailable
from tiering_kernels.engines import open_engine

if TYPE_CHECKING:
    from tiering.config import ObjTierConfig

__all__ = [
    "BucketSurvey",
    "Candidate",
    "Collector",
    "Finding",
    "Mount",
    "NamespaceSurvey",
    "Plan",
    "Scrub",
    "ScrubReport",
    "StoredChunks",
    "StoredGroup",
    "io_engines",
    "mount_of",
    "open_collector",
    "open_scrub",
    "probe_io_path",
    "require_root",
    "stored_chunks",
    "survey_bucket",
    "survey_root",
]

_SECONDS_IN_DAY = 86400
_BYTES_IN_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system that a root is on. Where it is not `shares_manifest`, each engine keeps
    its own in memory."""

    kind: str
    shares_manifest: bool
    free_bytes: int
    total_bytes: int


def require_root(root: Path) -> None:
    """TieringError where `root` is not a directory."""
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        raise TieringError(f"{root} {what}; give the root_dir of an fs tier")


def survey_root(root: Path) -> list[NamespaceSurvey]:
    """What lies under a file-system tier's root, from its files alone."""
    return survey(root)


def survey_bucket(
    config: ObjTierConfig, where: str, progress: Callable[[int], None]
) -> BucketSurvey:
    """What lies under an object tier's prefix, whose keys a user finds under `where`; `progress` is
    told how many objects were seen. ConfigError where the bucket cannot be used, TieringError where
    it fails later."""
    # Nothing else here needs what these need.
    from tiering.tiers.obj.names import above
    from tiering.tiers.obj.s3 import S3Store
    from tiering.tiers.upkeep.buckets import BucketLook

    prefix = above(config.prefix)
    store = S3Store(config.store_config, where=f"{where}store_config", prefix=prefix)
    return asyncio.run(BucketLook(store, prefix, MonotonicClock(), progress).survey())


def probe_io_path(directory: Path) -> Direct:
    """Which way a file-system tier would read and write in `directory`, by trying; OSError where
    nothing can be written there."""
    return diskio.probe(directory, "auto", "auto", MonotonicClock())


def mount_of(root: Path) -> Mount:
    """Raises OSError."""
    free, total = diskio.free_bytes(root)
    return Mount(mounts.kind_of(root), mounts.is_local(root), free, total)


def io_engines() -> dict[str, str]:
    """The engines of I/O, the first that works being the one that `auto` takes: "" for each that
    works here, else why it does not."""
    told: dict[str, str] = {}
    for engine in ENGINES:
        try:
            open_engine(engine)
            told[engine] = ""
        except EngineUnavailable as error:
            told[engine] = str(error)
    return told


def open_scrub(root: Path, only: Sequence[str], mb_per_second: float, quarantine: bool) -> Scrub:
    """A pass over the chunks under `root`, or those of the namespaces in `only`."""
    return Scrub(
        root,
        open_engine(),
        MonotonicClock(),
        UnixClock(),
        time.sleep,
        mb_per_second * _BYTES_IN_MB,
        quarantine,
        only,
    )


def open_collector(root: Path, orphaned_days: float, named: Sequence[str]) -> Collector:
    """See `tiering.tiers.upkeep.collect.Collector`."""
    return Collector(root, UnixClock(), orphaned_days * _SECONDS_IN_DAY, named)
