"""The engine's counters as vLLM's statistics: in its log line, and under /metrics.

The scheduler half counts; what grew since the last step is sent to the front end, which adds it
up. Every counter of the core is there, as `vllm:tiering_<name>_total`; what the tiers count, and
the state they are in, as `vllm:tiering_tier_total` and `vllm:tiering_tier_now`, by tier and name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from tiering.clock import Clock
from tiering.residency.core import COUNTERS
from tiering.tiers.base import GAUGE_PREFIX, Tier

TIER_SECONDS = 1.0


@dataclass
class TieringStats(KVConnectorStats):
    """`data`: how much each counter has grown, those that have not are left out; and what each
    gauge is now. A tier's are named `<tier>|<name>`."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        names = [*self.data, *(name for name in other.data if name not in self.data)]
        return TieringStats(
            {
                n: other.data.get(n, self.data.get(n))
                if is_gauge(n)
                else self.data.get(n, 0) + other.data.get(n, 0)
                for n in names
            }
        )

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Growth:
    """What counters have grown by since they were last looked at, and which gauges changed. Tiers
    are looked at once in TIER_SECONDS."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock) -> None:
        self._tiers = tiers
        self._clock = clock
        self._before: dict[str, int] = {}
        self._looked_at = -TIER_SECONDS

    def since(self, counters: Mapping[str, int]) -> TieringStats | None:
        now = dict(counters)
        if self._clock.now() - self._looked_at >= TIER_SECONDS:
            self._looked_at = self._clock.now()
            for tier in self._tiers:
                now |= {f"{tier.name}|{name}": value for name, value in tier.stats().items()}
        grown: dict[str, int] = {}
        for name, value in now.items():
            before = self._before.get(name, 0)
            if is_gauge(name) and value != before:
                grown[name] = value
            elif value > before:
                grown[name] = value - before
        self._before |= now
        return TieringStats(grown) if grown else None


def is_gauge(name: str) -> bool:
    return name.rpartition("|")[2].startswith(GAUGE_PREFIX)


class TieringPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each of the core's, by engine; the tiers' by tier and name."""

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

        labels = [*labelnames, "tier", "name"]
        self._totals: Any = self._counter_cls(
            name="vllm:tiering_tier",
            documentation="What a tier of the TieredConnector has counted, by name.",
            labelnames=labels,
        )
        self._gauges: Any = self._gauge_cls(
            name="vllm:tiering_tier_now",
            documentation="The state of a tier of the TieredConnector, by name.",
            labelnames=labels,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            tier, _, own_name = name.rpartition("|")
            if not tier:
                self._counters[engine_idx, name].inc(amount)
            elif is_gauge(name):
                now = own_name.removeprefix(GAUGE_PREFIX)
                self._gauges.labels(*engine, tier, now).set(amount)
            else:
                self._totals.labels(*engine, tier, own_name).inc(amount)
