"""The engine of `inproc` with vLLM's own OffloadingConnector and our spec in it.

`OffloadingEngine` is the test's half; run as a program, this file is the other one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inproc import Calls, EngineProcess, main


def offloading_config(root: Path | None, host_bytes: int, **extra: Any) -> dict[str, Any]:
    """vLLM's connector, as its own documentation starts it, with our spec."""
    tiers = [] if root is None else [{"type": "fs", "root_dir": str(root)}]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieredOffloadingSpec",
            "spec_module_path": "tiering_connectors.vllm.offloading.spec",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": tiers,
            **extra,
        },
    }


class OffloadingEngine(EngineProcess):
    PROGRAM = __file__


class OffloadingCalls(Calls):
    def state(self) -> dict[str, Any]:
        """What there is to know of our half of the scheduler, and vLLM's own counts."""
        half, vllms = self._half(), self._scheduler().connector.connector_scheduler
        slots = half._core.index.slots
        metrics = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value"):
                label = metric.labels.get("source", metric.labels.get("tier", ""))
                metrics[metric.name, label] = metric.value
        name = "vllm:prompt_tokens_cached_by_source"
        return {
            "counters": half.counters(),
            "cached": {s: int(v) for (n, s), v in metrics.items() if n == name},
            "preemptions": int(metrics["vllm:num_preemptions", ""]),
            "metrics": {f"{n}|{s}": v for (n, s), v in metrics.items() if "kv_offload" in n},
            "slots": {state.name: n for state, n in slots.census().items() if n},
            "rows": len(slots),
            "indexed": len(half._core.index),
            "pins": int(slots.load_pins.sum()) + int(slots.write_pins.sum()),
            "jobs": len(half._filling) + len(half._loads) + len(vllms._jobs),
            "requests": len(half._requests) + len(half._core._holds) + len(vllms._req_status),
            "waited_for": half._core._holds.slots_waited_for,
            "steps": half._core.steps_out,
        }

    def _half(self) -> Any:
        return self._scheduler().connector.connector_scheduler.manager._half


if __name__ == "__main__":
    main(OffloadingCalls())
