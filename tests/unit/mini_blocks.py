"""Requests and device blocks of the mini vLLM: hashes, stamps, and the prefix cache."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NULL_BLOCK = 0


@functools.cache
def digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(parent + repr(tokens).encode(), digest_size=16).digest()


@dataclass(eq=False)
class Request:
    """What the scheduler half reads of a vLLM request, and what the mini scheduler keeps. `blocks`
    is by KV cache group."""

    request_id: str
    tokens: list[int]
    outputs: int
    hash_tokens: int
    num_computed_tokens: int = 0
    status: str = "WAITING"
    is_resumed: bool = False
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: tuple[()] = ()
    blocks: list[list[int]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self._stamps: dict[int, list[int]] = {}
        self.hash_more()

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def hashed_tokens(self) -> int:
        return len(self.block_hashes) * self.hash_tokens

    def hash_more(self) -> None:
        size = self.hash_tokens
        for at in range(len(self.block_hashes) * size, len(self.tokens) - size + 1, size):
            parent = self.block_hashes[-1] if self.block_hashes else b"root"
            self.block_hashes.append(digest(parent, tuple(self.tokens[at : at + size])))

    def hash_at(self, tokens: int) -> bytes:
        """Of all of the first `tokens`, a multiple of what is hashed at a time."""
        return self.block_hashes[tokens // self.hash_tokens - 1]

    def stamps(self, start: int, end: int, epoch: int) -> list[int]:
        """One for each token from `start` to before `end`, of it and all tokens before."""
        known = self._stamps.setdefault(epoch, [])
        for at in range(len(known), end):
            hashed = at // self.hash_tokens
            parent = self.block_hashes[hashed - 1] if hashed else b"root"
            last = tuple(self.tokens[hashed * self.hash_tokens : at + 1])
            stamp = digest(parent + b"epoch %d" % epoch, last)
            known.append(int.from_bytes(stamp[:7], "big") << 8)
        return known[start:end]


class BlockPool:
    """Blocks in the order of their reuse, and what the prefix cache knows of them, by the group
    and the hash. Block 0 is nobody's, as in vLLM."""

    def __init__(self, count: int) -> None:
        self.free = dict.fromkeys(range(1, count))
        self.users = [0] * count
        self.cached: dict[tuple[int, bytes], int] = {}
        self._key_of: dict[int, tuple[int, bytes]] = {}

    def take(self, count: int) -> list[int]:
        taken = list(self.free)[:count]
        for block in taken:
            del self.free[block]
            self.users[block] = 1
            key = self._key_of.pop(block, None)
            if key is not None:
                del self.cached[key]
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block != NULL_BLOCK:
                self.free.pop(block, None)
                self.users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None

    def cache(self, block: int, group: int, block_hash: bytes) -> None:
        key = (group, block_hash)
        if block != NULL_BLOCK and key not in self.cached and block not in self._key_of:
            self.cached[key] = block
            self._key_of[block] = key

    def forget(self) -> None:
        self.cached.clear()
        self._key_of.clear()
