"""What the manager tells vLLM's /metrics: vLLM's own names where they mean something, and ours.

vLLM's front end stops at a name that `definitions` does not have, so both are made from the same
tables: `offload_names` for vLLM's, the core's counters for ours. What vLLM's connector measures
itself, copies and lookups, is left to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from tiering.residency.core import COUNTERS
from tiering_connectors.vllm.metrics import Growth
from tiering_connectors.vllm.offload_names import (
    ENGINE_SOURCES,
    HOST_LABEL,
    HOST_SOURCES,
    TIER_SOURCES,
    Kind,
    Metric,
    Source,
    sources_of_tier,
)

OURS = "vllm:kv_offload_tiered_"

OWN_COUNTERS = {
    "stores_failed": "Chunks that a worker could not copy to the host tier; they are dropped.",
    "stores_cut": "Chunks that were not stored because the host tier had no room for them.",
    "portal_restarts": "Times the process of the tiers had ended by itself and runs again.",
}

_OWN_SOURCES: dict[str, Sequence[Source]] = {
    **{
        name: (Source(Metric(f"{OURS}{name}", Kind.COUNTER, name.replace("_", " ").capitalize())),)
        for name in COUNTERS
    },
    **{
        name: (Source(Metric(f"{OURS}{name}", Kind.COUNTER, says)),)
        for name, says in OWN_COUNTERS.items()
    },
}
_ENGINE_SOURCES = {
    name: ENGINE_SOURCES[name]
    for name in (
        "reserved_chunks",
        "stores_skipped",
        "loads_cut",
        "chunks_asked",
        "chunks_hit_host",
    )
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every name that `Statistics` may tell."""
    tables = (_OWN_SOURCES, _ENGINE_SOURCES, HOST_SOURCES, TIER_SOURCES)
    metrics = [s.metric for table in tables for sources in table.values() for s in sources]
    return {metric.name: _metadata(metric) for metric in metrics}


class Statistics:
    """One for each manager, over a host tier of `slots` slots. `growth` looks at the tiers."""

    def __init__(self, growth: Growth, slots: int) -> None:
        self._growth = growth
        self._slots = slots

    def since(self, counters: Mapping[str, int]) -> OffloadingConnectorStats | None:
        """What has grown or changed since the last call; None if nothing has."""
        grown = self._growth.since(counters)
        if grown is None:
            return None
        stats = OffloadingConnectorStats()
        for name, value in grown.data.items():
            for source, label in _sources(name):
                self._tell(stats, source, label, value)
        return None if stats.is_empty() else stats

    def _tell(
        self, stats: OffloadingConnectorStats, source: Source, label: str, value: Any
    ) -> None:
        metric = source.metric
        labels = ((source.value or label),) if metric.label else ()
        for one in value if isinstance(value, list) else [value]:
            amount = one * source.scale / (self._slots if source.is_share else 1)
            if metric.kind is Kind.HISTOGRAM:
                stats.observe_histogram(metric.name, amount, labels)
            elif metric.kind is Kind.COUNTER:
                stats.increase_counter(metric.name, amount, labels)
            else:
                stats.set_gauge(metric.name, amount, labels)


def _sources(name: str) -> Iterator[tuple[Source, str]]:
    """What a value of ours feeds, and the label of its tier. A tier's is named
    `<number>:<kind>:<place>|<name>`."""
    tier, _, own_name = name.rpartition("|")
    if tier:
        sources, label = sources_of_tier(tier, own_name)
        yield from ((source, label) for source in sources)
        return
    for table in (_OWN_SOURCES, _ENGINE_SOURCES):
        yield from ((source, HOST_LABEL) for source in table.get(name, ()))


def _metadata(metric: Metric) -> OffloadingMetricMetadata:
    labels = (metric.label,) if metric.label else ()
    if metric.kind is Kind.HISTOGRAM:
        return OffloadingHistogramMetadata(metric.documentation, labels, metric.buckets)
    if metric.kind is Kind.GAUGE:
        return OffloadingGaugeMetadata(metric.documentation, labels)
    return OffloadingCounterMetadata(metric.documentation, labels)
