"""What the proxy decides, without a socket: engines as they are written, turns, prefixes, roles."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.errors import ConfigError
from tiering.peers.addresses import Address
from tiering.proxy import roles
from tiering.proxy.engines import Engine, Lineup
from tiering.proxy.prefixes import STEP_CHARS, STEPS_MAX, PrefixBook, steps_of
from tiering.proxy.roles import Asked
from tiering.proxy.routing import Router
from tiering.proxy.standing import BACK_OFF_SECONDS_MAX, Standing, Turns
from tiering.testing.clocks import ManualClock

A, B, C = (
    Engine.parse("--engine", f"http://{name}:8000=10.0.0.{at}:5710")
    for at, name in enumerate("abc")
)
LONG = "".join(f"word {number} " for number in range(400))


def asked(**body: Any) -> Asked:
    found = roles.read(json.dumps(body).encode())
    assert isinstance(found, Asked)
    return found


def router(*servers: Engine, prefillers: tuple[Engine, ...] = ()) -> tuple[Router, ManualClock]:
    clock, numbers = ManualClock(), itertools.count()
    return Router(Lineup(servers, prefillers), clock, lambda: f"id{next(numbers)}"), clock


# Engines


def test_an_engine_is_a_url_and_an_address() -> None:
    engine = Engine.parse("--engine", "https://[fd00::7]:8001/=[fd00::7]:5710")
    assert engine == Engine("https://[fd00::7]:8001", Address("fd00::7", 5710))


BAD = {
    "http://h:8001": "is not URL=HOST:PORT",
    "h:8001=h:5710": "has no URL of http or https before the =",
    "http://=h:5710": "has no URL of http or https before the =",
    "http://h:99999=h:5710": "has no usable URL: ",
    "http://h:8001/v1=h:5710": "has a URL with a path",
    "http://h:8001=h": "h is not HOST:PORT",
    "http://h:8001=h:0": "has port 0",
    "http://h:8001=h:70000": "h:70000 is no port",
    "http://h:8001=0.0.0.0:5710": "0.0.0.0:5710 is every address of this host",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--decode = ") as found:
        Engine.parse("--decode", text)
    assert found.value.reason.startswith(BAD[text])


def test_a_password_is_not_told() -> None:
    with pytest.raises(ConfigError) as found:
        Engine.parse("--engine", "http://me:secret@h:8001=h:5710")
    assert "secret" not in str(found.value)
    assert "...@h:8001=h:5710" in str(found.value)


def lineup(prefill: str = "", decode: str = "", engine: str = "") -> Lineup:
    given = (
        [f"http://{name}:8000={name}:5710" for name in names] for names in (prefill, decode, engine)
    )
    return Lineup.parse(*given)


def test_a_lineup_has_prefillers_and_decoders_or_engines() -> None:
    split, symmetric = lineup("ab", "c"), lineup(engine="ab")
    assert (len(split.prefillers), len(split.servers)) == (2, 1)
    assert (len(symmetric.prefillers), len(symmetric.servers)) == (0, 2)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("", "", ""), "--engine = None: is missing"),
        (("a", "", ""), "--decode = None: is missing"),
        (("", "a", ""), "--prefill = None: is missing"),
        (("a", "b", "c"), "cannot be beside --prefill and --decode"),
        (("a", "a", ""), "--decode = 'http://a:8000': is there twice"),
        (("", "", "aa"), "--engine = 'http://a:8000': is there twice"),
    ],
)
def test_what_is_no_lineup_is_refused(names: tuple[str, str, str], told: str) -> None:
    with pytest.raises(ConfigError) as found:
        lineup(*names)
    assert told in str(found.value)


def test_an_address_of_peers_is_one_engine_s() -> None:
    with pytest.raises(ConfigError, match="h:5710"):
        Lineup.parse([], [], ["http://h:8001=h:5710", "http://h:8002=h:5710"])


# Turns


def test_engines_take_turns() -> None:
    turns = Turns((A, B, C), Standing((A, B, C), ManualClock()))
    assert [turns.take() for _ in range(4)] == [[A, B, C], [B, C, A], [C, A, B], [A, B, C]]


def test_one_that_refuses_is_left_alone_for_longer_each_time() -> None:
    clock = ManualClock()
    standing = Standing((A, B), clock)
    turns = Turns((A, B), standing)
    for seconds in (1.0, 2.0, 4.0, 8.0, BACK_OFF_SECONDS_MAX, BACK_OFF_SECONDS_MAX):
        standing.refused(A)
        # One that was under way with it changes nothing.
        standing.refused(A)
        assert turns.take() == [B]
        assert turns.take_any() == [B, A]
        clock.advance(seconds - 0.01)
        assert not standing.is_usable(A)
        clock.advance(0.01)
        assert standing.is_usable(A)
    standing.refused(A)
    standing.answered(A)
    assert standing.is_usable(A)
    standing.refused(A)
    clock.advance(1.0)
    assert standing.is_usable(A)


def test_one_that_is_not_well_is_out_until_it_is() -> None:
    clock = ManualClock()
    standing = Standing((A, B), clock)
    standing.probed(A, False)
    clock.advance(1000.0)
    assert repr(standing) == "<Standing of 2 engines, out: http://a:8000>"
    standing.probed(A, True)
    assert standing.is_usable(A)


# Prefixes


def test_prompts_with_a_common_beginning_have_the_first_steps_in_common() -> None:
    one, other = steps_of({"prompt": LONG}), steps_of({"prompt": LONG[:1100] + "else" * 500})
    assert len(one) == len(LONG) // STEP_CHARS
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert steps_of({"prompt": LONG[: STEP_CHARS - 1]}) == []


def test_a_chat_that_goes_on_keeps_its_steps() -> None:
    messages = [{"role": "user", "content": LONG}]
    more = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": LONG}]
    first = steps_of({"messages": messages})
    assert list(steps_of({"messages": more})[: len(first)]) == list(first)
    assert len(first) > 2


def test_tokens_have_steps_too() -> None:
    tokens = list(range(1000))
    assert steps_of({"prompt": tokens}) == steps_of({"prompt": [tokens]})
    assert steps_of({"prompt": tokens})[0] != steps_of({"prompt": [1, *tokens]})[0]


@pytest.mark.parametrize("key", ["model", "cache_salt", "chat_template", "chat_template_kwargs"])
def test_another_setting_is_another_prompt(key: str) -> None:
    one = steps_of({"prompt": LONG, key: "a"})
    assert not set(one) & set(steps_of({"prompt": LONG, key: "b"}))


def test_other_tools_are_another_chat() -> None:
    chat = {"messages": [{"role": "user", "content": LONG}]}
    assert not set(steps_of(chat)) & set(steps_of(chat | {"tools": [{"type": "function"}]}))


def test_no_more_of_a_prompt_is_looked_at_than_said() -> None:
    long = "x" * (STEP_CHARS * (STEPS_MAX + 10))
    assert len(steps_of({"prompt": long})) == STEPS_MAX
    assert len(steps_of({"messages": [{"content": long}] * 3})) == STEPS_MAX
    assert len(steps_of({"prompt": [10] * len(long)})) == STEPS_MAX


@pytest.mark.parametrize("prompt", [None, 7, {}, [], [[]], ["a", "b"], [1, "a", None]])
def test_a_prompt_that_is_none_has_no_steps(prompt: object) -> None:
    assert steps_of({"prompt": prompt, "messages": 7}) == []


def test_of_what_is_remembered_the_end_goes_first() -> None:
    book = PrefixBook((A,), steps_max=4)
    book.note(A, [b"1", b"2", b"3"])
    book.note(A, [b"x", b"y"])
    assert book.common(A, [b"1", b"2", b"3"]) == 2
    assert book.common(A, [b"x", b"y", b"z"]) == 2
    book.note(A, [b"1", b"2", b"3", b"4"])
    assert (book.common(A, [b"1", b"2", b"3", b"4"]), book.common(A, [b"x"])) == (4, 0)
    assert repr(book) == "<PrefixBook http://a:8000: 4>"
    book.forget(A)
    assert book.common(A, [b"1"]) == 0


@given(st.lists(st.text("ab", max_size=6), max_size=8), st.text("ab", max_size=6))
def test_the_common_beginning_is_the_longest_of_what_was_sent(sent: list[str], now: str) -> None:
    book = PrefixBook((A,))
    for each in sent:
        book.note(A, steps_of({"prompt": "".join(char * STEP_CHARS for char in each)}))
    steps = steps_of({"prompt": "".join(char * STEP_CHARS for char in now)})
    beginnings = {each[:end] for each in sent for end in range(len(each) + 1)} | {""}
    common = max(end for end in range(len(now) + 1) if now[:end] in beginnings)
    assert book.common(A, steps) == common


# Roles


def test_a_prefill_asks_for_as_little_of_an_answer_as_can_be() -> None:
    sent = {
        "prompt": LONG,
        "stream": True,
        "stream_options": {},
        "max_tokens": 50,
        "min_tokens": 20,
        "n": 3,
        "logprobs": 2,
        "logprob_token_ids": [1, 2],  # which vLLM refuses without logprobs
        "echo": True,
        "temperature": 0.25,
        "seed": 2**60,
    }
    found = json.loads(asked(**sent).for_prefill(roles.remote_decoder("7")))
    assert found == {
        "prompt": LONG,
        "stream": False,
        "max_tokens": 1,
        "temperature": 0.25,
        "seed": 2**60,
        "kv_transfer_params": {"remote_decoder": {"kv_request_id": "7"}},
    }


@pytest.mark.parametrize(
    ("prompt", "is_one"),
    [("a", True), (["a"], True), ([1, 2], True), ([[1, 2]], True), ([[1], [2]], False)],
)
def test_several_prompts_are_told_from_one(prompt: object, is_one: bool) -> None:
    assert asked(prompt=prompt).is_one_prompt is is_one
    assert not asked(prompt=prompt, prompt_embeds="AAAA").is_one_prompt


def test_a_role_is_beside_what_a_client_says_itself() -> None:
    own = asked(prompt="a", kv_transfer_params={"max_load_tokens": 3})
    role = roles.remote_kv_source("7", B)
    assert json.loads(own.with_role(role))["kv_transfer_params"] == {
        "max_load_tokens": 3,
        "remote_kv_source": {"kv_request_id": "7", "remote_host": "10.0.0.1", "remote_port": 5710},
    }
    assert own.with_role({}) is own.raw
    assert asked(prompt="a", kv_transfer_params=None).with_role({}) == (
        b'{"prompt": "a", "kv_transfer_params": null}'
    )


# Decisions


def test_the_source_is_who_was_sent_most_of_the_prompt() -> None:
    routes, _ = router(A, B, C)
    routes.answered(A, 200, asked(prompt=LONG[:600]).steps)
    routes.answered(B, 200, asked(prompt=LONG).steps)
    wanted = asked(prompt=LONG + "and on")
    assert routes.to_answer(C, wanted, None) == roles.remote_kv_source("id0", B)
    assert routes.to_answer(A, wanted, None) == roles.remote_kv_source("id1", B)
    assert routes.to_answer(B, wanted, None) == {}
    assert routes.to_answer(C, asked(prompt="another"), None) == {}


def test_a_source_that_is_not_to_be_asked_is_none() -> None:
    routes, clock = router(A, B, C)
    wanted = asked(prompt=LONG)
    for each, steps in ((A, wanted.steps), (B, wanted.steps[:1])):
        routes.answered(each, 200, steps)
    routes.answered(A, 503, wanted.steps)
    assert routes.to_answer(C, wanted, None) == roles.remote_kv_source("id0", B)
    clock.advance(60.0)
    assert routes.to_answer(C, wanted, None) == roles.remote_kv_source("id1", A)
    routes.lost(A)
    clock.advance(60.0)
    # It has come back, and with an empty cache.
    assert routes.to_answer(C, wanted, None) == roles.remote_kv_source("id2", B)
    routes.probed(B, False)
    routes.probed(B, True)
    assert routes.to_answer(C, wanted, None) == {}


def test_what_was_not_answered_is_not_had() -> None:
    routes, _ = router(A, B)
    wanted = asked(prompt=LONG)
    routes.answered(A, 400, wanted.steps)
    assert routes.to_answer(B, wanted, None) == {}
    assert routes.usable() == [A, B]


def test_a_decoder_has_a_prefiller_or_nobody() -> None:
    routes, _ = router(C, prefillers=(A, B))
    wanted = asked(prompt=LONG)
    routes.answered(A, 200, wanted.steps)
    planned, role = routes.to_prefill(B, wanted)
    assert role == roles.remote_decoder("id0") | roles.remote_kv_source("id1", A)
    assert routes.to_answer(C, wanted, planned) == roles.remote_prefiller("id0", B)
    assert routes.to_answer(C, wanted, None) == {}


def test_a_prefiller_that_is_overdue_is_passed_over() -> None:
    routes, clock = router(C, prefillers=(A, B))
    wanted = asked(prompt=LONG)
    routes.overdue(A)
    assert routes.prefillers(wanted) == [B]
    routes.overdue(B)
    assert routes.prefillers(wanted) == []
    clock.advance(1.0)
    assert len(routes.prefillers(wanted)) == 2
