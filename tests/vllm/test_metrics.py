"""What becomes of the counters on their way to vLLM's /metrics, without a server."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client as prometheus
import pytest

from tiering.testing.clocks import ManualClock
from tiering.testing.memory import MemoryTier

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and torch say of themselves while they load
    from tiering_connectors.vllm.metrics import Growth, TieringPromMetrics, TieringStats


pytestmark = pytest.mark.slow


class Counting(MemoryTier):
    told: dict[str, int]

    def stats(self) -> dict[str, int]:
        return self.told


def test_counters_come_as_growth_and_gauges_as_they_are() -> None:
    clock, tier = ManualClock(), Counting(name="fs:/mnt/kv")
    tier.told = {"evicted": 3, "now_stores_paused": 1}
    growth = Growth([tier], clock)
    first = growth.since({"chunks_stored": 2, "chunks_loaded": 0})
    assert first is not None
    assert first.data == {
        "chunks_stored": 2,
        "fs:/mnt/kv|evicted": 3,
        "fs:/mnt/kv|now_stores_paused": 1,
    }
    tier.told = {"evicted": 5, "now_stores_paused": 0}
    second = growth.since({"chunks_stored": 3, "chunks_loaded": 0})
    assert second is not None
    assert second.data == {"chunks_stored": 1}, "tiers are asked once a second"
    clock.advance(1.0)
    third = growth.since({"chunks_stored": 3, "chunks_loaded": 0})
    assert third is not None
    assert third.data == {"fs:/mnt/kv|evicted": 2, "fs:/mnt/kv|now_stores_paused": 0}
    assert growth.since({"chunks_stored": 3, "chunks_loaded": 0}) is None
    whole = first.aggregate(second).aggregate(third)
    assert cast("TieringStats", whole).data == {
        "chunks_stored": 3,
        "fs:/mnt/kv|evicted": 5,
        "fs:/mnt/kv|now_stores_paused": 0,
    }


def test_they_are_exposed_by_tier_and_name() -> None:
    registry = prometheus.CollectorRegistry()

    def made(kind: Any) -> Any:
        return lambda **kwargs: kind(registry=registry, **kwargs)

    kinds = (prometheus.Gauge, prometheus.Counter, prometheus.Histogram)
    metrics = TieringPromMetrics(
        cast("Any", SimpleNamespace(kv_transfer_config=None)),
        {kind: made(kind) for kind in kinds},
        ["model_name", "engine"],
        {0: ["model", "0"]},
    )
    metrics.observe({"chunks_stored": 2, "fs:/mnt/a|evicted": 3, "fs:/mnt/a|now_loads_out": 1})
    metrics.observe({"fs:/mnt/a|evicted": 1, "fs:/mnt/a|now_loads_out": 0})
    own = {"model_name": "model", "engine": "0"}
    tier = {**own, "tier": "fs:/mnt/a"}
    assert registry.get_sample_value("vllm:tiering_chunks_stored_total", own) == 2
    evicted = {**tier, "name": "evicted"}
    assert registry.get_sample_value("vllm:tiering_tier_total", evicted) == 4
    out = {**tier, "name": "loads_out"}
    assert registry.get_sample_value("vllm:tiering_tier_now", out) == 0
