"""What a router believes of a real vLLM: disks that evict, the other layout, the other door.

As in test_engine_events, which has the usual tiers: after each thing that moves blocks, how far the
router sees a prompt is how far the engine has it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inproc import BLOCK_BYTES
from offloading_events_inproc import OffloadingEventEngine
from offloading_inproc import offloading_config
from prompts import BLOCK, random_prompt
from selection import Reach, running_router
from tiering_benchmarks.models import make_model
from workers import Audience, Setting, Worker

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HEADER_BYTES_MAX = 8192
HOST_ROWS_SPARE = 2
"""What vLLM's connector and our half leave word for one another in."""
DEVICE_BLOCKS = 80
TAIL = 8
CROWD = 6
"""Prompts, of which the device holds not all, the host tier fewer, a bounded disk not all."""

PROMPT_BLOCKS = {1: 16, 16: 32}
"""By blocks in a chunk."""
HOST_CHUNKS = {1: 40, 16: 5}
DISK_PROMPTS = 4

MakeSetting = Callable[..., Setting]


@pytest.fixture(scope="module")
def make_setting(tmp_path_factory: pytest.TempPathFactory) -> MakeSetting:
    model = make_model(tmp_path_factory.mktemp("models"), "tiny")

    def setting(factor: int, spare_rows: int = 0, **more: Any) -> Setting:
        host_rows = HOST_CHUNKS[factor] + spare_rows
        return Setting(
            model,
            factor,
            HEADER_BYTES_MAX + host_rows * factor * BLOCK_BYTES,
            DEVICE_BLOCKS * BLOCK_BYTES,
            {"max_model_len": DEVICE_BLOCKS * BLOCK // 2},
            **more,
        )

    return setting


@asynccontextmanager
async def heard(worker: Worker) -> AsyncIterator[Audience]:
    async with running_router(BLOCK) as router:
        audience = Audience(router, [worker])
        await audience.sit_down()
        yield audience


def prompts_of(name: object, blocks: int, count: int = CROWD) -> list[list[int]]:
    return [random_prompt((name, i), blocks * BLOCK + TAIL) for i in range(count)]


def ask_in_turn(worker: Worker, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        worker.engine.ask(prompt)
        worker.engine.call("settle")


@pytest.mark.parametrize(("layout", "factor"), [("files", 1), ("segments", 16)])
async def test_evictions_from_a_bounded_disk(
    layout: str, factor: int, make_setting: MakeSetting, tmp_path: Path
) -> None:
    """And what is left after a restart, which is announced before anybody has asked for it."""
    blocks = PROMPT_BLOCKS[factor]
    bound = DISK_PROMPTS * blocks * BLOCK_BYTES
    tier = {"layout": layout, "max_bytes": bound, "min_free_bytes": 0}
    prompts = prompts_of("bounded", blocks)
    with Worker(1, make_setting(factor, tier=tier), tmp_path) as worker:
        async with heard(worker) as audience:
            for i in range(CROWD):
                ask_in_turn(worker, prompts[i : i + 1])
                seen = await audience.assert_right(prompts[: i + 1])
            worker.engine.call("reset")
            worker.engine.call("empty_host")
            seen = await audience.assert_right(prompts)
            assert seen[0].storage < blocks
            assert seen[-1] == Reach(0, 0, blocks)
            worker.restart()
            await audience.follow_anew(worker)
            # What the router was sat down with may have cost another chunk.
            seen = await audience.assert_right(prompts)
            assert seen[0].storage < blocks
            assert seen[-1] == Reach(0, 0, blocks)
            answer = worker.engine.ask(prompts[-1])
            assert answer.cached_tokens == blocks * BLOCK
            ask_in_turn(worker, prompts[:2])
            await audience.assert_right(prompts)


@pytest.fixture(scope="module", params=[1, 16], ids=["chunks of 1", "chunks of 16"])
def other_door(
    request: pytest.FixtureRequest,
    make_setting: MakeSetting,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Worker, int]]:
    """A worker with vLLM's own connector over this engine, and the blocks in a prompt."""
    factor: int = request.param
    setting = make_setting(
        factor, HOST_ROWS_SPARE, engine=OffloadingEventEngine, connector=offloading_config
    )
    with Worker(1, setting, tmp_path_factory.mktemp("w")) as worker:
        yield worker, PROMPT_BLOCKS[factor]


async def test_the_other_door_stores_and_evicts(other_door: tuple[Worker, int]) -> None:
    worker, blocks = other_door
    prompts = prompts_of("evicted", blocks)
    async with heard(worker) as audience:
        for i, prompt in enumerate(prompts):
            worker.engine.ask(prompt)
            seen = await audience.assert_right(prompts[: i + 1])
            assert seen[-1].device == blocks
        assert seen[0].device < blocks
        assert min(reach.host for reach in seen) < blocks
        assert all(reach.storage == blocks for reach in seen)


async def test_the_other_door_promotes(other_door: tuple[Worker, int]) -> None:
    worker, blocks = other_door
    prompt, *others = prompts_of("promoted", blocks)
    async with heard(worker) as audience:
        ask_in_turn(worker, [prompt, *others])
        worker.engine.call("empty_host")
        (before,) = await audience.assert_right([prompt])
        assert before == Reach(0, 0, blocks)
        assert worker.engine.ask(prompt).cached_tokens == blocks * BLOCK
        assert await audience.assert_right([prompt]) == [Reach(blocks, blocks, blocks)]
        await audience.assert_right([prompt, *others])


async def test_the_other_door_announces_what_a_disk_has_kept_once_it_is_asked_for(
    other_door: tuple[Worker, int],
) -> None:
    """vLLM describes chunks from requests, and has none of before the restart."""
    worker, blocks = other_door
    (prompt,) = prompts_of("restart", blocks, 1)
    async with heard(worker) as audience:
        ask_in_turn(worker, [prompt])
        await audience.assert_right([prompt])
        worker.restart()
        await audience.follow_anew(worker)
        assert (await audience.router.reach(prompt)).get((1, 0), Reach(0, 0, 0)) == Reach(0, 0, 0)
        assert worker.engine.ask(prompt).cached_tokens == blocks * BLOCK
        assert await audience.assert_right([prompt]) == [Reach(blocks, blocks, blocks)]
