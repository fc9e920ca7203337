"""Settings to components: the one place that names a concrete tier, policy or copier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiering.clock import Clock, MonotonicClock
from tiering.config import EngineConfig, FsTierConfig
from tiering.device.base import DeviceCopier
from tiering.device.host import HostCopier
from tiering.layout import ShareLayout
from tiering.namespace import Namespace
from tiering.policy.base import EvictionPolicy
from tiering.policy.lru import LruPolicy
from tiering.residency.core import Residency
from tiering.tiers.base import Tier
from tiering.tiers.fs import FsTier
from tiering.tiers.fs_io import IoPath, probe
from tiering.tiers.fs_survey import NamespaceSurvey, survey

__all__ = [
    "NamespaceSurvey",
    "build_core",
    "build_host_copier",
    "build_tiers",
    "probe_io_path",
    "survey_root",
]

_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LruPolicy}


def build_core(
    config: EngineConfig, rows: int, tiers: int, clock: Clock | None = None
) -> Residency:
    """The core over a host tier of `rows` slots and `tiers` secondary tiers."""
    return Residency(
        rows,
        tiers,
        _POLICIES[config.eviction_policy](),
        clock or MonotonicClock(),
        config.load_deadline_seconds,
    )


def build_tiers(config: EngineConfig, namespace: Namespace, chunk_bytes: int) -> list[Tier]:
    """The secondary tiers in their order, not yet open. `chunk_bytes`: of a row, aligned."""
    return [_build_tier(tier, namespace, chunk_bytes) for tier in config.secondary_tiers]


def _build_tier(config: FsTierConfig, namespace: Namespace, chunk_bytes: int) -> Tier:
    return FsTier(
        Path(config.root_dir),
        namespace,
        chunk_bytes,
        config.n_read_threads,
        config.n_write_threads,
    )


def build_host_copier(
    pages: Sequence[npt.NDArray[np.uint8]], layout: ShareLayout, share: npt.NDArray[np.uint8]
) -> DeviceCopier:
    """Copies between host arrays (uint8, `(num_blocks, page_bytes)`, one a layer) and a rank's
    share of the host tier (uint8, `(rows, share_bytes)`)."""
    return HostCopier(pages, layout, share)


def survey_root(root_dir: Path) -> list[NamespaceSurvey]:
    """What lies under a file-system tier's root, from its files alone."""
    return survey(root_dir)


def probe_io_path(directory: Path) -> IoPath:
    """`direct` or `buffered`: how a file-system tier would read and write in `directory`, by
    trying; OSError where nothing can be written there."""
    return probe(directory)
