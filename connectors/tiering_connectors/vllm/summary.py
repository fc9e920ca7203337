"""A dozen numbers for vLLM's log line, out of everything that the statistics hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiering.tiers.base import GAUGE_PREFIX
from tiering_connectors.vllm.meter import HOST_TIER

_MB = 1e6

_ALWAYS = ("loaded", "stored")

_CHUNKS = {
    "loaded": ("chunks_loaded",),
    "stored": ("chunks_stored",),
    "asked": ("chunks_asked",),
    "missed": ("chunks_missed",),
    "from_tiers": ("promotions_succeeded",),
    "to_tiers": ("cascades_stored",),
    "refused": ("stores_refused", "loads_cut"),
    "lost": (
        "promotions_missing",
        "promotions_damaged",
        "promotions_failed",
        "promotions_late",
        "loads_failed",
    ),
    "unwritten": ("cascades_full", "cascades_refused", "cascades_failed", "cascades_skipped"),
}
"""What is told, and the counters that it is the sum of."""


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """`data` as `TieringStats` holds it, of one interval. `loaded` and `stored` are always there,
    the others where they are not 0; speeds are those of the copies, not of the interval."""
    told: dict[str, int | float] = {}
    for name, counters in _CHUNKS.items():
        value = sum(data.get(counter, 0) for counter in counters)
        if value or name in _ALWAYS:
            told[name] = value
    for name in ("load", "store"):
        seconds = data.get(f"{name}_seconds", 0)
        if seconds:
            told[f"{name}_MB/s"] = round(data.get(f"{name}_bytes", 0) / _MB / seconds)
    slots = data.get(f"{HOST_TIER}|{GAUGE_PREFIX}slots_used")
    if slots:
        told["host_slots_in_use"] = slots
    sick = [f"|{GAUGE_PREFIX}loads_out", f"|{GAUGE_PREFIX}stores_paused"]
    out = sum(bool(value) for name, value in data.items() if name.endswith(tuple(sick)))
    if out:
        told["tiers_out"] = out
    return told
