"""Publishes block events in vLLM's format: PUB, and a replay ROUTER, in a thread of its own.

For programs; under vLLM its own publisher sends what the connector hands over. `publish` may be
called from any thread and from a loop: it never blocks, and no consumer can make it fail. What does
not fit into the bounded queue is dropped, counted, and seen by every consumer as a gap, since each
batch uses up a sequence number whether it is sent or not.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from tiering.clock import Clock, MonotonicClock, UnixClock
from tiering.errors import ClosedError, ConfigError
from tiering.events import sockets
from tiering.events.blocks import BlockEvent, EventBatch, blocks_in
from tiering.events.cutting import cut, weight
from tiering.events.history import History
from tiering.events.replays import REQUEST_BYTES_MAX, Replays
from tiering.events.sockets import Socket, zmq
from tiering.events.wire import Encoder, packed

log = logging.getLogger("tiering")

_BATCHES_A_TURN = 256
_STALLED_POLL_MS = 10
_JOIN_SLACK_SECONDS = 5.0
_MILLISECONDS_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """`batches`, `events` and `blocks` were sent; `dropped` batches were not, each of them a gap.
    `queued` blocks are still to be sent, `buffered` batches can be replayed. `replays` were
    answered to the end, others refused, broken off or malformed."""

    batches: int
    events: int
    blocks: int
    dropped: int
    queued: int
    buffered: int
    buffered_bytes: int
    replays: int
    replays_refused: int
    replays_broken_off: int
    requests_malformed: int


class _Queued(NamedTuple):
    number: int
    batch: EventBatch
    weight: int


class ZmqPublisher:
    """Between `with` or `async with`, or between `open` and `close`.

    `endpoint` is bound or connected to as vLLM does it: bound with a wildcard, a port of 0, ipc or
    inproc, else connected to, as for a proxy; `is_bound` says which instead. `replay_endpoint` is
    always bound. For a data-parallel rank above 0 both change as in vLLM: the port plus the rank.

    `batch_blocks_max` bounds a message, `queue_blocks_max` what waits to be sent (each event counts
    as one block at least), `buffer_batches_max` and `buffer_bytes_max` what can be replayed,
    `unread_batches_max` what is kept for a consumer that does not read, beyond which ZeroMQ drops
    for that one. `linger_seconds` is what `close` waits at most for consumers to read.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        data_parallel_rank: int = 0,
        is_bound: bool | None = None,
        batch_blocks_max: int = 1024,
        queue_blocks_max: int = 262_144,
        buffer_batches_max: int = 10_000,
        buffer_bytes_max: int = 256 << 20,
        unread_batches_max: int = 100_000,
        linger_seconds: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        """`clock` counts from 1970. ConfigError for an endpoint or a bound that cannot be used."""
        _require(
            1,
            batch_blocks_max=batch_blocks_max,
            queue_blocks_max=queue_blocks_max,
            buffer_batches_max=buffer_batches_max,
            buffer_bytes_max=buffer_bytes_max,
            unread_batches_max=unread_batches_max,
        )
        _require(0, linger_seconds=linger_seconds, data_parallel_rank=data_parallel_rank)
        if batch_blocks_max > queue_blocks_max:
            told = f"is more than queue_blocks_max = {queue_blocks_max}"
            raise ConfigError("batch_blocks_max", batch_blocks_max, told, "write at most that")
        rank = data_parallel_rank
        self.endpoint = sockets.of_rank("endpoint", endpoint, rank)
        self.replay_endpoint = (
            None
            if replay_endpoint is None
            else sockets.of_rank("replay_endpoint", replay_endpoint, rank)
        )
        by_convention = sockets.is_bound_by_convention(self.endpoint)
        self._is_bound = by_convention if is_bound is None else is_bound
        self._topic = topic.encode()
        self._rank = rank
        self._batch_blocks_max = batch_blocks_max
        self._queue_blocks_max = queue_blocks_max
        self._unread_batches_max = unread_batches_max
        self._linger_ms = min(int(linger_seconds * 1000), _MILLISECONDS_MAX)
        self._clock = clock or UnixClock()
        self._history = History(buffer_batches_max, buffer_bytes_max)
        # Of both threads, under the lock.
        self._lock = threading.Lock()
        self._queue: deque[_Queued] = deque()
        self._queued_blocks = 0
        self._next_number = 0
        self._dropped = 0
        self._is_closing = False
        self._has_ended = False
        # Of the publisher's own thread; anyone may read.
        self._batches = self._events = self._blocks = 0
        # Made by `open`.
        self._context: zmq.Context[Socket] | None = None
        self._replays: Replays | None = None
        self._bell = -1
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Bind, and begin. ConfigError where the endpoints cannot be used, and then nothing is
        left open. `endpoint` and `replay_endpoint` have the real ports afterwards."""
        if self._thread is not None or self._is_closing:
            raise ClosedError("a ZmqPublisher can be opened once")
        is_shared = sockets.is_in_process(self.endpoint, self.replay_endpoint)
        context = zmq.Context.instance() if is_shared else zmq.Context()
        opened: list[Socket] = []
        try:
            pub = context.socket(zmq.PUB)
            opened.append(pub)
            pub.set_hwm(self._unread_batches_max)
            if self._is_bound:
                self.endpoint = sockets.bind(pub, "endpoint", self.endpoint)
            else:
                sockets.connect(pub, "endpoint", self.endpoint)
                log.info("KV events: connected to %s, where somebody must bind", self.endpoint)
            if self.replay_endpoint is not None:
                router = context.socket(zmq.ROUTER)
                opened.append(router)
                router.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
                self.replay_endpoint = sockets.bind(router, "replay_endpoint", self.replay_endpoint)
                self._replays = Replays(router, self._topic, self._history, MonotonicClock())
        except BaseException:
            for each in opened:
                sockets.close(each, 0, is_bound=self._is_bound)
            if not is_shared:
                context.term()
            raise
        self._context = None if is_shared else context
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=opened, daemon=True, name="tiering-kv-events"
        )
        self._thread.start()

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Put `events`, which are handed over, in order into the queue; ClosedError before `open`
        and after `close`, nothing else."""
        ts = self._clock.now()
        batches = [
            (EventBatch(ts, batch, self._rank), weight(batch))
            for batch in cut(events, self._batch_blocks_max)
        ]
        with self._lock:
            if self._thread is None or self._is_closing:
                raise ClosedError("a ZmqPublisher publishes only while it is open")
            for batch, blocks in batches:
                number, self._next_number = self._next_number, self._next_number + 1
                if self._has_ended:
                    self._drop("the publisher has failed")
                elif self._queued_blocks + blocks > self._queue_blocks_max:
                    self._drop("the queue is full")
                else:
                    self._queue.append(_Queued(number, batch, blocks))
                    self._queued_blocks += blocks
            if not self._has_ended:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Send what is queued, wait for consumers to read it, `linger_seconds` at most, and end.
        Blocks; a second call does nothing."""
        with self._lock:
            thread, is_first = self._thread, not self._is_closing
            self._is_closing = True
            if thread is None or not is_first:
                return
            if not self._has_ended:
                os.eventfd_write(self._bell, 1)
        thread.join(self._linger_ms / 1000 + _JOIN_SLACK_SECONDS)

    def stats(self) -> PublisherStats:
        """From any thread. Where nothing is queued, all that was published is counted."""
        queued, replays = self._queued_blocks, self._replays
        return PublisherStats(
            batches=self._batches,
            events=self._events,
            blocks=self._blocks,
            dropped=self._dropped,
            queued=queued,
            buffered=len(self._history),
            buffered_bytes=self._history.bytes,
            replays=replays.served if replays else 0,
            replays_refused=replays.refused if replays else 0,
            replays_broken_off=replays.broken_off if replays else 0,
            requests_malformed=replays.malformed if replays else 0,
        )

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        how = "bound to" if self._is_bound else "connected to"
        return f"<ZmqPublisher {how} {self.endpoint}, next {self._next_number}>"

    # The thread

    def _run(self, pub: Socket, router: Socket | None = None) -> None:
        encoder, poller, replays = Encoder(), zmq.Poller(), self._replays
        poller.register(self._bell, zmq.POLLIN)
        if router is not None:
            poller.register(router, zmq.POLLIN)
        try:
            while True:
                # Before the queue: nothing is put there once this is so.
                is_closing = self._is_closing
                has_more = self._send_some(pub, encoder)
                if replays is not None:
                    replays.turn()
                if is_closing and not has_more:
                    break
                ready = dict(poller.poll(_patience_ms(has_more, replays)))
                if self._bell in ready:
                    os.eventfd_read(self._bell)
        except Exception:
            log.exception("KV events: the publisher has failed; what follows is dropped")
        finally:
            self._end(pub, router)

    def _send_some(self, pub: Socket, encoder: Encoder) -> bool:
        """Whether there is more to send."""
        for _ in range(_BATCHES_A_TURN):
            with self._lock:
                if not self._queue:
                    return False
                # One at a time: what stays in the queue is counted, whatever happens to this one.
                number, batch, blocks = self._queue.popleft()
            why_not = self._send(pub, encoder, number, batch)
            with self._lock:
                self._queued_blocks -= blocks
                if why_not:
                    self._drop(why_not)
        return True

    def _send(self, pub: Socket, encoder: Encoder, number: int, batch: EventBatch) -> str:
        """Why it cannot be sent; "" if it was."""
        try:
            payload = encoder.encode(batch)
            pub.send_multipart((self._topic, packed(number), payload), zmq.NOBLOCK)
        except (TypeError, ValueError, OverflowError, zmq.ZMQError) as error:
            return str(error) or type(error).__name__
        self._history.add(number, payload)
        self._batches += 1
        self._events += len(batch.events)
        self._blocks += sum(map(blocks_in, batch.events))
        return ""

    def _drop(self, why: str) -> None:
        """Under the lock."""
        self._dropped += 1
        if self._dropped == 1:
            log.warning("KV events: a batch was dropped: %s (further ones are counted only)", why)

    def _end(self, pub: Socket, router: Socket | None) -> None:
        with self._lock:
            self._has_ended = True
            for each in self._queue:
                self._drop(f"batch {each.number} was not sent")
            self._queue.clear()
            self._queued_blocks = 0
            os.close(self._bell)
        sockets.close(pub, self._linger_ms, is_bound=self._is_bound)
        if router is not None:
            sockets.close(router, self._linger_ms, is_bound=True)
        if self._context is not None:
            self._context.term()


def _require(least: int, **values: float) -> None:
    for key, value in values.items():
        if not least <= value < math.inf:
            told = f"is not a number from {least} on"
            raise ConfigError(key, value, told, f"write {least} or more")


def _patience_ms(has_more: bool, replays: Replays | None) -> int | None:
    """How long to wait for something new; None for as long as it takes."""
    if has_more or (replays is not None and replays.is_waiting and not replays.is_stalled):
        return 0
    return _STALLED_POLL_MS if replays is not None and replays.is_waiting else None
