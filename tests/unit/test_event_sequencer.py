"""Batches in order, each once: gaps, replays, restarts, and a simulation of all of them."""

from __future__ import annotations

import random

import pytest

from tiering.events import sequencer
from tiering.events.sequencer import Ordered, Sequencer


def body(number: int, of: str = "a") -> bytes:
    return f"{of}{number}".encode()


def told(found: list[Ordered]) -> list[tuple[int, int, int]]:
    return [(each.number, each.missed, each.incarnation) for each in found]


def replay(sequencer: Sequencer, have: range, of: str = "a", is_whole: bool = True) -> int:
    """Answer the open question from what the publisher has; the number that it began with."""
    question = sequencer.question
    assert question is not None
    for number in have:
        if number >= question.start:
            sequencer.replayed(question, number, body(number, of))
    sequencer.ended(question, is_whole)
    return question.start


def test_a_stream_from_its_start_needs_no_replay() -> None:
    sequencer = Sequencer(can_ask=True)
    for number in range(3):
        sequencer.live(number, body(number))
    assert told(sequencer.take()) == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert sequencer.question is None


def test_without_replay_gaps_are_told_at_once() -> None:
    sequencer = Sequencer(can_ask=False)
    for number in (3, 4, 7):
        sequencer.live(number, body(number))
    assert told(sequencer.take()) == [(3, 3, 0), (4, 0, 0), (7, 2, 0)]
    assert sequencer.missed == 5


def test_a_gap_is_filled_by_a_replay_from_the_last_known() -> None:
    sequencer = Sequencer(can_ask=True)
    for number in (0, 1, 4, 5):
        sequencer.live(number, body(number))
    assert told(sequencer.take()) == [(0, 0, 0), (1, 0, 0)]
    assert sequencer.held == 2
    assert replay(sequencer, range(7)) == 1
    sequencer.live(6, body(6))
    sequencer.live(7, body(7))
    assert told(sequencer.take()) == [(number, 0, 0) for number in range(2, 8)]
    assert (sequencer.missed, sequencer.repeated, sequencer.question) == (0, 1, None)


def test_who_joins_late_gets_all_that_is_still_there() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.live(9, body(9))
    assert replay(sequencer, range(4, 11)) == 0
    assert told(sequencer.take())[0] == (4, 4, 0)
    sequencer.live(10, body(10))
    sequencer.live(11, body(11))
    assert told(sequencer.take()) == [(11, 0, 0)]


def test_what_an_answer_begins_behind_is_given_up_at_once() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.probe()
    question = sequencer.question
    assert question is not None
    for number in (4, 5):
        sequencer.replayed(question, number, body(number))
    assert told(sequencer.take()) == [(4, 4, 0), (5, 0, 0)], "and not kept until its end"


def test_what_the_publisher_dropped_is_told_as_missed() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.live(0, body(0))
    sequencer.live(5, body(5))
    question = sequencer.question
    assert question is not None
    for number in (0, 1, 4, 5):
        sequencer.replayed(question, number, body(number))
    sequencer.ended(question, is_whole=True)
    assert sequencer.question is not None, "what is missing in an answer may have been lost"
    question = sequencer.question
    for number in (1, 4, 5):
        sequencer.replayed(question, number, body(number))
    sequencer.ended(question, is_whole=True)
    assert sequencer.question is None
    assert told(sequencer.take()) == [(0, 0, 0), (1, 0, 0), (4, 2, 0), (5, 0, 0)]


def test_a_replay_without_an_answer_is_a_gap() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.live(0, body(0))
    sequencer.live(2, body(2))
    replay(sequencer, range(0), is_whole=False)
    assert told(sequencer.take()) == [(0, 0, 0), (2, 1, 0)]
    assert sequencer.question is None


def test_a_replay_that_broke_off_is_asked_for_again_where_it_had_come_to() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.live(0, body(0))
    sequencer.live(9, body(9))
    replay(sequencer, range(5), is_whole=False)
    assert replay(sequencer, range(10)) == 4
    assert [each.number for each in sequencer.take()] == list(range(10))


def test_asking_again_has_an_end() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.live(0, body(0))
    sequencer.live(1000, body(1000))
    asked = 0
    while sequencer.question is not None:
        replay(sequencer, range(sequencer.question.start + 2), is_whole=False)
        asked += 1
    assert asked <= 1 + 16
    assert sequencer.take()[-1].number == 1000
    assert sequencer.missed > 900


def test_numbers_that_go_back_are_another_publisher() -> None:
    sequencer = Sequencer(can_ask=False)
    for number in (0, 1, 2):
        sequencer.live(number, body(number))
    for number in (0, 1):
        sequencer.live(number, body(number, "b"))
    found = sequencer.take()
    assert told(found)[2:] == [(2, 0, 0), (0, 0, 1), (1, 0, 1)]
    assert found[3].payload == b"b0"


def test_numbers_that_go_back_behind_all_that_is_remembered_are_another_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequencer, "REMEMBERED_BATCHES_MAX", 2)
    under_test = Sequencer(can_ask=False)
    for number in range(9):
        under_test.live(number, body(number))
    under_test.live(3, body(3, "b"))
    assert told(under_test.take())[-1] == (3, 3, 1)


def test_another_batch_where_a_replay_ran_ahead_is_another_publisher() -> None:
    for of, incarnation in (("a", 0), ("b", 1)):
        sequencer = Sequencer(can_ask=True)
        sequencer.live(0, body(0))
        sequencer.probe()
        replay(sequencer, range(9))
        sequencer.live(7, body(7, of))
        assert sequencer.incarnation == incarnation


def test_the_same_batch_again_is_no_restart() -> None:
    sequencer = Sequencer(can_ask=False)
    for number in (0, 1, 1, 0, 2):
        sequencer.live(number, body(number))
    assert told(sequencer.take()) == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert sequencer.repeated == 2


def test_what_was_held_is_passed_on_before_a_restart() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.live(0, body(0))
    sequencer.live(5, body(5))
    sequencer.live(1, body(1, "b"))
    assert told(sequencer.take()) == [(0, 0, 0), (5, 4, 0)]
    assert replay(sequencer, range(2), "b") == 0
    assert told(sequencer.take()) == [(0, 0, 1), (1, 0, 1)]


def test_a_restart_behind_a_gap_is_seen_by_another_batch_under_a_known_number() -> None:
    sequencer = Sequencer(can_ask=True)
    for number in range(3):
        sequencer.live(number, body(number))
    sequencer.take()
    sequencer.live(7, body(7, "b"))
    assert replay(sequencer, range(8), "b") == 2
    assert sequencer.take() == []
    assert replay(sequencer, range(8), "b") == 0
    found = sequencer.take()
    assert told(found) == [(number, 0, 1) for number in range(8)]
    assert found[0].payload == b"b0"


def test_a_probe_finds_what_was_lost_at_the_end() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.live(0, body(0))
    sequencer.probe()
    assert replay(sequencer, range(3)) == 0
    assert [each.number for each in sequencer.take()] == [0, 1, 2]
    sequencer.probe()
    assert replay(sequencer, range(3)) == 2
    assert sequencer.question is None


def test_a_probe_finds_a_publisher_that_has_sent_less() -> None:
    sequencer = Sequencer(can_ask=True)
    for number in range(5):
        sequencer.live(number, body(number))
    sequencer.take()
    sequencer.probe()
    assert replay(sequencer, range(2), "b") == 4, "it has nothing so late"
    replay(sequencer, range(2), "b")
    replay(sequencer, range(2), "b")
    assert told(sequencer.take()) == [(0, 0, 1), (1, 0, 1)]


def test_it_is_known_for_another_one_though_what_was_there_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequencer, "REMEMBERED_BATCHES_MAX", 2)
    under_test = Sequencer(can_ask=True)
    for number in range(9):
        under_test.live(number, body(number))
    under_test.take()
    under_test.probe()
    replay(under_test, range(3), "b")
    replay(under_test, range(3), "b")
    replay(under_test, range(3), "b")
    assert told(under_test.take()) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]


def test_a_probe_of_a_publisher_that_keeps_nothing_is_no_restart() -> None:
    sequencer = Sequencer(can_ask=True)
    for number in range(3):
        sequencer.live(number, body(number))
    sequencer.probe()
    replay(sequencer, range(0))
    assert replay(sequencer, range(0)) == 0
    assert sequencer.question is None
    sequencer.live(3, body(3))
    assert told(sequencer.take())[-1] == (3, 0, 0)


def test_behind_a_new_connection_who_has_nothing_that_is_known_is_another_one() -> None:
    for have, incarnation in ((range(4, 9), 0), (range(6, 9), 1)):
        sequencer = Sequencer(can_ask=True)
        for number in range(5):
            sequencer.live(number, body(number))
        sequencer.take()
        sequencer.reconnected()
        replay(sequencer, have)
        if sequencer.question is not None:
            replay(sequencer, have)
        missed = 6 if incarnation else 0
        assert told(sequencer.take())[0] == (5 + incarnation, missed, incarnation)


def test_batches_that_come_during_a_replay_are_no_restart() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.live(0, body(0))
    sequencer.probe()
    question = sequencer.question
    assert question is not None
    sequencer.replayed(question, 0, body(0))
    for number in (1, 2, 3):
        sequencer.live(number, body(number))
    sequencer.ended(question, is_whole=True)
    assert told(sequencer.take()) == [(number, 0, 0) for number in range(4)]
    assert sequencer.incarnation == 0


def test_answers_to_a_question_that_is_void_are_ignored() -> None:
    sequencer = Sequencer(can_ask=True)
    sequencer.live(0, body(0))
    sequencer.live(3, body(3))
    question = sequencer.question
    assert question is not None
    sequencer.live(0, body(0, "b"))
    sequencer.replayed(question, 1, body(1))
    sequencer.ended(question, is_whole=True)
    assert [each.payload for each in sequencer.take()] == [b"a0", b"a3", b"b0"]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_each_batch_comes_once_and_in_order(seed: int) -> None:
    """A publisher with a bounded buffer that drops, restarts and is heard with losses; of odd seeds
    the answers have losses, too."""
    random_ = random.Random(seed)
    under_test = Sequencer(can_ask=True)
    sent: dict[str, list[int]] = {}
    names, buffer = iter("abcdefghijklmnopqrstuvwxyz"), 40
    name, number = next(names), 0
    sent[name] = []
    found: list[Ordered] = []

    def answer_all() -> None:
        while (question := under_test.question) is not None:
            have = [each for each in sent[name][-buffer:] if each >= question.start]
            loses = seed % 2 and random_.random() < 0.2
            lost_after = random_.randrange(len(have) + 1) if loses else len(have)
            for each in have[:lost_after]:
                under_test.replayed(question, each, body(each, name))
            under_test.ended(question, is_whole=lost_after == len(have))
            found.extend(under_test.take())

    for _ in range(400):
        chance = random_.random()
        if chance < 0.01:
            name, number = next(names), 0
            sent[name] = []
        elif chance < 0.05:
            number += 1  # dropped by the publisher
        else:
            sent[name].append(number)
            if random_.random() < 0.8:
                under_test.live(number, body(number, name))
            number += 1
        if random_.random() < 0.3:
            answer_all()
        found.extend(under_test.take())
    answer_all()
    under_test.probe()
    answer_all()
    by_incarnation: dict[int, list[Ordered]] = {}
    for each in found:
        by_incarnation.setdefault(each.incarnation, []).append(each)
    for batches in by_incarnation.values():
        numbers = [each.number for each in batches]
        assert numbers == sorted(set(numbers))
        assert len({each.payload[:1] for each in batches}) == 1, "of one publisher only"
        expected = 0
        for each in batches:
            assert each.missed == each.number - expected
            expected = each.number + 1
    last = by_incarnation[max(by_incarnation)]
    assert last[-1].payload == body(sent[name][-1], name)
    if seed % 2 == 0:
        assert {each.number for each in last} >= set(sent[name][-buffer:])
