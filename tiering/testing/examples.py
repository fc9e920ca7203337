"""Plausible values for tests, and what tests often do with them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from tiering.keys import chunk_key
from tiering.namespace import Namespace
from tiering.tiers.base import Tier, Write

_NAMESPACE = Namespace(
    model="org/model",
    revision="main",
    weights_fingerprint="",
    kv_dtype="bfloat16",
    layout="layer, block, K then V",
    backend="cpu",
    platform="x86_64",
    isa="avx512",
    engine="vllm",
    tokens_per_block=16,
    blocks_per_chunk=1,
    groups=("full attention",),
    tp_size=1,
    pp_size=1,
    pcp_size=1,
    dcp_size=1,
    share_bytes=8192,
    ranks=1,
    hash_algorithm="sha256",
)


def example_namespace(**changes: Any) -> Namespace:
    """A namespace as vLLM's CPU backend would have it, with `changes`."""
    return dataclasses.replace(_NAMESPACE, **changes)


CHUNK_BYTES = 8192


def key_number(number: int, group: int = 0) -> bytes:
    """A key as vLLM makes them: 32 bytes of hash and a group."""
    return chunk_key(hashlib.sha256(b"key %d" % number).digest(), group)


def payload_of(key: bytes) -> bytes:
    """CHUNK_BYTES that belong to `key` and to no other."""
    return hashlib.shake_128(key).digest(CHUNK_BYTES)


def views(payloads: Sequence[bytes]) -> list[memoryview]:
    """Writable buffers with these contents, each memory of its own."""
    return [memoryview(bytearray(payload)) for payload in payloads]


def blank(count: int) -> list[memoryview]:
    return views([b"\xee" * CHUNK_BYTES] * count)


async def stored(tier: Tier, keys: Sequence[bytes]) -> None:
    """Each of `keys` newly stored with its payload."""
    outcomes = await tier.write(keys, views([payload_of(key) for key in keys]))
    assert outcomes == [Write.STORED] * len(keys)


async def scanned(tier: Tier) -> list[bytes]:
    return sorted([key async for batch in tier.scan() for key in batch])
