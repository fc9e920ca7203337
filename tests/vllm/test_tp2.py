"""Two ranks: each copies its own share, and what they store is nothing to a server of one rank.

The same tokens at another TP size have the same hashes and other bytes: a hit across sizes would
answer with wrong text. Answers are compared within one size; sizes differ by rounding alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prompts import BLOCK, random_prompt
from tiering_benchmarks.demo import connector_config, wait_at_rest
from tiering_benchmarks.server import VllmServer

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNKS = 20
CACHED = 2 * CHUNKS * BLOCK


def assert_answered(server: VllmServer, prompt: list[int], source: str | None) -> None:
    """Answered as from nothing, with all of it from `source` or, if None, computed."""
    client = server.client
    cold = client.complete(prompt, 8, logprobs=True, cache_salt=f"a stranger to {source}")
    before = client.cached_by_source()
    answer = client.complete(prompt, 8, logprobs=True)
    grown = {name: count - before[name] for name, count in client.cached_by_source().items()}
    assert cold.cached_tokens == 0
    assert answer.token_ids == cold.token_ids
    assert {n: c for n, c in grown.items() if c} == ({source: CACHED} if source else {})


def test_two_ranks_restore_their_shares_and_sizes_never_mix(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    single, double = (
        make_server(
            connector=connector_config(tmp_path, 64 << 20, blocks_per_chunk=2),
            block_size=BLOCK,
            tensor_parallel_size=ranks,
        )
        for ranks in (1, 2)
    )
    of_single, of_double = (random_prompt(name, CACHED + 8) for name in ("single", "double"))
    with single:
        first = single.client.complete(of_single, 8)
        assert first.cached_tokens == 0
        wait_at_rest(tmp_path, CHUNKS)

    with double:
        assert_answered(double, of_double, None)
        device = double.client.complete(of_double, 8, logprobs=True)
        assert device.cached_tokens == CACHED
        double.client.reset_prefix_cache()
        host = double.client.complete(of_double, 8, logprobs=True)
        assert (host.token_ids, host.logprobs) == (device.token_ids, device.logprobs)
        assert double.client.cached_by_source()["host"] == CACHED
        # Also to be had at the other size, and yet nowhere to be seen from here.
        assert_answered(double, of_single, None)
        wait_at_rest(tmp_path, 4 * CHUNKS)

    with double:
        disk = double.client.complete(of_double, 8, logprobs=True)
        assert (disk.token_ids, disk.logprobs) == (device.token_ids, device.logprobs)
        assert double.client.cached_by_source()["disk"] == CACHED

    with single:
        assert_answered(single, of_double, None)
        assert_answered(single, of_single, "disk")
