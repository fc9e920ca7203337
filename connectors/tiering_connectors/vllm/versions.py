"""Which versions of vLLM the connector was tested with, and what differs between them.

The one place for such differences: what a version lacks is worked around here, by asking whether
it is there and never by comparing version numbers. Nothing of vLLM is imported before a function
needs it, so the halves can use this without vLLM. `tests/versions` runs all tested versions.
"""

from __future__ import annotations

import logging
from typing import Any, cast

log = logging.getLogger("tiering")

TESTED = ("0.29", "0.31", "0.32")
"""Of vLLM, major and minor number."""

_told: set[str] = set()


def warn_untested(version: str) -> bool:
    """Say once for each process if `version` of vLLM was not tested; whether it was said."""
    if is_tested(version) or version in _told:
        return False
    _told.add(version)
    log.warning(
        "this version of kv-tiering was tested with vLLM %s, this is %s: if something is odd, "
        "try one of those",
        ", ".join(TESTED),
        version,
    )
    return True


def is_tested(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in TESTED


def block_tables(block_state: Any, request_id: str) -> tuple[list[int], ...] | None:
    """The block ids of each KV cache group of a request, from a step's
    `kv_connector_block_state`; None for a request that is not in it, or where there is none."""
    if block_state is None:
        return None
    if hasattr(block_state, "get_block_ids"):
        return cast("tuple[list[int], ...] | None", block_state.get_block_ids(request_id))
    # Before 0.31: a copy of every table.
    return cast("tuple[list[int], ...] | None", block_state.block_ids.get(request_id))


def tokens_per_hash(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many tokens vLLM hashes at a time."""
    told = getattr(kv_cache_config, "hash_block_size", None)
    if told is None:
        # Before 0.32 every user of it works it out again.
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        _, told = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(told)


def is_host_resident(kv_cache_group: Any) -> bool:
    """Whether vLLM keeps this group's blocks in host memory itself, as some models have it since
    0.31."""
    return bool(getattr(kv_cache_group, "host_resident", False))


def tells_failed_loads() -> bool:
    """Whether vLLM asks for `get_transfer_results`, which names requests whose load failed. Before
    0.31 it asks for `get_finished`, and for the blocks, which it understands of one group only."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "get_transfer_results")


def replica_of(parallel_config: Any) -> int:
    """Which data-parallel one this engine is; a rank is renumbered where engines are independent
    of one another."""
    return int(getattr(parallel_config, "data_parallel_index", parallel_config.data_parallel_rank))
