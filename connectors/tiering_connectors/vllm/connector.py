"""`TieredConnector`: vLLM's door to the engine, one instance in the scheduler, one in each worker.

Owns the wiring of its half; `opening` has the order in which halves start. Every hook hands over to
a half; what is decided is decided there.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from tiering.clock import MonotonicClock
from tiering.config import EXTRA_CONFIG, ConnectorConfig, parse
from tiering.engine import Engine
from tiering.errors import ConfigError
from tiering.portal import OwnLoopPortal
from tiering.tiers.host import Region
from tiering.wiring import announced_tiers
from tiering_connectors.vllm.announcing import SILENCE, announcing_for
from tiering_connectors.vllm.devices import device_for
from tiering_connectors.vllm.geometry import (
    LAYOUT,
    Geometry,
    device_type,
    geometry_of,
    layout_digest,
)
from tiering_connectors.vllm.groups import Kind
from tiering_connectors.vllm.identity import namespace_of
from tiering_connectors.vllm.logs import log_with_vllm
from tiering_connectors.vllm.metadata import StepMetadata, WorkerMetadata
from tiering_connectors.vllm.metrics import Growth, TieringPromMetrics, TieringStats
from tiering_connectors.vllm.opening import (
    Opened,
    close,
    join_region,
    name_of_region,
    open_region,
)
from tiering_connectors.vllm.orders import StepOrders
from tiering_connectors.vllm.params import kinds_of
from tiering_connectors.vllm.pauses import pause_of
from tiering_connectors.vllm.plugin import register_connector
from tiering_connectors.vllm.scheduler import SchedulerHalf
from tiering_connectors.vllm.versions import replica_of, tells_failed_loads, warn_untested
from tiering_connectors.vllm.worker import Loaded, WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("tiering")


class TieredConnector(KVConnectorBase_V1):
    """See the module's docstring; for what each hook must do, see vLLM's base class."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_with_vllm()
        self._config = parse(
            ConnectorConfig, self._kv_transfer_config.kv_connector_extra_config, EXTRA_CONFIG
        )
        self._geometry = geometry_of(vllm_config, kv_cache_config, self._config)
        if not self._names_blocks and not tells_failed_loads():
            raise ConfigError(
                "vllm",
                vllm.__version__,
                "can only go on after a failed load of a model with full attention in every layer",
                "use vLLM 0.31 or newer",
            )
        self._bad_blocks: set[int] = set()
        self._region: Region | None = None
        self._portal: OwnLoopPortal | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._growth: Growth | None = None
        self._announcing = SILENCE
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a later miss, nothing more."""
        return False

    # Starting and stopping

    @property
    def _region_name(self) -> str:
        given = self._kv_transfer_config
        return name_of_region(given.engine_id, "connector", given.kv_connector_extra_config)

    def _start_scheduler(self) -> None:
        warn_untested(vllm.__version__)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            # vLLM reads this after it has made its connector. Its default would end a request
            # for a chunk that can be computed.
            log.info(
                "kv_load_failure_policy is set to 'recompute': a failed load is computed. "
                "(Under a MultiConnector set it beside that one's name.)"
            )
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
        region, digests = join_region(self._region_name)
        self._region = region
        # Of all ranks, of which this process has seen the first only.
        self._geometry = replace(self._geometry, share_bytes=region.geometry.share_bytes)
        namespace = namespace_of(self._vllm_config, self._geometry, digests)
        rows = region.geometry.rows
        announcing = announcing_for(
            self._vllm_config, self._kv_cache_config, self._config, self._geometry, namespace, rows
        )
        announced = announced_tiers(self._config) if announcing.is_heard else []
        replica = replica_of(self._vllm_config.parallel_config)
        opened = Opened.over(region, rows, namespace, self._config, announced, replica)
        self._portal = opened.portal
        self._announcing = announcing
        self._scheduler = half = SchedulerHalf(
            Engine(opened.core, opened.portal, announcing),
            self._geometry,
            self._config.offload_prompt_only,
            MonotonicClock(),
            kinds_of(self._config),
            announcing,
            pause_of(self._vllm_config.parallel_config.data_parallel_size),
        )
        self._growth = Growth(
            opened.tiers,
            MonotonicClock(),
            half.meter,
            lambda: half.host_now() | opened.counters(),
        )
        log.info(
            "TieredConnector: %d chunks in host memory (%s), then %s",
            rows,
            ", ".join(
                f"group {group.index}: {group.kind.value}, {group.tokens_per_chunk} tokens a chunk"
                for group in self._geometry.groups
            ),
            opened.describe_tiers(),
        )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        device = device_for(device_type(kv_caches))
        rank = self._vllm_config.parallel_config.rank
        self._geometry = geometry = self._agreed_geometry()
        self._region = region = open_region(
            self._region_name, geometry.row, self._config, geometry.world, device.nodes()
        )
        groups = geometry.pages if device.is_host else geometry.device_pages
        share = geometry.share_of(rank)
        self._worker = WorkerHalf(
            device.open_copier(groups(kv_caches), region, share, self._config),
            geometry.block_bytes,
            MonotonicClock(),
            rank % geometry.replicas,
            geometry.replicas,
        )
        region.announce(rank, layout_digest(kv_caches, self._kv_cache_config, geometry))

    def _agreed_geometry(self) -> Geometry:
        """With a share as large as the largest of the pipeline's stages needs it."""
        if self._vllm_config.parallel_config.pipeline_parallel_size == 1:
            return self._geometry
        from torch.distributed import all_gather_object
        from vllm.distributed.parallel_state import get_pp_group

        stages = get_pp_group()
        sizes = [0] * stages.world_size
        all_gather_object(sizes, self._geometry.share_bytes, group=stages.cpu_group)
        return replace(self._geometry, share_bytes=max(sizes))

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        close(self._portal, self._region)
        self._announcing.close()

    # Scheduler half

    def _scheduling(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("a hook of the scheduler's half was called in a worker")
        return self._scheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduling().matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduling().allocated(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        host = min(self._scheduling().loaded_from_host(request), num_external_tokens)
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: num_external_tokens - host}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return StepMetadata(self._scheduling().plan_step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.invalid_block_ids:
            # Another connector's load failed within a step: what the step computed from it, and
            # had us store, is wrong.
            self._scheduling().distrust_stores()
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, WorkerMetadata):
            self._scheduling().acknowledged(told.told)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling().finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling().finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduling().needs_steps

    def take_events(self) -> list[KVCacheEvent]:
        return self._announcing.take()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._announcing.bind(gpu_block_pool)

    def reset_cache(self) -> bool:
        self._scheduling().reset()
        return True

    # Worker half

    def _working(self) -> WorkerHalf:
        if self._worker is None:
            raise RuntimeError("a hook of the worker's half was called before register_kv_caches")
        return self._worker

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise TypeError(f"StepMetadata was expected, not {type(metadata).__name__}")
        return metadata.orders

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, StepMetadata):
            self._working().fence(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._working().start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end before their request is scheduled."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing: whole blocks are stored after the forward."""

    def wait_for_save(self) -> None:
        self._working().start_stores(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For versions of vLLM that know no `get_transfer_results`."""
        return None, self._take_loaded().requests or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        loaded = self._take_loaded()
        failed = set() if self._names_blocks else loaded.failed
        return KVConnectorTransferResults(finished_recving=loaded.requests, failed_recving=failed)

    def _take_loaded(self) -> Loaded:
        loaded = self._working().take_loaded()
        if self._names_blocks:
            self._bad_blocks |= loaded.bad_blocks
        return loaded

    @property
    def _names_blocks(self) -> bool:
        """Whether a failed load is told by its blocks, so that vLLM computes from the first bad
        one: that is enough where one group has all history. Else it computes everything."""
        return [group.kind for group in self._geometry.groups] == [Kind.FULL]

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        told = self._working().take_acknowledgements()
        return None if told is None else WorkerMetadata(told)

    # Of the class, and statistics

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return LAYOUT

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is None or self._growth is None:
            return None
        return self._growth.since(self._scheduler.counters())

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return TieringStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return TieringPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def __repr__(self) -> str:
        half = self._scheduler if self._role == KVConnectorRole.SCHEDULER else self._worker
        return f"<TieredConnector {self._role.name.lower()} {half!r} {self._region!r}>"


# A MultiConnector looks its children's classes up by name, also those given by module path.
register_connector()

if tells_failed_loads():
    # What makes vLLM keep several KV cache groups apart. Without it, it makes one of them, of
    # which a failed load can be told to it in any version.
    SupportsHMA.register(TieredConnector)
