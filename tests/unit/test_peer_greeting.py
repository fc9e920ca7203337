"""How a session begins: who is let in, who is refused, and that both sides are told why."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from peer_frames import KEY, NAMESPACE, OTHER_KEY, changed, introduction, one_of_each
from peer_sessions import Pair
from tiering.peers import auth
from tiering.peers.auth import SharedKey
from tiering.peers.messages import Connect, Disconnect, Heartbeat, decode, encode
from tiering.peers.session import Greeted, Opened, Over, Session, State

NOBODYS = SharedKey()


def ends(pair: Pair) -> tuple[Over, Over]:
    """What the greeting comes to for who asks and for who serves, where it comes to nothing."""
    pair.settle()
    asks, serves = pair.heard[pair.asks][-1], pair.heard[pair.serves][-1]
    assert isinstance(asks, Over)
    assert isinstance(serves, Over)
    return asks, serves


@pytest.mark.parametrize("key", [KEY, NOBODYS])
def test_two_who_fit_have_a_session(key: SharedKey) -> None:
    pair = Pair(keys=(key, key)).opened()
    (asks,), (greeted, serves) = pair.heard[pair.asks], pair.heard[pair.serves]
    assert isinstance(greeted, Greeted)
    assert isinstance(asks, Opened)
    assert isinstance(serves, Opened)
    assert (asks.peer.engine_id, serves.peer.engine_id) == (b"\2" * 16, b"\1" * 16)
    assert asks.peer.transports == list(introduction(2).transports)
    assert pair.asks.session_id == pair.serves.session_id != b""
    assert pair.asks.token == pair.serves.token


def test_every_session_is_another_one() -> None:
    pairs = [Pair().opened() for _ in range(3)]
    assert len({pair.asks.session_id for pair in pairs}) == 3
    assert len({pair.asks.token for pair in pairs}) == 3


def test_who_serves_believes_only_a_sealed_word() -> None:
    pair = Pair()
    pair.across(pair.asks)
    assert pair.serves.state is State.PROVING
    assert pair.heard[pair.serves] == [Greeted()]
    pair.across(pair.serves)
    assert pair.asks.state is State.OPEN
    assert pair.asks.token == pair.serves.token, "the one may use it, so the other has to know it"
    pair.across(pair.asks)
    assert pair.serves.state is State.OPEN


def other_namespace(**fields: object) -> Pair:
    return Pair(introduction(1, namespace=dataclasses.replace(NAMESPACE, **fields)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (
            other_namespace(model="other"),
            "another namespace: model is 'other' on the dialling engine, "
            "'org/model' on the dialled",
        ),
        (
            other_namespace(kv_dtype="fp8_e4m3"),
            "another namespace: kv_dtype is 'fp8_e4m3' on the dialling engine, "
            "'bfloat16' on the dialled",
        ),
        (
            other_namespace(tp_size=4),
            "another namespace: tp_size is '4' on the dialling engine, '2' on the dialled",
        ),
        (
            Pair(introduction(1, hash_seed="random")),
            "another hash seed: hash_seed is 'random' on the dialling engine, '0' on the dialled; "
            "set PYTHONHASHSEED to the same value on all engines",
        ),
        (
            Pair(introduction(1, row_bytes=8192)),
            "rows of another size: row_bytes is 8192 on the dialling engine, 4096 on the dialled",
        ),
        (
            Pair(keys=(NOBODYS, KEY)),
            "the dialled engine has a shared key and the dialling one has none; "
            "give both the same file as auth",
        ),
        (
            Pair(keys=(KEY, NOBODYS)),
            "the dialling engine has a shared key and the dialled one has none; "
            "give both the same file as auth",
        ),
        (
            Pair(keys=(OTHER_KEY, KEY)),
            "the two engines have different shared keys, or somebody has changed their greeting; "
            "give both the same file as auth",
        ),
    ],
    ids=["model", "dtype", "tp", "hash seed", "rows", "no key", "no key there", "other key"],
)
def test_two_who_do_not_fit_are_told_the_same(pair: Pair, reason: str) -> None:
    asks, serves = ends(pair)
    assert serves == Over("refused", reason, is_told=False)
    assert asks == Over("refused", reason, is_told=True)


def test_much_that_differs_is_told_in_short() -> None:
    fields = {"model": "m" * 900, "isa": "avx", "engine": "x", "kv_dtype": "y", "revision": "z"}
    _, serves = ends(other_namespace(**fields))
    assert serves.reason.count("is '") == 4
    assert serves.reason.endswith("; and 1 more")
    assert len(serves.reason) < 1000


def test_what_is_left_out_of_the_description_still_tells_them_apart() -> None:
    mine = dataclasses.replace(introduction(1), namespace=bytes(32))
    _, serves = ends(Pair(mine))
    assert serves.reason == (
        "another namespace: the engines describe themselves alike, "
        "and differ in what they leave out"
    )


@pytest.mark.parametrize(("newest", "oldest"), [(0, 0), (7, 2)])
def test_another_protocol_is_refused_by_whoever_hears_of_it(newest: int, oldest: int) -> None:
    greeting = changed(one_of_each()[0], protocol=newest, protocol_oldest=oldest)
    serves = Session(introduction(2), KEY, "dialled", 0.0)
    (over,) = serves.received((greeting, auth.greeting_seal(KEY, greeting)), 0.0)
    assert isinstance(over, Over)
    assert over.reason.startswith("no protocol in common: the dialling engine speaks version")
    assert "the dialled one version 1" in over.reason
    acknowledged = changed(one_of_each()[1], protocol=newest, protocol_oldest=oldest)
    asks = Session(introduction(1), KEY, "dialling", 0.0)
    (over,) = asks.received((acknowledged, b""), 0.0)
    assert isinstance(over, Over)
    assert "the dialling engine speaks version 1, the dialled one version" in over.reason


def test_a_newer_protocol_that_understands_ours_is_no_obstacle() -> None:
    greeting = changed(one_of_each()[0], protocol=9, protocol_oldest=1, news=[1])
    serves = Session(introduction(2), KEY, "dialled", 0.0)
    assert serves.received((greeting, auth.greeting_seal(KEY, greeting)), 0.0) == [Greeted()]
    assert serves.state is State.PROVING


def test_who_has_no_key_learns_nothing_about_this_engine() -> None:
    """Not even from a refusal for another reason: the key is looked at first."""
    for keys in ((NOBODYS, KEY), (OTHER_KEY, KEY)):
        pair = Pair(introduction(1, hash_seed="9", row_bytes=1), keys=keys)
        pair.settle()
        for session, (payload, _) in pair.said:
            if session is pair.serves:
                assert isinstance(decode(payload), Disconnect)
                assert b"Llama" not in payload


# Somebody in between


def test_a_greeting_that_is_played_back_comes_to_nothing() -> None:
    pair = Pair()
    (greeting,) = pair.asks.take()
    for _ in range(2):
        serves = Session(introduction(2), KEY, "dialled", 0.0)
        assert serves.received(greeting, 0.0) == [Greeted()]
        assert serves.state is State.PROVING
        (over,) = serves.received((encode(Heartbeat()), bytes(40)), 0.0)
        assert over == Over("refused", "a message that this session's key did not seal", False)


def test_a_session_that_is_played_back_comes_to_nothing() -> None:
    """All that was ever said to the engine that serves, said again to the same engine."""
    pair = Pair().opened()
    said = [frames for session, frames in pair.said if session is pair.asks]
    serves = Session(introduction(2), KEY, "dialled", 0.0)
    events = [event for frames in said for event in serves.received(frames, 0.0)]
    assert not any(isinstance(event, Opened) for event in events)
    assert serves.state is State.OVER


def test_a_greeting_cannot_be_sent_back_to_its_author() -> None:
    pair = Pair()
    ((payload, seal),) = pair.asks.take()
    (over,) = pair.asks.received((payload, seal), pair.now)
    assert over == Over("malformed", "a Connect before the session was acknowledged", False)
    fields = msgspec.to_builtins(decode(payload), builtin_types=(bytes,))
    forged = msgspec.msgpack.encode({**fields, "type": "connect_ack", "session": bytes(16)})
    other = Pair()
    assert isinstance(other.asks.received((forged, seal), other.now)[-1], Over)


@pytest.mark.parametrize("who", ["asks", "serves"])
def test_a_greeting_that_is_changed_on_the_way_is_noticed(who: str) -> None:
    """Whatever field of it: here one that the other side would have no reason to doubt."""
    pair = Pair()
    if who == "serves":
        pair.across(pair.asks)
    session: Session = getattr(pair, who)
    ((payload, seal),) = session.take()
    message = decode(payload)
    assert isinstance(message, Connect)
    elsewhere = [{"transport": "tcp", "address": "10.6.6.6:1"}]
    (over,) = pair.other(session).received((changed(message, transports=elsewhere), seal), pair.now)
    assert isinstance(over, Over)
    assert over.reason.startswith("the two engines have different shared keys, or somebody has")


@pytest.mark.parametrize("message", one_of_each()[1:], ids=lambda each: type(each).__name__)
def test_nothing_but_a_greeting_begins_a_session(message: object) -> None:
    serves = Session(introduction(2), KEY, "dialled", 0.0)
    (over,) = serves.received((encode(message), bytes(40)), 0.0)  # type: ignore[arg-type]
    assert isinstance(over, Over)
    assert over.ending == ("closing" if isinstance(message, Disconnect) else "unknown")
    assert bool(serves.take()) is not isinstance(message, Disconnect), "no answer to a goodbye"


def test_a_greeting_that_nobody_answers_is_given_up() -> None:
    pair = Pair()
    pair.asks.take()
    assert pair.wait(4.9, [pair.asks]) == []
    (over,) = pair.wait(0.1, [pair.asks])
    assert over == Over("failed", "no answer to our greeting within 5 seconds", False)


def test_who_greets_and_says_no_more_is_given_up() -> None:
    pair = Pair()
    pair.across(pair.asks)
    pair.wait(5.0, [pair.serves])
    assert pair.serves.state is State.OVER
