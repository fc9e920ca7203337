"""`tiering proxy` before two real servers: the answers are those of one, and little is computed
twice."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from prompts import BLOCK, random_prompt
from tiering.testing.ports import free_port
from tiering_benchmarks.client import Client
from tiering_benchmarks.server import MODEL_NAME, VllmServer

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WHOLE = 40 * BLOCK
PROMPT = WHOLE + 9


@dataclass
class Engine:
    server: VllmServer
    peer: str

    @property
    def at(self) -> str:
        """As the proxy is told of it."""
        client = self.server.client
        return f"http://{client.host}:{client.port}={self.peer}"


@pytest.fixture(scope="module")
def engines(make_server: ServerFactory) -> tuple[Engine, Engine]:
    def start(port: int) -> Engine:
        tier = {"type": "p2p", "host": "127.0.0.1", "port": port}
        server = make_server(
            connector={
                "kv_connector": "TieredConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": 64 << 20,
                    "blocks_per_chunk": 4,
                    "secondary_tiers": [tier],
                },
            },
        )
        server.start()
        return Engine(server, f"127.0.0.1:{port}")

    with ThreadPoolExecutor() as threads:
        one, other = threads.map(start, [free_port(), free_port()])
    return one, other


@contextmanager
def proxy(*arguments: str) -> Iterator[Client]:
    """The command, on a port of its own."""
    tiering = Path(sysconfig.get_path("scripts")) / "tiering"
    command = [str(tiering), "proxy", "--port", str(free_port()), "--json", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            host, _, port = url.removeprefix("http://").rpartition(":")
            yield Client(host, int(port), MODEL_NAME)
        finally:
            process.terminate()
            process.wait(10)


def test_one_prefills_and_the_other_decodes(engines: tuple[Engine, Engine]) -> None:
    prefills, decodes = engines
    prompts = [random_prompt(("prefill", at), PROMPT) for at in range(4)]
    alone = [prefills.server.client.complete(prompt, 12) for prompt in prompts]
    before = decodes.server.client.metrics()
    with (
        proxy("--prefill", prefills.at, "--decode", decodes.at) as client,
        ThreadPoolExecutor() as threads,
    ):
        answers = list(threads.map(lambda prompt: client.complete(prompt, 12), prompts))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    assert [answer.cached_tokens for answer in answers] == [WHOLE] * 4
    grown = computed(decodes.server.client.metrics()) - computed(before)
    assert grown == 4 * (PROMPT - WHOLE)


def computed(metrics: dict[str, float]) -> float:
    """Tokens of prompts that the server has computed itself."""
    cached = 'vllm:prompt_tokens_cached_by_source_total{source="'
    return metrics["vllm:prompt_tokens_total"] - sum(
        value for name, value in metrics.items() if name.startswith(cached)
    )


def test_each_has_from_the_other_what_that_one_was_asked_before(
    engines: tuple[Engine, Engine],
) -> None:
    one, other = engines
    with proxy("--engine", one.at, other.at) as client:
        conversation = random_prompt("conversation", PROMPT)
        answers = [client.complete(conversation, 8) for _ in range(4)]
    assert len({answer.token_ids for answer in answers}) == 1
    assert answers[0].cached_tokens == 0
    assert {answer.cached_tokens for answer in answers[1:]} == {WHOLE}


def test_a_client_whose_roles_contradict_one_another_is_told(
    engines: tuple[Engine, Engine],
) -> None:
    one, other = engines
    host, _, port = other.peer.rpartition(":")
    peer = {"kv_request_id": "7", "remote_host": host, "remote_port": int(port)}
    params = {"remote_prefiller": peer, "remote_kv_source": peer}
    with pytest.raises(HTTPError) as caught:
        post(one.server.client, random_prompt("wrong", BLOCK), params)
    assert caught.value.code == 400
    told = json.loads(caught.value.read())["error"]["message"]
    assert "remote_prefiller and remote_kv_source are two sources" in told
    assert one.server.client.is_healthy()
    only = {"remote_kv_source": peer}
    assert post(one.server.client, random_prompt("right", BLOCK), only)["choices"]


def post(client: Client, prompt: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": list(prompt), "kv_transfer_params": params}
    request = Request(
        f"http://{client.host}:{client.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer
