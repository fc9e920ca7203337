"""Storing what requests compute: which chunks, in which order, and when they can be copied.

Sans-IO, on the scheduler's thread. Chunks are stored in the step that completes them, while their
blocks are on the device for certain. Of groups that keep all history every chunk is stored; of
those that forget, what it takes to go on where a step ends or where prompts part ways: the
rest would never be asked for, and costs as much. A store that finds no room is tried again, and
nothing behind it is stored before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from tiering.device.base import BlockMap
from tiering.residency.core import Residency
from tiering_connectors.vllm.announcing import Silence
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.groups import Group, Kind
from tiering_connectors.vllm.jobs import JobBook
from tiering_connectors.vllm.meter import TransferMeter
from tiering_connectors.vllm.orders import CopyJob, blocks_of
from tiering_connectors.vllm.tracked import Tracked, floor_to

NULL_BLOCK = 0
"""vLLM's stand-in for a block that a group has forgotten."""

Table = Sequence[Sequence[int]]


class Storer:
    """Part of the scheduler half; same owner, same rules."""

    def __init__(
        self,
        core: Residency,
        geometry: Geometry,
        jobs: JobBook,
        meter: TransferMeter,
        prompt_only: bool,
        announcing: Silence,
    ) -> None:
        self._core = core
        self._announcing = announcing
        self._meter = meter
        self._geometry = geometry
        self._jobs = jobs
        self._prompt_only = prompt_only
        self._only_full = all(group.kind is Kind.FULL for group in geometry.groups)
        full = [g.tokens_per_chunk for g in geometry.groups if g.kind is Kind.FULL]
        # A shorter request may go on within the last chunk of all history.
        self._tail_tokens = max([*full, geometry.align])

    def is_due(self, tracked: Tracked, tokens: int) -> bool:
        """Whether this step, which computes `tokens` more, gives anything to store."""
        stores = tracked.stores
        if tracked.is_stale or stores.refused_at == self._core.changes:
            return False
        return stores.done < len(stores.chain) or self._limit(tracked, tokens) >= stores.wake_at

    def plan(self, tracked: Tracked, tokens: int, table: Table) -> CopyJob | None:
        """The copies of this step. `table`: the request's device blocks by group."""
        stores = tracked.stores
        self._extend(tracked, tokens, table)
        if stores.done == len(stores.chain):
            return None
        self._meter.reserved(len(stores.chain) - stores.done)
        reservation = self._core.reserve(tracked.owner, stores.chain, stores.done)
        stores.done = reservation.end
        is_refused = reservation.end < len(stores.chain)
        stores.refused_at = self._core.changes if is_refused else -1
        if not reservation.slots:
            return None
        where = [stores.where[i] for i in reservation.indices]
        parts, slots, gone = self._parts(where, reservation.slots, table)
        if gone:
            self._core.unfilled(gone)
        if not slots:
            return None
        self._announcing.expect(tracked, where)
        job = self._jobs.add_store(slots, blocks_of(parts))
        return CopyJob(job.job_id, parts)

    def is_over(self, tracked: Tracked) -> bool:
        """Whether all that may ever be stored of the request is cared for."""
        stores, most = tracked.stores, self._most(tracked)
        return most is not None and stores.wake_at > most and stores.done == len(stores.chain)

    def _limit(self, tracked: Tracked, tokens: int) -> int:
        """How many tokens of the request may be stored after this step: computed for certain,
        and known, which drafts are not."""
        request, most = tracked.request, self._most(tracked)
        limit = min(request.num_computed_tokens + tokens, request.num_tokens)
        return limit if most is None else min(limit, most)

    def _most(self, tracked: Tracked) -> int | None:
        """How many tokens of the request may ever be stored; None for all that there will be."""
        most = tracked.limits.max_offload_tokens
        if not self._prompt_only:
            return most
        prompt = tracked.request.num_prompt_tokens
        return prompt if most is None else min(most, prompt)

    def _extend(self, tracked: Tracked, tokens: int, table: Table) -> None:
        """Add to the chain what has become full since it was last looked at."""
        stores, limit = tracked.stores, self._limit(tracked, tokens)
        if limit < stores.wake_at:
            return
        if not stores.seen:
            stores.seen = [0] * len(self._geometry.groups)
        fresh: list[tuple[int, int, int]] = []
        wake_at = []
        for at, group in enumerate(self._geometry.groups):
            size, keys = group.tokens_per_chunk, tracked.keys[at]
            # A draft's cache of the last token may change once the next one is known.
            is_open = group.spare > 0 and limit > tracked.request.num_prompt_tokens
            end = min((limit - is_open) // size, len(keys))
            chunks = range(stores.seen[at], max(end, stores.seen[at]))
            if self._only_full and len(tracked.keys) == 1:
                stores.chain += keys[chunks.start : chunks.stop]
                stores.where += zip(repeat(at), chunks)
            else:
                kept = self._kept(tracked, at, group, chunks, tokens, limit, table[at])
                fresh += [((chunk + 1) * size, at, chunk) for chunk in kept]
            stores.seen[at] = chunks.stop
            wake_at.append((chunks.stop + 1) * size + (group.spare > 0))
        stores.wake_at = min(wake_at)
        for _, at, chunk in sorted(fresh):
            stores.chain.append(tracked.keys[at][chunk])
            stores.where.append((at, chunk))

    def _kept(
        self,
        tracked: Tracked,
        at: int,
        group: Group,
        chunks: range,
        tokens: int,
        limit: int,
        blocks: Sequence[int],
    ) -> Sequence[int]:
        """Those of `chunks` that are worth storing and whose blocks are all there."""
        if group.kind is Kind.FULL:
            return chunks
        size, per_chunk = group.tokens_per_chunk, group.blocks_per_chunk
        if group.kind is Kind.STATE:
            before = tracked.request.num_computed_tokens
            ends = {before + tokens}
            if before <= tracked.request.num_prompt_tokens:
                ends.add(before)
            kept = [end // size - 1 for end in ends if end % size == 0]
        else:
            tail = max(0, floor_to(limit, self._tail_tokens) - self._tail_tokens)
            spans = [(group.start_of(tail), limit)]
            if tracked.branch:
                spans.append((group.start_of(tracked.branch), tracked.branch))
            kept = sorted({c for low, high in spans for c in range(low // size, -(-high // size))})
        return [
            chunk
            for chunk in kept
            if chunk in chunks
            and len(own := blocks[chunk * per_chunk : (chunk + 1) * per_chunk]) == per_chunk
            and NULL_BLOCK not in own
        ]

    def _parts(
        self, where: Sequence[tuple[int, int]], slots: Sequence[int], table: Table
    ) -> tuple[tuple[BlockMap, ...], list[int], list[int]]:
        """What to copy from where, group by group; the slots that are filled by it, and those that
        nothing can be copied into, since the blocks have gone while room was waited for."""
        parts, filled, gone = [], [], []
        for at, group in enumerate(self._geometry.groups):
            own = [(c, slot) for (g, c), slot in zip(where, slots, strict=True) if g == at]
            if not own:
                continue
            per_chunk = group.blocks_per_chunk
            chunks, into = np.array(own, dtype=np.int32).T
            offsets = np.arange(per_chunk, dtype=np.int32)
            places = (chunks[:, None] * per_chunk + offsets).ravel()
            blocks = np.asarray(table[at], dtype=np.int32)[places].reshape(-1, per_chunk)
            is_there = (blocks != NULL_BLOCK).all(axis=1)
            gone += into[~is_there].tolist()
            blocks, into = blocks[is_there], into[is_there]
            if len(into):
                filled += into.tolist()
                positions = np.tile(offsets, len(into))
                parts.append(BlockMap(blocks.ravel(), np.repeat(into, per_chunk), positions, at))
        return tuple(parts), filled, gone
