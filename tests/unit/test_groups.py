"""What each kind of KV cache group needs at a boundary, against a reading token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mini_groups as mini
from tiering_connectors.vllm.groups import Group, Kind, blocks_per_chunk_for

per_block = st.sampled_from([1, 2, 4])
per_chunk = st.integers(1, 4)
span = st.integers(1, 24)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Chunks of a local group lie within its spans, unless they are single blocks."""
    kind, size, wide = draw(st.sampled_from(Kind)), draw(per_block), draw(span)
    chunk = blocks_per_chunk_for(kind, size, wide, draw(per_chunk))
    return Group(0, kind, size, chunk, wide if kind in (Kind.WINDOW, Kind.LOCAL) else 0)


def reads(group: Group, position: int, token: int) -> bool:
    """Whether computing `position` reads what `token` left in the cache."""
    match group.kind:
        case Kind.FULL:
            return token < position
        case Kind.WINDOW:
            return position - group.span < token < position
        case Kind.LOCAL:
            return token < position and token // group.span == position // group.span
        case Kind.STATE:
            # The state of the token before, which lies in that token's block.
            block = (position - 1) // group.tokens_per_block
            return token < position and token // group.tokens_per_block == block


def read_at(group: Group, boundary: int) -> set[int]:
    """Tokens before `boundary` that it or any later token reads."""
    positions = range(boundary, boundary + group.span + 1)
    if group.kind is Kind.STATE:
        positions = range(boundary, boundary + 1)
    return {t for t in range(boundary) if any(reads(group, p, t) for p in positions)}


@settings(max_examples=150, deadline=None)
@given(group=groups(), at=st.integers(0, 40))
def test_the_first_token_that_a_request_still_reads(group: Group, at: int) -> None:
    if group.kind is Kind.STATE:
        at -= at % group.tokens_per_block
    assert group.start_of(at) == min(read_at(group, at), default=at)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(group=groups(), at=st.integers(0, 20), here=st.integers(0, 20))
def test_the_chunks_to_load_are_those_of_tokens_that_are_read(
    group: Group, at: int, here: int
) -> None:
    boundary, there = at * group.tokens_per_block, here * group.tokens_per_block
    wanted = {t // group.tokens_per_chunk for t in read_at(group, boundary) if t >= there}
    assert set(group.chunks(there, boundary)) == wanted


def test_nothing_is_loaded_where_a_local_span_begins() -> None:
    group = mini.local(8, per_chunk=2)
    assert group.chunks(0, 16) == range(0)
    assert group.chunks(0, 20) == range(2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", Kind)
@settings(max_examples=100, deadline=None)
@given(
    size=per_block,
    wide=span,
    wanted=st.sampled_from([4, 6, 8, 12]),
    steps=st.lists(st.integers(1, 17), min_size=3, max_size=8),
)
def test_blocks_of_a_chunk_are_together_when_it_becomes_full(
    kind: Kind, size: int, wide: int, wanted: int, steps: list[int]
) -> None:
    """Whatever the steps: before each, vLLM forgets what nobody reads any more."""
    count = blocks_per_chunk_for(kind, size, wide, wanted)
    assert wanted % count == 0
    group = Group(0, kind, size, count, wide)
    computed = 0
    for tokens in steps:
        if kind is Kind.STATE:
            # Steps are cut so that states are final where blocks end.
            tokens = math.ceil(tokens / size) * size
        kept = mini.skipped_blocks(group, computed)
        fresh = range(computed // group.tokens_per_chunk, (computed + tokens) // (size * count))
        if kind is Kind.STATE:
            fresh = fresh[-1:]
        for chunk in fresh:
            assert chunk * count >= kept, f"block {chunk * count} is gone"
        computed += tokens


def test_chunks_are_as_large_as_wanted_where_that_is_safe() -> None:
    assert blocks_per_chunk_for(Kind.FULL, 16, 0, 12) == 12
    assert blocks_per_chunk_for(Kind.WINDOW, 16, 1024, 12) == 12
    assert blocks_per_chunk_for(Kind.WINDOW, 16, 128, 12) == 6
    assert blocks_per_chunk_for(Kind.WINDOW, 16, 16, 12) == 1
    assert blocks_per_chunk_for(Kind.LOCAL, 16, 64, 12) == 4
    assert blocks_per_chunk_for(Kind.LOCAL, 16, 8192, 16) == 16
    assert blocks_per_chunk_for(Kind.STATE, 512, 0, 12) == 1


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_mini_vllm_forgets_what_vllm_forgets() -> None:
    from vllm.v1.core import single_type_kv_cache_manager as managers

    def skipped(manager: Any, **facts: int) -> list[int]:
        own = object.__new__(manager)
        vars(own).update(facts)
        return [max(0, own.get_num_skipped_tokens(computed)) for computed in range(60)]

    for wide in (1, 4, 7, 16):
        for group, theirs in (
            (mini.full(), skipped(managers.FullAttentionManager)),
            (mini.state(), skipped(managers.MambaManager)),
            (
                mini.window(wide),
                skipped(
                    managers.SlidingWindowManager, sliding_window=wide, extra_retained_tokens=0
                ),
            ),
            (
                mini.local(wide),
                skipped(managers.ChunkedLocalAttentionManager, attention_chunk_size=wide),
            ),
        ):
            assert [mini.skipped_tokens(group, computed) for computed in range(60)] == theirs
            for boundary in range(0, 60, group.tokens_per_block):
                block = group.start_of(boundary) // group.tokens_per_block
                assert block == mini.skipped_blocks(group, boundary)
