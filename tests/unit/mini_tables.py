"""Block tables of the mini vLLM: its KV cache manager, over several groups and one pool.

Blocks are allocated, forgotten, cached and found again as vLLM does it. Groups forget before each
allocation what nobody reads any more, tokens that were loaded from elsewhere get blocks only where
they are still read, and a local hit is where all groups can stand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mini_blocks import NULL_BLOCK, BlockPool, Request
from mini_groups import align_of, most_blocks, skipped_blocks, wanted_blocks
from tiering_connectors.vllm.groups import Group, Kind

Blocks = list[list[int]]


class Tables:
    """`step_tokens`: the most that one step computes of a request."""

    def __init__(self, groups: Sequence[Group], pool: BlockPool, step_tokens: int) -> None:
        self.align = align_of(groups)
        self._groups = groups
        self._pool = pool
        self._step_tokens = step_tokens

    def local_hit(self, request: Request) -> tuple[int, Blocks]:
        """The furthest boundary at which every group has what it takes, and the blocks."""
        for boundary in range((request.num_tokens - 1) // self.align, 0, -1):
            tokens = boundary * self.align
            hit = [self._found(request, group, tokens) for group in self._groups]
            if None not in hit:
                return tokens, [blocks for blocks in hit if blocks is not None]
        return 0, [[] for _ in self._groups]

    def adopt(self, request: Request, hit: Blocks, local: int, external: int) -> None:
        """Blocks for the first `local + external` tokens, those of the local hit shared."""
        total = local + external
        request.blocks = []
        for group, blocks in zip(self._groups, hit, strict=True):
            skipped = skipped_blocks(group, total)
            shared = blocks[skipped:]
            self._pool.share(shared)
            request.blocks.append([NULL_BLOCK] * skipped + shared)
        # Only when all that is shared is safe: else it could be taken for another group.
        if external:
            for group, table in zip(self._groups, request.blocks, strict=True):
                table += self._taken(math.ceil(total / group.tokens_per_block) - len(table))

    def extend(self, request: Request, tokens: int) -> Blocks | None:
        """The new entries of each table for `tokens` in all, or None if there is no room."""
        if not request.blocks:
            request.blocks = [[] for _ in self._groups]
        self._forget_skipped(request)
        missing = [
            max(0, math.ceil(tokens / group.tokens_per_block) - len(table))
            for group, table in zip(self._groups, request.blocks, strict=True)
        ]
        # Of states only the last is a block.
        nulls = [
            max(0, count - 1) if group.kind is Kind.STATE else 0
            for group, count in zip(self._groups, missing, strict=True)
        ]
        if sum(missing) - sum(nulls) > len(self._pool.free):
            return None
        fresh = [
            [NULL_BLOCK] * null + self._taken(count - null)
            for count, null in zip(missing, nulls, strict=True)
        ]
        for table, more in zip(request.blocks, fresh, strict=True):
            table += more
        return fresh

    def fits_whole(
        self, request: Request, hit: Blocks, total: int, others: Sequence[Request]
    ) -> bool:
        """Whoever is admitted finds room to the end of its tokens, even if nobody gives way."""
        promised = sum(self._still_wanted(other, other.blocks) for other in others if other.blocks)
        kept = [
            blocks[skipped_blocks(group, total) :]
            for group, blocks in zip(self._groups, hit, strict=True)
        ]
        idle = sum(not self._pool.users[block] for blocks in kept for block in blocks)
        wanted = self._still_wanted(request, request.blocks or kept)
        return wanted + promised + idle <= len(self._pool.free)

    def cache(self, request: Request, tokens: int) -> None:
        """What is full once `tokens` are there can be found again, where a hit could be."""
        for group, table in zip(self._groups, request.blocks, strict=True):
            size = group.tokens_per_block
            end = tokens // self.align * self.align
            if group.is_draft:
                end = min(tokens, end + size)
            for index in range(end // size):
                self._pool.cache(table[index], group.index, request.hash_at((index + 1) * size))

    def free(self, request: Request) -> None:
        for table in request.blocks:
            self._pool.give_back(table)
        request.blocks = []

    def cached_before(self, request: Request, tokens: int) -> dict[tuple[int, bytes], int]:
        """What the prefix cache has of the first `tokens` of `request`."""
        keys = [
            (group.index, request.hash_at(end))
            for group in self._groups
            for end in range(group.tokens_per_block, tokens + 1, group.tokens_per_block)
        ]
        return {key: self._pool.cached[key] for key in keys if key in self._pool.cached}

    def _found(self, request: Request, group: Group, boundary: int) -> list[int] | None:
        wanted, size = wanted_blocks(group, boundary), group.tokens_per_block
        if wanted.stop * size > request.hashed_tokens:
            return None
        keys = [(group.index, request.hash_at((block + 1) * size)) for block in wanted]
        if any(key not in self._pool.cached for key in keys):
            return None
        found = [NULL_BLOCK] * wanted.start + [self._pool.cached[key] for key in keys]
        return found[: boundary // size]

    def _forget_skipped(self, request: Request) -> None:
        for group, table in zip(self._groups, request.blocks, strict=True):
            end = min(skipped_blocks(group, request.num_computed_tokens), len(table))
            self._pool.give_back(table[:end])
            table[:end] = [NULL_BLOCK] * end

    def _still_wanted(self, request: Request, tables: Blocks) -> int:
        """How many more blocks than in `tables` the request will take at most."""
        wanted = 0
        for group, table in zip(self._groups, tables, strict=True):
            held = sum(block != NULL_BLOCK for block in table)
            most = most_blocks(group, request.num_tokens, self._step_tokens)
            wanted += max(0, most - held)
        return wanted

    def _taken(self, count: int) -> list[int]:
        taken = self._pool.take(max(0, count))
        assert len(taken) == max(0, count), "admitted without room"
        return taken
