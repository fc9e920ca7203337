"""`TieredConnector`: vLLM's door to the engine, one instance in the scheduler, one in each worker.

Owns the wiring of its half and the order in which halves start: workers map the host tier and
say what they keep there, then the scheduler takes the namespace from that, opens the tiers and
removes the region's name. Every hook hands over to a half; what is decided is decided there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiering.clock import MonotonicClock
from tiering.config import EXTRA_CONFIG, ConnectorConfig, parse
from tiering.engine import Engine
from tiering.errors import ConfigError
from tiering.events import NoEvents
from tiering.portal import ThreadPortal
from tiering.tiers.host import Region, region_name
from tiering.wiring import build_core, build_host_copier, build_tiers
from tiering_connectors.vllm.geometry import LAYOUT, geometry_of, layout_digest
from tiering_connectors.vllm.identity import namespace_of
from tiering_connectors.vllm.metadata import StepMetadata, WorkerMetadata
from tiering_connectors.vllm.metrics import Growth, TieringPromMetrics, TieringStats
from tiering_connectors.vllm.orders import StepOrders
from tiering_connectors.vllm.scheduler import SchedulerHalf
from tiering_connectors.vllm.worker import WorkerHalf, device_type

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("tiering")

VLLM_TESTED = "0.32."
WORKERS_DEADLINE_SECONDS = 300.0
DRAIN_SECONDS = 2.0


class TieredConnector(KVConnectorBase_V1):
    """See the module's docstring; for what each hook must do, see vLLM's base class."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        self._config = parse(
            ConnectorConfig, self._kv_transfer_config.kv_connector_extra_config, EXTRA_CONFIG
        )
        self._geometry = geometry_of(vllm_config, kv_cache_config, self._config)
        self._region: Region | None = None
        self._portal: ThreadPortal | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._growth: Growth | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler()

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a later miss, nothing more."""
        return False

    # Starting and stopping

    def _open_region(self) -> Region:
        row = self._geometry.row
        if row.row_bytes > self._config.cpu_bytes_to_use:
            raise ConfigError(
                f"{EXTRA_CONFIG}.cpu_bytes_to_use",
                self._config.cpu_bytes_to_use,
                f"is less than one chunk of {row.row_bytes} bytes ({self._geometry.ranks} ranks)",
                "write a larger number, or make chunks smaller with blocks_per_chunk",
            )
        engine_id = str(self._kv_transfer_config.engine_id)
        return Region.open(
            region_name(engine_id),
            row,
            self._config.cpu_bytes_to_use,
            deadline_seconds=WORKERS_DEADLINE_SECONDS,
        )

    def _start_scheduler(self) -> None:
        if not vllm.__version__.startswith(VLLM_TESTED):
            log.warning(
                "this version of kv-tiering was tested with vLLM %sx, this is %s",
                VLLM_TESTED,
                vllm.__version__,
            )
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            # vLLM reads this after it has made its connector. Its default would end a request
            # for a chunk that can be computed.
            log.info("kv_load_failure_policy is set to 'recompute': a failed load is computed")
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._region = region = self._open_region()
        digests = region.wait_announced(WORKERS_DEADLINE_SECONDS)
        # Every worker has it mapped: from here on it lives exactly as long as they do.
        region.unlink()
        namespace = namespace_of(self._vllm_config, self._geometry, digests)
        tiers = build_tiers(self._config, namespace, self._geometry.row.row_bytes)
        self._portal = ThreadPortal(tiers, region.row)
        self._portal.start()
        core = build_core(self._config, region.geometry.rows, len(tiers))
        engine = Engine(core, self._portal, NoEvents())
        self._scheduler = SchedulerHalf(engine, self._geometry, self._config.offload_prompt_only)
        self._growth = Growth(tiers, MonotonicClock())
        log.info(
            "TieredConnector: %d chunks of %d tokens in host memory, then %s",
            region.geometry.rows,
            self._geometry.tokens_per_chunk,
            ", ".join(tier.name for tier in tiers) or "no other tier",
        )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        kind = device_type(kv_caches)
        if kind != "cpu":
            raise ConfigError(
                "--device",
                kind,
                "this version copies host tensors only",
                "run vLLM's CPU backend",
            )
        region = self._open_region()
        rank = self._vllm_config.parallel_config.rank
        self._region = region
        pages = self._geometry.pages(kv_caches)
        self._worker = WorkerHalf(
            build_host_copier(pages, self._geometry.share, region.share(rank))
        )
        region.announce(rank, layout_digest(kv_caches, self._kv_cache_config, self._geometry))

    def shutdown(self) -> None:
        """As far as vLLM gives time for it; nothing depends on its being called."""
        if self._worker is not None:
            self._worker.close()
        is_idle = self._portal is None or self._portal.close(DRAIN_SECONDS)
        if self._region is not None and is_idle:
            self._region.close()

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
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
        self._scheduling().allocated(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        host = min(self._scheduling().loaded_from_host(request), num_external_tokens)
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: num_external_tokens - host}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return StepMetadata(self._scheduling().plan_step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, WorkerMetadata):
            self._scheduling().acknowledged(told.told)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling().finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduling().needs_steps

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
        return None, self._working().take_loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working().take_bad_blocks()

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


def _log_with_vllm() -> None:
    """vLLM sets up its own logger only: what the engine says goes to the same place, unless
    somebody has set up ours."""
    ours, theirs = logging.getLogger("tiering"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = not theirs.handlers
