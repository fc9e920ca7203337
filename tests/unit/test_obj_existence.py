"""What is known of a bucket, and how few questions find out the rest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.testing.clocks import ManualClock
from tiering.testing.examples import key_number
from tiering.tiers.obj.existence import ChainSearch, Existence

KEYS = [key_number(i) for i in range(10)]


def known(existence: Existence, keys: list[bytes] = KEYS) -> str:
    """One letter a key: there, absent, unknown."""
    return "".join({True: "t", False: "a", None: "?"}[each] for each in existence.ask(keys))


def test_what_was_put_is_there_and_what_was_deleted_is_not() -> None:
    existence = Existence(ManualClock())
    existence.stored(KEYS[:4])
    existence.missing(KEYS[2:6])
    assert known(existence) == "ttaaaa????"
    existence.stored(KEYS[5:6])
    assert known(existence) == "ttaaat????"
    assert len(existence) == 3


def test_no_is_an_answer_for_a_short_time() -> None:
    clock = ManualClock()
    existence = Existence(clock, absent_seconds=5)
    existence.missing(KEYS[:2])
    clock.advance(4)
    existence.missing(KEYS[1:3])
    assert known(existence) == "aaa???????"
    clock.advance(1)
    assert known(existence) == "?aa???????"
    clock.advance(4)
    assert known(existence) == "??????????"


def test_a_put_clears_a_no_whose_time_then_passes_without_effect() -> None:
    clock = ManualClock()
    existence = Existence(clock, absent_seconds=5)
    existence.missing(KEYS[:1])
    existence.stored(KEYS[:1])
    clock.advance(10)
    assert known(existence)[0] == "t"


def test_what_was_told_twice_in_one_call_counts_once() -> None:
    existence = Existence(ManualClock())
    existence.stored([KEYS[0], KEYS[0]])
    existence.missing([KEYS[1], KEYS[1]])
    assert len(existence) == 1
    assert known(existence)[:2] == "ta"


def test_a_walk_replaces_what_was_known_when_it_ends() -> None:
    existence = Existence(ManualClock())
    existence.stored(KEYS[:4])
    existence.walk_begins()
    existence.page_asked()
    existence.page(KEYS[2:6])
    assert known(existence) == "tttttt????"
    existence.stored(KEYS[8:9])
    existence.found(KEYS[9:])
    existence.walk_ends()
    assert known(existence) == "??tttt??t?"


def test_a_walk_that_breaks_off_takes_nothing_away() -> None:
    existence = Existence(ManualClock())
    existence.stored(KEYS[:2])
    existence.walk_begins()
    existence.page_asked()
    existence.page(KEYS[4:5])
    existence.walk_breaks_off()
    assert known(existence) == "tt??t?????"


def test_what_goes_while_a_page_is_on_its_way_is_not_brought_back_by_it() -> None:
    existence = Existence(ManualClock())
    existence.walk_begins()
    existence.page_asked()
    existence.missing(KEYS[:2])
    existence.stored(KEYS[1:2])
    existence.page(KEYS[:3])
    assert known(existence)[:3] == "att"
    existence.page_asked()
    existence.page(KEYS[:1])
    existence.walk_ends()
    assert known(existence)[:3] == "ttt"


def test_what_goes_after_its_page_is_gone_when_the_walk_ends() -> None:
    clock = ManualClock()
    existence = Existence(clock)
    existence.walk_begins()
    existence.page_asked()
    existence.page(KEYS)
    existence.missing(KEYS[:1])
    existence.walk_ends()
    clock.advance(60)
    assert known(existence) == "?ttttttttt"


def test_memory_is_bounded() -> None:
    clock = ManualClock()
    existence = Existence(clock, keys_max=4, absent_keys_max=3)
    existence.walk_begins()
    existence.page_asked()
    existence.page(KEYS)
    existence.walk_ends()
    assert len(existence) == 4
    existence.stored([key_number(100)])
    assert len(existence) == 4
    other = Existence(clock, absent_keys_max=3)
    for key in KEYS:
        other.missing([key])
    assert known(other) == "???????aaa"


def test_a_put_that_there_is_no_room_to_remember_still_clears_a_no() -> None:
    existence = Existence(ManualClock(), keys_max=1)
    existence.missing(KEYS[:2])
    existence.stored(KEYS[:2])
    assert known(existence)[:2] == "t?"


# Searches


def search(there: list[bool]) -> tuple[list[bool], int, int]:
    """What a search finds, how many questions it asks, and in how many rounds."""
    chain, asked, rounds = ChainSearch(len(there)), 0, 0
    while questions := chain.questions:
        rounds += 1
        for place in questions:
            asked += 1
            chain.answer(place, there[place])
    return [place in chain.found for place in range(len(there))], asked, rounds


@given(count=st.integers(1, 2000), data=st.data())
def test_a_prefix_and_a_window_are_found_exactly_with_few_questions(
    count: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, count))
    for there in (
        [True] * size + [False] * (count - size),
        [False] * (count - size) + [True] * size,
    ):
        found, asked, rounds = search(there)
        assert found == there
        assert asked <= 2 + math.ceil(math.log2(count))
        assert rounds <= 1 + math.ceil(math.log2(count))


@given(there=st.lists(st.booleans(), min_size=1, max_size=60))
def test_whatever_is_there_a_search_ends_and_is_right_about_what_it_asked(
    there: list[bool],
) -> None:
    found, asked, _ = search(there)
    assert asked <= 2 + math.ceil(math.log2(len(there)))
    assert (found[0], found[-1]) == (there[0], there[-1])


def test_all_or_nothing_takes_two_questions_in_one_round() -> None:
    assert search([True] * 1000)[1:] == (2, 1)
    assert search([False] * 1000)[1:] == (2, 1)
    assert search([True])[1:] == (1, 1)
    with pytest.raises(ValueError, match="nothing"):
        ChainSearch(0)
