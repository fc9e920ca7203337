"""What Dynamo's router makes of batches that come late, twice, in bits or not at all.

As `test_router_core.py`: rules of Dynamo 1.6.1, nothing of ours.
"""

from __future__ import annotations

from typing import Any

import pytest

from selection import NOTHING, Reach, running_router
from stream import BLOCK, TOPIC, Followed, Prompt, encode, running_stream
from tiering.events.blocks import MEDIUM_CPU, EventBatch

ALL = Reach(0, 3, 3)


def numbered(number: int, *prompts: Prompt) -> tuple[bytes, bytes, bytes]:
    stored = [prompt.stored(MEDIUM_CPU) for prompt in prompts]
    return TOPIC, number.to_bytes(8, "big"), encode(EventBatch(0.0, stored, 0))


async def test_a_message_has_three_frames(followed: Followed) -> None:
    prompt = Prompt(3)
    topic, number, payload = numbered(0, prompt)
    for frames in ((number, payload), (topic, number, payload, b""), (topic, b"\0", payload)):
        await followed.stream.send(*frames)
    await followed.all_taken_in()
    assert await followed.reach(prompt) == NOTHING
    await followed.stream.publish_raw(payload)
    await followed.all_taken_in()
    assert await followed.reach(prompt) == ALL


async def test_any_topic_will_do(followed: Followed) -> None:
    prompt = Prompt(3)
    _, number, payload = numbered(0, prompt)
    await followed.stream.send(b"", number, payload)
    followed.stream.sequence = 1
    await followed.all_taken_in()
    assert await followed.reach(prompt) == ALL


async def test_a_gap_is_filled_from_the_replay(followed: Followed) -> None:
    lost, later = Prompt(3), Prompt(3)
    await followed.all_taken_in()
    first_lost = followed.stream.sequence
    await followed.stream.publish(lost.stored(MEDIUM_CPU), is_lost=True)
    assert await followed.reach(lost) == NOTHING
    assert followed.stream.replays_asked == []
    await followed.tell(later.stored(MEDIUM_CPU))
    assert await followed.reach(later) == ALL
    assert await followed.reach(lost) == ALL
    assert followed.stream.replays_asked == [first_lost]


async def test_a_late_reader_asks_for_the_past_once_it_hears_something() -> None:
    early, later = Prompt(3), Prompt(3)
    async with running_stream() as stream, running_router(BLOCK) as router:
        await stream.publish(early.stored(MEDIUM_CPU))
        await router.follow(1, stream.endpoint, replay=stream.replay)
        await stream.read()
        followed = Followed(router, stream)
        assert await router.reach(early.tokens) in ({}, {(1, 0): NOTHING})
        await followed.tell(later.stored(MEDIUM_CPU))
        assert await followed.reach(early) == ALL
        assert stream.replays_asked == [0]


async def test_without_a_replay_what_was_lost_is_lost() -> None:
    early, later = Prompt(3), Prompt(3)
    async with running_stream() as stream, running_router(BLOCK) as router:
        await stream.publish(early.stored(MEDIUM_CPU))
        await router.follow(1, stream.endpoint)
        await stream.read()
        followed = Followed(router, stream)
        await followed.tell(later.stored(MEDIUM_CPU))
        assert await followed.reach(later) == ALL
        assert await followed.reach(early) == NOTHING


async def test_a_number_that_was_there_is_stale(followed: Followed) -> None:
    again = Prompt(3)
    await followed.all_taken_in()
    topic, number, payload = numbered(0, again)
    await followed.stream.send(topic, number, payload)
    await followed.all_taken_in()
    assert await followed.reach(again) == NOTHING
    await followed.stream.publish_raw(payload)
    await followed.all_taken_in()
    assert await followed.reach(again) == ALL


async def test_a_restarted_engine_is_heard_once_it_is_followed_anew(followed: Followed) -> None:
    """Its numbers start from 0 again. A frontend does this by itself when a worker is gone and
    another one registers."""
    before, after = Prompt(3), Prompt(3)
    stream, router = followed.stream, followed.router
    await followed.tell(before.stored(MEDIUM_CPU))
    async with running_stream() as restarted:
        await router.forget(1)
        await router.follow(1, restarted.endpoint, replay=restarted.replay)
        await restarted.read()
        followed.stream = restarted
        await followed.tell(after.stored(MEDIUM_CPU))
        assert await followed.reach(after) == ALL
        assert await followed.reach(before) == NOTHING
    assert stream.sequence > 1


async def test_a_worker_that_is_gone_has_nothing(followed: Followed) -> None:
    prompt = Prompt(3)
    await followed.tell(prompt.stored(MEDIUM_CPU))
    async with running_stream() as other:
        await followed.router.follow(2, other.endpoint)
        await other.read()
        await other.publish(prompt.stored(MEDIUM_CPU))
        both = {(1, 0): ALL, (2, 0): ALL}
        await followed.router.until(prompt.tokens, lambda seen: seen == both)
        await followed.router.forget(1)
        assert await followed.router.reach(prompt.tokens) == {(2, 0): ALL}


async def test_a_router_chooses_whoever_has_more(followed: Followed) -> None:
    """Host memory counts, and storage does, each less than the device."""
    prompt = Prompt(8)
    async with running_stream() as other:
        await followed.router.follow(2, other.endpoint)
        await other.read()
        for medium, stream, wanted in (
            ("STORAGE", other, 2),
            ("CPU", followed.stream, 1),
            ("GPU", other, 2),
        ):
            await stream.publish(prompt.stored(medium))
            worker = wanted, 0

            def has_it(seen: Any, worker: Any = worker, medium: str = medium) -> bool:
                reach = seen[worker]
                return bool({"GPU": reach.device, "CPU": reach.host}.get(medium, reach.storage))

            await followed.router.until(prompt.tokens, has_it)
            assert await followed.router.chosen(prompt.tokens) == wanted


@pytest.mark.parametrize("size", [1, 1000])
async def test_a_batch_may_be_of_any_size(followed: Followed, size: int) -> None:
    prompts = [Prompt(3) for _ in range(size)]
    await followed.stream.send(*numbered(0, *prompts))
    followed.stream.sequence = 1
    await followed.all_taken_in()
    assert [await followed.reach(prompt) for prompt in prompts] == [ALL] * size
