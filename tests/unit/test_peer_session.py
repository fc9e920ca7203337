"""One session between two engines: rounds, deadlines, ends. Greetings have a file of their own."""

from __future__ import annotations

import pytest

from peer_frames import KEY, introduction, keys, one_of_each
from peer_sessions import Pair
from tiering.peers.messages import (
    KEYS_MAX,
    Abort,
    AbortAck,
    ConnectAck,
    Disconnect,
    FetchResp,
    LookupResp,
    Message,
    Reference,
    TransferDone,
    encode,
    keys_of,
    references_of,
)
from tiering.peers.rounds import Round
from tiering.peers.session import (
    Answered,
    Over,
    Released,
    RequestOver,
    Session,
    State,
    Unanswered,
    Wanted,
)

PLACES = [Reference(3, 9), None, Reference(4, 1)]


def looked_up(pair: Pair, count: int = 3) -> Round:
    of = pair.asks.lookup("r", keys(count), pair.now)
    assert of is not None
    pair.across(pair.asks)
    return of


def fetched(pair: Pair, count: int = 3) -> Round:
    of = pair.asks.fetch("r", keys(count), pair.now)
    assert of is not None
    pair.across(pair.asks)
    return of


def pinned(pair: Pair) -> Round:
    """A fetch that has its answer, and chunks that are pinned for it."""
    of = fetched(pair)
    assert pair.serves.places(of, PLACES, pair.now)
    (answered,) = pair.across(pair.serves)
    assert isinstance(answered, Answered)
    return of


def saying(session: Session, message: Message) -> tuple[bytes, bytes]:
    """`message` sealed by `session`, whether or not it would ever say so."""
    assert session._seals is not None
    payload = encode(message)
    return payload, session._seals.seal(payload)


# Rounds


def test_a_lookup_is_answered() -> None:
    pair = Pair().opened()
    of = looked_up(pair)
    (wanted,) = pair.heard[pair.serves][-1:]
    assert isinstance(wanted, Wanted)
    assert (wanted.of, keys_of(wanted.question)) == (of, keys(3))
    assert pair.serves.hits(of, b"\1\0\1", pair.now)
    assert pair.across(pair.serves) == [Answered(of, LookupResp("r", of.round_seq, b"\1\0\1"))]
    assert (len(pair.asks.asked), len(pair.serves.served)) == (0, 0)


def test_what_is_fetched_stays_pinned_until_it_is_read() -> None:
    pair = Pair().opened()
    of = fetched(pair)
    pair.serves.places(of, PLACES, pair.now)
    (answered,) = pair.across(pair.serves)
    assert isinstance(answered, Answered)
    assert isinstance(answered.message, FetchResp)
    assert references_of(answered.message) == PLACES
    assert len(pair.serves.served) == 1
    pair.asks.done(of, True, pair.now)
    assert pair.across(pair.asks) == [Released(of, True)]
    assert pair.serves.is_idle


def test_a_fetch_without_hits_pins_nothing() -> None:
    pair = Pair().opened()
    of = fetched(pair)
    pair.serves.places(of, [None, None, None], pair.now)
    pair.settle()
    assert pair.serves.is_idle
    pair.asks.done(of, False, pair.now)
    assert pair.across(pair.asks) == []


def test_a_request_that_is_over_is_told() -> None:
    pair = Pair().opened()
    pair.asks.request_over("r", pair.now)
    assert pair.across(pair.asks) == [RequestOver("r")]


def test_an_answer_counts_once_and_only_as_long_as_it_is_wanted() -> None:
    pair = Pair().opened()
    of = looked_up(pair)
    pair.serves.hits(of, b"\0\0\0", pair.now)
    (frames,) = pair.serves.take()
    assert len(pair.asks.received(frames, pair.now)) == 1
    again = saying(pair.serves, LookupResp(*of, b"\1\1\1"))
    assert pair.asks.received(again, pair.now) == []
    other = looked_up(pair)
    for strange in (
        LookupResp("another", other.round_seq, b"\1\1\1"),  # another request
        LookupResp("r", other.round_seq + 1, b"\1\1\1"),  # another round
        LookupResp("r", other.round_seq, b"\1\1"),  # another number of keys
        FetchResp("r", other.round_seq, b"\0\0\0", bytes(12), bytes(24)),  # another question
        AbortAck("r", other.round_seq),  # not aborted
    ):
        assert pair.asks.received(saying(pair.serves, strange), pair.now) == []
    assert pair.asks.asked.ignored == 6
    assert other in pair.asks.asked
    assert pair.asks.state is State.OPEN


def test_a_question_counts_once_and_an_old_one_not_at_all() -> None:
    pair = Pair().opened()
    for message in (Abort("r", 77), TransferDone("r", 77, True)):
        assert pair.serves.received(saying(pair.asks, message), pair.now) == []
    first, second = fetched(pair), fetched(pair)
    pair.serves.take()
    for of in (first, second):
        question = next(m for m in one_of_each() if type(m).__name__ == "Fetch")
        again = type(question)(of.kv_request_id, of.round_seq, 36, b"".join(keys(3)))
        assert pair.serves.received(saying(pair.asks, again), pair.now) == []
    assert len(pair.serves.served) == 2
    assert pair.serves.served.ignored == 4


def test_nobody_waits_for_an_answer_of_the_wrong_kind_or_twice() -> None:
    pair = Pair().opened()
    lookup, fetch = looked_up(pair), fetched(pair)
    assert not pair.serves.places(lookup, PLACES, pair.now)
    assert not pair.serves.hits(fetch, b"\0\0\0", pair.now)
    assert pair.serves.places(fetch, PLACES, pair.now)
    assert not pair.serves.places(fetch, PLACES, pair.now)


def test_an_aborted_round_is_let_go_and_its_late_answer_ignored() -> None:
    pair = Pair().opened()
    of = fetched(pair)
    pair.serves.places(of, PLACES, pair.now)  # which crosses the abort
    pair.asks.abort(of, pair.now)
    assert pair.across(pair.asks) == [Released(of, None)]
    assert pair.across(pair.serves) == []
    assert pair.asks.asked.ignored == 1
    assert pair.asks.is_idle
    assert pair.serves.is_idle


def test_an_aborted_round_cannot_be_answered_any_more() -> None:
    pair = Pair().opened()
    of = fetched(pair)
    pair.asks.abort(of, pair.now)
    pair.settle()
    assert not pair.serves.places(of, PLACES, pair.now)
    assert pair.asks.is_idle


def test_as_many_rounds_as_may_be_are_open() -> None:
    pair = Pair().opened()
    rounds = [looked_up(pair) for _ in range(4)]
    assert pair.asks.lookup("r", keys(1), pair.now) is None
    assert pair.asks.fetch("r", keys(1), pair.now) is None
    pair.serves.hits(rounds[0], b"\0\0\0", pair.now)
    pair.settle()
    assert pair.asks.lookup("r", keys(1), pair.now) is not None


def test_who_asks_more_than_may_be_is_refused() -> None:
    pair = Pair().opened()
    for _ in range(4):
        looked_up(pair)
    pair.asks.asked.rounds_max = 9
    looked_up(pair)
    over = pair.heard[pair.serves][-1]
    assert over == Over("refused", "more than 4 rounds at a time", False)
    assert [type(event) for event in pair.heard[pair.serves][-5:]] == [Released] * 4 + [Over]
    pair.across(pair.serves)
    assert pair.heard[pair.asks][-1] == Over("refused", "more than 4 rounds at a time", True)


def test_more_keys_than_a_message_takes_are_the_callers_fault() -> None:
    pair = Pair().opened()
    with pytest.raises(ValueError, match="bytes of keys"):
        pair.asks.lookup("r", [b"k"] * (KEYS_MAX + 1), pair.now)
    assert pair.asks.is_idle
    assert pair.asks.lookup("r", [b"k"] * KEYS_MAX, pair.now) is not None


# Deadlines


def test_a_question_without_an_answer_is_given_up_and_aborted() -> None:
    pair = Pair().opened()
    of = fetched(pair)
    for _ in range(11):
        pair.wait(1.0)
        pair.settle()
    assert pair.heard[pair.asks][-1] == Unanswered(of, "no answer in time")
    assert pair.heard[pair.serves][-1] == Released(of, None)
    assert pair.asks.state is State.OPEN
    assert pair.asks.is_idle


def test_a_question_may_have_a_patience_of_its_own() -> None:
    pair = Pair().opened()
    seconds = 2 * pair.serves.patience.pin_seconds_max
    of = pair.asks.fetch("r", keys(1), pair.now, seconds_max=seconds)
    for _ in range(int(seconds) - 1):
        pair.wait(1.0)
        pair.settle()
    assert of in pair.asks.asked
    assert of is not None
    assert pair.serves.served.question(of) is not None, "it can still be answered"
    pair.wait(1.0)
    pair.settle()
    assert of not in pair.asks.asked
    assert pair.serves.is_idle


def test_an_abort_that_is_lost_is_said_again() -> None:
    pair = Pair().opened()
    of = pair.asks.fetch("r", keys(1), pair.now, seconds_max=30.0)
    assert of is not None
    pair.settle()
    pair.asks.abort(of, pair.now)
    assert pair.asks.take(), "and lost"
    for _ in range(9):
        pair.wait(1.0)
        pair.settle()
    assert pair.serves.served.question(of) is not None
    pair.wait(1.0)
    pair.settle()
    assert pair.serves.is_idle
    assert pair.asks.is_idle


def test_what_a_peer_forgets_to_let_go_is_let_go() -> None:
    pair = Pair().opened()
    of = pinned(pair)
    for _ in range(59):
        pair.wait(1.0)
        pair.settle()
    assert len(pair.serves.served) == 1
    pair.wait(1.0)
    assert pair.heard[pair.serves][-1] == Released(of, None)
    pair.asks.done(of, True, pair.now)
    pair.settle()
    assert pair.heard[pair.serves][-1] == Released(of, None)


def test_two_who_have_nothing_to_say_stay_together() -> None:
    pair = Pair().opened()
    for _ in range(100):
        pair.wait(0.25)
        pair.settle()
    assert (pair.asks.state, pair.serves.state) == (State.OPEN, State.OPEN)
    assert 40 <= len(pair.said) <= 60, "a heartbeat each second of each side"


def test_who_says_nothing_is_given_up_by_both() -> None:
    pair = Pair().opened()
    of = pinned(pair)
    asked = looked_up(pair)
    pair.wait(3.9)
    pair.asks.take()
    pair.serves.take()  # lost on the way
    assert pair.asks.state is State.OPEN
    pair.wait(0.1)
    silent = "no word for 4 seconds"
    assert pair.heard[pair.asks][-2:] == [Unanswered(asked, silent), Over("failed", silent, False)]
    serving = pair.heard[pair.serves][-3:]
    assert set(serving[:2]) == {Released(of, None), Released(asked, None)}
    assert serving[2] == Over("failed", silent, False)


def test_a_suspect_is_given_little_time_and_a_word_clears_it() -> None:
    pair = Pair().opened()
    pair.asks.hurry(pair.now)
    pair.wait(1.9, [pair.asks])
    assert pair.asks.state is State.OPEN
    pair.wait(0.1, [pair.asks])
    assert pair.asks.state is State.OVER
    other = Pair().opened()
    other.asks.hurry(other.now)
    other.wait(1.0)
    other.settle()
    assert other.asks.heard_since(other.now - 0.5)
    other.wait(2.0, [other.asks])
    assert other.asks.state is State.OPEN


# Ends


def test_a_session_that_is_closed_tells_the_other_side_why() -> None:
    pair = Pair().opened()
    of = pinned(pair)
    asked = looked_up(pair)
    ours = pair.asks.close("closing", "the engine stops")
    assert ours == [
        Unanswered(asked, "the engine stops"),
        Over("closing", "the engine stops", False),
    ]
    theirs = pair.across(pair.asks)
    assert set(theirs[:2]) == {Released(of, None), Released(asked, None)}
    assert theirs[2] == Over("closing", "the engine stops", True)
    assert pair.asks.close("closing", "again") == []
    assert pair.asks.take() == pair.serves.take() == []


def test_a_reason_is_one_line_whoever_has_written_it() -> None:
    pair = Pair().opened()
    goodbye = encode(Disconnect("failed", "no\nword\x1b[2J, \u2028é"))
    over = Over("failed", "no?word?[2J, ?é", True)
    assert pair.asks.received((goodbye, b""), pair.now) == [over]


def test_what_is_over_says_and_hears_nothing() -> None:
    pair = Pair().opened()
    of = pinned(pair)
    pair.asks.close("closing", "the engine stops")
    pair.settle()
    pair.asks.done(of, True, pair.now)
    pair.asks.abort(of, pair.now)
    pair.asks.request_over("r", pair.now)
    assert not pair.serves.hits(of, b"", pair.now)
    assert not pair.serves.places(of, [], pair.now)
    assert pair.wait(100.0) == []
    assert pair.asks.take() == pair.serves.take() == []
    assert pair.asks.received((b"", b""), pair.now) == []


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ((b"", b""), "no message: cut off"),
        ((b"\xdf\xff\xff\xff\xff", b""), "no message: 8589934590 values in 0 bytes"),
        ((b"x",), "a message of 1 frames, not 2"),
        ((b"x", b"y", b"z"), "a message of 3 frames, not 2"),
    ],
)
@pytest.mark.parametrize("side", ["asks", "serves"])
def test_what_means_nothing_ends_the_session_on_both_sides(
    side: str, frames: tuple[bytes, ...], reason: str
) -> None:
    pair = Pair().opened()
    session: Session = getattr(pair, side)
    assert session.received(frames, pair.now) == [Over("malformed", reason, False)]
    assert pair.across(session) == [Over("malformed", reason, True)]


@pytest.mark.parametrize("side", ["asks", "serves"])
def test_what_the_other_side_has_no_business_to_say_ends_the_session(side: str) -> None:
    for message in one_of_each():
        pair = Pair().opened()
        session: Session = getattr(pair, side)
        events = session.received(saying(pair.other(session), message), pair.now)
        name = type(message).__name__
        allowed = {
            "asks": ("LookupResp", "FetchResp", "AbortAck", "Heartbeat", "Disconnect"),
            "serves": ("Lookup", "Fetch", "TransferDone", "Abort", "Heartbeat", "Disconnect"),
        }[side]
        if name in allowed:
            assert session.state is (State.OVER if name == "Disconnect" else State.OPEN)
        else:
            told = f"a {name}, which is not for the other side to say"
            assert events == [Over("malformed", told, False)]


def test_what_is_not_sealed_ends_the_session_but_a_goodbye_is_believed() -> None:
    pair = Pair().opened()
    payload, seal = saying(pair.serves, LookupResp("r", 1, b"\1"))
    (over,) = pair.asks.received((payload, bytes(len(seal))), pair.now)
    assert over == Over("refused", "a message that this session's key did not seal", False)
    other = Pair().opened()
    goodbye = encode(Disconnect("unknown", "who are you"))
    assert other.asks.received((goodbye, b""), other.now) == [Over("unknown", "who are you", True)]


def test_an_engine_that_has_started_anew_does_not_know_the_session() -> None:
    pair = Pair().opened()
    reborn = Session(introduction(3), KEY, "dialled", pair.now)
    pair.asks.lookup("r", keys(1), pair.now)
    (frames,) = pair.asks.take()
    (over,) = reborn.received(frames, pair.now)
    told = "a Lookup of no session that is known here: connect first"
    assert over == Over("unknown", told, False)
    (answer,) = reborn.take()
    events = pair.asks.received(answer, pair.now)
    assert events[-1] == Over("unknown", told, True)
    assert isinstance(events[0], Unanswered)


def test_a_session_shows_its_state() -> None:
    pair = Pair()
    assert repr(pair.asks) == "<Session dialling greeting with nobody yet: 0 asked, 0 served>"
    pair.opened()
    pinned(pair)
    assert repr(pair.serves) == "<Session dialled open with 01010101: 0 asked, 1 served>"
    assert ConnectAck is type(pair.asks.peer)
