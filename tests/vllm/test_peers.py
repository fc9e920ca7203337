"""Two real engines: what one has computed the other does not compute again."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from inproc import (
    BLOCK_BYTES,
    Answer,
    EngineFailed,
    EngineProcess,
    assert_at_rest,
    connector_config,
)
from offloading_inproc import OffloadingEngine, offloading_config
from prompts import BLOCK, random_prompt
from tiering.testing.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOMY_BYTES = 64 << 20
DEVICE_BLOCKS = 128
CHUNK_BLOCKS = 4
PROMPT = 48 * BLOCK + 8
WHOLE = 48 * BLOCK
"""What of it is stored: all but what is behind the last whole chunk."""
COMES_BACK_SECONDS = 90.0


DOORS: dict[str, tuple[type[EngineProcess], Callable[..., dict[str, Any]]]] = {
    "connector": (EngineProcess, connector_config),
    "spec": (OffloadingEngine, offloading_config),
}


@dataclass(frozen=True)
class Place:
    """Where an engine runs: the command that enters it, and what peers dial."""

    host: str
    within: tuple[str, ...] = ()
    key: Path | None = None


HERE = Place("127.0.0.1")
# By default UCX would read the other process's memory without asking it.
OVER_UCX = Place("127.0.0.1", ("env", "UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo"))


@dataclass
class Engine:
    """One with nothing but peers below its host tier."""

    process: EngineProcess
    host: str
    port: int

    def names(self, kv_request_id: str, role: str) -> dict[str, Any]:
        """For another engine's requests: this one as `role`."""
        peer = {"remote_host": self.host, "remote_port": self.port}
        return {role: {"kv_request_id": kv_request_id, **peer}}


@pytest.fixture(scope="module")
def open_engine(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def opened(
            transport: str = "auto",
            loop: str = "thread",
            door: str = "connector",
            place: Place = HERE,
        ) -> Engine:
            port = free_port()
            tier = {"type": "p2p", "host": place.host, "port": port, "transport": transport}
            if place.key is not None:
                tier["auth"] = str(place.key)
            process_class, config = DOORS[door]
            process = process_class(
                tmp_path_factory.mktemp("engine") / "vllm.log",
                model=str(tiny_model),
                connector=config(
                    None,
                    ROOMY_BYTES,
                    secondary_tiers=[tier],
                    loop=loop,
                    blocks_per_chunk=CHUNK_BLOCKS,
                    load_deadline_seconds=20.0,
                ),
                max_model_len=DEVICE_BLOCKS * BLOCK // 2,
                kv_cache_memory_bytes=DEVICE_BLOCKS * BLOCK_BYTES,
                within=place.within,
            )
            return Engine(stack.enter_context(process), place.host, port)

        yield opened


@pytest.fixture(
    scope="module",
    params=[
        ("tcp", "thread", "connector"),
        ("shm", "process", "connector"),
        ("auto", "thread", "spec"),
        pytest.param(
            ("nixl", "thread", "connector"),
            marks=pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed"),
        ),
    ],
    ids=lambda param: "-".join(param),
)
def pair(request: pytest.FixtureRequest, open_engine: Callable[..., Engine]) -> tuple[Engine, ...]:
    place = OVER_UCX if request.param[0] == "nixl" else HERE
    with ThreadPoolExecutor() as threads:
        found = threads.map(lambda _: open_engine(*request.param, place), range(2))
        return tuple(found)


def decoder(kv_request_id: str) -> dict[str, Any]:
    return {"remote_decoder": {"kv_request_id": kv_request_id}}


def prefilled(engine: Engine, prompt: list[int], kv_request_id: str) -> Answer:
    """With the steps that a server makes by itself until its copies have ended."""
    answer = engine.process.ask(prompt, 1, params=decoder(kv_request_id))
    engine.process.call("settle")
    return answer


def test_what_one_prefills_the_other_decodes(pair: tuple[Engine, Engine]) -> None:
    prefills, decodes = pair
    prompt = random_prompt("classic", PROMPT)
    first = prefilled(prefills, prompt, "c")
    with decodes.process.counting() as grown:
        answer = decodes.process.ask(prompt, 8, params=prefills.names("c", "remote_prefiller"))
    alone = prefills.process.ask(prompt, 8)
    assert answer.tokens[:1] == first.tokens
    assert answer.tokens == alone.tokens
    assert answer.cached_tokens == WHOLE
    assert grown["promotions_succeeded"] == WHOLE // (BLOCK * CHUNK_BLOCKS)
    for engine in pair:
        engine.process.call("settle")
        assert_at_rest(engine.process)


def test_a_decoder_that_comes_first_waits(pair: tuple[Engine, Engine]) -> None:
    prefills, decodes = pair
    prompt = random_prompt("early", PROMPT)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(
            decodes.process.ask, prompt, 8, params=prefills.names("e", "remote_prefiller")
        )
        first = prefilled(prefills, prompt, "e")
        answer = asked.result()
    assert answer.cached_tokens == WHOLE
    assert answer.tokens[:1] == first.tokens


def test_an_idle_engine_is_a_source(pair: tuple[Engine, Engine]) -> None:
    has, wants = pair
    prompt = random_prompt("source", PROMPT)
    cold = has.process.ask(prompt, 8)
    has.process.call("settle")
    longer = prompt[:WHOLE] + random_prompt("more", 8 * BLOCK + 3)
    answer = wants.process.ask(prompt, 8, params=has.names("s", "remote_kv_source"))
    assert (answer.tokens, answer.cached_tokens) == (cold.tokens, WHOLE)
    wants.process.call("reset")
    wants.process.call("empty_host")
    answer = wants.process.ask(longer, 8, params=has.names("t", "remote_kv_source"))
    assert answer.cached_tokens == WHOLE, "what the source has not is computed"
    assert answer.tokens == has.process.ask(longer, 8).tokens


def test_a_prefiller_with_a_source_has_it_for_its_decoder(pair: tuple[Engine, Engine]) -> None:
    one, other = pair
    prompt = random_prompt("both", PROMPT)
    cold = one.process.ask(prompt, 8)
    one.process.call("settle")
    params = decoder("b") | one.names("b-source", "remote_kv_source")
    assert other.process.ask(prompt, 1, params=params).cached_tokens == WHOLE
    other.process.call("settle")
    one.process.call("reset")
    one.process.call("empty_host")
    answer = one.process.ask(prompt, 8, params=other.names("b", "remote_prefiller"))
    assert (answer.tokens, answer.cached_tokens) == (cold.tokens, WHOLE)


def test_roles_that_contradict_one_another_are_refused(pair: tuple[Engine, Engine]) -> None:
    one, other = pair
    prompt = random_prompt("contrary", PROMPT)
    params = decoder("x") | other.names("x", "remote_prefiller")
    with pytest.raises(EngineFailed, match="remote_prefiller and remote_decoder contradict"):
        one.process.ask(prompt, 1, params=params)
    assert one.process.ask(prompt, 1).cached_tokens == 0


def test_a_peer_that_stops_or_dies_costs_seconds(open_engine: Callable[..., Engine]) -> None:
    with ThreadPoolExecutor() as threads:
        has, wants = threads.map(lambda _: open_engine(), range(2))
    first, second, third = (random_prompt(("gone", at), PROMPT) for at in range(3))
    cold = [has.process.ask(prompt, 8) for prompt in (first, second, third)]
    has.process.call("settle")

    def asked(prompt: list[int], role: str, cached: int, salt: str | None = None) -> list[int]:
        answer = wants.process.ask(prompt, 8, salt=salt, params=has.names("g", role))
        assert answer.cached_tokens == cached
        return answer.tokens

    assert asked(first, "remote_kv_source", WHOLE) == cold[0].tokens
    has.process.signal(signal.SIGSTOP)
    assert asked(second, "remote_kv_source", 0) == cold[1].tokens
    asked(second, "remote_prefiller", 0, "stranger")
    has.process.signal(signal.SIGCONT)
    give_up = time.monotonic() + COMES_BACK_SECONDS
    cached = 0
    while not cached:  # Who did not answer is left alone for a while.
        assert time.monotonic() < give_up, "it is never asked again"
        time.sleep(0.5)
        wants.process.call("reset")
        wants.process.call("empty_host")
        params = has.names("g", "remote_kv_source")
        answer = wants.process.ask(second, 8, params=params)
        assert answer.tokens == cold[1].tokens
        cached = answer.cached_tokens
    assert cached == WHOLE
    has.process.kill()
    assert asked(third, "remote_kv_source", 0) == cold[2].tokens
    wants.process.call("settle")
    assert_at_rest(wants.process)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[tuple[Place, Place]]:
    """Network namespaces with a cable between them: as much of two hosts as one machine can be."""
    key = tmp_path / "peers.key"
    key.write_text(secrets.token_urlsafe(48))
    key.chmod(0o600)
    names = [f"kvt{os.getpid()}{side}" for side in "ab"]
    places = [
        Place(f"10.71.0.{at + 1}", ("ip", "netns", "exec", name), key)
        for at, name in enumerate(names)
    ]
    with ExitStack() as stack:
        try:
            for name in names:
                network("netns", "add", name)
                stack.callback(network, "netns", "del", name)
            one, other = names
            network("link", "add", one, "netns", one, "type", "veth", "peer", other, "netns", other)
            for name, place in zip(names, places, strict=True):
                network("-n", name, "addr", "add", f"{place.host}/24", "dev", name)
                for device in (name, "lo"):
                    network("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield places[0], places[1]


def network(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


def test_two_hosts_with_a_shared_key(
    open_engine: Callable[..., Engine], two_hosts: tuple[Place, Place]
) -> None:
    with ThreadPoolExecutor() as threads:
        one, other = threads.map(lambda place: open_engine("tcp", place=place), two_hosts)
    prompt = random_prompt("hosts", PROMPT)
    first = prefilled(one, prompt, "h")
    answer = other.process.ask(prompt, 8, params=one.names("h", "remote_prefiller"))
    assert (answer.tokens[:1], answer.cached_tokens) == (first.tokens, WHOLE)
    assert answer.tokens == one.process.ask(prompt, 8).tokens
    stranger = random_prompt("stranger", PROMPT)
    prefilled(other, stranger, "i")
    answer = one.process.ask(stranger, 8, params=other.names("i", "remote_kv_source"))
    assert answer.cached_tokens == WHOLE
