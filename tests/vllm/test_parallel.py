"""More than one worker, and more than one engine: what comes back is what was stored, per rank.

Tensor parallelism with full attention is in test_tp2.py. Answers are compared within one way of
splitting the model, since each rounds differently.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prompts import BLOCK, random_prompt
from tiering_benchmarks.demo import connector_config, wait_at_rest

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCKS = 40
CACHED = BLOCKS * BLOCK
TOKENS = 8

WARMED_UP = ["--no-enforce-eager", '--compilation-config={"mode":1,"cudagraph_mode":"NONE"}']
"""Without a warm-up, which eager mode leaves out, vLLM's CPU backend cannot run a pipeline."""


def test_two_stages_of_a_pipeline_restore_their_layers(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """Each stage has layers of its own, and they need not be equally many."""
    server = make_server(
        connector=connector_config(tmp_path, 64 << 20, blocks_per_chunk=2),
        block_size=BLOCK,
        arguments=["--pipeline-parallel-size=2", *WARMED_UP],
        environment={"VLLM_PP_LAYER_PARTITION": "3,1"},
    )
    prompt = random_prompt("pipeline", CACHED + 8)
    with server:
        client = server.client
        cold = client.complete(prompt, TOKENS, logprobs=True)
        device = client.complete(prompt, TOKENS, logprobs=True)
        assert (cold.cached_tokens, device.cached_tokens) == (0, CACHED)
        client.reset_prefix_cache()
        host = client.complete(prompt, TOKENS, logprobs=True)
        assert (host.token_ids, host.logprobs) == (device.token_ids, device.logprobs)
        assert client.cached_by_source()["host"] == CACHED
        wait_at_rest(tmp_path, BLOCKS // 2)
    with server:
        disk = server.client.complete(prompt, TOKENS, logprobs=True)
        assert (disk.token_ids, disk.logprobs) == (device.token_ids, device.logprobs)
        assert server.client.cached_by_source()["disk"] == CACHED


def test_two_replicas_have_a_host_tier_each_and_share_a_directory(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """Requests go to either: what one has stored the other reads from the disk."""
    server = make_server(
        connector=connector_config(tmp_path, 32 << 20, blocks_per_chunk=1),
        block_size=BLOCK,
        arguments=["--data-parallel-size=2"],
    )
    prompts = [random_prompt(f"replica {i}", CACHED + 8) for i in range(4)]
    with server:
        client = server.client
        cold = [client.complete(prompt, TOKENS) for prompt in prompts]
        wait_at_rest(tmp_path, BLOCKS * len(prompts))
        for _ in range(3):
            client.reset_prefix_cache()
            for prompt, first in zip(prompts, cold, strict=True):
                again = client.complete(prompt, TOKENS)
                assert again.token_ids == first.token_ids
                assert again.cached_tokens == CACHED
        sources = client.cached_by_source()
        assert sources["host"] + sources["disk"] == CACHED * len(prompts) * 3
    with server:
        for prompt, first in zip(prompts, cold, strict=True):
            again = server.client.complete(prompt, TOKENS)
            assert again.token_ids == first.token_ids
            assert again.cached_tokens == CACHED
        assert server.client.cached_by_source()["disk"] == CACHED * len(prompts)
