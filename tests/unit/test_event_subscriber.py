"""The subscriber over real sockets: late, with losses, restarts, and publishers that write junk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from pathlib import Path

import pytest
import zmq

from event_streams import (
    LOOPBACK,
    PATIENCE_SECONDS,
    bare_publisher,
    cleared,
    has_ipv6,
    numbers,
    payload,
    receive,
    receive_until,
    removed,
    stored,
    until,
)
from tiering.errors import ClosedError, ConfigError
from tiering.events.blocks import BlockEvent
from tiering.events.mirror import EventMirror
from tiering.events.publisher import ZmqPublisher
from tiering.events.subscriber import EventSubscriber

SOON = 0.2


async def test_who_joins_late_gets_all_by_replay_and_goes_on_live() -> None:
    async with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK) as publisher:
        for number in range(100):
            publisher.publish([stored(number)])
        async with EventSubscriber(
            publisher.endpoint, replay_endpoint=publisher.replay_endpoint
        ) as subscriber:
            found = await receive(subscriber, 100)
            assert await receive_until(subscriber, lambda: subscriber.is_settled) == []
            publisher.publish([cleared()])
            found += await receive(subscriber, 1)
            stats = subscriber.stats()
    assert numbers(found) == list(range(101))
    assert found[5].batch.events == [stored(5)]
    assert (stats.missed, stats.restarts, stats.connects) == (0, 0, 1)


async def test_who_joins_late_without_replay_is_told_what_is_missed() -> None:
    async with ZmqPublisher(LOOPBACK) as publisher:
        publisher.publish([cleared()])
        await until(lambda: publisher.stats().batches == 1)
        async with EventSubscriber(publisher.endpoint) as subscriber:
            found = []
            while not found:
                publisher.publish([cleared()])
                found = await subscriber.receive(0.01)
    assert found[0].missed == found[0].sequence > 0


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            "tcp://[::1]:0", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback")
        ),
        "ipc",
        "inproc",
    ],
)
async def test_other_transports(place: str, tmp_path: Path) -> None:
    pub, replay = {
        "ipc": (f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"),
        "inproc": ("inproc://kv-events-test", "inproc://kv-replay-test"),
    }.get(place, (place, place))
    async with ZmqPublisher(pub, replay_endpoint=replay) as publisher:
        publisher.publish([stored(1)])
        async with EventSubscriber(
            publisher.endpoint, replay_endpoint=publisher.replay_endpoint
        ) as subscriber:
            found = await receive(subscriber, 1)
            publisher.publish([removed(1)])
            found += await receive(subscriber, 1)
    assert [each.batch.events for each in found] == [[stored(1)], [removed(1)]]


def test_a_wildcard_stands_for_this_host() -> None:
    assert EventSubscriber("tcp://*:5557").endpoint == "tcp://127.0.0.1:5557"
    assert EventSubscriber("tcp://[::]:5557").endpoint == "tcp://[::1]:5557"
    assert EventSubscriber("tcp://a:1", replay_endpoint="tcp://*:2").replay_endpoint == (
        "tcp://127.0.0.1:2"
    )


@pytest.mark.parametrize("endpoint", ["", "5557", "tcp://a", "tcp://a:70000"])
def test_a_bad_endpoint_is_one_sentence_with_the_key(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^endpoint = "):
        EventSubscriber(endpoint)
    with pytest.raises(ConfigError, match=r"^replay_endpoint = "):
        EventSubscriber(LOOPBACK, replay_endpoint=endpoint)


async def test_nobody_there_is_waited_for(tmp_path: Path) -> None:
    endpoint, replay_endpoint = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    async with EventSubscriber(
        endpoint, replay_endpoint=replay_endpoint, probe_seconds=0.02, replay_seconds_max=0.02
    ) as subscriber:
        stats = subscriber.stats
        assert await receive_until(subscriber, lambda: stats().replays_failed > 1) == []
        assert not subscriber.is_connected
        async with ZmqPublisher(endpoint, replay_endpoint=replay_endpoint) as publisher:
            publisher.publish([stored(1)])
            found = await receive(subscriber, 1)
            # The replay may have been there first.
            await receive_until(subscriber, lambda: subscriber.is_connected)
    assert (found[0].sequence, found[0].missed) == (0, 0)


async def test_outside_of_its_block_it_cannot_be_used() -> None:
    with pytest.raises(ClosedError):
        await EventSubscriber(LOOPBACK.replace(":0", ":9")).receive(0)


async def test_a_gap_is_filled_before_what_comes_after_it() -> None:
    with bare_publisher() as bare:
        async with EventSubscriber(
            bare.endpoint, replay_endpoint=bare.replay_endpoint
        ) as subscriber:
            await receive_until(subscriber, bare.count_requests)
            bare.answer(0)
            for number in (0, 1, 4):
                bare.send(number, payload(stored(number)))
            found = await receive_until(subscriber, lambda: bare.count_requests() > 1)
            assert bare.requests[1][1:] == [b"", (1).to_bytes(8, "big")]
            bare.answer(1, *((number, payload(stored(number))) for number in range(1, 5)))
            found += await receive_until(subscriber, lambda: subscriber.is_settled)
    assert numbers(found) == [0, 1, 2, 3, 4]
    assert subscriber.stats().missed == 0


async def test_a_replay_without_an_end_is_given_up_and_told() -> None:
    with bare_publisher() as bare:
        async with EventSubscriber(
            bare.endpoint, replay_endpoint=bare.replay_endpoint, replay_seconds_max=SOON
        ) as subscriber:
            await receive_until(subscriber, bare.count_subscriptions)
            bare.send(0, payload(stored(0)))
            bare.send(3, payload(stored(3)))
            found = await receive(subscriber, 2)
    assert [(each.sequence, each.missed) for each in found] == [(0, 0), (3, 2)]
    assert subscriber.stats().replays_failed >= 1


async def test_what_is_held_while_a_replay_is_waited_for_is_bounded() -> None:
    with bare_publisher() as bare:
        async with EventSubscriber(
            bare.endpoint,
            replay_endpoint=bare.replay_endpoint,
            replay_seconds_max=PATIENCE_SECONDS,
            unread_batches_max=10,
        ) as subscriber:
            await receive_until(subscriber, bare.count_subscriptions)
            for number in range(5, 1000):
                bare.send(number, payload(stored(number)))
            await receive_until(subscriber, lambda: subscriber._sequencer.held == 10)
            await receive_until(subscriber, bare.count_requests)
            bare.answer(0)  # that there is nothing before
            found = await receive(subscriber, 10)
    assert numbers(found)[:10] == list(range(5, 15))
    assert found[0].missed == 5


async def test_a_restart_is_another_incarnation(tmp_path: Path) -> None:
    endpoint, replay_endpoint = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    found = []
    async with EventSubscriber(endpoint, replay_endpoint=replay_endpoint) as subscriber:
        for count in (3, 5, 7):
            async with ZmqPublisher(endpoint, replay_endpoint=replay_endpoint) as publisher:
                for number in range(count):
                    publisher.publish([stored(number)])
                found.append(await receive(subscriber, count))
            assert await receive_until(subscriber, lambda: not subscriber.is_connected) == []
    assert [numbers(each) for each in found] == [list(range(n)) for n in (3, 5, 7)]
    assert len({received.incarnation for each in found for received in each}) == 3
    assert all(each[0].missed == 0 for each in found)


async def test_a_restart_without_replay_is_seen_by_numbers_that_go_back() -> None:
    with bare_publisher() as bare:
        async with EventSubscriber(bare.endpoint) as subscriber:
            await receive_until(subscriber, bare.count_subscriptions)
            for number, ts in ((0, 1.0), (1, 1.0), (0, 2.0)):
                bare.send(number, payload(stored(number), ts=ts))
            found = await receive(subscriber, 3)
    assert [(each.sequence, each.incarnation) for each in found] == [(0, 0), (1, 0), (0, 1)]
    assert subscriber.stats().restarts == 1


async def test_the_last_batch_lost_is_found_by_asking_while_nothing_comes() -> None:
    with bare_publisher() as bare:
        async with EventSubscriber(
            bare.endpoint, replay_endpoint=bare.replay_endpoint, probe_seconds=0.05
        ) as subscriber:
            await receive_until(subscriber, bare.count_requests)
            bare.answer(0, (0, payload(stored(0))))
            assert numbers(await receive(subscriber, 1)) == [0]
            asked = len(bare.requests)
            await receive_until(subscriber, lambda: bare.count_requests() > asked)
            for request in range(asked, len(bare.requests)):
                bare.answer(request, (0, payload(stored(0))), (1, payload(stored(1))))
            assert numbers(await receive(subscriber, 1)) == [1]


async def test_junk_is_counted_told_once_and_costs_only_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "tiering")
    with bare_publisher() as bare:
        async with EventSubscriber(bare.endpoint) as subscriber:
            await receive_until(subscriber, bare.count_subscriptions)
            bare.pub.send_multipart((b"", b"7"))
            bare.pub.send_multipart((b"", b"7", b"short number"))
            bare.send(0, payload(stored(0)))
            bare.send(1, b"junk")
            bad = payload(removed(1)).replace(b"BlockRemoved", b"BlockRemovex")
            bare.send(2, bad)
            bare.send(3, payload(cleared()))
            found = await receive(subscriber, 3)
            stats = subscriber.stats()
    assert [(each.sequence, each.missed) for each in found] == [(0, 0), (2, 1), (3, 0)]
    assert found[1].batch.events == []
    assert (stats.malformed, stats.undecodable_batches, stats.undecodable_events) == (2, 1, 1)
    assert len(caplog.records) == 1
    assert "a message has 3 frames, not 2" in caplog.text


async def test_junk_in_a_replay_is_counted_and_gone_past() -> None:
    with bare_publisher() as bare:
        async with EventSubscriber(
            bare.endpoint, replay_endpoint=bare.replay_endpoint
        ) as subscriber:
            await receive_until(subscriber, bare.count_requests)
            identity = bare.requests[0][0]
            bare.router.send_multipart((identity, b"", b"junk"))
            bare.answer(0, (0, payload(cleared())))
            assert numbers(await receive(subscriber, 1)) == [0]
            assert subscriber.stats().malformed == 1


async def test_topics_are_prefixes() -> None:
    with bare_publisher() as bare:
        async with EventSubscriber(bare.endpoint, topic="kv-a") as subscriber:
            await receive_until(subscriber, bare.count_subscriptions)
            for number, topic in enumerate((b"kv-b", b"kv-a", b"kv-abc")):
                bare.send(number, payload(cleared()), topic)
            assert numbers(await receive(subscriber, 2)) == [1, 2]


async def test_a_cancelled_read_loses_nothing() -> None:
    async with (
        ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK) as publisher,
        EventSubscriber(
            publisher.endpoint, replay_endpoint=publisher.replay_endpoint
        ) as subscriber,
    ):
        found = []
        for number in range(200):
            publisher.publish([stored(number)])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    found += await subscriber.receive(PATIENCE_SECONDS)
        found += await receive(subscriber, 200 - len(found))
    assert numbers(found) == list(range(200))
    assert sum(each.missed for each in found) == 0


async def test_it_can_be_iterated_over() -> None:
    async with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK) as publisher:
        for number in range(5):
            publisher.publish([stored(number)])
        async with EventSubscriber(
            publisher.endpoint, replay_endpoint=publisher.replay_endpoint
        ) as subscriber:
            async for received in subscriber:
                if received.sequence == 4:
                    break
            assert "batches=5" in repr(subscriber)


async def test_nothing_is_left_open() -> None:
    before = zmq.Context.instance()
    with bare_publisher() as bare:
        for _ in range(3):
            async with EventSubscriber(
                bare.endpoint, replay_endpoint=bare.replay_endpoint
            ) as subscriber:
                await receive_until(subscriber, bare.count_requests)
            assert subscriber._context is None
    assert not before.closed


def operations(count: int, seed: int) -> tuple[list[list[BlockEvent]], dict[str, set[int]]]:
    """Random calls of `publish` with `count` events together, and what is where after them."""
    random_ = random.Random(seed)
    truth = {medium: set[int]() for medium in ("GPU", "CPU", "STORAGE")}
    calls: list[list[BlockEvent]] = []
    made = 0
    while made < count:
        call: list[BlockEvent] = []
        for _ in range(random_.randrange(1, 40)):
            medium = random_.choice(("GPU", "CPU", "STORAGE"))
            there = truth[medium]
            some = {random_.getrandbits(14) << 40 for _ in range(random_.randrange(1, 5))}
            if random_.random() < 0.0001:
                call.append(cleared())
                truth = {name: set() for name in truth}
            elif new := some - there:
                call.append(stored(*new, medium=medium))
                there |= new
            else:
                call.append(removed(*some, medium=medium))
                there -= some
        made += len(call)
        calls.append(call)
    return calls, truth


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_random_operations_through_a_socket_leave_the_mirror_equal(count: int) -> None:
    calls, truth = operations(count, seed=7)
    mirror = EventMirror()
    async with (
        ZmqPublisher(
            LOOPBACK, replay_endpoint=LOOPBACK, batch_blocks_max=50, queue_blocks_max=1 << 20
        ) as publisher,
        # Live batches come before replays, and this publishes without a pause.
        EventSubscriber(
            publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            replay_seconds_max=PATIENCE_SECONDS,
        ) as subscriber,
    ):
        for at, call in enumerate(calls):
            publisher.publish(call)
            if at % 50 == 0:
                for each in await subscriber.receive(0.0):
                    mirror.apply(each.batch.events)
        await until(lambda: publisher.stats().queued == 0)
        while subscriber.stats().batches < publisher.stats().batches:
            for each in await subscriber.receive(0.1):
                mirror.apply(each.batch.events)
        stats = subscriber.stats()
    assert mirror.difference(truth) == {}
    assert mirror.anomalies == 0
    assert (stats.missed, stats.restarts, publisher.stats().dropped) == (0, 0, 0)
    assert stats.events >= count
