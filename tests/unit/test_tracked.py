"""Keys of chunks of several groups, and the order in which a request's chunks are used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mini_groups as mini
from tiering.keys import chunk_key
from tiering_connectors.vllm.tracked import KeyMaker, floor_to, interleaved

HASHES = [bytes([i]) * 32 for i in range(24)]


def key_maker() -> KeyMaker:
    """Blocks of 4 and 8 tokens; 2 are hashed at a time."""
    groups = mini.numbered([mini.full(4, 3), mini.window(20, 8, 2), mini.state(4)])
    return KeyMaker(mini.geometry_for(groups, 2, num_blocks=8, world=1, replicas=1))


def test_a_chunk_is_named_by_its_last_hash_and_its_group() -> None:
    keys: list[list[bytes]] = [[], [], []]
    key_maker().extend(keys, HASHES)
    assert keys[0] == [chunk_key(HASHES[i], 0) for i in (5, 11, 17, 23)]
    assert keys[1] == [chunk_key(HASHES[i], 1) for i in (7, 15, 23)]
    assert keys[2] == [chunk_key(HASHES[i], 2) for i in range(1, 24, 2)]


@pytest.mark.slow
@given(cuts=st.lists(st.integers(0, 24), max_size=5))
def test_keys_grow_with_the_hashes_and_stay_as_they_are(cuts: list[int]) -> None:
    maker = key_maker()
    keys: list[list[bytes]] = [[], [], []]
    for cut in [*sorted(cuts), 24]:
        before = [list(known) for known in keys]
        maker.extend(keys, HASHES[:cut])
        assert [known[: len(old)] for known, old in zip(keys, before, strict=True)] == before
        assert [len(known) for known in keys] == [cut // 6, cut // 8, cut // 2]
    whole: list[list[bytes]] = [[], [], []]
    maker.extend(whole, HASHES)
    assert keys == whole


def test_a_mask_gives_every_chunk_another_name_of_the_same_form() -> None:
    maker = key_maker()
    plain: list[list[bytes]] = [[], [], []]
    maker.extend(plain, HASHES)
    names = {key for known in plain for key in known}
    for mask in (1 << 255, 3 << 300 | 1):
        maker.mask = mask
        masked: list[list[bytes]] = [[], [], []]
        maker.extend(masked, HASHES)
        for own, others in zip(masked, plain, strict=True):
            assert len(set(own)) == len(others)
            assert not names & set(own)
            assert [len(key) for key in own] == [len(key) for key in others]
            assert [key[-4:] for key in own] == [key[-4:] for key in others]


@pytest.mark.slow
@settings(max_examples=100)
@given(
    ranges=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from([1, 2, 4])),
        min_size=1,
        max_size=4,
    )
)
def test_chunks_come_by_the_token_at_which_they_end(ranges: list[tuple[int, int, int]]) -> None:
    groups = [replace(mini.full(size), index=at) for at, (_, _, size) in enumerate(ranges)]
    chunks = [range(start, start + count) for start, count, _ in ranges]
    order = interleaved(groups, chunks)
    assert sorted(order) == [(at, chunk) for at, own in enumerate(chunks) for chunk in own]
    ends = [(chunk + 1) * groups[at].tokens_per_chunk for at, chunk in order]
    assert ends == sorted(ends)


def test_tokens_are_cut_to_whole_units() -> None:
    assert [floor_to(tokens, 8) for tokens in (0, 7, 8, 17)] == [0, 0, 8, 16]
