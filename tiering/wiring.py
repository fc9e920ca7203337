"""Settings to components: the one place that names a concrete tier, policy or copier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiering.clock import Clock, MonotonicClock, UnixClock
from tiering.config import EngineConfig, FsTierConfig
from tiering.device.base import DeviceCopier
from tiering.device.host import HostCopier
from tiering.errors import ConfigError
from tiering.layout import ShareLayout
from tiering.namespace import Namespace
from tiering.policy.base import EvictionPolicy
from tiering.policy.lru import LruPolicy
from tiering.residency.core import Residency
from tiering.tiers.base import Tier
from tiering.tiers.disk.iopool import IoPool
from tiering.tiers.files.limits import Limits, max_bytes_for
from tiering.tiers.files.tier import FsTier
from tiering.tiers.segments.tier import SegmentTier
from tiering.tiers.wrappers.guarded import GuardedTier
from tiering.tiers.wrappers.striped import StripedTier
from tiering_kernels.chunkio import EngineUnavailable
from tiering_kernels.engines import open_engine

__all__ = [
    "build_core",
    "build_host_copier",
    "build_tiers",
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
    """Each root guarded by itself, so that a sick one is out alone; several are striped over."""
    clock = MonotonicClock()
    roots = [
        GuardedTier(_build_root(config, Path(root), namespace, chunk_bytes), clock)
        for root in config.roots
    ]
    return roots[0] if len(roots) == 1 else StripedTier(roots, clock)


def _share_of(config: FsTierConfig, chunk_bytes: int) -> int | None:
    """Bytes that each root may take; ConfigError where that is less than a chunk."""
    if config.max_bytes is None:
        return None
    share, need = config.max_bytes // len(config.roots), max_bytes_for(1, chunk_bytes)
    if share < need:
        raise ConfigError(
            "secondary_tiers[].max_bytes",
            config.max_bytes,
            f"is less than one chunk of {need} bytes for each root_dir",
            f"write at least {need * len(config.roots)}, and better a thousand times that",
        )
    return share


def _build_root(config: FsTierConfig, root: Path, namespace: Namespace, chunk_bytes: int) -> Tier:
    try:
        io = open_engine(config.io_engine)
    except EngineUnavailable as error:
        raise ConfigError(
            "secondary_tiers[].io_engine",
            config.io_engine,
            str(error),
            'write "auto", or leave the key out',
        ) from error
    pool = IoPool(f"fs:{root}", config.n_read_threads, config.n_write_threads)
    max_bytes = _share_of(config, chunk_bytes)
    low = config.high_watermark if config.low_watermark is None else config.low_watermark
    if config.layout == "segments":
        if max_bytes is None:
            raise AssertionError("the configuration has been checked")
        return SegmentTier(
            root,
            namespace,
            chunk_bytes,
            max_bytes=max_bytes,
            min_free_bytes=config.min_free_bytes,
            high_watermark=config.high_watermark,
            low_watermark=low,
            durability=config.durability,
            read_path=config.read_path,
            write_path=config.write_path,
            io=io,
            pool=pool,
            clock=UnixClock(),
        )
    return FsTier(
        root,
        namespace,
        chunk_bytes,
        limits=Limits(max_bytes, config.min_free_bytes, config.high_watermark, low),
        durability=config.durability,
        read_path=config.read_path,
        write_path=config.write_path,
        io=io,
        pool=pool,
    )


def build_host_copier(
    pages: Sequence[npt.NDArray[np.uint8]], layout: ShareLayout, share: npt.NDArray[np.uint8]
) -> DeviceCopier:
    """Copies between host arrays (uint8, `(num_blocks, page_bytes)`, one a layer) and a rank's
    share of the host tier (uint8, `(rows, share_bytes)`)."""
    return HostCopier(pages, layout, share)
