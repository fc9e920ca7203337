"""The publisher: what a consumer gets, what it may ask for, and that no consumer can harm it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from event_streams import (
    LOOPBACK,
    PATIENCE_SECONDS,
    cleared,
    has_ipv6,
    removed,
    stored,
    wait_until,
)
from tiering.errors import ClosedError
from tiering.events import publisher as publisher_module
from tiering.events import replays
from tiering.events.blocks import EventBatch
from tiering.events.history import History
from tiering.events.publisher import ZmqPublisher

END = b"\xff" * 8


class SetClock:
    seconds = 1_700_000_000.5

    def now(self) -> float:
        return self.seconds


class Consumer:
    """Written from vLLM's description of its protocol, with nothing of ours."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.dealer = self.context.socket(zmq.DEALER)
        self.sub.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))
        self.dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))

    def subscribe(self, endpoint: str, topic: bytes = b"") -> None:
        self.sub.setsockopt(zmq.IPV6, 1)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.sub.connect(endpoint)

    def next_live(self) -> tuple[bytes, int, bytes]:
        topic, number, body = self.sub.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), body

    def ask(self, *frames: bytes) -> None:
        self.dealer.send_multipart(frames)

    def answers(self) -> list[int]:
        """Numbers up to the end marker."""
        found: list[int] = []
        while True:
            empty, _, number, body = self.dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert body == b""
                return found
            found.append(int.from_bytes(number, "big"))

    def replay(self, start: int) -> list[int]:
        self.ask(b"", start.to_bytes(8, "big"))
        return self.answers()


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    made = Consumer()
    yield made
    # With whatever else a test that failed has left open there: `term` would wait for it for ever.
    made.context.destroy(linger=0)


def in_step(publisher: ZmqPublisher, consumer: Consumer) -> int:
    """Publish until what was published last has come; the next number. What comes before that may
    have been dropped where a consumer reads little."""

    def has_come() -> bool:
        publisher.publish([cleared()])
        last = publisher._next_number - 1
        while consumer.sub.poll(20):
            if consumer.next_live()[1] == last:
                return True
        return False

    wait_until(has_come)
    return publisher._next_number


def test_a_batch_is_three_frames_in_vllms_form(consumer: Consumer) -> None:
    with ZmqPublisher(
        LOOPBACK, topic="kv", data_parallel_rank=2, clock=SetClock(), is_bound=True
    ) as publisher:
        consumer.subscribe(publisher.endpoint, b"kv")
        number = in_step(publisher, consumer)
        publisher.publish([removed(7), cleared()])
        topic, found, body = consumer.next_live()
    assert (topic, found) == (b"kv", number)
    assert body.hex() == (
        "93cb41d954fc40200000928"
        "4a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391"
        "07a66d656469756da3435055a967726f75705f69647800"
        "81a474797065b0416c6c426c6f636b73436c6561726564"
        "02"
    )


def test_events_of_one_call_are_cut_into_bounded_batches_in_order(consumer: Consumer) -> None:
    with ZmqPublisher(LOOPBACK, batch_blocks_max=4) as publisher:
        consumer.subscribe(publisher.endpoint)
        number = in_step(publisher, consumer)
        publisher.publish([stored(1, 2, 3), removed(4), stored(*range(10, 19)), cleared()])
        batches = [consumer.next_live() for _ in range(4)]
    assert [found for _, found, _ in batches] == list(range(number, number + 4))
    decoded = [msgspec.msgpack.decode(body, type=EventBatch) for _, _, body in batches]
    assert decoded[0].events == [stored(1, 2, 3), removed(4)]
    sizes = [[len(getattr(e, "block_hashes", [])) for e in batch.events] for batch in decoded]
    assert sizes == [[3, 1], [4], [4], [1, 0]]


def test_replays_are_answered_from_the_number_on(consumer: Consumer) -> None:
    with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK) as publisher:
        assert publisher.replay_endpoint is not None
        consumer.dealer.connect(publisher.replay_endpoint)
        assert consumer.replay(0) == [], "also when nothing was published"
        for number in range(300):
            publisher.publish([stored(number)])
        wait_until(lambda: publisher.stats().batches == 300)
        assert consumer.replay(0) == list(range(300))
        assert consumer.replay(298) == [298, 299]
        assert consumer.replay(300) == []
        assert consumer.replay(2**64 - 1) == []
        # Counted after the answer was sent.
        wait_until(lambda: publisher.stats().replays == 5)
        stats = publisher.stats()
    assert (stats.replays, stats.buffered, stats.requests_malformed) == (5, 300, 0)


def test_a_client_may_ask_again_before_it_was_answered(consumer: Consumer) -> None:
    with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK) as publisher:
        consumer.dealer.connect(str(publisher.replay_endpoint))
        for number in range(200):
            publisher.publish([stored(number)])
        wait_until(lambda: publisher.stats().batches == 200)
        for start in (0, 199, 100):
            consumer.ask(b"", start.to_bytes(8, "big"))
        assert [len(consumer.answers()) for _ in range(3)] == [200, 1, 100]


def test_what_is_buffered_no_more_shows_in_the_first_number(consumer: Consumer) -> None:
    with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK, buffer_batches_max=3) as publisher:
        consumer.dealer.connect(str(publisher.replay_endpoint))
        for number in range(10):
            publisher.publish([stored(number)])
        wait_until(lambda: publisher.stats().batches == 10)
        assert consumer.replay(2) == [7, 8, 9]


def test_the_buffer_is_bounded_by_bytes_too_and_keeps_the_newest() -> None:
    history = History(batches_max=10, bytes_max=100)
    for number in (0, 1, 5):
        history.add(number, bytes(40))
    assert (len(history), history.bytes, history.newest) == (2, 80, 5)
    assert history.at_or_after(0) == (1, bytes(40))
    assert history.at_or_after(2) == (5, bytes(40))
    assert history.at_or_after(6) is None
    history.add(6, bytes(500))
    assert (len(history), history.bytes) == (1, 500)


MALFORMED = [
    (b"",),
    (b"12345678",),
    (b"", b"1234567"),
    (b"", b"123456789"),
    (b"", b"", b"12345678"),
    (b"x", b"12345678"),
]


def test_malformed_requests_are_counted_and_ignored(consumer: Consumer) -> None:
    with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK) as publisher:
        consumer.dealer.connect(str(publisher.replay_endpoint))
        publisher.publish([cleared()])
        wait_until(lambda: publisher.stats().batches == 1)
        for frames in MALFORMED:
            consumer.ask(*frames)
        assert consumer.replay(0) == [0]
        assert publisher.stats().requests_malformed == len(MALFORMED)


def test_a_full_queue_drops_counts_and_leaves_a_gap(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread is stopped before the encoder, as a machine may stop it."""
    is_there, goes_on, real = threading.Event(), threading.Event(), publisher_module.Encoder

    class Waits(real):  # type: ignore[misc, valid-type]
        def encode(self, batch: EventBatch) -> bytes:
            is_there.set()
            assert goes_on.wait(PATIENCE_SECONDS)
            return bytes(super().encode(batch))

    monkeypatch.setattr(publisher_module, "Encoder", Waits)
    caplog.set_level(logging.WARNING, "tiering")
    with ZmqPublisher(
        LOOPBACK, replay_endpoint=LOOPBACK, batch_blocks_max=4, queue_blocks_max=9
    ) as publisher:
        consumer.dealer.connect(str(publisher.replay_endpoint))
        publisher.publish([stored(0)])
        assert is_there.wait(PATIENCE_SECONDS)
        publisher.publish([stored(1, 2, 3)])
        publisher.publish([stored(*range(10, 22))])
        assert publisher.stats().dropped == 2, "of three batches one fits"
        publisher.publish([cleared()])
        goes_on.set()
        wait_until(lambda: publisher.stats().batches == 4)
        publisher.publish([cleared()])
        wait_until(lambda: publisher.stats().batches == 5)
        assert consumer.replay(0) == [0, 1, 2, 5, 6]
    told = [record.message for record in caplog.records]
    assert told == [
        "KV events: a batch was dropped: the queue is full (further ones are counted only)"
    ]


def test_what_cannot_be_encoded_is_a_gap_and_nothing_more(consumer: Consumer) -> None:
    with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK) as publisher:
        consumer.dealer.connect(str(publisher.replay_endpoint))
        publisher.publish([stored(0)])
        publisher.publish([removed(2**70)])
        publisher.publish([stored(1)])
        wait_until(lambda: publisher.stats().batches == 2)
        assert publisher.stats().dropped == 1
        assert consumer.replay(0) == [0, 2]


def test_nobody_who_listens_costs_nothing() -> None:
    with ZmqPublisher(LOOPBACK) as publisher:
        for number in range(5000):
            publisher.publish([stored(number)])
        wait_until(lambda: publisher.stats().batches == 5000)
        stats = publisher.stats()
    assert (stats.dropped, stats.queued, stats.blocks, stats.events) == (0, 0, 5000, 5000)


def test_a_consumer_that_does_not_read_costs_only_itself(consumer: Consumer) -> None:
    consumer.sub.set_hwm(1)
    consumer.sub.setsockopt(zmq.RCVBUF, 4096)
    with ZmqPublisher(
        LOOPBACK, unread_batches_max=2, queue_blocks_max=1 << 20, linger_seconds=0.0
    ) as publisher:
        consumer.subscribe(publisher.endpoint)
        in_step(publisher, consumer)
        first = publisher._next_number
        count = 3000
        for _ in range(count):
            publisher.publish([stored(*range(200))])
        wait_until(lambda: publisher.stats().batches == first + count)
        publisher.publish([cleared()])
        found: list[int] = []

        def is_through() -> bool:
            # What it missed is a gap; the last is published again until it finds room.
            publisher.publish([cleared()])
            while consumer.sub.poll(1):
                found.append(consumer.next_live()[1])
            return bool(found) and found[-1] > first + count

        wait_until(is_through)
    assert found == sorted(found)
    assert len(found) < count


def test_a_replay_waits_for_who_reads_slowly_and_loses_nothing(consumer: Consumer) -> None:
    consumer.dealer.set_hwm(1)
    consumer.dealer.setsockopt(zmq.RCVBUF, 4096)
    count = 3000
    with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK, queue_blocks_max=1 << 20) as publisher:
        consumer.dealer.connect(str(publisher.replay_endpoint))
        for number in range(count):
            publisher.publish([stored(*range(number, number + 100))])
        wait_until(lambda: publisher.stats().batches == count)
        consumer.ask(b"", bytes(8))
        wait_until(lambda: publisher._replays is not None and publisher._replays.is_stalled)
        publisher.publish([cleared()])
        wait_until(lambda: publisher.stats().batches == count + 1)
        assert consumer.answers() == list(range(count))


def test_a_client_that_goes_away_or_never_reads_is_given_up(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "STALLED_SECONDS_MAX", 0.2)
    consumer.dealer.set_hwm(1)
    consumer.dealer.setsockopt(zmq.RCVBUF, 4096)
    with ZmqPublisher(
        LOOPBACK, replay_endpoint=LOOPBACK, linger_seconds=0.0, queue_blocks_max=1 << 20
    ) as publisher:
        gone = consumer.context.socket(zmq.DEALER)
        gone.setsockopt(zmq.RCVBUF, 4096)
        gone.set_hwm(1)
        for each in (gone, consumer.dealer):
            each.connect(str(publisher.replay_endpoint))
        for number in range(3000):
            publisher.publish([stored(*range(number, number + 100))])
        wait_until(lambda: publisher.stats().batches == 3000)
        gone.send_multipart((b"", bytes(8)))
        # Seen while it lasts, or when it is over.
        replays_of = publisher._replays
        assert replays_of is not None
        wait_until(lambda: replays_of.is_waiting or replays_of.broken_off)
        gone.close(linger=0)
        consumer.ask(b"", bytes(8))
        wait_until(lambda: publisher.stats().replays_broken_off == 2)


@pytest.mark.slow
def test_too_many_requests_are_ignored_and_counted(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "REQUESTS_MAX", 3)
    consumer.dealer.set_hwm(1)
    consumer.dealer.setsockopt(zmq.RCVBUF, 4096)
    with ZmqPublisher(
        LOOPBACK, replay_endpoint=LOOPBACK, linger_seconds=0.0, queue_blocks_max=1 << 20
    ) as publisher:
        consumer.dealer.connect(str(publisher.replay_endpoint))
        for number in range(3000):
            publisher.publish([stored(*range(number, number + 100))])
        wait_until(lambda: publisher.stats().batches == 3000)
        for _ in range(5):
            consumer.ask(b"", bytes(8))
        wait_until(lambda: publisher.stats().replays_refused == 2)
        assert [len(consumer.answers()) for _ in range(3)] == [3000] * 3


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
def test_ipv6_loopback(consumer: Consumer) -> None:
    with ZmqPublisher("tcp://[::1]:0", replay_endpoint="tcp://[::1]:0") as publisher:
        consumer.subscribe(publisher.endpoint)
        in_step(publisher, consumer)
        assert publisher.endpoint.startswith("tcp://[::1]:")


def test_without_a_wildcard_it_connects_as_vllm_does() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.SUB) as proxy:
        proxy.setsockopt(zmq.SUBSCRIBE, b"")
        proxy.bind(LOOPBACK)
        with ZmqPublisher(proxy.getsockopt_string(zmq.LAST_ENDPOINT)) as publisher:
            assert "connected to" in repr(publisher)

            def has_come() -> bool:
                publisher.publish([cleared()])
                return bool(proxy.poll(5))

            wait_until(has_come)
            proxy.close(linger=0)
    context.term()


def test_closing_sends_what_is_queued_and_waits_for_who_reads(consumer: Consumer) -> None:
    consumer.sub.setsockopt(zmq.RCVBUF, 4096)
    consumer.sub.set_hwm(1)
    publisher = ZmqPublisher(LOOPBACK, queue_blocks_max=1 << 20, linger_seconds=PATIENCE_SECONDS)
    publisher.open()
    consumer.subscribe(publisher.endpoint)
    number = in_step(publisher, consumer)
    for _ in range(2000):
        publisher.publish([stored(*range(200))])
    closing = threading.Thread(target=publisher.close)
    closing.start()
    found = [consumer.next_live()[1] for _ in range(2000)]
    closing.join(PATIENCE_SECONDS)
    assert found == list(range(number, number + 2000))
    publisher.close()
    with pytest.raises(ClosedError):
        publisher.publish([cleared()])
    with pytest.raises(ClosedError):
        publisher.open()
    assert publisher.stats().batches == number + 2000


def test_what_was_published_just_before_the_close_is_sent(consumer: Consumer) -> None:
    """The thread has just seen an empty queue when both happen."""
    publisher = ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK)
    real, seen = publisher._send_some, []

    def send_some(*sockets: Any) -> bool:
        has_more = real(*sockets)
        if not seen and publisher.stats().batches:
            seen.append(has_more)
            publisher.publish([cleared()])
            publisher._is_closing = True
        return has_more

    publisher._send_some = send_some  # type: ignore[method-assign]
    publisher.open()
    publisher.publish([cleared()])
    wait_until(lambda: publisher._has_ended)
    assert (publisher.stats().batches, publisher.stats().dropped) == (2, 0)


async def test_it_serves_a_loop_and_many_threads() -> None:
    async with ZmqPublisher(LOOPBACK, replay_endpoint=LOOPBACK) as publisher:
        publish = publisher.publish
        await asyncio.gather(
            *(asyncio.to_thread(publish, [stored(number)]) for number in range(100))
        )
        publish([cleared()])
        wait_until(lambda: publisher.stats().batches == 101)
    assert not any(thread.name == "tiering-kv-events" for thread in threading.enumerate())


def test_a_thread_that_fails_is_told_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: History, number: int, payload: bytes) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(History, "add", fail)
    with ZmqPublisher(LOOPBACK) as publisher:
        publisher.publish([cleared()])
        wait_until(lambda: publisher._has_ended)
        publisher.publish([cleared()])
        assert publisher.stats().dropped == 1
    assert "the publisher has failed" in caplog.text


def test_without_pyzmq_the_sentence_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError('no zmq here')\n")
    for module in ("publisher", "subscriber"):
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport tiering.events.{module}"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 1
        assert "pyzmq is not installed: install this package with its extra `events`" in done.stderr


def test_events_of_the_core_need_no_pyzmq() -> None:
    code = "import sys, tiering.events, tiering.events.mirror, tiering.events.blocks\n"
    code += "assert 'zmq' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
