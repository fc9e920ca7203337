"""Where vLLM's KV cache has its blocks, and what of that makes a chunk.

Derived from vLLM's own configuration alone, the same in the scheduler and in every worker, and
checked against the real tensors in the worker. What cannot be served is refused here, at start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiering.config import ConnectorConfig
from tiering.errors import ConfigError
from tiering.layout import RowLayout, ShareLayout

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

LAYOUT = "LBHNC"
"""What the connector asks vLLM for: each layer's blocks one after another."""


@dataclass(frozen=True, slots=True)
class Region:
    """A run of equal pages in the backing allocation: page b is `page_bytes` at
    `offset + b * stride`, all in bytes."""

    offset: int
    stride: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """One rank's KV cache as chunks see it."""

    tokens_per_block: int
    hashes_per_block: int
    num_blocks: int
    regions: tuple[Region, ...]
    blocks_per_chunk: int
    ranks: int
    group: str

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def share(self) -> ShareLayout:
        return ShareLayout(tuple(r.page_bytes for r in self.regions), self.blocks_per_chunk)

    @property
    def row(self) -> RowLayout:
        return RowLayout(self.share.share_bytes, self.ranks)

    def pages(self, kv_caches: Mapping[str, torch.Tensor]) -> list[npt.NDArray[np.uint8]]:
        """The regions of a worker's host tensors: uint8, `(num_blocks, page_bytes)` each."""
        import torch

        tensor = next(iter(kv_caches.values()))
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        pages = []
        for region in self.regions:
            end = region.offset + (self.num_blocks - 1) * region.stride + region.page_bytes
            if end > raw.nbytes:
                raise ConfigError(
                    "kv_cache_layout",
                    f"{end} bytes",
                    f"vLLM allocated {raw.nbytes}, less than it described",
                    "report this with the model's name and the version of vLLM",
                )
            view = np.lib.stride_tricks.as_strided(
                raw[region.offset :],
                shape=(self.num_blocks, region.page_bytes),
                strides=(region.stride, 1),
            )
            pages.append(view)
        return pages


def geometry_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
) -> Geometry:
    """Read it off; ConfigError for what the connector does not serve."""
    parallel = vllm_config.parallel_config
    _refuse_parallelism(parallel)
    _refuse_layout(kv_cache_config.kv_cache_layout)
    spec = _only_full_attention(kv_cache_config)
    tokens = spec.block_size
    hash_tokens = kv_cache_config.hash_block_size or tokens
    if tokens % hash_tokens:
        raise ConfigError(
            "--block-size",
            tokens,
            f"is not a multiple of the {hash_tokens} tokens that vLLM hashes at a time",
            f"choose a multiple of {hash_tokens}",
        )
    return Geometry(
        tokens_per_block=tokens,
        hashes_per_block=tokens // hash_tokens,
        num_blocks=kv_cache_config.num_blocks,
        regions=_regions(kv_cache_config),
        blocks_per_chunk=config.blocks_in_chunk(tokens),
        ranks=parallel.tensor_parallel_size,
        group=_describe(spec),
    )


def layout_digest(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig, geometry: Geometry
) -> bytes:
    """32 bytes over how the pages lie in memory: every layer's name, shape, strides and type."""
    told = [str(kv_cache_config.kv_cache_layout), repr(geometry.regions)]
    base = min(tensor.data_ptr() for tensor in kv_caches.values())
    for name, tensor in kv_caches.items():
        inner = (tuple(tensor.shape[1:]), tensor.stride(), tensor.data_ptr() - base)
        told.append(f"{name} {inner} {tensor.dtype} {tensor.device.type}")
    return hashlib.sha256("\n".join(told).encode()).digest()


def _refuse_parallelism(parallel: object) -> None:
    for name, flag in (
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("nnodes", "--nnodes"),
    ):
        value = getattr(parallel, name, 1)
        if value > 1:
            raise ConfigError(
                flag, value, "this version of the TieredConnector does not serve it", "write 1"
            )


def _refuse_layout(layout: str | None) -> None:
    """A block's bytes must lie together in each layer, heads and tokens inside them."""
    if layout is not None and not {"L", "B"} == set(layout[:2]):
        raise ConfigError(
            "kv_cache_layout",
            layout,
            "spreads a block of one layer over several places, which this version does not serve",
            f"let vLLM choose {LAYOUT}, by naming no other layout",
        )


def _only_full_attention(kv_cache_config: KVCacheConfig) -> KVCacheSpec:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise ConfigError(
            "kv_cache_groups",
            kinds,
            f"the model has {len(groups)} groups of KV cache, this version serves one",
            "use a model with full attention in every layer",
        )
    (group,) = groups
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    if not isinstance(spec, FullAttentionSpec) or group.host_resident:
        raise ConfigError(
            "kv_cache_groups[0]",
            type(spec).__name__,
            "this version serves full attention only",
            "use a model with full attention in every layer",
        )
    return spec


def _regions(kv_cache_config: KVCacheConfig) -> tuple[Region, ...]:
    """One region for each layer, or one for all where a block holds every layer's page."""
    regions = []
    for tensor in kv_cache_config.kv_cache_tensors:
        if tensor.block_stride * kv_cache_config.num_blocks > tensor.layer_stride > 0 and (
            len(tensor.layers) > 1
        ):
            # Blocks outermost: all layers of a block lie side by side.
            return (Region(0, tensor.block_stride, tensor.block_stride),)
        regions += [
            Region(
                tensor.offset + i * tensor.layer_stride, tensor.block_stride, tensor.block_stride
            )
            for i in range(len(tensor.layers))
        ]
    return tuple(regions)


def _describe(spec: KVCacheSpec) -> str:
    facts = [type(spec).__name__]
    for name in ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype"):
        facts.append(f"{name}={getattr(spec, name, None)}")
    facts.append(f"quant={getattr(spec, 'kv_quant_mode', None)!r}")
    facts.append(f"window={getattr(spec, 'sliding_window', None)}")
    return " ".join(facts)
