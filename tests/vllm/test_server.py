"""`vllm serve` with the connector: a prompt comes back from host memory, and after a restart from
disk, with the same answer; the server's own metrics say from where. Each of its processes is a new
interpreter, as it is for a user, and as it is not in the other tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prompts import BLOCK, random_prompt
from tiering_benchmarks.client import Client, Completion
from tiering_benchmarks.demo import connector_config, wait_at_rest
from tiering_benchmarks.server import start_command

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNKS = 20
BLOCKS_PER_CHUNK = 2
CACHED = CHUNKS * BLOCKS_PER_CHUNK * BLOCK


def ask(client: Client, prompt: list[int]) -> tuple[Completion, dict[str, int]]:
    """The answer, and where the tokens that were not computed came from."""
    before = client.cached_by_source()
    answer = client.complete(prompt, 8, logprobs=True)
    after = client.cached_by_source()
    return answer, {source: after[source] - before[source] for source in after}


def test_device_host_and_disk_give_the_same_answer(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    prompt = random_prompt("served", CACHED + 8)
    nothing = {"device": 0, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
    server = make_server(
        connector=connector_config(tmp_path, 64 << 20, BLOCKS_PER_CHUNK),
        block_size=BLOCK,
        start=start_command,
    )
    with server:
        client = server.client
        (cold, from_nowhere), (device, from_device) = (ask(client, prompt) for _ in range(2))
        client.reset_prefix_cache()
        host, from_host = ask(client, prompt)
        metrics = client.metrics()
        assert metrics["vllm:external_prefix_cache_hits_total"] == CACHED
        assert metrics["vllm:tiering_chunks_loaded_total"] == CHUNKS
        assert wait_at_rest(tmp_path, CHUNKS) == CHUNKS
        assert server.stop(), server.log_tail()
    with server:
        client = server.client
        disk, from_disk = ask(client, prompt)
        metrics = client.metrics()
        assert metrics["vllm:external_prefix_cache_hits_total"] == CACHED
        assert metrics["vllm:tiering_promotions_succeeded_total"] == CHUNKS

    assert from_nowhere == nothing
    assert from_device == {**nothing, "device": CACHED}
    assert from_host == {**nothing, "host": CACHED}
    assert from_disk == {**nothing, "disk": CACHED}
    assert [a.cached_tokens for a in (cold, device, host, disk)] == [0, CACHED, CACHED, CACHED]
    assert cold.token_ids == device.token_ids == host.token_ids == disk.token_ids
    assert device.logprobs == host.logprobs == disk.logprobs
