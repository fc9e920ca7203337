"""Many events as batches of a bounded number of blocks, in order. Pure functions.

An event that is longer than a batch may be is cut as well, so that a consumer reads the same from
the pieces: tokens and extra keys go with their blocks, and each piece's parent is the last block of
the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from tiering.events.blocks import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    blocks_in,
)


def weight(events: Iterable[BlockEvent]) -> int:
    """Of a batch in a queue, in blocks; an event counts as one at least."""
    return sum(max(1, blocks_in(event)) for event in events)


def cut(events: Iterable[BlockEvent], batch_blocks_max: int) -> Iterator[list[BlockEvent]]:
    """Lists whose `weight` is at most `batch_blocks_max`, at least 1; none for no events."""
    batch: list[BlockEvent] = []
    room = batch_blocks_max
    for event in events:
        size = max(1, blocks_in(event))
        if size > room and batch:
            yield batch
            batch, room = [], batch_blocks_max
        if size <= room:
            batch.append(event)
            room -= size
            continue
        *whole, last = _pieces(event, batch_blocks_max)
        for piece in whole:
            yield [piece]
        batch, room = [last], batch_blocks_max - max(1, blocks_in(last))
    if batch:
        yield batch


def _pieces(event: BlockEvent, blocks_max: int) -> Iterator[BlockEvent]:
    if isinstance(event, AllBlocksCleared):
        yield event
        return
    total = len(event.block_hashes)
    for start in range(0, total, blocks_max):
        end = min(start + blocks_max, total)
        if isinstance(event, BlockRemoved):
            yield msgspec.structs.replace(event, block_hashes=event.block_hashes[start:end])
        else:
            yield _part(event, start, end, is_last=end == total)


def _part(event: BlockStored, start: int, end: int, is_last: bool) -> BlockStored:
    size, hashes = event.block_size, event.block_hashes
    # Blocks of a placeholder are not said to follow one another.
    follows = start > 0 and size > 0
    return msgspec.structs.replace(
        event,
        block_hashes=hashes[start:end],
        parent_block_hash=hashes[start - 1] if follows else event.parent_block_hash,
        token_ids=event.token_ids[start * size : None if is_last else end * size],
        extra_keys=None if event.extra_keys is None else event.extra_keys[start:end],
    )
