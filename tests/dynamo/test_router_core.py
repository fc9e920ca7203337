"""What Dynamo's router makes of KV events: the rules of its wire that our events rely on.

Nothing of ours is tested here. Each test is a rule that was found by trying Dynamo 1.6.1; where a
newer version has another, its name says which of ours to look at. What can be read at all is in
`test_router_encoding.py`, what becomes of a sequence of batches in `test_router_sequence.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from selection import NOTHING, Reach, running_router
from stream import AT, BLOCK, CPU, GPU, STORAGE, Followed, Prompt, encode, running_stream
from tiering.events.blocks import AllBlocksCleared

ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
NOT_ALL_HISTORY = (
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "chunked_local_attention",
    "cross_attention",
    "encoder_only_attention",
    "something_new",
)


# Where blocks are


async def test_each_medium_goes_on_where_the_one_before_ends(followed: Followed) -> None:
    prompt = Prompt(6)
    await followed.tell(
        prompt.stored(GPU, 0, 1), prompt.stored(CPU, 1, 3), prompt.stored(STORAGE, 3, 6)
    )
    assert await followed.reach(prompt) == Reach(1, 3, 6)


async def test_what_several_media_have_counts_for_the_first(followed: Followed) -> None:
    prompt = Prompt(4)
    await followed.tell(prompt.stored(STORAGE), prompt.stored(CPU, 0, 3), prompt.stored(GPU, 0, 2))
    assert await followed.reach(prompt) == Reach(2, 3, 4)
    await followed.tell(prompt.removed(GPU, 0, 2))
    assert await followed.reach(prompt) == Reach(0, 3, 4)
    await followed.tell(prompt.removed(CPU, 0, 3))
    assert await followed.reach(prompt) == Reach(0, 0, 4)


@pytest.mark.parametrize(
    ("name", "medium"),
    [
        *((name, GPU) for name in (None, "", "GPU", "DEVICE")),
        *((name, CPU) for name in ("CPU", "CPU_PINNED", "CPU_TIER1")),
        *((name, STORAGE) for name in ("STORAGE", "DISK", "NVME", "CPU_TIER2", "EXTERNAL")),
    ],
)
async def test_media_that_have_a_tier(followed: Followed, name: str | None, medium: str) -> None:
    prompt = Prompt(2)
    await followed.tell(prompt.stored(name))
    assert await followed.reach(prompt) == AT[medium](2)
    await followed.tell(prompt.removed(name))
    assert await followed.reach(prompt) == NOTHING


@pytest.mark.parametrize("name", ["FS", "OBJ", "FILE", "P2P", "cpu", "storage", "gpu"])
async def test_media_that_have_none_are_dropped(followed: Followed, name: str) -> None:
    prompt = Prompt(2)
    await followed.tell(prompt.stored(name))
    assert await followed.reach(prompt) == NOTHING


async def test_removal_names_the_class_that_the_store_named(followed: Followed) -> None:
    prompt = Prompt(2)
    await followed.tell(prompt.stored("STORAGE"), prompt.removed("EXTERNAL"))
    assert await followed.reach(prompt) == AT[STORAGE](2)
    await followed.tell(prompt.removed("DISK"))
    assert await followed.reach(prompt) == NOTHING


@pytest.mark.parametrize("medium", [CPU, STORAGE])
@pytest.mark.parametrize(
    ("field", "value", "counts"),
    [
        ("locality", "LOCAL", True),
        ("locality", "REMOTE", False),
        ("locality", "", False),
        ("ownership", "", False),
        ("ownership", "shared", False),
    ],
)
async def test_only_a_workers_own_blocks_count(
    followed: Followed, medium: str, field: str, value: str, counts: bool
) -> None:
    prompt = Prompt(2)
    await followed.tell(prompt.stored(medium, **{field: value}))
    assert await followed.reach(prompt) == (AT[medium](2) if counts else NOTHING)


# Chains


@pytest.mark.parametrize("medium", [CPU, STORAGE])
async def test_below_the_device_a_child_may_come_first(followed: Followed, medium: str) -> None:
    prompt = Prompt(4)
    await followed.tell(prompt.stored(medium, 2, 4))
    await followed.tell(prompt.stored(medium, 1, 2))
    assert await followed.reach(prompt) == NOTHING
    await followed.tell(prompt.stored(medium, 0, 1))
    assert await followed.reach(prompt) == AT[medium](4)


async def test_on_the_device_a_child_of_nobody_is_refused(followed: Followed) -> None:
    prompt = Prompt(4)
    await followed.tell(prompt.stored(GPU, 2, 4))
    await followed.tell(prompt.stored(GPU, 0, 2))
    assert await followed.reach(prompt) == AT[GPU](2)
    await followed.tell(prompt.stored(GPU, 2, 4))
    assert await followed.reach(prompt) == AT[GPU](4)


async def test_host_memory_behind_storage_is_not_reached(followed: Followed) -> None:
    prompt = Prompt(4)
    await followed.tell(prompt.stored(STORAGE, 0, 2), prompt.stored(CPU, 2, 4))
    assert await followed.reach(prompt) == Reach(0, 0, 2)


@pytest.mark.parametrize("medium", [GPU, CPU, STORAGE])
async def test_a_hole_ends_the_reach_until_it_is_filled(followed: Followed, medium: str) -> None:
    prompt = Prompt(5)
    await followed.tell(prompt.stored(medium))
    await followed.tell(prompt.removed(medium, 2, 3))
    assert await followed.reach(prompt) == AT[medium](2)
    await followed.tell(prompt.stored(medium, 2, 3))
    # The device's index forgets what it cannot reach; vLLM evicts from the tail.
    assert await followed.reach(prompt) == AT[medium](3 if medium == GPU else 5)


@pytest.mark.parametrize("medium", [GPU, CPU, STORAGE])
async def test_removal_leaves_the_sibling(followed: Followed, medium: str) -> None:
    first, second = Prompt(4), Prompt(4)
    second.tokens[: 2 * BLOCK] = first.tokens[: 2 * BLOCK]
    second.hashes[:2] = first.hashes[:2]
    await followed.tell(first.stored(medium), second.stored(medium, 2, 4))
    await followed.tell(first.removed(medium, 2, 4))
    assert await followed.reach(first) == AT[medium](2)
    assert await followed.reach(second) == AT[medium](4)


@pytest.mark.parametrize("medium", [CPU, STORAGE])
async def test_a_chunk_is_one_event_of_many_blocks(followed: Followed, medium: str) -> None:
    prompt = Prompt(48)
    await followed.tell(*(prompt.stored(medium, i, i + 16) for i in (16, 0, 32)))
    assert await followed.reach(prompt) == AT[medium](48)
    await followed.tell(prompt.removed(medium, 16, 32))
    assert await followed.reach(prompt) == AT[medium](16)
    await followed.tell(prompt.stored(medium, 16, 32), prompt.removed(medium, 40, 48))
    assert await followed.reach(prompt) == AT[medium](40)


@pytest.mark.parametrize("medium", [CPU, STORAGE])
async def test_the_device_may_end_within_a_chunk(followed: Followed, medium: str) -> None:
    prompt = Prompt(32)
    await followed.tell(prompt.stored(GPU, 0, 5), prompt.stored(medium, 0, 16))
    await followed.tell(prompt.stored(medium, 16, 32))
    assert (await followed.reach(prompt))[::2] == (5, 32)


@pytest.mark.parametrize("medium", [GPU, CPU, STORAGE])
async def test_the_block_size_is_never_that_of_the_chunk(followed: Followed, medium: str) -> None:
    """What it would otherwise be taken for is the first of them."""
    for size, blocks in ((BLOCK, 1), (4 * BLOCK, 0)):
        prompt = Prompt(4)
        told = prompt.stored(medium, 3, 4, token_ids=prompt.tokens, parent_block_hash=None)
        told.block_size = size
        await followed.tell(told)
        assert await followed.reach(prompt) == AT[medium](blocks)


async def test_tokens_that_are_too_few_cost_the_last_blocks(followed: Followed) -> None:
    prompt = Prompt(4)
    await followed.tell(prompt.stored(CPU, token_ids=prompt.tokens[: 3 * BLOCK - 1]))
    assert await followed.reach(prompt) == AT[CPU](2)


async def test_a_placeholder_tells_nothing_and_harms_nothing(followed: Followed) -> None:
    prompt, other = Prompt(2), Prompt(2)
    empty: dict[str, Any] = {"token_ids": [], "block_size": 0, "parent_block_hash": None}
    await followed.tell(prompt.stored(CPU, **empty), other.stored(CPU))
    await followed.tell(prompt.removed(CPU))
    assert await followed.reach(prompt) == NOTHING
    assert await followed.reach(other) == AT[CPU](2)


# Exactly once


@pytest.mark.parametrize("medium", [GPU, CPU, STORAGE])
async def test_residency_is_not_counted(followed: Followed, medium: str) -> None:
    """The relay within `dynamo.vllm` does count: stored twice and removed once is still there.
    Only what is announced and removed exactly once is right for both."""
    prompt = Prompt(3)
    await followed.tell(prompt.stored(medium), prompt.stored(medium))
    assert await followed.reach(prompt) == AT[medium](3)
    await followed.tell(prompt.removed(medium))
    assert await followed.reach(prompt) == NOTHING
    await followed.tell(prompt.removed(medium), prompt.stored(medium))
    assert await followed.reach(prompt) == AT[medium](3)


# Groups


@pytest.mark.parametrize("medium", [GPU, CPU])
@pytest.mark.parametrize("kind", ATTENTION)
async def test_groups_with_all_history_count_whatever_their_number(
    followed: Followed, medium: str, kind: str
) -> None:
    prompt = Prompt(2)
    await followed.tell(prompt.stored(medium, group_idx=1, kv_cache_spec_kind=kind))
    assert await followed.reach(prompt) == AT[medium](2)
    # What kind it is was learned; a removal does not say.
    await followed.tell(prompt.removed(medium, group_idx=1))
    assert await followed.reach(prompt) == NOTHING


@pytest.mark.parametrize("medium", [GPU, CPU])
@pytest.mark.parametrize("kind", NOT_ALL_HISTORY)
async def test_groups_without_all_history_do_not(
    followed: Followed, medium: str, kind: str
) -> None:
    """Blocks of all groups have the same hashes: those of a window must not remove the others."""
    prompt = Prompt(2)
    await followed.tell(
        prompt.stored(medium, 0, 1, group_idx=0, kv_cache_spec_kind=kind),
        prompt.stored(medium, 0, 1, group_idx=1, kv_cache_spec_kind="full_attention"),
        prompt.stored(medium, 1, 2, group_idx=0, kv_cache_spec_kind=kind),
    )
    assert await followed.reach(prompt) == AT[medium](1)
    await followed.tell(prompt.removed(medium, group_idx=0))
    assert await followed.reach(prompt) == AT[medium](1)


async def test_storage_of_a_window_is_taken_for_history(followed: Followed) -> None:
    """So storage must be announced of groups with all history only."""
    prompt = Prompt(2)
    await followed.tell(prompt.stored(STORAGE, group_idx=0, kv_cache_spec_kind="sliding_window"))
    assert await followed.reach(prompt) == AT[STORAGE](2)


@pytest.mark.parametrize(("group", "counts"), [(None, True), (0, True), (1, False)])
async def test_without_a_kind_the_first_group_counts(
    followed: Followed, group: int | None, counts: bool
) -> None:
    prompt = Prompt(2)
    await followed.tell(prompt.stored(CPU, group_idx=group))
    assert await followed.reach(prompt) == (AT[CPU](2) if counts else NOTHING)


# What else a prompt is told apart by


@pytest.mark.parametrize("medium", [GPU, CPU, STORAGE])
async def test_an_adapter_is_told_by_its_name(followed: Followed, medium: str) -> None:
    prompt = Prompt(2)
    await followed.tell(prompt.stored(medium, lora_name="tuned", lora_id=7))
    assert await followed.reach(prompt) == NOTHING
    assert await followed.reach(prompt, lora_name="tuned") == AT[medium](2)
    assert await followed.reach(prompt, lora_name="other") == NOTHING


@pytest.mark.parametrize("medium", [GPU, CPU, STORAGE])
async def test_a_salt_is_known_by_dynamos_prefix(followed: Followed, medium: str) -> None:
    prompt = Prompt(2)
    await followed.tell(prompt.stored(medium, extra_keys=[["dynamo-cache-salt:s"], None]))
    assert await followed.reach(prompt) == NOTHING
    assert await followed.reach(prompt, cache_salt="s") == AT[medium](2)
    assert await followed.reach(prompt, cache_salt="t") == NOTHING


@pytest.mark.parametrize("medium", [CPU, STORAGE])
async def test_a_salt_is_inherited_in_host_memory_only(followed: Followed, medium: str) -> None:
    """So each event of storage has to say whose it is."""
    heir, named, salt = Prompt(2), Prompt(2), [["dynamo-cache-salt:s"]]
    for prompt, own in ((heir, None), (named, salt)):
        await followed.tell(prompt.stored(medium, 0, 1, extra_keys=salt))
        await followed.tell(prompt.stored(medium, 1, 2, extra_keys=own))
    assert await followed.reach(named, cache_salt="s") == AT[medium](2)
    told = await followed.reach(heir, cache_salt="s")
    assert told == AT[medium](2 if medium == CPU else 1)


@pytest.mark.parametrize("medium", [GPU, CPU, STORAGE])
async def test_any_other_salt_is_taken_for_none(followed: Followed, medium: str) -> None:
    """The engine knows better: its hashes differ, so the worst is a request that computes."""
    prompt = Prompt(2)
    await followed.tell(prompt.stored(medium, extra_keys=[["tenant"], None]))
    assert await followed.reach(prompt) == AT[medium](2)
    assert await followed.reach(prompt, cache_salt="tenant") == NOTHING


# Whose blocks


async def test_workers_with_the_same_content_are_both_seen() -> None:
    prompt = Prompt(4)
    async with running_stream() as first, running_stream() as second, running_router(BLOCK) as it:
        for worker, stream in enumerate((first, second)):
            await it.follow(worker, stream.endpoint)
            await stream.read()
        await first.publish(prompt.stored(GPU, 0, 1), prompt.stored(CPU, 1, 2))
        await it.until(prompt.tokens, lambda seen: seen[0, 0] == Reach(1, 2, 2))
        await second.publish(prompt.stored(CPU, 0, 3), prompt.stored(STORAGE))
        both = {(0, 0): Reach(1, 2, 2), (1, 0): Reach(0, 3, 4)}
        assert await it.until(prompt.tokens, lambda seen: seen[1, 0].storage == 4) == both
        await first.publish(prompt.removed(CPU, 1, 2))
        await it.until(prompt.tokens, lambda seen: seen[0, 0] == Reach(1, 1, 1))
        assert (await it.reach(prompt.tokens))[1, 0] == Reach(0, 3, 4)


@pytest.mark.parametrize("medium", [GPU, CPU, STORAGE])
async def test_below_the_device_hashes_must_agree_among_workers(medium: str) -> None:
    """The worker that is second with other hashes for the same tokens is not seen: block hashes
    have to start from the same seed everywhere."""
    one, two = Prompt(2, seed=1), Prompt(2, seed=1)
    two.hashes = Prompt(2).hashes
    async with running_stream() as first, running_stream() as second, running_router(BLOCK) as it:
        for worker, (stream, prompt) in enumerate(((first, one), (second, two))):
            await it.follow(worker, stream.endpoint)
            await stream.read()
            await stream.publish(prompt.stored(medium))
            await Followed(it, stream, worker).all_taken_in()
        seen = await it.reach(one.tokens)
        assert seen == {(0, 0): AT[medium](2), (1, 0): AT[medium](2 if medium == GPU else 0)}


async def test_each_rank_has_a_row_and_an_end_of_its_own() -> None:
    prompt = Prompt(3)
    async with running_stream(0) as zero, running_stream(1) as one, running_router(BLOCK) as it:
        await it.follow(5, zero.endpoint, one.endpoint)
        for stream in (zero, one):
            await stream.read()
            await stream.publish(*(prompt.stored(medium) for medium in AT))
        whole = {(5, 0): Reach(3, 3, 3), (5, 1): Reach(3, 3, 3)}
        await it.until(prompt.tokens, lambda seen: seen == whole)
        await one.publish(AllBlocksCleared())
        seen = await it.until(prompt.tokens, lambda seen: seen[5, 1] == NOTHING)
        assert seen[5, 0] == Reach(3, 3, 3)


async def test_a_batch_says_of_which_rank_it_is(followed: Followed) -> None:
    prompt = Prompt(2)
    stored = encode([0.0, [prompt.stored(CPU)], 3])
    await followed.stream.publish_raw(stored)
    await followed.all_taken_in()
    assert await followed.router.reach(prompt.tokens) == {(1, 0): NOTHING, (1, 3): AT[CPU](2)}


async def test_clearing_clears_every_medium(followed: Followed) -> None:
    prompts = {medium: Prompt(2) for medium in AT}
    await followed.tell(*(prompt.stored(medium) for medium, prompt in prompts.items()))
    for medium, prompt in prompts.items():
        assert await followed.reach(prompt) == AT[medium](2)
    await followed.tell(AllBlocksCleared())
    for prompt in prompts.values():
        assert await followed.reach(prompt) == NOTHING
    await followed.tell(prompts[CPU].stored(CPU))
    assert await followed.reach(prompts[CPU]) == AT[CPU](2)
