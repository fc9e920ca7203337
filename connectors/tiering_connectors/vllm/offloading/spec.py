"""`TieredOffloadingSpec`: the engine inside vLLM's own OffloadingConnector.

vLLM makes one in the scheduler and one in each worker. Workers come first: they map the host tier,
say what they keep there, and rank 0 leaves the namespace; then the scheduler's opens the tiers and
removes the region's name. In the front end only `build_metric_definitions` is called.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    Locality,
    Medium,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    ReqContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from tiering.clock import MonotonicClock
from tiering.config import EXTRA_CONFIG, ConnectorConfig, parse
from tiering.engine import Engine
from tiering.errors import ConfigError
from tiering.events import HOST, NoEvents
from tiering.layout import RowLayout
from tiering.portal import OwnLoopPortal
from tiering.tiers.host import Region
from tiering_connectors.vllm.devices import device_for
from tiering_connectors.vllm.geometry import device_type
from tiering_connectors.vllm.logs import log_with_vllm
from tiering_connectors.vllm.meter import TransferMeter, host_now
from tiering_connectors.vllm.metrics import Growth
from tiering_connectors.vllm.offloading.copies import RankCopies
from tiering_connectors.vllm.offloading.events import OffloadedEvents, Place
from tiering_connectors.vllm.offloading.facts import (
    device_pages_of,
    layout_digest,
    namespace_from,
    namespace_note,
    pages_of,
)
from tiering_connectors.vllm.offloading.half import OffloadingHalf, Removals
from tiering_connectors.vllm.offloading.ledger import Ledger
from tiering_connectors.vllm.offloading.lookups import Lookups
from tiering_connectors.vllm.offloading.manager import TieredOffloadingManager
from tiering_connectors.vllm.offloading.stats import Statistics, definitions
from tiering_connectors.vllm.offloading.worker import TieredOffloadingWorker
from tiering_connectors.vllm.opening import (
    Opened,
    close,
    join_region,
    name_of_region,
    open_region,
)
from tiering_connectors.vllm.pauses import pause_of

log = logging.getLogger("tiering")


@dataclass(frozen=True, slots=True)
class _LoadFilter:
    """Which secondary tiers a request's `kv_load_tiers` lets it load from."""

    localities: tuple[Locality | None, ...]

    def __call__(self, req_context: ReqContext) -> frozenset[int] | None:
        allows = req_context.load_tier_filter.allows
        tiers = [at for at, where in enumerate(self.localities) if allows(Medium.STORAGE, where)]
        return None if len(tiers) == len(self.localities) else frozenset(tiers)


class TieredOffloadingSpec(OffloadingSpec):
    """See the module's docstring; for what each method must do, see vLLM's base class."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        log_with_vllm()
        _refuse(config)
        self._settings = parse(ConnectorConfig, dict(config.extra_config), EXTRA_CONFIG)
        # Where all ranks hold the same bytes, as with MLA, a row has them once: vLLM lets rank 0
        # alone store, and all of them load.
        self.replicated_layout = config.replicated_layout
        self._region: Region | None = None
        self._portal: OwnLoopPortal | None = None
        self._manager: TieredOffloadingManager | None = None
        self._worker: TieredOffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self._open_manager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self._open_worker(kv_caches)
        return self._worker

    def _ledger(self, region: Region) -> Ledger:
        ranks = self.config.parallel.world_size
        return Ledger(region.rows_view(), ranks, 1 if self.replicated_layout else ranks)

    def _open_manager(self) -> TieredOffloadingManager:
        region, digests = join_region(self._region_name)
        self._region = region
        settings, clock, ledger = self._settings, MonotonicClock(), self._ledger(region)
        namespace = namespace_from(ledger.note(), digests)
        replica = self.config.parallel.data_parallel_index
        opened = Opened.over(region, ledger.slots, namespace, settings, replica=replica)
        self._portal, core = opened.portal, opened.core
        log.info(
            "TieredOffloadingSpec: %d chunks of %s tokens in host memory, then %s",
            ledger.slots,
            " or ".join(str(each * self.blocks_per_chunk) for each in set(self.tokens_per_block)),
            opened.describe_tiers(),
        )
        events = self._events()
        meter, removals = TransferMeter(), Removals(events or NoEvents())
        half = OffloadingHalf(
            Engine(core, opened.portal, removals),
            removals,
            ledger,
            Lookups(core, len(opened.tiers), clock, settings.load_deadline_seconds),
            meter,
            [group.group_id for group in self.config.groups],
            pause_of(self.config.parallel.data_parallel_size),
        )
        if events is not None:
            events.bind(half.name_of)
        return TieredOffloadingManager(
            half,
            Statistics(
                Growth(opened.tiers, clock, meter, lambda: host_now(core) | opened.counters()),
                ledger.slots,
            ),
            _LoadFilter(tuple(map(_locality, settings.secondary_tiers))),
            self._close,
            events,
        )

    def _events(self) -> OffloadedEvents | None:
        """What is told of, if vLLM publishes events at all."""
        if not self.kv_events_config.enable_kv_cache_events:
            return None
        places = {HOST: Place(Medium.CPU)}
        for number, tier in enumerate(self._settings.secondary_tiers):
            if tier.enable_kv_events:
                places[number] = Place(Medium.STORAGE, _locality(tier))
        # A chunk of one block goes under its own name.
        return OffloadedEvents(places, keeps_descriptions=self.blocks_per_chunk > 1)

    def _open_worker(self, kv_caches: CanonicalKVCaches) -> TieredOffloadingWorker:
        tensors = {str(at): each.tensor for at, each in enumerate(kv_caches.tensors)}
        device = device_for(device_type(tensors))
        parallel = self.config.parallel
        find_pages = pages_of if device.is_host else device_pages_of
        groups = find_pages(kv_caches, self.blocks_per_chunk)
        row = RowLayout(
            max(group.layout.share_bytes for group in groups),
            1 if self.replicated_layout else parallel.world_size,
        )
        self._region = region = open_region(
            self._region_name, row, self._settings, parallel.world_size, device.nodes()
        )
        ledger = self._ledger(region)
        number = 0 if self.replicated_layout else parallel.rank
        if parallel.rank == 0:
            ledger.leave_note(namespace_note(self.config, row.share_bytes))
        copies = RankCopies(
            device.open_copier(groups, region, number, self._settings),
            ledger,
            parallel.rank,
            region.share(number),
            [sum(group.layout.page_bytes) for group in groups],
            self.blocks_per_chunk,
            MonotonicClock(),
        )
        region.announce(parallel.rank, layout_digest(kv_caches, self.config))
        return TieredOffloadingWorker(copies, region.close)

    @property
    def _region_name(self) -> str:
        return name_of_region(self.config.engine_id, "offloading", self.config.extra_config)

    def _close(self) -> None:
        close(self._portal, self._region)


def _refuse(config: OffloadingConfig) -> None:
    """ConfigError for what this version does not serve."""
    parallel = config.parallel
    for flag, value in (
        ("--pipeline-parallel-size", parallel.pp_size),
        ("--prefill-context-parallel-size", parallel.pcp_size),
        ("--decode-context-parallel-size", parallel.dcp_size),
    ):
        if value > 1:
            raise ConfigError(
                flag, value, "this version of TieredOffloadingSpec does not serve it", "write 1"
            )


def _locality(tier: Any) -> Locality | None:
    return None if tier.locality is None else Locality(tier.locality)
