"""One medium as a router sees it: each block is announced once while it is there, and removed once.

Owns which chunks were announced in the medium. Chunks of several blocks may share blocks, where two
prompts part ways within a chunk: what two of them have is announced with the first of them and
removed with the last. Sans-IO; used by the announcer, on its thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tiering.events.blocks import BlockEvent, BlockRemoved, BlockStored
from tiering.events.descriptions import (
    HASH_BYTES,
    TOKEN_BYTES,
    Description,
    Shape,
    integers,
    token_ids,
)
from tiering.events.holdings import Holdings

BLOCKS_IN_EVENT_MAX = 512


class Medium(NamedTuple):
    """What an event says of where a block is. `locality`, LOCAL or REMOTE, is left out if None."""

    name: str
    locality: str | None = None


class Outbox:
    """Events that wait to be taken, in order; what follows on from the last one joins it."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._events: deque[BlockEvent] = deque()
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._events)

    def clear(self) -> None:
        self._events.clear()
        self.blocks = 0

    def add(self, event: BlockEvent) -> None:
        """An event as it is."""
        self._events.append(event)

    def stored(
        self, medium: Medium, hashes: bytes, parent: int | None, tokens: bytes, told: Description
    ) -> None:
        """Blocks that can be read from now on. Of `told`, what holds for the whole chunk."""
        blocks = integers(hashes)
        self.blocks += len(blocks)
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and parent is not None
            and last.block_hashes[-1] == parent
            and (last.medium, last.locality) == medium
            and last.lora_name == told.lora_name
            and last.extra_keys is None
            and told.extra_keys is None
            and len(last.block_hashes) < BLOCKS_IN_EVENT_MAX
            and last.block_size
        ):
            last.block_hashes += blocks
            last.token_ids += token_ids(tokens)
            return
        extra = told.extra_keys
        self._events.append(
            BlockStored(
                block_hashes=list(blocks),
                parent_block_hash=parent,
                token_ids=token_ids(tokens),
                block_size=self._shape.block_tokens,
                lora_id=None,
                medium=medium.name,
                lora_name=told.lora_name,
                extra_keys=None if extra is None else extra[-len(blocks) :],
                group_idx=self._shape.group,
                kv_cache_spec_kind=self._shape.kind,
                kv_cache_spec_sliding_window=self._shape.sliding_window,
                locality=medium.locality,
            )
        )

    def placeholder(self, medium: Medium, block_hash: int) -> None:
        """A chunk of which nothing else is told."""
        self.blocks += 1
        self._events.append(
            BlockStored(
                block_hashes=[block_hash],
                parent_block_hash=None,
                token_ids=[],
                block_size=0,
                lora_id=None,
                medium=medium.name,
                lora_name=None,
                group_idx=self._shape.group,
                locality=medium.locality,
            )
        )

    def removed(self, medium: Medium, hashes: bytes) -> None:
        """Blocks that cannot be read any more."""
        blocks = integers(hashes)
        self.blocks += len(blocks)
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockRemoved)
            and (last.medium, last.locality) == medium
            and len(last.block_hashes) < BLOCKS_IN_EVENT_MAX
        ):
            last.block_hashes += blocks
            return
        self._events.append(
            BlockRemoved(list(blocks), medium.name, self._shape.group, medium.locality)
        )

    def take(self, blocks_max: int) -> list[BlockEvent]:
        """The oldest, up to so many blocks, and one event at least."""
        taken: list[BlockEvent] = []
        count = 0
        while self._events and (not taken or count < blocks_max):
            event = self._events.popleft()
            taken.append(event)
            if isinstance(event, BlockStored | BlockRemoved):
                count += len(event.block_hashes)
        self.blocks -= count
        return taken


class Channel:
    """`holdings` are those of the tiers that are announced as `medium`."""

    def __init__(
        self, medium: Medium, holdings: Sequence[Holdings], shape: Shape, outbox: Outbox
    ) -> None:
        self.medium = medium
        self._holdings = holdings
        self._outbox = outbox
        self._shares_blocks = shape.blocks_per_chunk > 1
        self._block_bytes = shape.block_tokens * TOKEN_BYTES
        self._announced: dict[bytes, tuple[bytes, int | None]] = {}
        # Chunks that begin after the same block, the only ones that can share any.
        self._siblings: dict[int | None, list[bytes]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._announced

    def __len__(self) -> int:
        return len(self._announced)

    def is_held(self, key: bytes) -> bool:
        """Whether the chunk is in one of the tiers."""
        return any(key in holdings for holdings in self._holdings)

    def announce(self, key: bytes, told: Description) -> None:
        """The chunk is there, and was not announced."""
        known, parent = 0, told.parent
        if self._shares_blocks:
            known = self._shared(key, told.hashes, parent)
            self._siblings.setdefault(parent, []).append(key)
        self._announced[key] = told.hashes, parent
        if known == 0:
            self._outbox.stored(self.medium, told.hashes, parent, told.tokens, told)
        elif known < len(told.hashes) // HASH_BYTES:
            at = known * HASH_BYTES
            parent = int.from_bytes(told.hashes[at - HASH_BYTES : at], "big")
            tokens = told.tokens[known * self._block_bytes :]
            self._outbox.stored(self.medium, told.hashes[at:], parent, tokens, told)

    def announce_bare(self, key: bytes, block_hash: int) -> None:
        """The same without anything but its hash."""
        self._announced[key] = block_hash.to_bytes(HASH_BYTES, "big"), None
        self._outbox.placeholder(self.medium, block_hash)

    def withdraw(self, key: bytes) -> None:
        """The chunk is not there any more. Nothing happens if it was never announced."""
        if (announced := self._announced.pop(key, None)) is None:
            return
        hashes, parent = announced
        left = 0
        if self._shares_blocks and (siblings := self._siblings.get(parent)):
            if key in siblings:
                siblings.remove(key)
            left = self._shared(key, hashes, parent)
            if not siblings:
                del self._siblings[parent]
        if hashes := hashes[left * HASH_BYTES :]:
            self._outbox.removed(self.medium, hashes)

    def withdraw_all(self) -> None:
        for key in list(self._announced):
            self.withdraw(key)

    def forget(self) -> None:
        """Nothing counts as announced, without a word."""
        self._announced.clear()
        self._siblings.clear()

    def _shared(self, key: bytes, hashes: bytes, parent: int | None) -> int:
        """How many leading blocks are announced with other chunks."""
        most = 0
        for other in self._siblings.get(parent, ()):
            if other != key:
                most = max(most, _common_blocks(self._announced[other][0], hashes))
        return most


def _common_blocks(one: bytes, other: bytes) -> int:
    for at in range(0, min(len(one), len(other)), HASH_BYTES):
        if one[at : at + HASH_BYTES] != other[at : at + HASH_BYTES]:
            return at // HASH_BYTES
    return min(len(one), len(other)) // HASH_BYTES
