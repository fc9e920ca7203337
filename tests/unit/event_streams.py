"""What the tests of KV events share: events, waiting for something to be so, a bare publisher."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import zmq

from tiering.events.blocks import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from tiering.events.subscriber import EventSubscriber, Received

LOOPBACK = "tcp://127.0.0.1:0"
PATIENCE_SECONDS = 60.0
SIZE = 4


def stored(
    *hashes: int, parent: int | None = None, medium: str | None = MEDIUM_CPU, group: int | None = 0
) -> BlockStored:
    """Blocks that follow one another, of 4 tokens each."""
    tokens = [token for each in hashes for token in range(each % 1000, each % 1000 + SIZE)]
    return BlockStored(list(hashes), parent, tokens, SIZE, None, medium, None, group_idx=group)


def removed(*hashes: int, medium: str | None = MEDIUM_CPU, group: int | None = 0) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, group)


def cleared() -> AllBlocksCleared:
    return AllBlocksCleared()


def placeholder(last: int, medium: str = MEDIUM_CPU) -> BlockStored:
    return BlockStored([last], None, [], 0, None, medium, None)


def payload(*events: BlockEvent, ts: float = 1.0) -> bytes:
    return msgspec.msgpack.encode(EventBatch(ts, list(events), 0))


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.002)


async def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.002)


async def receive(subscriber: EventSubscriber, count: int) -> list[Received]:
    """The next `count` batches."""
    found: list[Received] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} came: {subscriber.stats()}"
        found += await subscriber.receive(0.1)
    return found


async def receive_until(subscriber: EventSubscriber, is_so: Callable[[], object]) -> list[Received]:
    """What comes until it is so, reading all the time."""
    found: list[Received] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"it did not come to be: {subscriber.stats()}"
        found += await subscriber.receive(0.02)
    return found


def numbers(received: list[Received]) -> list[int]:
    return [each.sequence for each in received]


@dataclass
class BarePublisher:
    """A PUB and a ROUTER under a test's control; XPUB, so that a subscription can be awaited."""

    pub: zmq.Socket[bytes]
    router: zmq.Socket[bytes]
    endpoint: str
    replay_endpoint: str
    subscriptions: int = 0
    requests: list[list[bytes]] = field(default_factory=list)

    def send(self, number: int, body: bytes, topic: bytes = b"") -> None:
        self.pub.send_multipart((topic, number.to_bytes(8, "big"), body))

    def count_subscriptions(self) -> int:
        while self.pub.poll(0):
            self.subscriptions += self.pub.recv()[:1] == b"\x01"
        return self.subscriptions

    def count_requests(self) -> int:
        while self.router.poll(0):
            self.requests.append(self.router.recv_multipart())
        return len(self.requests)

    def answer(self, request: int, *answers: tuple[int, bytes], is_whole: bool = True) -> None:
        identity = self.requests[request][0]
        for number, body in answers:
            frames = (identity, b"", b"", number.to_bytes(8, "big"), body)
            self.router.send_multipart(frames)
        if is_whole:
            self.router.send_multipart((identity, b"", b"", b"\xff" * 8, b""))


@contextmanager
def bare_publisher(endpoint: str = LOOPBACK, replay: str = LOOPBACK) -> Iterator[BarePublisher]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    pub.setsockopt(zmq.XPUB_VERBOSE, 1)
    try:
        pub.bind(endpoint)
        router.bind(replay)
        yield BarePublisher(
            pub,
            router,
            pub.getsockopt_string(zmq.LAST_ENDPOINT),
            router.getsockopt_string(zmq.LAST_ENDPOINT),
        )
    finally:
        pub.close(linger=0)
        router.close(linger=0)
        context.term()
