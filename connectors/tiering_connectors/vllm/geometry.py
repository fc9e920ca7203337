"""Where vLLM's KV cache has its blocks, and what of that makes a chunk.

Derived from vLLM's own configuration alone, the same in the scheduler and in every worker, and
checked against the real tensors in the worker. What cannot be served is refused here, at start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tiering.config import ConnectorConfig
from tiering.device.base import DevicePages, HostPages, PageRun
from tiering.errors import ConfigError
from tiering.layout import RowLayout, ShareLayout
from tiering_connectors.vllm.groups import Group, Kind, blocks_per_chunk_for
from tiering_connectors.vllm.versions import is_host_resident, tokens_per_hash

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

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
    """One rank's KV cache as chunks see it.

    `regions[i]` are those of `groups[i]`; groups may lie on the same bytes, since a block belongs
    to one of them at a time. `world` ranks carry out every job; `replicas` neighbours among them
    hold the same bytes, which a row has once. `share_bytes` is what a share has room for: of the
    largest group, over all ranks.
    """

    groups: tuple[Group, ...]
    regions: tuple[tuple[Region, ...], ...]
    tokens_per_hash: int
    num_blocks: int
    world: int
    share_bytes: int
    replicas: int = 1

    @property
    def align(self) -> int:
        """Tokens at which blocks of all groups end."""
        return math.lcm(*(group.tokens_per_block for group in self.groups))

    @property
    def shares(self) -> tuple[ShareLayout, ...]:
        """How each group's chunk lies in a share."""
        return tuple(
            ShareLayout(tuple(region.page_bytes for region in regions), group.blocks_per_chunk)
            for group, regions in zip(self.groups, self.regions, strict=True)
        )

    @property
    def block_bytes(self) -> list[int]:
        """Of each group, in one rank."""
        return [sum(region.page_bytes for region in regions) for regions in self.regions]

    @property
    def row(self) -> RowLayout:
        return RowLayout(self.share_bytes, self.world // self.replicas)

    def share_of(self, rank: int) -> int:
        """Which share of a row `rank` reads and writes."""
        return rank // self.replicas

    def hashes_per_chunk(self, group: Group) -> int:
        return group.tokens_per_chunk // self.tokens_per_hash

    def pages(self, kv_caches: Mapping[str, Any]) -> list[HostPages]:
        """Each group's pages among a worker's host tensors."""
        import torch

        tensor = next(iter(_tensors(kv_caches)))[1]
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        return [
            HostPages([self._page(raw, region) for region in regions], layout)
            for regions, layout in zip(self.regions, self.shares, strict=True)
        ]

    def device_pages(self, kv_caches: Mapping[str, Any]) -> list[DevicePages]:
        """Each group's pages among a worker's device tensors."""
        storage = next(iter(_tensors(kv_caches)))[1].untyped_storage()
        groups = []
        for regions, layout in zip(self.regions, self.shares, strict=True):
            for region in regions:
                self._require_within(storage.nbytes(), region)
            runs = [
                PageRun(
                    storage.data_ptr() + region.offset,
                    region.stride,
                    region.page_bytes,
                    self.num_blocks,
                )
                for region in regions
            ]
            groups.append(DevicePages(runs, layout))
        return groups

    def _require_within(self, allocated_bytes: int, region: Region) -> None:
        end = region.offset + (self.num_blocks - 1) * region.stride + region.page_bytes
        if end > allocated_bytes:
            raise ConfigError(
                "kv_cache_layout",
                f"{end} bytes",
                f"vLLM allocated {allocated_bytes}, less than it described",
                "report this with the model's name and the version of vLLM",
            )

    def _page(self, raw: npt.NDArray[np.uint8], region: Region) -> npt.NDArray[np.uint8]:
        self._require_within(raw.nbytes, region)
        return np.lib.stride_tricks.as_strided(
            raw[region.offset :],
            shape=(self.num_blocks, region.page_bytes),
            strides=(region.stride, 1),
        )


def geometry_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
) -> Geometry:
    """Read it off; ConfigError for what the connector does not serve."""
    parallel = vllm_config.parallel_config
    _refuse_parallelism(parallel)
    _refuse_layout(getattr(kv_cache_config, "kv_cache_layout", None))
    _refuse_whole_prompts(vllm_config)
    drafts = _drafts(vllm_config, kv_cache_config)
    groups = tuple(
        _group(index, group, config, index in drafts)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    if not groups:
        raise ConfigError(
            "kv_cache_groups",
            "none",
            "the model has no KV cache, so there is nothing to keep",
            "start it without the connector",
        )
    regions = tuple(
        _regions(kv_cache_config, set(group.layer_names), group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
    )
    geometry = Geometry(
        groups=groups,
        regions=regions,
        tokens_per_hash=_checked_hash(tokens_per_hash(vllm_config, kv_cache_config), groups),
        num_blocks=kv_cache_config.num_blocks,
        world=parallel.world_size,
        share_bytes=0,
        replicas=_replicas(kv_cache_config, parallel),
    )
    largest = max(layout.share_bytes for layout in geometry.shares)
    return dataclasses.replace(geometry, share_bytes=largest)


def layout_digest(
    kv_caches: Mapping[str, Any], kv_cache_config: KVCacheConfig, geometry: Geometry
) -> bytes:
    """32 bytes over how a block's bytes lie in its pages: every layer's name, shape, strides, type
    and place. Not over how many blocks there are: an engine with more memory reads the same."""
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    told = [str(layout), repr(geometry.groups), repr(geometry.shares)]
    for name, tensor in _tensors(kv_caches):
        offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
        inner = (tuple(tensor.shape[1:]), tensor.stride(), _places(geometry, offset))
        told.append(f"{name} {inner} {tensor.dtype} {tensor.device.type}")
    return hashlib.sha256("\n".join(told).encode()).digest()


def _places(geometry: Geometry, offset: int) -> list[tuple[int, int, int]]:
    """Of a tensor at `offset`: in each group that lies there, the number of the region, and how
    far into the first page it begins."""
    return [
        (at, number, offset - region.offset)
        for at, regions in enumerate(geometry.regions)
        for number, region in enumerate(regions)
        if 0 <= offset - region.offset < region.page_bytes
    ]


def device_type(kv_caches: Mapping[str, Any]) -> str:
    """The one kind of device that all of a worker's KV cache is on."""
    kinds = sorted({tensor.device.type for _, tensor in _tensors(kv_caches)})
    if len(kinds) != 1:
        raise ConfigError(
            "--device",
            ", ".join(kinds) or "none",
            "the KV cache is not on one device",
            "report this with the model's name and the version of vLLM",
        )
    return str(kinds[0])


def _tensors(kv_caches: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """vLLM gives a tensor for each layer, or for a layer with several states a list of them."""
    for name, given in kv_caches.items():
        for tensor in given if isinstance(given, list | tuple) else (given,):
            yield name, tensor


def _refuse_parallelism(parallel: Any) -> None:
    for name, flag in (
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


def _refuse_whole_prompts(vllm_config: VllmConfig) -> None:
    """Latent attention that is not computed in pieces reads nothing that was cached before the
    first token of a step: what is loaded would be left out, and the answer wrong."""
    model = getattr(vllm_config, "model_config", None)
    scheduler = getattr(vllm_config, "scheduler_config", None)
    if getattr(model, "use_mla", False) and not getattr(scheduler, "enable_chunked_prefill", True):
        raise ConfigError(
            "--enable-chunked-prefill",
            False,
            "vLLM cannot go on within a prompt of a model with latent attention then; on CPUs "
            "without AMX it switches it off",
            "use a machine on which vLLM leaves it on, or no connector",
        )


def _checked_hash(tokens: int, groups: Sequence[Group]) -> int:
    """Tokens that vLLM hashes at a time, which must divide every group's blocks."""
    sizes = [group.tokens_per_block for group in groups]
    if any(size % tokens for size in sizes):
        raise ConfigError(
            "--block-size",
            ", ".join(map(str, sizes)),
            f"is not a multiple of the {tokens} tokens that vLLM hashes at a time",
            f"choose a multiple of {tokens}",
        )
    return tokens


def _replicas(kv_cache_config: KVCacheConfig, parallel: Any) -> int:
    """Neighbouring tensor-parallel ranks that vLLM says hold the same bytes, as MLA's do."""
    replicas = int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    return replicas if parallel.tensor_parallel_size % replicas == 0 else 1


def _drafts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> set[int]:
    """The groups with layers of a draft model. vLLM marks them where it can tell; where it marks
    none though there is a draft, it treats all groups as such, and so must we."""
    groups = kv_cache_config.kv_cache_groups
    marked = {i for i, group in enumerate(groups) if getattr(group, "is_eagle_group", False)}
    speculative = getattr(vllm_config, "speculative_config", None)
    if marked or speculative is None:
        return marked
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return set(range(len(groups))) if drops() else set()


def _group(index: int, group: KVCacheGroupSpec, config: ConnectorConfig, is_draft: bool) -> Group:
    spec = layer_specs(group.kv_cache_spec)[0]
    kind, span = _kind(index, group, spec)
    tokens = spec.block_size
    wanted = config.blocks_in_chunk(tokens)
    return Group(
        index=index,
        kind=kind,
        tokens_per_block=tokens,
        blocks_per_chunk=blocks_per_chunk_for(kind, tokens, span, wanted),
        span=span,
        is_draft=is_draft,
        description=_describe(spec),
    )


def layer_specs(spec: Any) -> list[Any]:
    """The specs of a group's layers: of one kind, though their pages may differ."""
    several = getattr(spec, "kv_cache_specs", None)
    return list(several.values()) if several else [spec]


def _kind(index: int, group: KVCacheGroupSpec, spec: Any) -> tuple[Kind, int]:
    """What the group keeps, and its span in tokens; ConfigError for what is not known here."""
    from vllm.v1 import kv_cache_interface as vllm_specs

    name, way_out = type(spec).__name__, "use a model without such layers, or no connector"
    can_move = getattr(group, "enable_kv_transfer", True) and not is_host_resident(group)
    if not can_move or not getattr(spec, "prefix_cacheable", True):
        raise _refused(index, name, "vLLM does not find its blocks again by their hash", way_out)
    if isinstance(spec, vllm_specs.MambaSpec):
        if spec.mamba_cache_mode != "align":
            raise _refused(
                index,
                f"{name} with mamba_cache_mode {spec.mamba_cache_mode!r}",
                "keeps no state at the end of a block, so there is nothing to go on from",
                "start vLLM with --enable-prefix-caching --mamba-cache-mode align",
            )
        return Kind.STATE, 0
    if isinstance(spec, vllm_specs.SlidingWindowSpec):
        return Kind.WINDOW, spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    if isinstance(spec, vllm_specs.ChunkedLocalAttentionSpec):
        return Kind.LOCAL, spec.attention_chunk_size
    if isinstance(spec, vllm_specs.FullAttentionSpec):
        return Kind.FULL, 0
    raise _refused(index, name, "this kind of KV cache is not served", way_out)


def _refused(index: int, what: str, problem: str, way_out: str) -> ConfigError:
    return ConfigError(f"kv_cache_groups[{index}]", what, problem, way_out)


def _regions(kv_cache_config: KVCacheConfig, layers: set[str], spec: Any) -> tuple[Region, ...]:
    """Where the pages of `layers` lie, neighbours in every block as one."""
    page_of = getattr(spec, "kv_cache_specs", None) or {}
    found = []
    for tensor in kv_cache_config.kv_cache_tensors:
        for at, layer in enumerate(tensor.layers):
            if layer in layers:
                page = page_of.get(layer, layer_specs(spec)[0]).page_size_bytes
                offset = tensor.offset + at * tensor.layer_stride
                found.append(Region(offset, tensor.block_stride, min(page, tensor.block_stride)))
    merged: list[Region] = []
    for region in sorted(found, key=lambda region: region.offset):
        last = merged[-1] if merged else None
        joins = (
            last is not None
            and last.stride == region.stride
            and last.offset + last.page_bytes == region.offset
            and last.page_bytes + region.page_bytes <= last.stride
        )
        if last is not None and joins:
            merged[-1] = Region(last.offset, last.stride, last.page_bytes + region.page_bytes)
        else:
            merged.append(region)
    return tuple(merged)


def _describe(spec: Any) -> str:
    facts = [type(spec).__name__]
    for name in (
        *("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype"),
        *("sliding_window", "attention_chunk_size", "shapes", "dtypes", "mamba_type"),
        *("cache_dtype_str", "model_version", "page_size_bytes"),
    ):
        value = getattr(spec, name, None)
        if value is not None:
            facts.append(f"{name}={value}")
    facts.append(f"quant={getattr(spec, 'kv_quant_mode', None)!r}")
    return " ".join(facts)
