"""The engine's counters as vLLM's statistics: in its log line, and under /metrics.

The scheduler half counts; what grew since the last step is sent to the front end, which adds it
up. Every counter of the core and of the meter is there as `vllm:tiering_<name>_total`; what tiers
count, and the state that they and the host tier are in, as `vllm:tiering_tier_total` and
`vllm:tiering_tier_now`, by tier and name. Dashboards for vLLM's own offloading find its names,
too: see `offload_names`. docs/metrics.md lists them all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
from tiering.events.announcer import COUNTERS as EVENT_COUNTERS
from tiering.portal import TierView
from tiering.residency.core import COUNTERS
from tiering.tiers.base import GAUGE_PREFIX
from tiering_connectors.vllm import offload_names as names
from tiering_connectors.vllm.meter import (
    HOST_TIER,
    METER_COUNTERS,
    PORTAL_COUNTERS,
    TransferMeter,
)
from tiering_connectors.vllm.nohits import NeverHits, Seen
from tiering_connectors.vllm.summary import summary

log = logging.getLogger("tiering")

TIER_SECONDS = 1.0

Value = int | float | list[float]

# With several front ends the latest value counts; they are not added up.
_GAUGE_OPTIONS: dict[str, Any] = {"multiprocess_mode": "mostrecent"}


@dataclass
class TieringStats(KVConnectorStats):
    """`data`: how much each counter has grown, those that have not are left out; what each gauge
    is now; and samples, as lists. A tier's are named `<number>:<tier>|<name>`, the host tier's
    number being 0. Plain values only: it crosses to the front end."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Of both; a gauge is what `other`, the later one, says."""
        data = dict(self.data)
        for name, value in other.data.items():
            data[name] = value if is_gauge(name) or name not in data else data[name] + value
        return TieringStats(data)

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Growth:
    """What counters have grown by since they were last looked at, and which gauges changed.

    `tiers`, and the host tier through `host_now`, are looked at once in TIER_SECONDS; what
    `meter` has is taken each time. Says so, once, if nothing that is stored is ever found.
    """

    def __init__(
        self,
        tiers: Sequence[TierView],
        clock: Clock,
        meter: TransferMeter | None = None,
        host_now: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._tiers = {f"{i}:{tier.name}|": tier for i, tier in enumerate(tiers, 1)}
        self._clock = clock
        self._meter = meter or TransferMeter()
        self._host_now = host_now
        self._core_before: Mapping[str, int] = {}
        self._before: dict[str, int] = {}
        self._looked_at = -TIER_SECONDS
        self._never_hits = NeverHits()
        self._at_start: int | None = None

    def since(self, counters: Mapping[str, int]) -> TieringStats | None:
        """None if there is nothing new, which most steps of a busy decode end with."""
        now = self._clock.now()
        is_due = now - self._looked_at >= TIER_SECONDS
        if not is_due and self._meter.is_empty and counters == self._core_before:
            return None
        self._core_before = dict(counters)
        told = dict(counters)
        if is_due:
            self._looked_at = now
            told |= self._look(now)
        grown: dict[str, Value] = {}
        for name, value in told.items():
            if is_gauge(name):
                if value != self._before.get(name):
                    grown[name] = value
            elif value > (before := self._before.get(name, 0)):
                grown[name] = value - before
        self._before |= told
        grown |= self._meter.take()
        return TieringStats(grown) if grown else None

    def _look(self, now: float) -> dict[str, int]:
        told = dict(self._host_now()) if self._host_now is not None else {}
        for prefix, tier in self._tiers.items():
            told |= {f"{prefix}{name}": value for name, value in tier.stats().items()}
        if self._at_start is None:
            held = f"|{GAUGE_PREFIX}chunks"
            self._at_start = sum(value for name, value in told.items() if name.endswith(held))
        warning = self._never_hits.look(Seen.of(self._core_before, self._at_start), now)
        if warning is not None:
            log.warning("%s", warning)
        return told


def is_gauge(name: str) -> bool:
    return name.rpartition("|")[2].startswith(GAUGE_PREFIX)


class TieringPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each of ours, by engine; the tiers' by tier and name; and those
    of vLLM's offloading. Whatever it is sent, it does not raise: it is in the front end."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str], Any] = {}
        for name in (*COUNTERS, *EVENT_COUNTERS, *METER_COUNTERS, *PORTAL_COUNTERS):
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
            **_GAUGE_OPTIONS,
        )
        self._offload: _OffloadMetrics | None = None

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if self._offload is None:
            # Not before: by now every other connector of a MultiConnector has registered its own,
            # and where one of them is vLLM's, these names are taken.
            self._offload = _OffloadMetrics(self)
        for name, value in transfer_stats_data.items():
            tier, _, own_name = name.rpartition("|")
            if tier:
                self._observe_tier(engine_idx, tier.partition(":")[2], own_name, value)
                self._offload.of_tier(engine_idx, tier, own_name, value)
            else:
                counter = self._counters.get((engine_idx, name))
                if counter is not None:
                    counter.inc(value)
                self._offload.of_engine(engine_idx, name, value)

    def _observe_tier(self, engine_idx: int, tier: str, name: str, value: float) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        if is_gauge(name):
            now = name.removeprefix(GAUGE_PREFIX)
            self._gauges.labels(*engine, tier, now).set(value)
        else:
            self._totals.labels(*engine, tier, name).inc(value)

    def make(self, metric: names.Metric) -> Any:
        """Register one of vLLM's metrics; ValueError where somebody else has."""
        options: dict[str, Any] = {
            "name": metric.name,
            "documentation": metric.documentation,
            "labelnames": [*self._labelnames, *([metric.label] if metric.label else [])],
        }
        if metric.kind is names.Kind.GAUGE:
            return self._gauge_cls(**options, **_GAUGE_OPTIONS)
        if metric.kind is names.Kind.HISTOGRAM:
            options["buckets"] = metric.buckets
            return self._histogram_cls(**options)
        return self._counter_cls(**options)


class _OffloadMetrics:
    """The metrics of vLLM's offloading, fed from our statistics, but for those that are taken."""

    def __init__(self, owner: TieringPromMetrics) -> None:
        self._engines = owner.per_engine_labelvalues
        self._metrics: dict[str, Any] = {}
        self._slots: dict[int, int] = {}
        taken = []
        for metric in names.all_metrics().values():
            try:
                self._metrics[metric.name] = owner.make(metric)
            except ValueError:
                taken.append(metric.name)
        if taken:
            log.info("another connector serves %s: ours are left out", ", ".join(taken))

    def of_engine(self, engine_idx: int, name: str, value: Value) -> None:
        self._feed(engine_idx, names.ENGINE_SOURCES.get(name, ()), "", value)

    def of_tier(self, engine_idx: int, tier: str, name: str, value: Value) -> None:
        if tier == HOST_TIER and name == f"{GAUGE_PREFIX}slots" and isinstance(value, int):
            self._slots[engine_idx] = value
        sources, label = names.sources_of_tier(tier, name)
        self._feed(engine_idx, sources, label, value)

    def _feed(
        self, engine_idx: int, sources: Sequence[names.Source], tier: str, value: Value
    ) -> None:
        for source in sources:
            metric = self._metrics.get(source.metric.name)
            if metric is None:
                continue
            labels = [source.value or tier] if source.metric.label else []
            bound = metric.labels(*self._engines[engine_idx], *labels)
            for one in value if isinstance(value, list) else [value]:
                if source.metric.kind is names.Kind.HISTOGRAM:
                    bound.observe(one)
                elif source.metric.kind is names.Kind.COUNTER:
                    bound.inc(one * source.scale)
                else:
                    slots = self._slots.get(engine_idx, 0) if source.is_share else 1
                    bound.set(one * source.scale / slots if slots else 0.0)
