"""One medium as a router sees it: each block is announced once while it is there, and removed once.

Owns which chunks were announced in the medium. Chunks of several blocks may share blocks, where two
prompts part ways within a chunk: what two of them have is announced with the first of them and
removed with the last. Sans-IO; used by the announcer, on its thread. Batches, since it is the
scheduler's: what can be done for many chunks at once is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

from tiering.events.blocks import HASH_BYTES, BlockEvent, BlockRemoved, BlockStored, blocks_in
from tiering.events.descriptions import (
    TOKEN_BYTES,
    Described,
    Description,
    Run,
    Shape,
    integers,
    token_ids,
)
from tiering.metrics import Counters

BLOCKS_IN_EVENT_MAX = 512

_hashes_of, _tokens_of = attrgetter("hashes"), attrgetter("tokens")

COUNTERS = ("events_blocks_stored", "events_blocks_removed")


class Medium(NamedTuple):
    """What an event says of where a block is. `locality`, LOCAL or REMOTE, is left out if None."""

    name: str
    locality: str | None = None


class Outbox:
    """Events that wait to be taken, in order; what follows on from the last one joins it."""

    def __init__(self, shape: Shape, counters: Counters) -> None:
        self._shape = shape
        self._counters = counters
        self._chunks_in_event_max = max(1, BLOCKS_IN_EVENT_MAX // shape.blocks_per_chunk)
        self._events: deque[BlockEvent] = deque()
        # The last block of the last event, if more may join it.
        self._open_end = b""
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._events)

    def clear(self) -> None:
        self._events.clear()
        self.blocks = 0

    def stored(self, medium: Medium, chunks: list[Description]) -> None:
        """Blocks that can be read from now on, some or all of a chunk's in each of `chunks`."""
        start = 0
        while start < len(chunks):
            first = chunks[start]
            stop = start + 1
            if first.extra_keys is None:
                stop = _end_of_run(chunks, start, self._chunks_in_event_max)
            some = chunks[start:stop]
            hashes = b"".join(map(_hashes_of, some))
            self._stored(medium, first, hashes, token_ids(b"".join(map(_tokens_of, some))))
            start = stop

    def stored_run(self, medium: Medium, run: Run, tokens: list[int] | None = None) -> None:
        """The same for whole chunks. `tokens`: of all of them as numbers; the list is the outbox's
        from now on."""
        if run.extra_keys is not None:
            self.stored(medium, run.descriptions())
            return
        count, most = len(run), self._chunks_in_event_max
        if tokens is None:
            tokens = token_ids(run.tokens)
        if count <= most:
            self._stored(medium, run, b"".join(run.hashes), tokens)
            return
        size = len(tokens) // count
        for start in range(0, count, most):
            stop = min(start + most, count)
            part, own = run.part(start, stop), tokens[start * size : stop * size]
            self._stored(medium, part, b"".join(part.hashes), own)

    def _stored(
        self, medium: Medium, first: Description | Run, hashes: bytes, tokens: list[int]
    ) -> None:
        """One event, or more of the last one. `first` says what is not of each block."""
        blocks = integers(hashes)
        self._counters.add("events_blocks_stored", len(blocks))
        self.blocks += len(blocks)
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and first.parent
            and first.parent == self._open_end
            and last.medium == medium.name
            and last.locality == medium.locality
            and last.lora_name == first.lora_name
            and last.extra_keys is None
            and first.extra_keys is None
            and last.block_size
            and len(last.block_hashes) < BLOCKS_IN_EVENT_MAX
        ):
            last.block_hashes += blocks
            last.token_ids += tokens
        else:
            self._events.append(
                BlockStored(
                    block_hashes=list(blocks),
                    parent_block_hash=int.from_bytes(first.parent, "big") if first.parent else None,
                    token_ids=tokens,
                    block_size=self._shape.block_tokens,
                    lora_id=None,
                    medium=medium.name,
                    lora_name=first.lora_name,
                    extra_keys=first.extra_keys,
                    group_idx=self._shape.group,
                    kv_cache_spec_kind=self._shape.kind,
                    kv_cache_spec_sliding_window=self._shape.sliding_window,
                    locality=medium.locality,
                )
            )
        self._open_end = hashes[-HASH_BYTES:]

    def placeholders(self, medium: Medium, hashes: bytes) -> None:
        """Chunks of which nothing is told but the hash of the last block."""
        blocks = integers(hashes)
        self._counters.add("events_blocks_stored", len(blocks))
        self.blocks += len(blocks)
        for block in blocks:
            self._events.append(
                BlockStored(
                    block_hashes=[block],
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
        if not blocks:
            return
        self._counters.add("events_blocks_removed", len(blocks))
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
            count += blocks_in(event)
        self.blocks -= count
        return taken


class Channel:
    """For the tiers that are announced as `medium`."""

    def __init__(self, medium: Medium, shape: Shape, outbox: Outbox) -> None:
        self.medium = medium
        self._outbox = outbox
        self._shares_blocks = shape.blocks_per_chunk > 1
        self._block_bytes = shape.block_tokens * TOKEN_BYTES
        # The hashes, as in its Description.
        self._announced: dict[bytes, bytes] = {}
        # Of chunks that can share blocks, the parent, and by that those who have the same: no
        # others can share any.
        self._parents: dict[bytes, bytes] = {}
        self._siblings: dict[bytes, list[bytes]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._announced

    def __len__(self) -> int:
        return len(self._announced)

    def unknown(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Which of `keys` are not announced."""
        announced = self._announced
        if announced.keys().isdisjoint(keys):
            return keys
        return [key for key in keys if key not in announced]

    def announce(self, run: Run, tokens: list[int] | None = None) -> None:
        """The chunks are there, and were not announced. `tokens`: of all of them, as numbers; the
        list is the channel's from now on."""
        if not self._shares_blocks:
            self._announced.update(zip(run.keys, run.hashes, strict=True))
        else:
            known = list(map(self._joined, run.keys, run.hashes, run.parents()))
            if any(known):
                self._outbox.stored(self.medium, self._rests(run.descriptions(), known))
                return
        self._outbox.stored_run(self.medium, run, tokens)

    def announce_each(self, described: list[Described]) -> None:
        """The same of chunks that need not follow one another."""
        told = [each for _, each in described]
        if not self._shares_blocks:
            self._announced.update((key, each.hashes) for key, each in described)
        else:
            known = [self._joined(key, each.hashes, each.parent) for key, each in described]
            told = self._rests(told, known)
        self._outbox.stored(self.medium, told)

    def announce_bare(self, keys: Sequence[bytes], hashes: bytes) -> None:
        """The same without anything but the hash of each one's last block, HASH_BYTES each."""
        for at, key in enumerate(keys):
            self._announced[key] = hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
        self._outbox.placeholders(self.medium, hashes)

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """The chunks are not there any more. Those that were not announced do not matter."""
        pop = self._announced.pop
        if not self._parents:
            self._outbox.removed(self.medium, b"".join(filter(None, map(pop, keys, repeat(None)))))
            return
        gone = []
        for key in keys:
            hashes = pop(key, None)
            if hashes is not None:
                gone.append(self._left(key, hashes) if key in self._parents else hashes)
        self._outbox.removed(self.medium, b"".join(gone))

    def withdraw_all(self) -> None:
        self.withdraw(list(self._announced))

    def forget(self) -> None:
        """Nothing counts as announced, without a word."""
        for some in (self._announced, self._parents, self._siblings):
            some.clear()

    def _joined(self, key: bytes, hashes: bytes, parent: bytes) -> int:
        """A chunk comes; how many of its leading blocks are announced with others."""
        known = self._shared(key, hashes, parent)
        self._siblings.setdefault(parent, []).append(key)
        self._parents[key] = parent
        self._announced[key] = hashes
        return known

    def _rests(self, chunks: list[Description], known: list[int]) -> list[Description]:
        """What is left of them without so many leading blocks of each, if anything is."""
        size = self._block_bytes
        return [
            Description(
                told.hashes[count * HASH_BYTES :],
                told.hashes[(count - 1) * HASH_BYTES : count * HASH_BYTES],
                told.tokens[count * size :],
                told.lora_name,
                None if told.extra_keys is None else told.extra_keys[count:],
            )
            if count
            else told
            for told, count in zip(chunks, known, strict=True)
            if count * HASH_BYTES < len(told.hashes)
        ]

    def _left(self, key: bytes, hashes: bytes) -> bytes:
        """What of a chunk that goes is not announced with others."""
        parent = self._parents.pop(key)
        siblings = self._siblings[parent]
        siblings.remove(key)
        known = self._shared(key, hashes, parent)
        if not siblings:
            del self._siblings[parent]
        return hashes[known * HASH_BYTES :]

    def _shared(self, key: bytes, hashes: bytes, parent: bytes) -> int:
        """How many leading blocks are announced with other chunks."""
        most = 0
        for other in self._siblings.get(parent, ()):
            if other != key:
                most = max(most, _common_blocks(self._announced[other], hashes))
        return most


def _end_of_run(chunks: Sequence[Description], start: int, most: int) -> int:
    """Where the chunks end that one event can tell of together with that at `start`, which has no
    extra keys: those that follow one another, at most so many."""
    first, stop = chunks[start], start + 1
    end = first.hashes[-HASH_BYTES:]
    while stop < len(chunks) and stop - start < most:
        told = chunks[stop]
        if told.parent != end or told.extra_keys is not None or told.lora_name != first.lora_name:
            break
        end = told.hashes[-HASH_BYTES:]
        stop += 1
    return stop


def _common_blocks(one: bytes, other: bytes) -> int:
    for at in range(0, min(len(one), len(other)), HASH_BYTES):
        if one[at : at + HASH_BYTES] != other[at : at + HASH_BYTES]:
            return at // HASH_BYTES
    return min(len(one), len(other)) // HASH_BYTES
