"""What the connector uses of vLLM: every class, field, method and parameter, and what is missing.

A table, and one function that holds an installed vLLM against it. vLLM is imported only there, and
nothing of pytest, so that `tests/versions` can ask every version it has.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator

KV = "vllm.distributed.kv_transfer.kv_connector"
CONNECTOR = "tiering_connectors.vllm.connector.TieredConnector"

CLASSES: dict[str, tuple[str, ...]] = {
    "vllm.config.VllmConfig": (
        "cache_config",
        "kv_transfer_config",
        "model_config",
        "parallel_config",
        "scheduler_config",
    ),
    "vllm.config.CacheConfig": ("cache_dtype", "prefix_caching_hash_algo"),
    "vllm.config.KVTransferConfig": (
        "engine_id",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
    ),
    "vllm.config.ModelConfig": (
        "config_format",
        "dtype",
        "hf_config",
        "model",
        "quantization",
        "revision",
    ),
    "vllm.config.ParallelConfig": (
        "decode_context_parallel_size",
        "nnodes",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "rank",
        "tensor_parallel_size",
    ),
    "vllm.v1.request.Request": (
        "block_hashes",
        "kv_transfer_params",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "request_id",
        "skip_reading_prefix_cache",
    ),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "kv_connector_block_state",
        "num_scheduled_tokens",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
    ),
    "vllm.v1.core.sched.output.NewRequestData": ("block_ids", "num_computed_tokens", "req_id"),
    "vllm.v1.core.sched.output.CachedRequestData": ("new_block_ids", "req_ids"),
    "vllm.v1.outputs.KVConnectorOutput": ("invalid_block_ids", "kv_connector_worker_meta"),
    "vllm.v1.kv_cache_interface.KVCacheConfig": (
        "kv_cache_groups",
        "kv_cache_layout",
        "kv_cache_tensors",
        "num_blocks",
    ),
    "vllm.v1.kv_cache_interface.KVCacheTensor": (
        "block_stride",
        "layer_stride",
        "layers",
        "offset",
    ),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": ("kv_cache_spec", "layer_names"),
    "vllm.v1.kv_cache_interface.FullAttentionSpec": (
        "block_size",
        "dtype",
        "head_size",
        "num_kv_heads",
        "sliding_window",
    ),
    "vllm.v1.kv_cache_interface.ChunkedLocalAttentionSpec": ("attention_chunk_size", "block_size"),
    "vllm.v1.kv_cache_interface.MambaSpec": ("block_size", "mamba_cache_mode"),
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": ("block_size", "sliding_window"),
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": ("first_spec",),
}
"""Attributes that are read; methods are below."""

CALLS: dict[str, tuple[str, ...]] = {
    f"{KV}.factory.KVConnectorFactory.register_connector": ("name", "module_path", "class_name"),
    f"{KV}.v1.base.KVConnectorBase_V1.__init__": ("vllm_config", "role", "kv_cache_config"),
    f"{KV}.v1.metrics.KVConnectorPromMetrics.__init__": (
        "vllm_config",
        "metric_types",
        "labelnames",
        "per_engine_labelvalues",
    ),
    "vllm.distributed.parallel_state.get_pp_group": (),
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids": (),
    "vllm.utils.hashing.get_hash_fn_by_name": ("hash_fn_name",),
    "vllm.v1.core.kv_cache_utils.resolve_none_hash_seed": ("hash_fn",),
}
"""What is called, with the parameters that are given."""

DERIVED: dict[str, tuple[str, ...]] = {
    CONNECTOR: (f"{KV}.v1.base.KVConnectorBase_V1", f"{KV}.v1.base.SupportsHMA"),
    "tiering_connectors.vllm.metadata.StepMetadata": (f"{KV}.v1.base.KVConnectorMetadata",),
    "tiering_connectors.vllm.metadata.WorkerMetadata": (f"{KV}.v1.base.KVConnectorWorkerMetadata",),
    "tiering_connectors.vllm.metrics.TieringStats": (f"{KV}.v1.metrics.KVConnectorStats",),
    "tiering_connectors.vllm.metrics.TieringPromMetrics": (
        f"{KV}.v1.metrics.KVConnectorPromMetrics",
    ),
}
"""Classes of ours and those of vLLM that they stand in for: what vLLM calls must take what it
gives, and whatever it leaves to a subclass must be there."""

OLDER: dict[str, str] = {
    "get_external_cache_hit_sources": "0.32",
    "get_transfer_results": "0.31",
}
"""Hooks that older versions of vLLM do not know, and the first that does."""


def problems() -> list[str]:
    """One sentence for each thing that the installed vLLM does not have as it is used."""
    return [*_missing_attributes(), *_missing_parameters(), *_hooks_that_differ()]


def _missing_attributes() -> Iterator[str]:
    for name, attributes in CLASSES.items():
        found = _found(name)
        if found is None:
            yield f"{name} is not there"
            continue
        known = _attributes(found)
        yield from (f"{name} has no {wanted}" for wanted in attributes if wanted not in known)


def _missing_parameters() -> Iterator[str]:
    for name, wanted in CALLS.items():
        found = _found(name)
        if found is None:
            yield f"{name} is not there"
            continue
        taken = _parameters(found)
        if not _takes(taken, wanted):
            yield f"{name}({', '.join(taken)}) does not take ({', '.join(wanted)})"


def _hooks_that_differ() -> Iterator[str]:
    for own_name, names in DERIVED.items():
        own, bases = _found(own_name), {name: _found(name) for name in names}
        if own is None or None in bases.values():
            lacking = [name for name, found in {own_name: own, **bases}.items() if found is None]
            yield from (f"{name} is not there" for name in lacking)
            continue
        for missing in sorted(getattr(own, "__abstractmethods__", ())):
            yield f"{own_name} does not implement {missing}, which {names[0]} leaves to it"
        for hook in vars(own):
            if hook.startswith("_") or not callable(getattr(own, hook)):
                continue
            owners = [name for name, base in bases.items() if hasattr(base, hook)]
            if not owners and own_name == CONNECTOR and hook not in OLDER:
                yield f"{own_name}.{hook}: {names[0]} has no such hook"
            for name in owners:
                given = _parameters(getattr(bases[name], hook))
                taken = _parameters(getattr(own, hook))
                if not _takes(taken, given):
                    yield f"{own_name}.{hook}({', '.join(taken)}): {name} has ({', '.join(given)})"


def _found(name: str) -> object | None:
    """What a dotted name stands for: a module's attribute, or a class's."""
    module_name, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except ImportError:
        owner = _found(module_name) if "." in module_name else None
        return None if owner is None else getattr(owner, attribute, None)


def _attributes(found: object) -> set[str]:
    known = set(dir(found))
    if dataclasses.is_dataclass(found):
        known |= {field.name for field in dataclasses.fields(found)}
    for base in getattr(found, "__mro__", ()):
        known |= set(getattr(base, "__annotations__", {}))
        # Those that a constructor sets are in no declaration.
        init = vars(base).get("__init__")
        code = getattr(inspect.unwrap(init), "__code__", None) if init is not None else None
        known |= set(code.co_names) if code is not None else set()
    return known


def _parameters(found: object) -> list[str]:
    assert callable(found)
    names = [
        f"**{name}" if parameter.kind is parameter.VAR_KEYWORD else name
        for name, parameter in inspect.signature(found).parameters.items()
    ]
    return [name for name in names if name not in ("self", "cls")]


def _takes(taken: list[str], given: tuple[str, ...] | list[str]) -> bool:
    """Whether everything that is given has its place among what is taken, in the same order."""
    return taken[: len(given)] == list(given)
