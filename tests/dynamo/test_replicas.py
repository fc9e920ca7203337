"""What a router believes of a real vLLM with two data-parallel replicas: each is a rank.

They have a device, a host tier and a stream of events each, and one directory. Where a request was
computed and where its tokens came from is counted by the server, which nothing here looks into.
"""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from inproc import connector_config
from prompts import BLOCK, random_prompt
from selection import NOTHING, PATIENCE_SECONDS, Reach, Reaches, running_router
from tiering_benchmarks.client import Client
from tiering_benchmarks.models import make_model
from tiering_benchmarks.server import VllmServer
from warm import fork_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCKS = 16
CACHED = BLOCKS * BLOCK
WORKER = 1
RANKS = (0, 1)


class Replicas:
    """Both of them, through one front end, which sends a request to either."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._nudges = itertools.count()

    def ask(self, prompt: Sequence[int]) -> tuple[int, int, str]:
        """The rank that has computed it, how many tokens were cached, and where."""
        before = self._counts()
        cached = self._client.complete(prompt, 2).cached_tokens
        grown = {name: count - before[name] for name, count in self._counts().items()}
        (rank,) = (rank for rank in RANKS if grown[f"rank {rank}"])
        sources = [name for name in ("device", "host", "disk") if grown.get(name)]
        return rank, cached, " and ".join(sources)

    def nudge(self, tokens: int) -> list[int]:
        """Have one of them make a step."""
        prompt = random_prompt(("nudge", next(self._nudges)), tokens)
        self._client.complete(prompt, 1)
        return prompt

    def reset_devices(self) -> None:
        self._client.reset_prefix_cache()

    def _counts(self) -> dict[str, int]:
        return {**self._client.cached_by_source(), **self._prompt_tokens()}

    def _prompt_tokens(self) -> dict[str, int]:
        """That each of them was given, ever."""
        from prometheus_client.parser import text_string_to_metric_families

        url = f"http://{self._client.host}:{self._client.port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        return {
            f"rank {sample.labels['engine']}": int(sample.value)
            for family in families
            for sample in family.samples
            if sample.name == "vllm:prompt_tokens_total"
        }


async def test_two_replicas_are_two_ranks_of_a_worker(tmp_path: Path) -> None:
    config = connector_config(
        tmp_path / "tier", 64 << 20, blocks_per_chunk=1, self_describing_kv_events=True
    )
    config["kv_connector_extra_config"]["secondary_tiers"][0]["enable_kv_events"] = True
    # vLLM adds the rank to what looks like a port, unless that is 0. As the name of a file, nobody
    # else can read it.
    streams = [f"ipc://{tmp_path}/tcp:{rank + 1}" for rank in RANKS]
    events = {"publisher": "zmq", "topic": "kv", "endpoint": streams[0]}
    server = VllmServer(
        make_model(tmp_path, "tiny"),
        tmp_path / "vllm.log",
        connector=config,
        block_size=BLOCK,
        arguments=[
            "--data-parallel-size=2",
            f"--kv-events-config={json.dumps({**events, 'enable_kv_cache_events': True})}",
        ],
        start=fork_server,
    )
    prompts = [random_prompt(("replica", i), CACHED + 8) for i in range(6)]
    with server:
        replicas = Replicas(server.client)
        async with running_router(BLOCK) as router:
            await router.follow(WORKER, *streams)

            async def nudged_until(prompt: Sequence[int], holds: Callable[[Reaches], bool]) -> None:
                deadline = time.monotonic() + PATIENCE_SECONDS
                while not holds(await router.reach(prompt)):
                    assert time.monotonic() < deadline, await router.reach(prompt)
                    replicas.nudge(BLOCK // 2)

            for _ in range(100):
                nudges = [replicas.nudge(BLOCK + 1) for _ in range(4)]
                seen = [await router.reach(nudge) for nudge in nudges]
                if all(any(each.get((WORKER, r), NOTHING).device for each in seen) for r in RANKS):
                    break
            else:
                raise AssertionError(f"not both ranks are read: {seen}")

            homes = []
            for prompt in prompts:
                home, cached, _ = replicas.ask(prompt)
                assert cached == 0
                homes.append(home)
                there = at(home, Reach(BLOCKS, BLOCKS, BLOCKS))
                await nudged_until(prompt, lambda seen, there=there: dict(seen) == there)
            assert set(homes) == set(RANKS)
            replicas.reset_devices()
            for prompt, home in zip(prompts, homes, strict=True):
                there = at(home, Reach(0, BLOCKS, BLOCKS))
                await nudged_until(prompt, lambda seen, there=there: dict(seen) == there)
            for prompt, home in zip(prompts, homes, strict=True):
                rank, cached, source = replicas.ask(prompt)
                assert (cached, source) == (CACHED, "host" if rank == home else "disk")
                there = at(rank, Reach(BLOCKS, BLOCKS, BLOCKS))
                if rank != home:
                    there |= {(WORKER, home): Reach(0, BLOCKS, BLOCKS)}
                await nudged_until(prompt, lambda seen, there=there: dict(seen) == there)


def at(rank: int, reach: Reach) -> dict[tuple[int, int], Reach]:
    """What is seen of a prompt that one rank has and the other does not."""
    return {(WORKER, each): reach if each == rank else NOTHING for each in RANKS}
