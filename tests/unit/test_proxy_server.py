"""`tiering proxy` between clients and stand-ins for engines, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading

import aiohttp
import pytest
from yarl import URL

from stand_in_engines import DEADLINE_SECONDS, PIECES, proxied, standing_in, until
from tiering.clock import MonotonicClock
from tiering.proxy.engines import Lineup
from tiering.proxy.server import BODY_BYTES_MAX, Patience, serving
from tiering.testing.transports import descriptors

LONG = "once upon a time " * 100
ASKED = {"model": "m", "prompt": LONG, "max_tokens": 7}
STREAMED = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}


async def test_a_prompt_is_prefilled_by_one_engine_and_answered_by_another() -> None:
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        for _ in range(2):
            assert await client.post(ASKED) == (200, {"from": "d", "choices": [{"text": "d"}]})
    ids = [seen.role("remote_decoder")["kv_request_id"] for seen in p.seen]
    assert len(set(ids)) == 2
    assert [seen.role("remote_prefiller") for seen in d.seen] == [
        {"kv_request_id": each, "remote_host": "127.0.0.1", "remote_port": p.peer_port}
        for each in ids
    ]
    for seen in p.seen:
        assert (seen.body["prompt"], seen.body["max_tokens"]) == (LONG, 1)
        assert seen.body["stream"] is False
    for seen in d.seen:
        assert {key: seen.body[key] for key in ASKED} == ASKED
        assert set(seen.body) == {*ASKED, "kv_transfer_params"}


@pytest.mark.parametrize("waits_for", ["answers", "goes_on"])
async def test_the_decoder_is_asked_when_the_prefiller_has_answered(waits_for: str) -> None:
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        event: asyncio.Event = getattr(p, waits_for)
        event.clear()
        asking = asyncio.get_running_loop().create_task(client.post(ASKED))
        seen = await p.arrived()
        await asyncio.sleep(0.05)
        assert d.seen == []
        event.set()
        assert (await asking)[0] == 200
        assert not seen.is_gone.is_set()


async def test_engines_have_the_beginning_of_a_prompt_from_one_another() -> None:
    async with standing_in("a", "b") as (a, b), proxied(a, b) as client:
        for _ in range(3):
            await client.post(ASKED)
        await client.post({**ASKED, "prompt": "another one" + LONG})
    assert [seen.params for seen in a.seen] == [None, None]
    assert b.seen[0].role("remote_kv_source") == {
        "kv_request_id": b.seen[0].role("remote_kv_source")["kv_request_id"],
        "remote_host": "127.0.0.1",
        "remote_port": a.peer_port,
    }
    assert b.seen[1].params is None
    # As it came, to the byte.
    assert a.seen[0].raw == json.dumps(ASKED).encode()


async def test_a_prefiller_has_the_beginning_of_a_prompt_from_a_peer() -> None:
    async with (
        standing_in("p", "q", "d") as (p, q, d),
        proxied(d, prefillers=(p, q)) as client,
    ):
        for _ in range(2):
            await client.post(ASKED)
    (seen,) = q.seen
    assert seen.params is not None
    assert set(seen.params) == {"remote_decoder", "remote_kv_source"}
    ids = [role["kv_request_id"] for role in seen.params.values()]
    assert ids[0] != ids[1]
    assert seen.params["remote_kv_source"]["remote_port"] == p.peer_port
    assert d.seen[1].role("remote_prefiller")["kv_request_id"] == ids[0]


async def test_an_answer_is_passed_on_piece_by_piece() -> None:
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        d.goes_on.clear()
        async with client.session.post(client.url + "/v1/completions", json=STREAMED) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert await response.content.readany() == PIECES[0]
            d.goes_on.set()
            assert await response.content.read() == b"".join(PIECES[1:])
    assert "stream_options" not in p.seen[0].body
    assert d.seen[0].body["stream_options"] == {"include_usage": True}


async def test_a_chat_is_prefilled_too() -> None:
    chat = {"messages": [{"role": "user", "content": LONG}], "max_completion_tokens": 9}
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        assert (await client.post(chat, "/v1/chat/completions"))[0] == 200
    assert p.seen[0].path == d.seen[0].path == "/v1/chat/completions"
    assert p.seen[0].body["max_completion_tokens"] == 1
    assert d.seen[0].body["max_completion_tokens"] == 9


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_a_prefill_that_fails_does_not_fail_the_request(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        p.fail_with = (status, b"no", {})
        assert (await client.post(ASKED))[0] == 200
        assert d.seen[0].raw == json.dumps(ASKED).encode()
        p.fail_with = None
        await client.post(ASKED)
    assert f"prefill at {p.engine} failed: status {status}" in caplog.text
    # An engine that refuses is left alone; one that finds a fault in the request is not.
    assert len(p.seen) == (2 if status == 400 else 1)


async def test_a_prefiller_that_is_not_there_is_passed_over() -> None:
    async with standing_in("p", "q", "d") as (p, q, d):
        await p.stop()
        async with proxied(d, prefillers=(p, q)) as client:
            assert (await client.post(ASKED))[0] == 200
        assert d.seen[0].role("remote_prefiller")["remote_port"] == q.peer_port


async def test_a_prefiller_that_says_nothing_is_not_waited_for() -> None:
    patience = Patience(prefill_seconds=0.2, probe_seconds=1000.0)
    async with (
        standing_in("p", "d") as (p, d),
        proxied(d, prefillers=(p,), patience=patience) as client,
    ):
        p.answers.clear()
        assert (await client.post(ASKED))[0] == 200
        for seen in p.seen:  # which a busy machine may not have let arrive in that time
            await asyncio.wait_for(seen.is_gone.wait(), DEADLINE_SECONDS)
        assert d.seen[0].params is None


async def test_what_an_engine_answers_reaches_the_client_as_it_is() -> None:
    packed = gzip.compress(b'{"error": {"message": "too long"}}')
    about = {"Content-Type": "application/json", "Content-Encoding": "gzip", "X-Why": "length"}
    async with standing_in("a") as (a,), proxied(a) as client:
        a.fail_with = (422, packed, about)
        async with client.session.post(client.url + "/v1/completions", json=ASKED) as response:
            assert response.status == 422
            assert response.headers["X-Why"] == "length"
            assert (await response.json())["error"]["message"] == "too long"


async def test_headers_are_passed_on_but_those_of_a_connection() -> None:
    given = {
        "Authorization": "Bearer secret",
        "X-Request-Id": "7",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "X-data-parallel-rank": "1",
    }
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        await client.post(ASKED, headers=given)
    for seen in (p.seen[0], d.seen[0]):
        assert seen.headers["authorization"] == "Bearer secret"
        assert seen.headers["x-request-id"] == "7"
        assert seen.headers["content-type"] == "application/json"
        assert not {"x-hop", "x-data-parallel-rank"} & set(seen.headers)


async def test_a_client_that_goes_away_ends_the_stream_at_the_engine() -> None:
    async with standing_in("a") as (a,), proxied(a) as client:
        a.goes_on.clear()
        async with client.session.post(client.url + "/v1/completions", json=STREAMED) as response:
            await response.content.readany()
        await asyncio.wait_for(a.seen[0].is_gone.wait(), DEADLINE_SECONDS)


@pytest.mark.parametrize("at", ["p", "d"])
async def test_a_client_that_goes_away_before_an_answer_ends_what_is_under_way(at: str) -> None:
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        slow = p if at == "p" else d
        slow.answers.clear()
        asking = asyncio.get_running_loop().create_task(client.post(ASKED))
        seen = await slow.arrived()
        asking.cancel()
        await asyncio.wait_for(seen.is_gone.wait(), DEADLINE_SECONDS)


async def test_an_answer_that_breaks_off_does_so_for_the_client() -> None:
    async with standing_in("a") as (a,), proxied(a) as client:
        a.breaks = True
        with pytest.raises(aiohttp.ClientError):
            async with client.session.post(client.url + "/v1/completions", json=STREAMED) as got:
                await got.read()


async def test_an_engine_that_cannot_be_reached_is_passed_over_and_comes_back() -> None:
    patience = Patience(probe_seconds=0.02)
    async with standing_in("a", "b") as (a, b):
        await a.stop()
        async with proxied(a, b, patience=patience, clock=MonotonicClock()) as client:
            assert [(await client.post(ASKED))[1]["from"] for _ in range(3)] == ["b"] * 3

            async def answers_again() -> bool:
                _, told = await client.post(ASKED)
                return bool(told["from"] == "a")

            await a.start()
            await until(answers_again)


async def test_an_engine_that_was_lost_is_not_asked_again_at_once() -> None:
    async with standing_in("a", "b", "p") as (a, b, p), proxied(a, b, prefillers=(p,)) as client:

        async def were_probed() -> bool:
            return all(each.probes for each in (a, b, p))

        await until(were_probed)
        await a.stop()
        await p.stop()
        assert (await client.post(ASKED))[1]["from"] == "b"
        assert await client.health() == (200, [str(b.engine)])
        # It listens again, and is left alone all the same.
        await p.start()
        assert (await client.post(ASKED))[0] == 200
        assert p.seen == []


async def test_when_no_engine_can_be_reached_each_is_named() -> None:
    async with standing_in("a", "b") as (a, b):
        await a.stop()
        await b.stop()
        async with proxied(a, b) as client:
            status, told = await client.post(ASKED)
    assert status == 503
    assert told["error"]["code"] == 503
    for each in (a, b):
        assert f"engine {each.engine}: cannot be reached: " in told["error"]["message"]


async def test_an_engine_that_dies_over_a_request_does_not_take_the_others_along() -> None:
    async with standing_in("a", "b") as (a, b), proxied(a, b) as client:
        a.answers.clear()
        asking = asyncio.get_running_loop().create_task(client.post(ASKED))
        await a.arrived()
        await a.stop()
        status, told = await asking
    assert status == 502
    assert f"engine {a.engine}: broke off" in told["error"]["message"]
    assert b.seen == []


async def test_an_engine_that_falls_silent_is_an_error() -> None:
    patience = Patience(silence_seconds=0.2, probe_seconds=1000.0)
    async with standing_in("a") as (a,), proxied(a, patience=patience) as client:
        a.answers.clear()
        status, told = await client.post(ASKED)
    assert status == 502
    assert "says nothing any more" in told["error"]["message"]


async def test_an_engine_that_is_not_well_gets_no_requests() -> None:
    async with standing_in("a", "b") as (a, b):
        a.is_well = False
        async with proxied(a, b, patience=Patience(probe_seconds=0.02)) as client:

            async def is_out() -> bool:
                return await client.health() == (200, [str(b.engine)])

            async def are_both_out() -> bool:
                return await client.health() == (503, [])

            await until(is_out)
            for _ in range(2):
                await client.post(ASKED)
            assert a.seen == []
            b.is_well = False
            await until(are_both_out)


REFUSED: list[tuple[bytes, str]] = [
    (b"{", "the body is no JSON"),
    (b"[1]", "the body is no JSON object"),
    (b'{"kv_transfer_params": [1]}', "kv_transfer_params must be an object"),
    *(
        (json.dumps({"kv_transfer_params": {role: {}}}).encode(), f"kv_transfer_params.{role}: ")
        for role in ("remote_decoder", "remote_prefiller", "remote_kv_source")
    ),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED)
async def test_what_cannot_be_passed_on_is_refused(body: bytes, reason: str) -> None:
    async with standing_in("a") as (a,), proxied(a) as client:
        status, told = await client.post(body)
    assert (status, told["error"]["code"], a.seen) == (400, 400, [])
    assert told["error"]["type"] == "BadRequestError"
    assert told["error"]["message"].startswith(reason)


async def test_roles_are_refused_on_other_paths_too() -> None:
    async with standing_in("a") as (a,), proxied(a) as client:
        status, told = await client.post(REFUSED[-1][0], "/v1/responses")
        assert (status, told["error"]["param"]) == (400, "kv_transfer_params.remote_kv_source")
        assert a.seen == []


async def test_other_parameters_of_a_client_are_kept() -> None:
    own = {"max_offload_tokens": 64}
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        await client.post({**ASKED, "kv_transfer_params": own})
    for seen, role in ((p.seen[0], "remote_decoder"), (d.seen[0], "remote_prefiller")):
        assert seen.params is not None
        assert set(seen.params) == {role, "max_offload_tokens"}
        assert seen.params["max_offload_tokens"] == 64


async def test_several_prompts_in_one_request_get_no_roles() -> None:
    several = {**ASKED, "prompt": [LONG, LONG]}
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        await client.post(several)
    assert p.seen == []
    assert d.seen[0].body == several


async def test_other_paths_are_passed_to_one_engine() -> None:
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        url = URL(client.url + "/v1/models?a=%2F", encoded=True)
        async with client.session.get(url) as response:
            assert (await response.json())["from"] == "d"
        await client.post(b"\x00\xff", "/v1/audio/transcriptions")
        async with client.session.get(client.url + "/metrics") as response:
            assert response.status == 404
            assert (await response.json())["error"]["message"] == "GET /metrics: Not Found"
    assert [(seen.method, seen.path, seen.raw) for seen in d.seen] == [
        ("GET", "/v1/models?a=%2F", b""),
        ("POST", "/v1/audio/transcriptions", b"\x00\xff"),
    ]
    assert p.seen == []


async def test_a_packed_body_is_unpacked() -> None:
    packed = gzip.compress(json.dumps(ASKED).encode())
    async with standing_in("a") as (a,), proxied(a) as client:
        assert (await client.post(packed, headers={"Content-Encoding": "gzip"}))[0] == 200
    assert a.seen[0].body == ASKED


async def test_a_body_that_is_too_long_is_refused() -> None:
    async with standing_in("a") as (a,), proxied(a) as client:
        fits = {**ASKED, "prompt": "x" * (BODY_BYTES_MAX - 1000)}
        assert (await client.post(fits))[0] == 200
        status, told = await client.post({**ASKED, "prompt": "x" * BODY_BYTES_MAX})
    assert (status, len(a.seen)) == (413, 1)
    assert told["error"]["message"] == f"the body is longer than {BODY_BYTES_MAX} bytes"


async def test_more_requests_than_are_taken_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.proxy.server.REQUESTS_MAX", 1)
    async with standing_in("a") as (a,), proxied(a) as client:
        a.answers.clear()
        asking = asyncio.get_running_loop().create_task(client.post(ASKED))
        await a.arrived()
        assert (await client.post(ASKED))[0] == 429
        a.answers.set()
        assert (await asking)[0] == 200


async def test_secrets_and_prompts_are_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with standing_in("p", "d") as (p, d), proxied(d, prefillers=(p,)) as client:
        p.fail_with = (500, b"no", {})
        await client.post(ASKED, headers={"Authorization": "Bearer secret"})
        p.fail_with = None
    assert "answered by" in caplog.text
    assert not any(word in caplog.text for word in ("secret", "once upon"))


async def test_nothing_is_left_when_it_ends() -> None:
    async with standing_in("a") as (a,):

        async def was_probed() -> bool:
            return a.probes >= 2

        threads, files = set(threading.enumerate()), descriptors()
        async with serving(Lineup((a.engine,)), "127.0.0.1", 0, Patience(probe_seconds=0.01)):
            await until(was_probed)
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
        assert not any("_Proxy" in name for name in names)

        async def are_as_before() -> bool:
            # The stand-in's end of a connection is closed a moment later; and what tests before
            # this one have left to the garbage collector may be closed at any moment.
            return not (set(threading.enumerate()) - threads or descriptors() - files)

        await until(are_as_before)
