"""Keys of chunks: what they are made of, and how to chain them over tokens.

A key is bytes: the hash of the chunk's last block, followed by the KV cache group's index as
4 bytes big-endian (the form vLLM's offloading uses, so the two agree on a chunk's name).
A hash covers everything before it in the prefix, so equal keys mean equal prefixes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

GROUP_BYTES = 4
KEY_BYTES_MAX = 128


def chunk_key(block_hash: bytes, group: int = 0) -> bytes:
    """The key of the chunk whose last block hashes to `block_hash`, in KV cache group `group`."""
    return block_hash + group.to_bytes(GROUP_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """`(block_hash, group)` of a key; ValueError where `key` cannot be one."""
    if not GROUP_BYTES < len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"a key has {GROUP_BYTES + 1} to {KEY_BYTES_MAX} bytes, not {len(key)}")
    return key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big")


def group_of(key: bytes) -> bytes:
    """What names the KV cache group of `key`; empty where it is too short to be a chunk's."""
    return key[-GROUP_BYTES:] if len(key) > GROUP_BYTES else b""


def by_group(keys: Iterable[bytes]) -> list[list[bytes]]:
    """`keys` by KV cache group, each in its order: within a group they are one prefix."""
    chains: dict[bytes, list[bytes]] = {}
    for key in keys:
        chains.setdefault(group_of(key), []).append(key)
    return list(chains.values())


def tagged(fields: Iterable[tuple[str, bytes]]) -> bytes:
    """Typed fields as bytes, injectively: tag and value are both length-prefixed.

    Two different field lists never give the same bytes, so nothing hashed over the result can
    collide by moving bytes from one field into its neighbour.
    """
    parts: list[bytes] = []
    for tag, value in fields:
        name = tag.encode()
        parts += (struct.pack(">II", len(name), len(value)), name, value)
    return b"".join(parts)


def token_keys(
    tokens: Sequence[int], tokens_per_chunk: int, salt: bytes = b"", group: int = 0
) -> list[bytes]:
    """One key for each full chunk of `tokens`, each chained to its parent with SHA-256.

    `salt` separates tenants, adapters or anything else that changes the bytes without being in
    the tokens. For programs; under vLLM the keys come from vLLM's own block hashes.
    """
    if tokens_per_chunk < 1:
        raise ValueError(f"tokens_per_chunk must be at least 1, not {tokens_per_chunk}")
    parent = hashlib.sha256(tagged([("kv-tiering root", b""), ("salt", salt)])).digest()
    keys: list[bytes] = []
    full = len(tokens) - len(tokens) % tokens_per_chunk
    for start in range(0, full, tokens_per_chunk):
        ids = tokens[start : start + tokens_per_chunk]
        packed = struct.pack(f">{len(ids)}q", *ids)
        parent = hashlib.sha256(tagged([("parent", parent), ("tokens", packed)])).digest()
        keys.append(chunk_key(parent, group))
    return keys
