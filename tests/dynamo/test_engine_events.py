"""What a router believes of a real vLLM is what that engine has: device, host memory and disk.

Dynamo's router reads the events of vLLM engines with our connector. After each thing that moves
blocks, how far it sees a prompt is compared with how far the engine has it, which is looked up in
the engine itself. Every router here comes late and has the past from vLLM's replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inproc import BLOCK_BYTES
from prompts import BLOCK, random_prompt
from selection import Reach, running_router
from tiering.events.blocks import AllBlocksCleared, BlockRemoved, BlockStored
from tiering_benchmarks.models import make_model
from workers import Audience, Setting, Worker

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HEADER_BYTES_MAX = 8192
DEVICE_BLOCKS = 80
TAIL = 8

PROMPT_BLOCKS = {1: 16, 16: 32}
"""By blocks in a chunk."""
HOST_CHUNKS = {1: 40, 16: 5}
CROWD = 6
"""Prompts, of which the device holds not all, and the host tier fewer."""

Hear = Callable[..., AbstractAsyncContextManager[Audience]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny_setting(models: Path) -> Callable[..., Setting]:
    model = make_model(models, "tiny")

    def setting(factor: int, **options: Any) -> Setting:
        return Setting(
            model,
            factor,
            HEADER_BYTES_MAX + HOST_CHUNKS[factor] * factor * BLOCK_BYTES,
            DEVICE_BLOCKS * BLOCK_BYTES,
            {"max_model_len": DEVICE_BLOCKS * BLOCK // 2, **options},
        )

    return setting


@pytest.fixture(scope="module", params=[1, 16], ids=["chunks of 1", "chunks of 16"])
def world(
    request: pytest.FixtureRequest,
    tiny_setting: Callable[..., Setting],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Worker, int]]:
    """A worker, and how many blocks a prompt has there."""
    factor: int = request.param
    with Worker(1, tiny_setting(factor), tmp_path_factory.mktemp("w")) as worker:
        yield worker, PROMPT_BLOCKS[factor]


@asynccontextmanager
async def heard(*workers: Worker) -> AsyncIterator[Audience]:
    async with running_router(BLOCK) as router:
        audience = Audience(router, workers)
        await audience.sit_down()
        yield audience


def prompts_of(name: object, blocks: int, count: int = CROWD) -> list[list[int]]:
    return [random_prompt((name, i), blocks * BLOCK + TAIL) for i in range(count)]


def ask_in_turn(worker: Worker, prompts: list[list[int]]) -> None:
    """Each once the one before is on the disk: a crowd would not find room in the host tier, and
    what finds none is not kept."""
    for prompt in prompts:
        worker.engine.ask(prompt)
        worker.engine.call("settle")


async def test_stores_and_evictions_from_the_device(world: tuple[Worker, int]) -> None:
    """One prompt after the other, until the first are gone from the device."""
    worker, blocks = world
    prompts = prompts_of("evicted", blocks)
    async with heard(worker) as audience:
        for i, prompt in enumerate(prompts):
            worker.engine.ask(prompt)
            seen = await audience.assert_right(prompts[: i + 1])
            assert seen[-1].device == blocks
        assert seen[0].device < blocks
        strangers = prompts_of("never asked", blocks)
        assert await audience.assert_right(strangers) == [Reach(0, 0, 0)] * CROWD


async def test_evictions_from_host_memory_leave_the_disk(world: tuple[Worker, int]) -> None:
    worker, blocks = world
    prompts = prompts_of("cascaded", blocks)
    async with heard(worker) as audience:
        ask_in_turn(worker, prompts)
        seen = await audience.assert_right(prompts)
        assert min(reach.host for reach in seen) < blocks
        assert all(reach.storage == blocks for reach in seen)
        worker.engine.call("reset")
        worker.engine.call("empty_host")
        assert await audience.assert_right(prompts) == [Reach(0, 0, blocks)] * CROWD


async def test_what_is_promoted_is_in_host_memory_again(world: tuple[Worker, int]) -> None:
    worker, blocks = world
    prompt, *others = prompts_of("promoted", blocks)
    async with heard(worker) as audience:
        worker.engine.ask(prompt)
        worker.engine.ask_all(others)
        worker.engine.call("settle")
        worker.engine.call("empty_host")
        (before,) = await audience.assert_right([prompt])
        assert before == Reach(0, 0, blocks)
        answer = worker.engine.ask(prompt)
        assert answer.cached_tokens == before.storage * BLOCK
        assert await audience.assert_right([prompt]) == [Reach(blocks, blocks, blocks)]
        await audience.assert_right([prompt, *others])


async def test_what_is_seen_is_what_is_loaded(world: tuple[Worker, int]) -> None:
    """A request gets as many tokens from the cache as the router counted on."""
    worker, blocks = world
    prompts = prompts_of("loaded", blocks)
    async with heard(worker) as audience:
        ask_in_turn(worker, prompts)
        worker.engine.call("reset")
        for prompt in prompts:
            (seen,) = await audience.assert_right([prompt])
            assert worker.engine.ask(prompt).cached_tokens == seen.storage * BLOCK == blocks * BLOCK


async def test_a_restart_over_the_same_disk(world: tuple[Worker, int]) -> None:
    """Nobody has asked the new engine for the prompts when it announces that it has them. (After a
    reset of all tiers it would not have them: they are kept under other keys then.)"""
    worker, blocks = world
    prompts = prompts_of("restart", blocks, 3)
    async with heard(worker) as audience:
        ask_in_turn(worker, prompts)
        await audience.assert_right(prompts)
        worker.restart()
        await audience.follow_anew(worker)
        assert await audience.assert_right(prompts) == [Reach(0, 0, blocks)] * 3
        assert worker.engine.ask(prompts[0]).cached_tokens == blocks * BLOCK
        await audience.assert_right(prompts)


async def test_a_reset_of_the_device(world: tuple[Worker, int]) -> None:
    """vLLM says that all is cleared, by which a router means every tier; the tiers are not."""
    worker, blocks = world
    prompts = prompts_of("reset", blocks, 2)
    async with heard(worker) as audience:
        worker.engine.ask_all(prompts)
        before = await audience.assert_right(prompts)
        assert before == [Reach(blocks, blocks, blocks)] * 2
        assert worker.engine.call("reset")
        assert await audience.assert_right(prompts) == [Reach(0, blocks, blocks)] * 2
        worker.engine.ask_all(prompts)
        assert await audience.assert_right(prompts) == [Reach(blocks, blocks, blocks)] * 2


async def test_a_reset_of_all_tiers(world: tuple[Worker, int]) -> None:
    worker, blocks = world
    prompts = prompts_of("reset all", blocks, 2)
    async with heard(worker) as audience:
        worker.engine.ask_all(prompts)
        assert (await audience.assert_right(prompts))[0] == Reach(blocks, blocks, blocks)
        assert worker.engine.call("reset", connector=True)
        assert await audience.assert_right(prompts) == [Reach(0, 0, 0)] * 2
        worker.engine.ask_all(prompts)
        assert await audience.assert_right(prompts) == [Reach(blocks, blocks, blocks)] * 2
        worker.engine.call("reset")
        assert await audience.assert_right(prompts) == [Reach(0, blocks, blocks)] * 2


async def test_a_salted_prompt_is_told_apart_in_the_engine(world: tuple[Worker, int]) -> None:
    """Under its hash, that is; to a router it has the tokens that it has."""
    worker, blocks = world
    (prompt,) = prompts_of("salted", blocks, 1)
    async with heard(worker) as audience:
        worker.engine.ask(prompt, salt="tenant")
        seen = await audience.assert_right([prompt], salt="tenant")
        assert seen == [Reach(blocks, blocks, blocks)]
        worker.engine.call("reset")
        seen = await audience.assert_right([prompt], salt="tenant")
        assert seen == [Reach(0, blocks, blocks)]
        (other,) = worker.engine.held([prompt])
        assert not any(other.device + other.host + other.disk)


async def test_each_residency_is_announced_and_taken_back_once(
    world: tuple[Worker, int],
) -> None:
    """Routers differ in what they make of a second time. And each event is one that they can
    read and place: of blocks as large as the device's, with all their tokens."""
    worker, blocks = world
    prompts = prompts_of("once", blocks)
    for _ in range(2):
        worker.engine.ask_all(prompts)
        worker.engine.call("settle")
        worker.engine.call("reset")
    worker.engine.call("empty_host")
    worker.engine.ask_all(prompts)
    worker.engine.call("settle")
    resident: Counter[tuple[Any, ...]] = Counter()
    media: set[str | None] = set()
    for event in worker.history():
        if isinstance(event, AllBlocksCleared):
            resident.clear()
            continue
        media.add(event.medium)
        if event.medium == "GPU":
            continue
        for block_hash in event.block_hashes:
            place = event.medium, event.group_idx or 0, block_hash
            resident[place] += 1 if isinstance(event, BlockStored) else -1
            assert resident[place] == isinstance(event, BlockStored), place
        assert event.ownership is None
        if isinstance(event, BlockStored):
            assert event.block_size == BLOCK
            assert len(event.token_ids) == len(event.block_hashes) * BLOCK
        else:
            assert isinstance(event, BlockRemoved)
    assert media == {"GPU", "CPU", "STORAGE"}


async def test_two_workers_with_the_same_content(
    tiny_setting: Callable[..., Setting], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Below the device a router has one table of hashes for all workers: theirs must agree."""
    blocks = PROMPT_BLOCKS[1]
    first, second = (
        Worker(number, tiny_setting(1), tmp_path_factory.mktemp(f"w{number}")) for number in (1, 2)
    )
    shared, *others = prompts_of("shared", blocks, 2 + CROWD)
    with first, second:
        async with heard(first, second) as audience:
            for worker in (first, second):
                worker.engine.ask(shared)
                await audience.assert_right([shared])
            # The second one's device, and then its host memory, lose it.
            second.engine.ask_all(others)
            await audience.assert_right([shared, *others])
            seen = await audience.router.reach(shared)
            assert seen[1, 0] == Reach(blocks, blocks, blocks)
            assert seen[2, 0] == Reach(0, 0, blocks)
            assert await audience.router.chosen(shared) == 1
            first.engine.call("reset", connector=True)
            await audience.assert_right([shared, *others])
            assert await audience.router.chosen(shared) == 2


async def test_two_ranks_are_one_worker(
    tiny_setting: Callable[..., Setting], tmp_path: Path
) -> None:
    blocks = PROMPT_BLOCKS[1]
    prompts = prompts_of("two ranks", blocks)
    # A block is divided between two devices, so as many bytes of each hold twice as many.
    both = {"tensor_parallel_size": 2, "num_gpu_blocks_override": DEVICE_BLOCKS}
    setting = tiny_setting(1, **both)
    with Worker(1, setting, tmp_path) as worker:
        async with heard(worker) as audience:
            for prompt in prompts:
                worker.engine.ask(prompt)
            seen = await audience.assert_right(prompts)
            assert seen[0].device < blocks
            assert seen[-1].device == blocks
            assert worker.engine.call("reset")
            assert (await audience.assert_right(prompts))[-1] == Reach(0, blocks, blocks)
            for prompt in (prompts[0], prompts[-1]):
                worker.engine.ask(prompt)
                (reach,) = await audience.assert_right([prompt])
                assert reach == Reach(blocks, blocks, blocks)


async def test_of_several_groups_the_one_with_all_history_counts(
    models: Path, tmp_path: Path
) -> None:
    """Sliding windows and full attention: blocks of a window are no prefix of anything."""
    blocks = 34
    setting = Setting(
        make_model(models, "gemma2"),
        2,
        HEADER_BYTES_MAX + 60 * BLOCK_BYTES,
        64 << 20,
        {"max_model_len": 2048, "num_gpu_blocks_override": 160},
    )
    prompts = prompts_of("windows", blocks)
    with Worker(1, setting, tmp_path) as worker:
        async with heard(worker) as audience:
            for prompt in prompts:
                worker.engine.ask(prompt)
            seen = await audience.assert_right(prompts)
            assert seen[0].device < blocks
            assert seen[-1].device == blocks
            kinds = {
                event.kv_cache_spec_kind
                for event in worker.history()
                if isinstance(event, BlockStored)
            }
            assert {"full_attention", "sliding_window"} <= kinds
            storage = {
                event.kv_cache_spec_kind
                for event in worker.history()
                if isinstance(event, BlockStored) and event.medium == "STORAGE"
            }
            assert storage == {"full_attention"}
            worker.engine.call("reset")
            await audience.assert_right(prompts)
            worker.restart()
            await audience.follow_anew(worker)
            await audience.assert_right(prompts)
