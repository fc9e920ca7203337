"""What the connector knows of one request: its keys, what it loads, what of it is stored.

Plain state, owned by the scheduler half: `finding` writes what concerns loading, `storing` what
concerns storing, and each is told in the comments which is whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

from tiering.keys import GROUP_BYTES
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.groups import Group
from tiering_connectors.vllm.params import RequestLimits
from tiering_connectors.vllm.roles import NO_ROLES, Roles

if TYPE_CHECKING:
    from vllm.v1.request import Request


END = 1 << 62
"""Behind every token."""


class KeyMaker:
    """Keys of chunks from vLLM's block hashes: the hash of a chunk's last block, and the group.

    `mask`, if any, is mixed into every hash: after a reset, nothing stored before is found again.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.mask = 0
        self._suffixes = [group.index.to_bytes(GROUP_BYTES, "big") for group in geometry.groups]
        self._strides = [geometry.hashes_per_chunk(group) for group in geometry.groups]

    def extend(self, keys: Sequence[list[bytes]], hashes: Sequence[bytes]) -> None:
        """Add to each group's `keys` those of the chunks that `hashes` have become enough for."""
        for known, suffix, stride in zip(keys, self._suffixes, self._strides, strict=True):
            if len(hashes) // stride > len(known):
                fresh = hashes[len(known) * stride + stride - 1 :: stride]
                if self.mask:
                    fresh = [_masked(block_hash, self.mask) for block_hash in fresh]
                known += [block_hash + suffix for block_hash in fresh]


def _masked(block_hash: bytes, mask: int) -> bytes:
    size = len(block_hash)
    mixed = int.from_bytes(block_hash, "big") ^ (mask & ((1 << 8 * size) - 1))
    return mixed.to_bytes(size, "big")


@dataclass(slots=True)
class Load:
    """A way to go on at `boundary`, from `local`: the `chunks` to be had, each the group's
    position and the chunk, and their `keys`, of which `ready` were in the host tier when this was
    found. `host_end`: the tokens before it need nothing but those."""

    local: int
    boundary: int
    chunks: list[tuple[int, int]]
    keys: list[bytes]
    ready: int
    host_end: int

    @property
    def tokens(self) -> int:
        return self.boundary - self.local

    @property
    def is_ready(self) -> bool:
        return self.ready == len(self.keys)


@dataclass(slots=True)
class Stores:
    """`chain`: keys of the chunks to be stored, by the token at which they end, and `where[i]` the
    group and chunk of `chain[i]`; `done` of them are cared for. `seen` chunks of each group were
    looked at. Nothing is to be done before the request has `wake_at` tokens, or, while some wait
    for room, before the core's count of changes is another than `refused_at`."""

    chain: list[bytes] = field(default_factory=list)
    where: list[tuple[int, int]] = field(default_factory=list)
    done: int = 0
    seen: list[int] = field(default_factory=list)
    wake_at: int = 0
    refused_at: int = -1


@dataclass(slots=True)
class Tracked:
    """`keys` by group. `branch`: the boundary up to which others have the same tokens. `asked_at`:
    when vLLM was first told to ask again, 0 if it has its answer. `has_lost`: something that it
    waited for did not come, and `is_late` that its time was over then. `promoted_from`: where that
    begins which was promoted for it. `is_stale`: its blocks are from before a reset."""

    request: Request
    limits: RequestLimits
    keys: list[list[bytes]]
    roles: Roles = NO_ROLES
    local: int = 0
    branch: int = 0
    asked_at: float = 0.0
    # Of the finder.
    load: Load | None = None
    rounds: int = 0
    has_lost: bool = False
    promoted_from: int = END
    is_late: bool = False
    deferred_at: int = -1
    # Of the storer.
    stores: Stores = field(default_factory=Stores)
    loaded_from_host: int = 0
    is_loading: bool = False
    is_stale: bool = False
    has_failed: bool = False
    is_finished: bool = False

    @property
    def owner(self) -> str:
        return self.request.request_id

    @property
    def kept(self) -> Sequence[bytes]:
        """What of it is in the host tier, or will be, unless it was evicted."""
        return () if self.is_stale else self.stores.chain[: self.stores.done]


def interleaved(groups: Sequence[Group], chunks: Sequence[range]) -> list[tuple[int, int]]:
    """The `chunks` of each group as pairs, the group's position and the chunk, by the token at
    which each ends: a prefix of the list is what a shorter request has."""
    if len(chunks) == 1:
        return list(zip(repeat(0), chunks[0]))
    ends = [
        ((chunk + 1) * group.tokens_per_chunk, at, chunk)
        for at, (group, own) in enumerate(zip(groups, chunks, strict=True))
        for chunk in own
    ]
    return [(at, chunk) for _, at, chunk in sorted(ends)]


def floor_to(tokens: int, size: int) -> int:
    return tokens // size * size
