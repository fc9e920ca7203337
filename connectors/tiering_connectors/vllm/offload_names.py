"""The names under which vLLM's own offloading reports, and what of ours is told under each.

So that dashboards made for vLLM's OffloadingConnector go on working. Names, types, labels and
buckets are vLLM's; what has no meaning here is left out. Plain data; `metrics` registers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tiering_connectors.vllm.meter import HOST_TIER

SIZE_BUCKETS = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
CALL_BUCKETS = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1)
WAIT_BUCKETS = (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)
CHUNK_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

PER_MICROSECOND = 1e-6

HOST_LABEL = "0:primary"
TIER = "tier"
DIRECTION = "transfer_type"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One of vLLM's. `label`: the name of the one label it has beside those of every metric."""

    name: str
    kind: Kind
    documentation: str
    label: str = ""
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Feeds `metric` with a value of ours, `scale` times it, or its share of the host tier's
    slots. `value`: of its label; a tier's is filled in."""

    metric: Metric
    value: str = ""
    scale: float = 1.0
    is_share: bool = False


def _counter(name: str, documentation: str, label: str = "") -> Metric:
    return Metric(f"vllm:kv_offload_{name}", Kind.COUNTER, documentation, label)


def _gauge(name: str, documentation: str, label: str = "") -> Metric:
    return Metric(f"vllm:kv_offload_{name}", Kind.GAUGE, documentation, label)


def _histogram(
    name: str, documentation: str, buckets: tuple[float, ...], label: str = ""
) -> Metric:
    return Metric(f"vllm:kv_offload_{name}", Kind.HISTOGRAM, documentation, label, buckets)


_OLD_BYTES = _counter("total_bytes", "Bytes copied, deprecated by vLLM.", DIRECTION)
_OLD_TIME = _counter("total_time", "Seconds of copies, deprecated by vLLM.", DIRECTION)
_OLD_SIZE = _histogram("size", "Bytes of each copy, deprecated by vLLM.", SIZE_BUCKETS, DIRECTION)
_TO_DEVICE, _FROM_DEVICE = "CPU_to_GPU", "GPU_to_CPU"

_QUERIES = _counter("tiering_chunk_queries", "Chunks that a tier was asked for.", TIER)
_HITS = _counter("tiering_chunk_hits", "Chunks that a tier was asked for and had.", TIER)
_READ_FAILURES = _counter("tiering_promotion_job_failures", "Chunks that could not be read.", TIER)
_USAGE = _gauge("cpu_cache_usage_perc", "Share of the host tier that cannot be evicted now.")

ENGINE_SOURCES: dict[str, tuple[Source, ...]] = {
    "load_bytes": (
        Source(_counter("load_bytes", "Bytes copied from the host tier to the device.")),
        Source(_OLD_BYTES, _TO_DEVICE),
    ),
    "load_seconds": (
        Source(_counter("load_time", "Seconds of copies from the host tier to the device.")),
        Source(_OLD_TIME, _TO_DEVICE),
    ),
    "load_size": (
        Source(_histogram("load_size", "Bytes of each copy to the device.", SIZE_BUCKETS)),
        Source(_OLD_SIZE, _TO_DEVICE),
    ),
    "store_bytes": (
        Source(_counter("store_bytes", "Bytes copied from the device to the host tier.")),
        Source(_OLD_BYTES, _FROM_DEVICE),
    ),
    "store_seconds": (
        Source(_counter("store_time", "Seconds of copies from the device to the host tier.")),
        Source(_OLD_TIME, _FROM_DEVICE),
    ),
    "store_size": (
        Source(_histogram("store_size", "Bytes of each copy from the device.", SIZE_BUCKETS)),
        Source(_OLD_SIZE, _FROM_DEVICE),
    ),
    "lookup_seconds": (
        Source(
            _histogram("lookup_sync_delay_seconds", "Seconds of each lookup call.", CALL_BUCKETS)
        ),
    ),
    "answer_seconds": (
        Source(
            _histogram(
                "lookup_async_delay_seconds",
                "Seconds from a request's first deferred lookup to its answer.",
                WAIT_BUCKETS,
            )
        ),
    ),
    "reserved_chunks": (
        Source(
            _histogram("cpu_allocation_size", "Chunks that each store asked for.", CHUNK_BUCKETS)
        ),
    ),
    "stores_refused": (
        Source(_counter("allocation_failure", "Stores that found no room in the host tier.")),
    ),
    "stores_skipped": (
        Source(_counter("stores_skipped", "Chunks not stored: not asked for often enough.")),
    ),
    "loads_cut": (
        Source(
            _counter(
                "tiering_promotion_allocation_failures",
                "Loads from a tier that found too little room in the host tier.",
            )
        ),
    ),
    "chunks_asked": (Source(_QUERIES, HOST_LABEL),),
    "chunks_hit_host": (Source(_HITS, HOST_LABEL),),
}
"""By the name of a counter or sample of ours, without those of a tier."""

HOST_SOURCES: dict[str, tuple[Source, ...]] = {
    "now_slots_used": (Source(_USAGE, is_share=True),),
    "now_slots_filling": (
        Source(
            _gauge("cpu_cache_write_usage_perc", "Share of the host tier being written to."),
            is_share=True,
        ),
    ),
    "now_slots_pinned": (
        Source(
            _gauge("cpu_cache_read_usage_perc", "Share of the host tier being read from."),
            is_share=True,
        ),
    ),
}
"""By the name of a gauge of the host tier."""

TIER_SOURCES: dict[str, tuple[Source, ...]] = {
    "lookups": (Source(_QUERIES),),
    "lookups_hit": (Source(_HITS),),
    "read_bytes": (
        Source(_counter("tiering_read_bytes", "Bytes read from a tier into the host tier.", TIER)),
    ),
    "reads_microseconds": (
        Source(
            _counter("tiering_read_time", "Seconds of reads from a tier.", TIER),
            scale=PER_MICROSECOND,
        ),
    ),
    "written_bytes": (
        Source(
            _counter("tiering_write_bytes", "Bytes written from the host tier to a tier.", TIER)
        ),
    ),
    "writes_microseconds": (
        Source(
            _counter("tiering_write_time", "Seconds of writes to a tier.", TIER),
            scale=PER_MICROSECOND,
        ),
    ),
    "reads_failed": (Source(_READ_FAILURES),),
    "reads_damaged": (Source(_READ_FAILURES),),
    "writes_failed": (
        Source(_counter("tiering_cascade_job_failures", "Chunks that could not be written.", TIER)),
    ),
    "now_store_us_per_mib": (
        Source(
            _gauge("tiering_backpressure_store_latency_ema", "Seconds per MiB stored.", TIER),
            scale=PER_MICROSECOND,
        ),
    ),
    "pressure_refused_calls": (
        Source(
            _counter("tiering_backpressure_stores_dropped", "Writes refused to spare it.", TIER)
        ),
    ),
    "pressure_refused_chunks": (
        Source(
            _counter("tiering_backpressure_blocks_dropped", "Chunks refused to spare it.", TIER)
        ),
    ),
    "now_reads_calls": (
        Source(_gauge("tiering_active_promotion_jobs", "Reads from a tier under way.", TIER)),
    ),
    "now_writes_calls": (
        Source(_gauge("tiering_active_cascade_jobs", "Writes to a tier under way.", TIER)),
    ),
    "now_reads": (
        Source(
            _gauge(
                "tiering_primary_write_usage_perc",
                "Share of the host tier being written to from a tier.",
                TIER,
            ),
            is_share=True,
        ),
    ),
    "now_writes": (
        Source(
            _gauge(
                "tiering_primary_read_usage_perc",
                "Share of the host tier being read from for a tier.",
                TIER,
            ),
            is_share=True,
        ),
    ),
}
"""By the name of a statistic of a secondary tier."""


def sources_of_tier(tier: str, name: str) -> tuple[Sequence[Source], str]:
    """What a value of that name feeds, of a tier as statistics name it, and the tier's label: to
    vLLM `1:fs:/mnt/kv` is `1:fs`."""
    if tier == HOST_TIER:
        return HOST_SOURCES.get(name, ()), HOST_LABEL
    return TIER_SOURCES.get(name, ()), ":".join(tier.split(":")[:2])


def all_metrics() -> dict[str, Metric]:
    """Every metric of vLLM's that is fed here, by name."""
    tables = (ENGINE_SOURCES, HOST_SOURCES, TIER_SOURCES)
    sources = [source for table in tables for fed in table.values() for source in fed]
    return {source.metric.name: source.metric for source in sources}
