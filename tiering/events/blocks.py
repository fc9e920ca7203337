"""KV events as vLLM puts them on the wire: by block, in msgpack, for routers.

Format: vLLM 0.32, `vllm/distributed/kv_events.py`. An event is a map with its type's name under
"type", in which what has its default is left out; a batch is an array of three: seconds since 1970,
the events, the data-parallel rank. A message has three frames: topic, sequence number in 8 bytes
big-endian, batch. NVIDIA Dynamo 1.6 takes integer hashes only, and loses a whole batch for one
event that it cannot decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE = "GPU", "CPU", "STORAGE"

BlockHash = int | bytes
"""Of a block and all before it: 64 bits, the last 8 bytes of vLLM's hash, or all of its bytes
where vLLM was told so by VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""

HASH_BYTES = 8
"""Of a block's hash the last so many are told, as a number."""

ExtraKeys = Sequence[Sequence[Any] | None]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that follow one another can be read from `medium`; None there is the GPU.

    `token_ids` are those of all blocks, `block_size` of each, and `parent_block_hash` is that of
    the block before the first, None at the beginning of a prompt. `extra_keys`, one item a block,
    is what else its hash was made of. Without tokens and with a `block_size` of 0 it is a
    placeholder, from which nothing can be learned but that something is there.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks cannot be read from `medium` any more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing that was stored until now can be read, from any medium of this rank."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


def blocks_in(event: BlockEvent) -> int:
    return 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """`ts`: seconds since 1970."""

    ts: float
    events: list[BlockEvent]
    data_parallel_rank: int | None = None
