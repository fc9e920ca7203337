"""The sides of `tiering-bench serve`: no connector, ours, and vLLM's own, alike in all but that.

Ours and vLLM's are given the same host bytes, chunks of the same size and a directory each. What
their connectors are told is here; the load, and how large its device and host memory are, is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering_benchmarks.serve_load import Load

BLOCKS_PER_CHUNK = 2
NONE = "none"

# Of all that a load has to keep. The device has room for a part, and for one request at least.
DEVICE_SHARE = 0.25
HOST_SHARE = 1.25
SMALL_SHARE = 0.5
REQUESTS_AT_LEAST = 1.25
"""Neither connector can use host memory that is smaller than one request."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device's KV cache and of host memory, roomy and small."""

    device_bytes: int
    host_bytes: int
    small_bytes: int

    @classmethod
    def of(cls, load: Load, kv_bytes_per_token: int) -> Memory:
        def least(share: float) -> int:
            tokens = max(share * load.distinct_tokens, REQUESTS_AT_LEAST * load.model_len)
            return int(tokens) * kv_bytes_per_token

        # Warming up has left a prompt there.
        warm = load.model_len * kv_bytes_per_token
        return cls(least(DEVICE_SHARE), least(HOST_SHARE) + warm, least(SMALL_SHARE))

    def __str__(self) -> str:
        sizes = (self.device_bytes, self.host_bytes, self.small_bytes)
        return "device {} MiB, host {}, small host {}".format(*(each >> 20 for each in sizes))


@dataclass(frozen=True, slots=True)
class Side:
    """`connector` makes a server use it: "" for none, "tiered" for ours, "vllm" for vLLM's."""

    name: str
    connector: str
    has_small_host: bool = False
    has_disk: bool = False

    def config(self, memory: Memory, root: Path, engine_id: str) -> Mapping[str, Any] | None:
        """What --kv-transfer-config takes; the fs tier, if any, is in `root`."""
        if not self.connector:
            return None
        extra: dict[str, Any] = {
            "cpu_bytes_to_use": memory.small_bytes if self.has_small_host else memory.host_bytes,
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
        }
        if self.has_disk:
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(root)}]
        config = {"kv_role": "kv_both", "engine_id": engine_id, "kv_connector_extra_config": extra}
        if self.connector == "tiered":
            return config | {
                "kv_connector": "TieredConnector",
                "kv_connector_module_path": "tiering_connectors.vllm.connector",
            }
        extra["spec_name"] = "CopyingTieringSpec" if self.has_disk else "CopyingHostSpec"
        extra["spec_module_path"] = "tiering_benchmarks.upstream_worker"
        return config | {"kv_connector": "OffloadingConnector"}


SIDES = {
    side.name: side
    for side in (
        Side(NONE, ""),
        *(
            Side(f"{connector}{suffix}", connector, small, disk)
            for suffix, small, disk in (
                ("", False, False),
                ("-fs", False, True),
                ("-small-fs", True, True),
            )
            for connector in ("tiered", "vllm")
        ),
    )
}
"""By name: host memory alone, with an fs tier, and too small for the load with an fs tier."""


def rivals(names: list[str]) -> list[tuple[str, str]]:
    """Which of `names` is compared with which: each with no connector, then ours with vLLM's of
    the same memory."""
    plain = [(name, NONE) for name in names if name != NONE and NONE in names]
    theirs = [
        (name, f"vllm{name.removeprefix('tiered')}") for name in names if name.startswith("tiered")
    ]
    return plain + [(ours, other) for ours, other in theirs if other in names]
