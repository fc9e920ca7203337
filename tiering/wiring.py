"""Settings to components: the one place that names a concrete tier, policy or copier.

What is of the user's own is loaded and made here, too; whatever goes wrong with that is a
ConfigError that names its key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tiering.clock import Clock, MonotonicClock, UnixClock
from tiering.config import (
    EngineConfig,
    FsTierConfig,
    ObjTierConfig,
    P2pTierConfig,
    PressureConfig,
    TierConfig,
    UserTierConfig,
)
from tiering.device.base import DeviceCopier, DevicePages, HostPages
from tiering.device.cuda import CudaCopier
from tiering.device.futures import Watcher
from tiering.device.host import HostCopier
from tiering.device.pinned import pin
from tiering.device.runtime import DeviceRuntime, KernelUse
from tiering.errors import ConfigError
from tiering.events import HOST
from tiering.events.blocks import MEDIUM_CPU, MEDIUM_STORAGE
from tiering.events.channels import Medium
from tiering.namespace import Namespace
from tiering.plugins import Given, load_class
from tiering.policy.admission import AdmissionPolicy, AdmitAll, SeenOften
from tiering.policy.base import EvictionPolicy
from tiering.policy.registry import place_of
from tiering.residency.core import Residency
from tiering.residency.state import Generations
from tiering.tiers.base import PeerTier, Tier
from tiering.tiers.disk.catalogue import Catalogue, catalogue_path
from tiering.tiers.disk.iopool import IoPool
from tiering.tiers.files.limits import Limits, max_bytes_for
from tiering.tiers.files.tier import FsTier
from tiering.tiers.host import Region
from tiering.tiers.obj.names import above
from tiering.tiers.obj.parts import ObjLimits
from tiering.tiers.obj.s3 import S3Store
from tiering.tiers.obj.tier import ObjTier
from tiering.tiers.segments.tier import SegmentTier
from tiering.tiers.wrappers.guarded import GuardedTier
from tiering.tiers.wrappers.metered import MeteredPeerTier, MeteredTier
from tiering.tiers.wrappers.pressure import PressureLimits, PressureTier
from tiering.tiers.wrappers.striped import StripedTier
from tiering_kernels.chunkio import HEADER_BYTES, EngineUnavailable
from tiering_kernels.engines import open_engine

__all__ = [
    "announced_tiers",
    "build_catalogues",
    "build_core",
    "build_device_copier",
    "build_host_copier",
    "build_tiers",
    "media_of",
    "peer_tiers",
]

Made = TypeVar("Made")

# Those that chunks are stored in.
_Storing = FsTierConfig | ObjTierConfig | UserTierConfig

_STORE_SECONDS = 60.0
"""How long a call that stores chunks in a bucket may take."""

_SPARE_SECONDS = 5.0


def build_core(
    config: EngineConfig,
    rows: int,
    tiers: int,
    clock: Clock | None = None,
    surveyed: Collection[int] = (),
    peers: Collection[int] = (),
    generations: Generations | None = None,
) -> Residency:
    """The core over a host tier of `rows` slots and `tiers` secondary tiers, of which it has those
    `surveyed` that somebody keeps an index of, and `peers` that are of peers. `generations`: where
    these see those of the slots, one for each at least."""
    return Residency(
        rows,
        tiers,
        _build_policy(config, rows),
        clock or MonotonicClock(),
        config.load_deadline_seconds,
        _build_admission(config),
        surveyed,
        peers,
        None if generations is None else generations[:rows],
    )


def _build_policy(config: EngineConfig, capacity: int) -> EvictionPolicy:
    name = Given("eviction_policy", config.eviction_policy)
    if place := place_of(config.eviction_policy):
        module, of_class = Given(name.path, place.module), Given(name.path, place.name)
    elif config.cache_policy_module_path is not None:
        module, of_class = Given("cache_policy_module_path", config.cache_policy_module_path), name
    else:
        raise AssertionError("the configuration has been checked")
    policy_class = load_class(module, of_class, EvictionPolicy)  # type: ignore[type-abstract]
    return _made(name, lambda: policy_class(capacity), "let its constructor take `capacity`")


def _build_admission(config: EngineConfig) -> AdmissionPolicy:
    if config.store_threshold <= 1:
        return AdmitAll()
    return SeenOften(config.store_threshold, config.max_tracker_size)


def build_tiers(
    config: EngineConfig,
    namespace: Namespace,
    chunk_bytes: int,
    region: Region | None = None,
    replica: int = 0,
) -> list[Tier]:
    """The secondary tiers in their order, not yet open. `chunk_bytes`: of a row, aligned. `region`:
    what a tier of peers serves, as data-parallel replica `replica`."""
    clock = MonotonicClock()
    tiers: list[Tier] = []
    for at, tier in enumerate(config.secondary_tiers):
        where = f"secondary_tiers[{at}]"
        if isinstance(tier, P2pTierConfig):
            seconds = config.load_deadline_seconds
            peers = _build_peers(tier, namespace, region, replica, where, seconds)
            tiers.append(MeteredPeerTier(peers, chunk_bytes, clock))
            continue
        inner = _build_inner(tier, config.load_deadline_seconds, where, namespace, chunk_bytes)
        built = _guarded(inner, tier, config.pressure_on(tier), config.load_deadline_seconds)
        tiers.append(MeteredTier(built, chunk_bytes, clock))
    for name, count in Counter(tier.name for tier in tiers).items():
        if count > 1:
            raise ConfigError(
                "secondary_tiers",
                name,
                f"is the name of {count} of them, and metrics would not tell them apart",
                "let each tier of your own have a name of its own",
            )
    return tiers


def media_of(config: EngineConfig) -> dict[int, Medium]:
    """How each tier is announced that is, by its number or HOST."""
    tiers = config.secondary_tiers
    return {HOST: Medium(MEDIUM_CPU)} | {
        at: Medium(tiers[at].event_medium or MEDIUM_STORAGE, tiers[at].locality)
        for at in announced_tiers(config)
    }


def announced_tiers(config: EngineConfig) -> list[int]:
    """The numbers of the secondary tiers that are."""
    return [at for at, tier in enumerate(config.secondary_tiers) if tier.enable_kv_events]


def peer_tiers(config: EngineConfig) -> list[int]:
    """The numbers of the secondary tiers that are of peers."""
    tiers = config.secondary_tiers
    return [at for at, tier in enumerate(tiers) if isinstance(tier, P2pTierConfig)]


def build_catalogues(config: EngineConfig, namespace: Namespace) -> dict[int, Catalogue]:
    """For the tiers that are announced, by number, where their chunks are described: beside them
    if that is a directory of this machine's. Each begins to work when it is first used."""
    return {
        at: Catalogue(partial(catalogue_path, Path(roots[0]), namespace.directory))
        for at in announced_tiers(config)
        if (roots := config.secondary_tiers[at].roots)
    }


def _build_inner(
    config: _Storing, deadline_seconds: float, where: str, namespace: Namespace, chunk_bytes: int
) -> list[Tier]:
    """What a tier consists of: its roots, or one thing."""
    if isinstance(config, UserTierConfig):
        return [_build_users(config, where, namespace, chunk_bytes)]
    if isinstance(config, ObjTierConfig):
        return [_build_bucket(config, deadline_seconds, where, namespace, chunk_bytes)]
    return [_build_root(config, Path(root), where, namespace, chunk_bytes) for root in config.roots]


def _guarded(
    inner: list[Tier],
    config: TierConfig,
    pressure: PressureConfig | None,
    deadline_seconds: float,
) -> Tier:
    """Each root guarded by itself, so that a sick one is out alone; several are striped over."""
    clock = MonotonicClock()
    if pressure is not None:
        limits = _limits_of(pressure, config)
        inner = [PressureTier(tier, clock, limits) for tier in inner]
    if isinstance(config, ObjTierConfig):
        # It has deadlines of its own, and a large batch over a slow line is no stall.
        stall_seconds = max(deadline_seconds, _STORE_SECONDS) + _SPARE_SECONDS
        return GuardedTier(inner[0], clock, stall_seconds=stall_seconds)
    roots = [GuardedTier(tier, clock) for tier in inner]
    return roots[0] if len(roots) == 1 else StripedTier(roots, clock)


def _limits_of(pressure: PressureConfig, tier: TierConfig) -> PressureLimits:
    high, low = pressure.watermarks(tier.locality)
    return PressureLimits(
        high_seconds=high,
        low_seconds=low,
        weight=pressure.alpha,
        warmup_calls=pressure.warmup_completions,
        half_life_seconds=pressure.decay_half_life_s,
        cooldown_seconds=pressure.cooldown_s,
        refuses_all=pressure.policy_cls == "DropStorePolicy",
    )


def _build_users(
    config: UserTierConfig, where: str, namespace: Namespace, chunk_bytes: int
) -> Tier:
    name = Given(f"{where}.type", config.type)
    module = Given(f"{where}.module_path", config.module_path)
    tier_class: Callable[..., Tier] = load_class(module, name, Tier)  # type: ignore[type-abstract]
    remedy = "correct its keys, or its constructor: it is given a namespace, chunk_bytes and them"
    tier = _made(name, lambda: tier_class(namespace, chunk_bytes, **config.own_keys), remedy)
    if not _made(name, lambda: tier.name, "let `name` be a text"):
        raise ConfigError(*name, "has an empty name", "let `name` be what metrics call it")
    return tier


def _made(name: Given, make: Callable[[], Made], remedy: str) -> Made:
    """What `make`, code of the user's, returns; ConfigError for whatever it raises."""
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:
        reason = f"cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(*name, reason, remedy) from error


def _share_of(config: FsTierConfig, where: str, chunk_bytes: int) -> int | None:
    """Bytes that each root may take; ConfigError where that is less than a chunk."""
    if config.max_bytes is None:
        return None
    share, need = config.max_bytes // len(config.roots), max_bytes_for(1, chunk_bytes)
    if share < need:
        raise ConfigError(
            f"{where}.max_bytes",
            config.max_bytes,
            f"is less than one chunk of {need} bytes for each root_dir",
            f"write at least {need * len(config.roots)}, and better a thousand times that",
        )
    return share


def _build_root(
    config: FsTierConfig, root: Path, where: str, namespace: Namespace, chunk_bytes: int
) -> Tier:
    try:
        io = open_engine(config.io_engine)
    except EngineUnavailable as error:
        raise ConfigError(
            f"{where}.io_engine",
            config.io_engine,
            str(error),
            'write "auto", or leave the key out',
        ) from error
    pool = IoPool(f"fs:{root}", config.n_read_threads, config.n_write_threads)
    max_bytes = _share_of(config, where, chunk_bytes)
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


def _build_peers(
    config: P2pTierConfig,
    namespace: Namespace,
    region: Region | None,
    replica: int,
    where: str,
    deadline_seconds: float,
) -> PeerTier:
    if region is None:
        raise ConfigError(
            f"{where}.type",
            config.type,
            "needs an engine whose host memory peers can read, and there is none here",
            "use it under vLLM or in a TieredStore",
        )
    if find_spec("zmq") is None:
        raise ConfigError(
            f"{where}.type",
            config.type,
            "needs a package that is not installed: pyzmq",
            "run pip install 'kv-tiering[p2p]'",
        )
    # Of an extra: nothing else here needs it.
    from tiering.tiers.peers.making import build_peers

    return build_peers(config, namespace, region, replica, where, deadline_seconds)


def _build_bucket(
    config: ObjTierConfig,
    deadline_seconds: float,
    where: str,
    namespace: Namespace,
    chunk_bytes: int,
) -> Tier:
    need = HEADER_BYTES + chunk_bytes
    if config.max_bytes is not None and config.max_bytes < need:
        raise ConfigError(
            f"{where}.max_bytes",
            config.max_bytes,
            f"is less than one chunk of {need} bytes",
            f"write at least {need}, and better a thousand times that",
        )
    bucket = config.store_config.bucket
    store = S3Store(
        config.store_config,
        where=f"{where}.store_config",
        prefix=above(config.prefix),
    )
    return ObjTier(
        f"obj:{bucket}/{config.prefix}" if config.prefix else f"obj:{bucket}",
        store,
        config.prefix,
        namespace,
        chunk_bytes,
        limits=ObjLimits(
            requests_max=config.io_threads,
            load_deadline_seconds=deadline_seconds,
            store_deadline_seconds=_STORE_SECONDS,
            max_bytes=config.max_bytes,
        ),
        where=where,
    )


def build_host_copier(groups: Sequence[HostPages], share: npt.NDArray[np.uint8]) -> DeviceCopier:
    """Copies between host arrays, by KV cache group, and a rank's share of the host tier (uint8,
    `(rows, share_bytes)`)."""
    return HostCopier(groups, share)


def build_device_copier(
    runtime: DeviceRuntime,
    groups: Sequence[DevicePages],
    memory: npt.NDArray[np.uint8],
    share: npt.NDArray[np.uint8],
    server_stream: Callable[[], int],
    kernel: KernelUse | None = None,
) -> DeviceCopier:
    """Copies between a device's memory, by KV cache group, and a rank's `share` of the host tier's
    `memory`, which is pinned first: about 0.1 seconds a GiB. `server_stream` is asked at each copy
    on which stream the server computes. DeviceCallError."""
    with _watchers_lock:
        watcher = _watchers.get(runtime)
        if watcher is None:
            # One that is made and not used would keep its bell for ever.
            watcher = _watchers[runtime] = Watcher(runtime)
    pinned = pin(runtime, memory)
    try:
        return CudaCopier(runtime, watcher, groups, share, pinned, server_stream, kernel)
    except BaseException:
        pinned.close()
        raise


# One for each device that this process copies from and to.
_watchers: dict[DeviceRuntime, Watcher] = {}
_watchers_lock = Lock()
