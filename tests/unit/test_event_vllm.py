"""Our half of KV events against vLLM's: the same bytes, its publisher read by our subscriber."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from event_streams import numbers, receive, receive_until, removed, stored, wait_until
from test_event_wire import GOLDEN
from tiering.events.blocks import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from tiering.events.mirror import EventMirror
from tiering.events.publisher import ZmqPublisher
from tiering.events.subscriber import EventSubscriber

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    # vLLM's own imports are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


def theirs(batch: EventBatch) -> Any:
    """The same in vLLM's own structs."""
    from vllm.distributed import kv_events

    events = [
        getattr(kv_events, type(event).__name__)(**msgspec.structs.asdict(event))
        for event in batch.events
    ]
    rank = batch.data_parallel_rank
    return kv_events.KVEventBatch(ts=batch.ts, events=events, data_parallel_rank=rank)


@pytest.mark.parametrize("name", GOLDEN)
def test_vllms_own_structs_give_the_same_bytes(name: str) -> None:
    batch, expected = GOLDEN[name]
    assert msgspec.msgpack.Encoder().encode(theirs(batch)).hex() == expected


def test_fields_and_defaults_are_vllms() -> None:
    from vllm.distributed import kv_events

    for ours in (BlockStored, BlockRemoved, AllBlocksCleared):
        other = getattr(kv_events, ours.__name__)
        assert ours.__struct_fields__ == other.__struct_fields__
        assert ours.__struct_defaults__ == other.__struct_defaults__
        assert ours.__struct_config__.tag == other.__struct_config__.tag
    assert EventBatch.__struct_fields__ == kv_events.KVEventBatch.__struct_fields__


@contextmanager
def their_publisher(directory: Path, **settings: Any) -> Iterator[Any]:
    """Over ipc, which it binds; a loopback address it would connect to."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    publisher = ZmqEventPublisher(
        0, f"ipc://{directory}/pub", f"ipc://{directory}/replay", topic="kv", **settings
    )
    try:
        yield publisher
    finally:
        publisher.shutdown()


def ours_at(directory: Path, with_replay: bool = True, **settings: Any) -> EventSubscriber:
    replay = f"ipc://{directory}/replay" if with_replay else None
    return EventSubscriber(f"ipc://{directory}/pub", replay_endpoint=replay, **settings)


async def test_vllms_publisher_is_read_from_its_start(tmp_path: Path) -> None:
    with their_publisher(tmp_path) as publisher:
        for number in range(50):
            publisher.publish(theirs(EventBatch(1.0, [stored(number)])))
        async with ours_at(tmp_path, topic="kv") as subscriber:
            found = await receive(subscriber, 50)
            publisher.publish(theirs(EventBatch(2.0, [removed(3), AllBlocksCleared()])))
            found += await receive(subscriber, 1)
    assert numbers(found) == list(range(51))
    assert found[7].batch == EventBatch(1.0, [stored(7)], 0)
    assert found[50].batch.events == [removed(3), AllBlocksCleared()]
    assert sum(each.missed for each in found) == 0


async def test_what_vllms_buffer_has_no_more_is_told_as_missed(tmp_path: Path) -> None:
    with their_publisher(tmp_path, buffer_steps=5) as publisher:
        for number in range(20):
            publisher.publish(theirs(EventBatch(1.0, [stored(number)])))
        wait_until(lambda: publisher._event_queue.empty() and len(publisher._buffer) == 5)
        async with ours_at(tmp_path) as subscriber:
            found = await receive(subscriber, 5)
    assert numbers(found)[0] + 5 == 20
    assert found[0].missed == 15


async def test_vllms_publisher_is_followed_through_its_restart(tmp_path: Path) -> None:
    mirror, incarnations = EventMirror(), []
    async with ours_at(tmp_path, probe_seconds=0.2) as subscriber:
        for round_ in range(2):
            with their_publisher(tmp_path) as publisher:
                for number in range(10 - 4 * round_):
                    publisher.publish(theirs(EventBatch(1.0 + round_, [stored(number)])))
                for each in await receive(subscriber, 10 - 4 * round_):
                    if each.incarnation not in incarnations:
                        incarnations.append(each.incarnation)
                        mirror.forget()
                    mirror.apply(each.batch.events)
            await receive_until(subscriber, lambda: not subscriber.is_connected)
    assert len(incarnations) == 2
    assert mirror.residents("CPU") == set(range(6))
    assert mirror.anomalies == 0


def test_what_we_publish_vllms_structs_decode(tmp_path: Path) -> None:
    from vllm.distributed.kv_events import KVEventBatch

    events = [stored(1, 2, medium="STORAGE"), removed(1), AllBlocksCleared()]
    endpoint = f"ipc://{tmp_path}/pub"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sub, decoder = context.socket(zmq.SUB), msgspec.msgpack.Decoder(KVEventBatch)
    try:
        with ZmqPublisher(endpoint, topic="kv-events", data_parallel_rank=0) as publisher:
            sub.connect(endpoint)
            sub.setsockopt_string(zmq.SUBSCRIBE, "kv-events")

            def has_come() -> bool:
                publisher.publish(events)
                return bool(sub.poll(5))

            wait_until(has_come)
            topic, _, body = sub.recv_multipart()
    finally:
        sub.close(linger=0)
        context.term()
    batch = decoder.decode(body)
    assert topic == b"kv-events"
    assert batch == theirs(EventBatch(batch.ts, list(events), 0))


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:5557", "tcp://127.0.0.1:5557", "tcp://[::]:5557", "tcp://h:0", "inproc://kv", None],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_endpoints_of_ranks_and_which_are_bound_are_as_vllm_has_them(
    endpoint: str | None, rank: int
) -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    ours = ZmqPublisher(endpoint or "tcp://*:1", data_parallel_rank=rank)
    theirs_at = ZmqEventPublisher.offset_endpoint_port(endpoint or "tcp://*:1", rank)
    assert ours.endpoint == theirs_at
    if not str(theirs_at).endswith(":0"):
        assert ("bound" in repr(ours)) == ZmqEventPublisher._is_bind_endpoint(str(theirs_at))
