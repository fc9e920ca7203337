"""Many events as bounded batches: what a consumer reads is the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from event_streams import SIZE, cleared, placeholder, removed, stored
from tiering.events.blocks import BlockEvent, BlockStored
from tiering.events.cutting import cut, weight
from tiering.events.mirror import EventMirror

BLOCKS = st.integers(0, 9).map(range)
EVENTS = st.lists(
    BLOCKS.map(lambda some: stored(*some))
    | BLOCKS.map(lambda some: removed(*some))
    | st.just(cleared()),
    max_size=12,
)


def mirrored(batches: list[list[BlockEvent]]) -> EventMirror:
    mirror = EventMirror()
    for batch in batches:
        mirror.apply(batch)
    return mirror


@given(EVENTS, st.integers(1, 7))
def test_batches_are_bounded_and_say_the_same_in_order(events: list[BlockEvent], most: int) -> None:
    batches = list(cut(events, most))
    assert all(0 < weight(batch) <= most for batch in batches)
    once, cut_up = mirrored([events]), mirrored(batches)
    assert cut_up.residents("CPU") == once.residents("CPU")
    assert cut_up.counts == once.counts
    assert cut_up.cleared == once.cleared
    assert cut_up.malformed == once.malformed == 0
    chains = [[mirror.chain("CPU", 8, 9) for mirror in (once, cut_up)]]
    assert all(before == after for before, after in chains)


def test_nothing_is_no_batch() -> None:
    assert list(cut([], 5)) == []


def test_what_fits_is_left_as_it_is() -> None:
    events = [stored(1, 2), removed(3), cleared()]
    assert list(cut(events, 4)) == [events]
    assert [len(batch) for batch in cut(events, 3)] == [2, 1]


def test_a_long_chain_is_cut_between_its_blocks() -> None:
    event = stored(1, 2, 3, 4, 5, parent=9)
    event.extra_keys = [["a"], None, ["c"], ["d"], ["e"]]
    (first,), (second,), (third,) = cut([event], 2)
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert isinstance(third, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == ([1, 2], 9)
    assert (second.block_hashes, second.parent_block_hash) == ([3, 4], 2)
    assert (third.block_hashes, third.parent_block_hash) == ([5], 4)
    assert first.token_ids + second.token_ids + third.token_ids == event.token_ids
    assert second.token_ids == event.token_ids[2 * SIZE : 4 * SIZE]
    assert second.extra_keys == [["c"], ["d"]]
    assert {each.group_idx for each in (first, second, third)} == {0}


def test_placeholders_are_not_made_a_chain() -> None:
    event = placeholder(1)
    event.block_hashes = [1, 2, 3]
    pieces = [piece for batch in cut([event], 1) for piece in batch]
    found = [piece for piece in pieces if isinstance(piece, BlockStored)]
    assert [each.block_hashes for each in found] == [[1], [2], [3]]
    assert [each.parent_block_hash for each in found] == [None] * 3


@pytest.mark.parametrize("most", [1, 3])
def test_the_rest_of_a_long_event_shares_its_batch_with_the_next(most: int) -> None:
    batches = list(cut([removed(*range(most + 1)), cleared()], most))
    assert len(batches) == (3 if most == 1 else 2)
