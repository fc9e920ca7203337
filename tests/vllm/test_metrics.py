"""What becomes of the counters on their way to vLLM's /metrics, without a server."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import warnings
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import prometheus_client as prometheus
import pytest

from tiering.events.announcer import COUNTERS as EVENT_COUNTERS
from tiering.residency.core import COUNTERS
from tiering.testing.clocks import ManualClock
from tiering.testing.memory import MemoryTier
from tiering_connectors.vllm import offload_names
from tiering_connectors.vllm.meter import METER_COUNTERS, TransferMeter
from tiering_connectors.vllm.nohits import CHUNKS_ASKED_MIN, CHUNKS_STORED_MIN, SECONDS_MIN

if TYPE_CHECKING:
    from tiering_connectors.vllm.metrics import TieringPromMetrics, TieringStats

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OWN = {"model_name": "model", "engine": "0"}


@functools.cache
def ours() -> ModuleType:
    """The module under test, imported when a test runs: it takes vLLM along, which takes as long as
    all else that is collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM and torch say of themselves while they load
        return importlib.import_module("tiering_connectors.vllm.metrics")


class Counting(MemoryTier):
    told: dict[str, int]

    def stats(self) -> dict[str, int]:
        return self.told


def made(registry: prometheus.CollectorRegistry) -> TieringPromMetrics:
    """Ours in `registry`, by the name under which vLLM would make it."""

    def in_registry(kind: Any) -> Any:
        return lambda **kwargs: kind(registry=registry, **kwargs)

    kinds = (prometheus.Gauge, prometheus.Counter, prometheus.Histogram)
    return ours().TieringPromMetrics(
        cast("Any", SimpleNamespace(kv_transfer_config=None)),
        {kind: in_registry(kind) for kind in kinds},
        list(OWN),
        {0: list(OWN.values())},
    )


def test_counters_come_as_growth_and_gauges_as_they_are() -> None:
    clock, tier = ManualClock(), Counting(name="fs:/mnt/kv")
    tier.told = {"evicted": 3, "now_stores_paused": 1}
    growth = ours().Growth([tier], clock)
    first = growth.since({"chunks_stored": 2, "chunks_loaded": 0})
    assert first is not None
    assert first.data == {
        "chunks_stored": 2,
        "1:fs:/mnt/kv|evicted": 3,
        "1:fs:/mnt/kv|now_stores_paused": 1,
    }
    tier.told = {"evicted": 5, "now_stores_paused": 0}
    second = growth.since({"chunks_stored": 3, "chunks_loaded": 0})
    assert second is not None
    assert second.data == {"chunks_stored": 1}, "tiers are asked once a second"
    clock.advance(1.0)
    third = growth.since({"chunks_stored": 3, "chunks_loaded": 0})
    assert third is not None
    assert third.data == {"1:fs:/mnt/kv|evicted": 2, "1:fs:/mnt/kv|now_stores_paused": 0}
    assert growth.since({"chunks_stored": 3, "chunks_loaded": 0}) is None
    whole = first.aggregate(second).aggregate(third)
    assert cast("TieringStats", whole).data == {
        "chunks_stored": 3,
        "1:fs:/mnt/kv|evicted": 5,
        "1:fs:/mnt/kv|now_stores_paused": 0,
    }


def test_what_was_measured_and_the_host_tier_come_along() -> None:
    clock, meter = ManualClock(), TransferMeter()
    growth = ours().Growth(
        [], clock, meter, lambda: {"0:host|now_slots": 8, "0:host|now_slots_free": 0}
    )
    meter.loaded(100, 0.5)
    first = growth.since({})
    assert first is not None
    assert first.data == {
        "0:host|now_slots": 8,
        "0:host|now_slots_free": 0,
        "load_bytes": 100,
        "load_seconds": 0.5,
        "load_size": [100],
    }
    meter.loaded(50, 0.25)
    second = growth.since({})
    assert second is not None
    whole = cast("TieringStats", first.aggregate(second)).data
    assert (whole["load_bytes"], whole["load_size"]) == (150, [100, 50])
    # As it crosses to the front end.
    assert json.loads(json.dumps(whole)) == whole


def test_a_cache_that_never_hits_is_told_of_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock, tier = ManualClock(), Counting(name="fs:/mnt/kv")
    tier.told = {"now_chunks": 10 * CHUNKS_STORED_MIN}
    growth = ours().Growth([tier], clock)
    with caplog.at_level(logging.WARNING, "tiering"):
        for _ in range(3):
            growth.since({"chunks_asked": CHUNKS_ASKED_MIN})
            clock.advance(SECONDS_MIN)
    (record,) = caplog.records
    assert "never hits" in record.getMessage()
    assert "20000 of any model lay in the tiers" in record.getMessage()


def test_they_are_exposed_by_tier_and_name() -> None:
    registry = prometheus.CollectorRegistry()
    metrics = made(registry)
    metrics.observe({"chunks_stored": 2, "1:fs:/mnt/a|evicted": 3, "1:fs:/mnt/a|now_loads_out": 1})
    metrics.observe({"1:fs:/mnt/a|evicted": 1, "1:fs:/mnt/a|now_loads_out": 0})
    metrics.observe({"0:host|now_slots_free": 7})
    tier = {**OWN, "tier": "fs:/mnt/a"}
    assert registry.get_sample_value("vllm:tiering_chunks_stored_total", OWN) == 2
    evicted = {**tier, "name": "evicted"}
    assert registry.get_sample_value("vllm:tiering_tier_total", evicted) == 4
    out = {**tier, "name": "loads_out"}
    assert registry.get_sample_value("vllm:tiering_tier_now", out) == 0
    free = {**OWN, "tier": "host", "name": "slots_free"}
    assert registry.get_sample_value("vllm:tiering_tier_now", free) == 7


def test_dashboards_for_vllms_offloading_find_its_names() -> None:
    registry = prometheus.CollectorRegistry()
    metrics = made(registry)
    metrics.observe(
        {
            "load_bytes": 2_000_000,
            "load_seconds": 0.5,
            "load_size": [1_500_000, 500_000],
            "stores_refused": 3,
            "chunks_asked": 12,
            "0:host|now_slots": 8,
            "0:host|now_slots_used": 4,
            "1:fs:/mnt/a|reads_microseconds": 250_000,
            "1:fs:/mnt/a|lookups": 5,
            "1:fs:/mnt/a|now_reads": 2,
            "1:fs:/mnt/a|now_reads_calls": 1,
            "1:fs:/mnt/a|now_store_us_per_mib": 5000,
        }
    )

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:kv_offload_{name}", {**OWN, **labels})

    assert value("load_bytes_total") == 2_000_000
    assert value("load_time_total") == 0.5
    assert (value("load_size_count"), value("load_size_bucket", le="1e+06")) == (2, 1)
    assert value("total_bytes_total", transfer_type="CPU_to_GPU") == 2_000_000
    assert value("allocation_failure_total") == 3
    assert value("cpu_cache_usage_perc") == 0.5
    assert value("tiering_chunk_queries_total", tier="0:primary") == 12
    assert value("tiering_chunk_queries_total", tier="1:fs") == 5
    assert value("tiering_read_time_total", tier="1:fs") == 0.25
    assert value("tiering_primary_write_usage_perc", tier="1:fs") == 0.25
    assert value("tiering_active_promotion_jobs", tier="1:fs") == 1
    assert value("tiering_backpressure_store_latency_ema", tier="1:fs") == 0.005


def test_names_types_labels_and_buckets_are_vllms() -> None:
    ours()  # Silences what vLLM says while it loads.
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        get_connector_metric_definitions,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    theirs = {
        **get_connector_metric_definitions(),
        **TieringOffloadingSpec.build_metric_definitions({"store_threshold": 2}),
    }
    deprecated = {f"vllm:kv_offload_{name}" for name in ("total_bytes", "total_time", "size")}
    mine = offload_names.all_metrics()
    assert deprecated < mine.keys()
    for name in mine.keys() - deprecated:
        labels = [mine[name].label] if mine[name].label else []
        assert list(theirs[name].labelnames) == labels, name
        kind = type(theirs[name]).__name__.removeprefix("Offloading").removesuffix("Metadata")
        assert mine[name].kind.value == kind.lower(), name
        assert tuple(getattr(theirs[name], "buckets", None) or ()) == mine[name].buckets, name
    assert {name.removeprefix("vllm:kv_offload_") for name in theirs.keys() - mine.keys()} == {
        # Lookups of a tier are answered in batches, beside the scheduler.
        "tiering_lookup_sync_delay_seconds",
        "tiering_lookup_async_delay_seconds",
    }


def test_names_that_another_connector_serves_are_left_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = prometheus.CollectorRegistry()
    metrics = made(registry)
    # It comes after ours, as it may in a MultiConnector.
    prometheus.Counter("vllm:kv_offload_load_bytes", "Theirs.", list(OWN), registry=registry)
    with caplog.at_level(logging.INFO, "tiering"):
        for _ in range(2):
            metrics.observe({"load_bytes": 100, "store_bytes": 10})
    assert registry.get_sample_value("vllm:tiering_load_bytes_total", OWN) == 200
    assert registry.get_sample_value("vllm:kv_offload_load_bytes_total", OWN) is None
    assert registry.get_sample_value("vllm:kv_offload_store_bytes_total", OWN) == 20
    assert [record.getMessage() for record in caplog.records] == [
        "another connector serves vllm:kv_offload_load_bytes: ours are left out"
    ]


def test_a_name_that_nobody_knows_harms_nothing() -> None:
    registry = prometheus.CollectorRegistry()
    metrics = made(registry)
    metrics.observe({"of another version": 1, "chunks_stored": 1})
    assert registry.get_sample_value("vllm:tiering_chunks_stored_total", OWN) == 1


def test_every_counter_is_exposed() -> None:
    registry = prometheus.CollectorRegistry()
    made(registry)
    for name in (*COUNTERS, *EVENT_COUNTERS, *METER_COUNTERS):
        assert registry.get_sample_value(f"vllm:tiering_{name}_total", OWN) == 0
