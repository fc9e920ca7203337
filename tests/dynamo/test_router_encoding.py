"""What Dynamo's router can read of a batch of KV events, and what it loses by what it cannot.

As `test_router_core.py`: rules of Dynamo 1.6.1, nothing of ours.
"""

from __future__ import annotations

from typing import Any

import pytest

from selection import NOTHING
from stream import AT, BLOCK, CPU, GPU, STORAGE, Followed, Prompt, encode


@pytest.mark.parametrize("medium", [GPU, CPU, STORAGE])
async def test_hashes_are_64_bits_with_a_sign_or_without(followed: Followed, medium: str) -> None:
    prompt = Prompt(2)
    prompt.hashes = [1 << 63, (1 << 64) - 1]
    signed = [-(1 << 63), -1]
    await followed.tell(prompt.stored(medium))
    assert await followed.reach(prompt) == AT[medium](2)
    await followed.tell(prompt.removed(medium, block_hashes=signed))
    assert await followed.reach(prompt) == NOTHING


@pytest.mark.parametrize(
    "spoilt",
    [
        {"block_hashes": [b"8 bytes.", b"and more"]},
        {"parent_block_hash": b"8 bytes."},
        {"token_ids": [-1] * 2 * BLOCK},
        {"token_ids": [1 << 32] * 2 * BLOCK},
        {"block_size": None},
        {"token_ids": None},
        {"lora_name": 7},
        {"extra_keys": [[["mm", "id", 0]], None]},
        {"extra_keys": [[None], None]},
        {"extra_keys": [[{"a": 1}], None]},
        {"type": "BlockMoved"},
        {"type": "TierBlocksCleared"},
    ],
    ids=lambda spoilt: "-".join(f"{k}-{v!r:.20}" for k, v in spoilt.items()),
)
async def test_an_event_that_cannot_be_read_costs_its_batch(
    followed: Followed, spoilt: dict[str, Any]
) -> None:
    prompt, other, later = Prompt(2), Prompt(2), Prompt(2)
    fields = {"type": "BlockStored", **_fields(other.stored(CPU)), **spoilt}
    good = {"type": "BlockStored", **_fields(prompt.stored(GPU))}
    await followed.stream.publish_raw(encode([0.0, [good, fields], 0]))
    await followed.tell(later.stored(GPU))
    assert await followed.reach(prompt) == NOTHING
    assert await followed.reach(other) == NOTHING
    assert await followed.reach(later) == AT[GPU](2)


@pytest.mark.parametrize(
    "keys",
    [None, [None, None], [["a"], ["b", "c"]], [[["id", 3]], None], [[7], None], [[b"x"], None]],
    ids=repr,
)
async def test_extra_keys_that_can_be_read(followed: Followed, keys: list[Any] | None) -> None:
    prompt = Prompt(2)
    await followed.tell(prompt.stored(CPU, extra_keys=keys))
    later = Prompt(2)
    await followed.tell(later.stored(GPU))
    assert await followed.reach(later) == AT[GPU](2)


@pytest.mark.parametrize("same", ["as its parent", "as another"])
async def test_a_hash_that_comes_twice_in_an_event_costs_it(followed: Followed, same: str) -> None:
    prompt, other = Prompt(2), Prompt(2)
    told = prompt.stored(CPU)
    if same == "as its parent":
        told.parent_block_hash = told.block_hashes[0]
    else:
        told.block_hashes = told.block_hashes[:1] * 2
    await followed.tell(told, other.stored(CPU))
    assert await followed.reach(prompt) == NOTHING
    assert await followed.reach(other) == AT[CPU](2)


async def test_a_batch_is_an_array_of_three(followed: Followed) -> None:
    prompt = Prompt(2)
    told = {"type": "BlockStored", **_fields(prompt.stored(GPU))}
    batch: list[Any] = [[0.0, [told]], [0.0, [told], 0, None], {"ts": 0.0, "events": [told]}]
    for payload in batch:
        await followed.stream.publish_raw(encode(payload))
    await followed.all_taken_in()
    assert await followed.reach(prompt) == NOTHING
    await followed.stream.publish_raw(encode([0.0, [told], 0]))
    await followed.all_taken_in()
    assert await followed.reach(prompt) == AT[GPU](2)


async def test_events_may_be_arrays_as_vllm_had_them(followed: Followed) -> None:
    prompt = Prompt(2)
    stored = ["BlockStored", prompt.hashes, None, prompt.tokens, BLOCK, None, CPU, None]
    removed = ["BlockRemoved", prompt.hashes[1:], CPU]
    await followed.stream.publish_raw(encode([0.0, [stored, removed], 0]))
    await followed.all_taken_in()
    assert await followed.reach(prompt) == AT[CPU](1)


async def test_fields_that_nobody_knows_are_passed_over(followed: Followed) -> None:
    prompt = Prompt(2)
    told = {"type": "BlockStored", **_fields(prompt.stored(CPU)), "new_in_vllm": [1]}
    await followed.stream.publish_raw(encode([0.0, [told], 0]))
    await followed.all_taken_in()
    assert await followed.reach(prompt) == AT[CPU](2)


def _fields(event: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(event, name) for name in event.__struct_fields__}
    return fields
