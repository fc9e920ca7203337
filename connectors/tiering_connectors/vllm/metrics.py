"""The engine's counters as vLLM's statistics: in its log line, and under /metrics.

The scheduler half counts; what grew since the last step is sent to the front end, which adds it
up. Every counter of the core is there, as `vllm:tiering_<name>_total`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from tiering.residency.core import COUNTERS


@dataclass
class TieringStats(KVConnectorStats):
    """`data`: how much each counter has grown; those that have not are left out."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        names = [*self.data, *(name for name in other.data if name not in self.data)]
        return TieringStats({n: self.data.get(n, 0) + other.data.get(n, 0) for n in names})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Growth:
    """What counters have grown by since they were last looked at."""

    def __init__(self, counters: Mapping[str, int]) -> None:
        self._before = dict(counters)

    def since(self, counters: Mapping[str, int]) -> TieringStats | None:
        before, self._before = self._before, dict(counters)
        grown = {n: v - before[n] for n, v in counters.items() if v > before[n]}
        return TieringStats(grown) if grown else None


class TieringPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each of the core's, by engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str], Any] = {}
        for name in COUNTERS:
            counter: Any = self._counter_cls(
                name=f"vllm:tiering_{name}",
                documentation=f"{name.replace('_', ' ').capitalize()}, by the TieredConnector.",
                labelnames=labelnames,
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counters[engine_idx, name].inc(amount)
