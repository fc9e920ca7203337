"""What a worker knows of its KV cache and the scheduler's side needs: the engine's namespace.

vLLM gives an OffloadingSpec an excerpt of its configuration, in which the model's revision, its
weights and much else are missing. A worker can see the whole while it registers its KV cache, so
rank 0 works out the namespace there and leaves it as a note in the host tier's memory, and every
rank announces how its own pages lie.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import msgspec
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.config import OffloadingConfig

from tiering.device.base import DevicePages, HostPages, PageRun
from tiering.errors import ConfigError, RegionError
from tiering.layout import ShareLayout
from tiering.namespace import Namespace
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.groups import Group, Kind
from tiering_connectors.vllm.identity import namespace_of

_DOOR = b"TieredOffloadingSpec"
"""Into the digest of the layout: this door's rows are not those of TieredConnector."""


def pages_of(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> list[HostPages]:
    """Each group's pages among a worker's host tensors."""
    tensors = [each.tensor.numpy().view("uint8") for each in kv_caches.tensors]
    groups = []
    for refs in kv_caches.group_data_refs:
        pages = [tensors[ref.tensor_idx][:, : ref.page_size_bytes] for ref in refs]
        layout = ShareLayout(tuple(page.shape[1] for page in pages), blocks_per_chunk)
        groups.append(HostPages(pages, layout))
    return groups


def device_pages_of(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> list[DevicePages]:
    """Each group's pages among a worker's device tensors."""
    tensors = [each.tensor for each in kv_caches.tensors]
    groups = []
    for refs in kv_caches.group_data_refs:
        pages = []
        for ref in refs:
            tensor = tensors[ref.tensor_idx]
            stride = tensor.stride(0) * tensor.element_size()
            run = PageRun(tensor.data_ptr(), stride, ref.page_size_bytes, tensor.shape[0])
            pages.append(run)
        layout = ShareLayout(tuple(run.page_bytes for run in pages), blocks_per_chunk)
        groups.append(DevicePages(pages, layout))
    return groups


def layout_digest(kv_caches: CanonicalKVCaches, config: OffloadingConfig) -> bytes:
    """32 bytes over how a block's bytes lie in this rank's pages, however many blocks it has."""
    told = [str(config.kv_cache_layout), repr(config.groups)]
    for each in kv_caches.tensors:
        told.append(f"{each.tensor.shape[1:]} {each.tensor.stride()} {each.tensor.dtype}")
    for refs in kv_caches.group_data_refs:
        told.append(" ".join(f"{ref.tensor_idx}:{ref.page_size_bytes}" for ref in refs))
    return hashlib.sha256("\n".join(told).encode()).digest()


def namespace_note(config: OffloadingConfig, share_bytes: int) -> bytes:
    """What rank 0 leaves for the scheduler's side; call it while vLLM registers KV caches."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        raise ConfigError(
            "spec_name",
            "TieredOffloadingSpec",
            "this version of vLLM does not say which model it registers a KV cache of",
            "use kv_connector TieredConnector",
        )
    return msgspec.json.encode(namespace_of(vllm_config, _geometry(config, share_bytes), []))


def namespace_from(note: bytes, layout_digests: Sequence[bytes]) -> Namespace:
    """The engine's namespace, from rank 0's note and what each rank announced, in rank order."""
    try:
        namespace = msgspec.json.decode(note, type=Namespace)
    except msgspec.DecodeError as error:
        raise RegionError(f"the note of rank 0 cannot be read: {error}") from error
    layout = hashlib.sha256(_DOOR + b"".join(layout_digests)).hexdigest()
    return dataclasses.replace(namespace, layout=layout)


def _geometry(config: OffloadingConfig, share_bytes: int) -> Geometry:
    """As far as the namespace asks for it. A spec is not told what its groups keep, and need not
    be: vLLM's scheduler decides what to ask for, and the model's configuration is in the
    namespace."""
    groups = tuple(
        Group(
            index=group.group_id,
            kind=Kind.FULL,
            tokens_per_block=group.tokens_per_block,
            blocks_per_chunk=config.cache.blocks_per_chunk,
            description=" ".join(group.layer_names),
        )
        for group in config.groups
    )
    return Geometry(
        groups=groups,
        regions=tuple(() for _ in groups),
        tokens_per_hash=config.cache.tokens_per_hash,
        num_blocks=0,
        world=config.parallel.world_size,
        share_bytes=share_bytes,
    )
