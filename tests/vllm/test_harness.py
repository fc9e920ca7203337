"""The harness itself, under a real vLLM without any connector: what other tests build upon."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiering_benchmarks.client import RequestFailed
from tiering_benchmarks.models import VOCABULARY
from tiering_benchmarks.server import (
    ServerFailed,
    Start,
    VllmServer,
    group_members,
    start_command,
)
from warm import fork_server

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 32
PROMPT_TOKENS = 20 * BLOCK + 8


def random_prompt(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(16, VOCABULARY) for _ in range(PROMPT_TOKENS)]


def shared_memory_of(pids: list[int]) -> set[Path]:
    links = (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir())
    return {path for link in links if (path := link.readlink()).is_relative_to("/dev/shm")}


@pytest.fixture(scope="module", params=[start_command, fork_server], ids=["started", "forked"])
def start(request: pytest.FixtureRequest) -> Start:
    found: Start = request.param
    return found


@pytest.fixture(scope="module")
def one(make_server: ServerFactory, start: Start) -> VllmServer:
    return make_server(block_size=BLOCK, start=start)


@pytest.fixture
def server(one: VllmServer) -> VllmServer:
    """Running: the one that other tests have asked, or started again after a test ended it."""
    if not one.is_running:
        one.start()
    return one


def test_a_device_hit_answers_as_the_cold_run_did(server: VllmServer) -> None:
    prompt = random_prompt(1)
    before = server.client.cached_by_source()
    cold, first_hit, second_hit = (
        server.client.complete(prompt, 8, logprobs=True) for _ in range(3)
    )
    after = server.client.cached_by_source()

    assert (cold.prompt_tokens, cold.cached_tokens) == (PROMPT_TOKENS, 0)
    assert first_hit.cached_tokens == second_hit.cached_tokens == 20 * BLOCK
    assert after["device"] - before["device"] == 2 * 20 * BLOCK
    assert {source: after[source] - before[source] for source in after if source != "device"} == {
        "host": 0,
        "p2p": 0,
        "disk": 0,
        "external_unspecified": 0,
    }
    assert len(cold.token_ids) == len(cold.logprobs) == 8
    assert cold.token_ids == first_hit.token_ids == second_hit.token_ids
    assert cold.text == first_hit.text != ""
    assert first_hit.logprobs == second_hit.logprobs
    assert 0 < cold.first_token_seconds < cold.total_seconds


def test_one_early_token_changes_the_answer(server: VllmServer) -> None:
    """Without this, no test on this model could tell a right KV cache from a wrong one."""
    for seed in range(2, 6):
        prompt = random_prompt(seed)
        altered = [*prompt[:40], prompt[40] ^ 1, *prompt[41:]]
        answer, other = (
            server.client.complete(tokens, 8, logprobs=True) for tokens in (prompt, altered)
        )
        assert answer.token_ids != other.token_ids
        assert abs(answer.logprobs[0] - other.logprobs[0]) > 0.01


def test_reset_empties_the_device_cache(server: VllmServer) -> None:
    prompt = random_prompt(7)
    server.client.complete(prompt, 1)
    assert server.client.complete(prompt, 1).cached_tokens > 0
    server.client.reset_prefix_cache()
    assert server.client.complete(prompt, 1).cached_tokens == 0


def test_text_is_a_prompt_too(server: VllmServer) -> None:
    answer = server.client.complete("The with statement wraps a block.", 4)
    assert 1 < answer.prompt_tokens < 34
    assert len(answer.token_ids) == 4


def test_a_refused_request_says_why(server: VllmServer) -> None:
    with pytest.raises(RequestFailed, match=r"400 .*maximum context length"):
        server.client.complete([100] * 5000, 1)


def test_stop_leaves_no_process(server: VllmServer) -> None:
    stopped = server.pid
    assert len(group_members(stopped)) > 1, "a front end alone is not a server"
    assert os.getpgid(stopped) == stopped != os.getpgid(0)
    assert server.stop(), server.log_tail()
    assert group_members(stopped) == []
    with pytest.raises(ServerFailed, match="not running"):
        _ = server.pid


def test_kill_leaves_no_process(server: VllmServer) -> None:
    killed, client = server.pid, server.client
    assert client.is_healthy()
    memory = shared_memory_of(server.processes())
    assert memory
    server.kill()
    assert group_members(killed) == []
    assert [path for path in memory if path.exists()] == []
    assert not client.is_healthy()


def test_a_server_that_cannot_start_shows_the_cause(
    make_server: ServerFactory, start: Start
) -> None:
    server = make_server(max_model_len=4096, device_bytes=1 << 20, start=start)
    with pytest.raises(ServerFailed, match=r"first error is: .*larger than the available KV cache"):
        server.start()
    assert "stopped" in repr(server)
