"""KV cache groups of the mini vLLM: what vLLM keeps of each, said in its own way, and sets of them.

Nothing here asks the connector's own arithmetic, so that the two can be held against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tiering.layout import ShareLayout
from tiering_connectors.vllm.geometry import Geometry, Region
from tiering_connectors.vllm.groups import Group, Kind

BLOCK = 4
LAYERS = 2
WORD_BYTES = 8


def full(per_block: int = BLOCK, per_chunk: int = 1, is_draft: bool = False) -> Group:
    return Group(0, Kind.FULL, per_block, per_chunk, is_draft=is_draft)


def window(span: int, per_block: int = BLOCK, per_chunk: int = 1, is_draft: bool = False) -> Group:
    return Group(0, Kind.WINDOW, per_block, per_chunk, span, is_draft)


def local(span: int, per_block: int = BLOCK, per_chunk: int = 1) -> Group:
    return Group(0, Kind.LOCAL, per_block, per_chunk, span)


def state(per_block: int = BLOCK, is_draft: bool = False) -> Group:
    return Group(0, Kind.STATE, per_block, 1, is_draft=is_draft)


SETS: dict[str, tuple[Group, ...]] = {
    "full": (full(),),
    "window alone": (window(10),),
    "state alone": (state(),),
    "window": (full(), window(10)),
    "window first": (window(6, per_chunk=1), full(per_chunk=2)),
    "wide window": (full(per_chunk=2), window(17, per_chunk=2)),
    "small windows": (full(2 * BLOCK), window(7), window(13, per_chunk=3)),
    "local": (local(16, per_chunk=2), full()),
    "state": (full(), state()),
    "large state": (full(per_chunk=2), state(2 * BLOCK), state(2 * BLOCK)),
    "all kinds": (full(), window(9), local(8), state()),
    "draft": (full(), full(per_chunk=2, is_draft=True)),
    "draft of windows": (full(), window(9), window(9, is_draft=True)),
    # As vLLM has it where it cannot tell which of the groups is the draft's.
    "any may be draft": (full(is_draft=True), state(is_draft=True)),
}


def numbered(groups: Sequence[Group]) -> tuple[Group, ...]:
    return tuple(replace(group, index=index) for index, group in enumerate(groups))


def skipped_tokens(group: Group, computed: int) -> int:
    """How many leading tokens nobody reads any more once `computed` tokens are there."""
    match group.kind:
        case Kind.FULL:
            return 0
        case Kind.WINDOW:
            return max(0, computed - group.span + 1)
        case Kind.LOCAL:
            return computed // group.span * group.span
        case Kind.STATE:
            return max(0, computed - 1)


def skipped_blocks(group: Group, computed: int) -> int:
    return skipped_tokens(group, computed) // group.tokens_per_block


def wanted_blocks(group: Group, boundary: int) -> range:
    """Blocks that must be there to go on at `boundary`; of a draft's, one more must be known,
    unless it is of states, which no draft has."""
    stop = boundary // group.tokens_per_block
    has_more = group.is_draft and group.kind is not Kind.STATE and boundary > 0
    return range(skipped_blocks(group, boundary), stop + has_more)


def most_blocks(group: Group, tokens: int, step_tokens: int) -> int:
    """How many blocks a request of `tokens` may hold at once, computed `step_tokens` at a time."""
    most = math.ceil(tokens / group.tokens_per_block)
    match group.kind:
        case Kind.FULL:
            return most
        case Kind.STATE:
            return min(most, 2)
        case _:
            held = group.span + step_tokens
            return min(most, math.ceil(held / group.tokens_per_block) + 1)


def request_blocks(groups: Sequence[Group], tokens: int, step_tokens: int) -> int:
    """The most device blocks that one request takes, in all groups together."""
    return sum(most_blocks(group, tokens, step_tokens) for group in groups)


def align_of(groups: Sequence[Group]) -> int:
    return math.lcm(*(group.tokens_per_block for group in groups))


def page_bytes(group: Group) -> int:
    """One word for each token, or for a state."""
    return WORD_BYTES * (1 if group.kind is Kind.STATE else group.tokens_per_block)


def geometry_for(
    groups: Sequence[Group], tokens_per_hash: int, num_blocks: int, world: int, replicas: int
) -> Geometry:
    """All groups on the same bytes, layer after layer."""
    stride = max(map(page_bytes, groups))
    regions = tuple(
        tuple(Region(layer * num_blocks * stride, stride, page_bytes(g)) for layer in range(LAYERS))
        for g in groups
    )
    shares = [ShareLayout((page_bytes(g),) * LAYERS, g.blocks_per_chunk) for g in groups]
    return Geometry(
        groups=tuple(groups),
        regions=regions,
        tokens_per_hash=tokens_per_hash,
        num_blocks=num_blocks,
        world=world,
        share_bytes=max(share.share_bytes for share in shares),
        replicas=replicas,
    )
