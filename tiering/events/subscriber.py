"""Reads a stream of block events in order, each batch once, whoever publishes it: vLLM or we.

One coroutine at a time may read. SUB for what is published, and where there is a replay endpoint a
DEALER, new for each question, for what was missed: at the start, behind each gap, after each
connect, and now and then while nothing comes, for the last batch could have been lost as well.
ZeroMQ reconnects by itself; what cannot be had is told with the next batch, what cannot be read is
counted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

from tiering.clock import Clock, MonotonicClock
from tiering.errors import ClosedError
from tiering.events import sockets, wire
from tiering.events.blocks import EventBatch
from tiering.events.sequencer import Ordered, Question, Sequencer
from tiering.events.sockets import parse_monitor_message, zmq

log = logging.getLogger("tiering")

AsyncSocket = zmq.asyncio.Socket

_MESSAGES_A_TURN = 1000
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


@dataclass(frozen=True, slots=True)
class Received:
    """A batch and its number. `missed` batches directly before it could not be had or not be read;
    before the first one that is all that was published until then. Another `incarnation` is another
    publisher at the same place: whatever was known of the one before is void."""

    sequence: int
    batch: EventBatch
    missed: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class SubscriberStats:
    """`missed` batches could not be had, of `undecodable_batches` nothing could be read,
    `undecodable_events` were left out of theirs; `malformed` messages were none. `repeated` batches
    came live and by replay. `replays` were asked for, `replays_failed` ended without an answer."""

    batches: int
    events: int
    missed: int
    undecodable_batches: int
    undecodable_events: int
    malformed: int
    repeated: int
    replays: int
    replays_failed: int
    connects: int
    disconnects: int
    restarts: int


@dataclass(slots=True)
class _Counts:
    batches: int = 0
    events: int = 0
    undecodable_batches: int = 0
    undecodable_events: int = 0
    malformed: int = 0
    replays: int = 0
    replays_failed: int = 0
    connects: int = 0
    disconnects: int = 0


@dataclass(slots=True)
class _Replay:
    """A question that was sent, and when to give it up."""

    question: Question
    socket: AsyncSocket
    give_up_at: float


class EventSubscriber:
    """Within `async with`; then `receive`, or iterate over it.

    `endpoint` and `replay_endpoint` are connected to, a wildcard being this host. `topic` is a
    prefix. A replay that says nothing for `replay_seconds_max` is given up; one is asked for
    whenever nothing came for `probe_seconds`. `unread_batches_max` bounds what is kept here while
    nobody reads or a replay is waited for. Messages are as large as the publisher makes them.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_seconds_max: float = 5.0,
        probe_seconds: float = 5.0,
        unread_batches_max: int = 100_000,
        clock: Clock | None = None,
    ) -> None:
        """`clock` is monotonic. ConfigError for what is no endpoint."""
        self.endpoint = sockets.reachable(sockets.checked("endpoint", endpoint))
        self.replay_endpoint = (
            None
            if replay_endpoint is None
            else sockets.reachable(sockets.checked("replay_endpoint", replay_endpoint))
        )
        self._topic = topic.encode()
        self._replay_seconds_max = replay_seconds_max
        self._probe_seconds = probe_seconds
        self._unread_batches_max = unread_batches_max
        self._clock = clock or MonotonicClock()
        self._sequencer = Sequencer(can_ask=replay_endpoint is not None)
        self._decoder = wire.Decoder()
        self._ready: deque[Received] = deque()
        self._unreadable = 0
        self._counts = _Counts()
        self._has_told = False
        self._is_connected = False
        self._last_heard = 0.0
        self._replay: _Replay | None = None
        # Made on entering.
        self._context: zmq.asyncio.Context | None = None
        self._sub: AsyncSocket | None = None
        self._monitor: AsyncSocket | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a publisher now, as far as ZeroMQ has told while we were reading."""
        return self._is_connected

    @property
    def is_settled(self) -> bool:
        """Whether nothing is held back and no replay is waited for."""
        return not (self._ready or self._sequencer.held or self._sequencer.question)

    async def __aenter__(self) -> Self:
        """ConfigError where the endpoints cannot be used. Does not wait for a publisher."""
        self._context = _context_for(self.endpoint, self.replay_endpoint)
        try:
            self._sub = self._new_socket(zmq.SUB)
            self._sub.subscribe(self._topic)
            self._monitor = self._sub.get_monitor_socket(_WATCHED)
            sockets.connect(self._sub, "endpoint", self.endpoint)
            if sockets.is_in_process(self.endpoint):
                self._sequencer.probe()  # nothing tells of its connection
        except BaseException:
            self._close()
            raise
        self._last_heard = self._clock.now()
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._close()

    async def receive(self, seconds_max: float) -> list[Received]:
        """What has come, in order, waiting for at most so long for the first of it; none then. Safe
        to cancel: nothing is lost."""
        give_up_at = self._clock.now() + seconds_max
        while not self._ready:
            left = give_up_at - self._clock.now()
            await self._turn(max(left, 0.0))
            if left <= 0:
                break
        received = list(self._ready)
        self._ready.clear()
        return received

    async def __aiter__(self) -> AsyncIterator[Received]:
        while True:
            while not self._ready:
                await self._turn(self._probe_seconds)
            yield self._ready.popleft()

    def stats(self) -> SubscriberStats:
        counts, sequencer = self._counts, self._sequencer
        return SubscriberStats(
            **{name: getattr(counts, name) for name in _Counts.__slots__},
            missed=sequencer.missed,
            repeated=sequencer.repeated,
            restarts=sequencer.incarnation,
        )

    def __repr__(self) -> str:
        return f"<EventSubscriber to {self.endpoint}, {self._counts}>"

    # Parts of the above

    async def _turn(self, seconds_max: float) -> None:
        """Wait for something, at most so long, and take in all that is there."""
        if self._sub is None or self._monitor is None:
            raise ClosedError("an EventSubscriber can be used only inside its `async with` block")
        self._ask_what_is_wanted()
        poller = zmq.asyncio.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        if self._sequencer.held < self._unread_batches_max:
            poller.register(self._sub, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay.socket, zmq.POLLIN)
        await poller.poll(int(self._patience(seconds_max) * 1000) + 1)
        # What was published before a replay was answered is to be known before its end is.
        await self._read_monitor(self._monitor)
        await self._read_live(self._sub)
        if self._replay is not None:
            await self._read_replay(self._replay)
        self._look_at_the_clock()
        for ordered in self._sequencer.take():
            self._decode(ordered)

    def _patience(self, seconds_max: float) -> float:
        due = seconds_max
        if self._replay is not None:
            due = min(due, self._replay.give_up_at - self._clock.now())
        elif self.replay_endpoint is not None:
            due = min(due, self._last_heard + self._probe_seconds - self._clock.now())
        return max(due, 0.0)

    def _ask_what_is_wanted(self) -> None:
        question, running = self._sequencer.question, self._replay
        if running is not None and running.question is question:
            return
        self._end_replay()
        if question is None or self.replay_endpoint is None:
            return
        dealer = self._new_socket(zmq.DEALER)
        try:
            sockets.connect(dealer, "replay_endpoint", self.replay_endpoint)
            # Into a queue of its own; there is nothing to wait for.
            zmq.Socket.shadow(dealer.underlying).send_multipart(
                (b"", wire.packed(question.start)), zmq.NOBLOCK
            )
        except BaseException:
            dealer.close(linger=0)
            raise
        self._counts.replays += 1
        give_up_at = self._clock.now() + self._replay_seconds_max
        self._replay = _Replay(question, dealer, give_up_at)

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.socket.close(linger=0)
            self._replay = None
            self._last_heard = self._clock.now()

    def _look_at_the_clock(self) -> None:
        now = self._clock.now()
        if self._replay is not None:
            if now >= self._replay.give_up_at:
                self._counts.replays_failed += 1
                self._sequencer.ended(self._replay.question, is_whole=False)
                self._end_replay()
        elif now - self._last_heard >= self._probe_seconds:
            self._last_heard = now
            self._sequencer.probe()

    async def _read_monitor(self, monitor: AsyncSocket) -> None:
        while (frames := await _next_of(monitor)) is not None:
            happened = parse_monitor_message(frames)["event"]
            self._is_connected = happened == zmq.Event.HANDSHAKE_SUCCEEDED
            if self._is_connected:
                self._counts.connects += 1
                self._sequencer.reconnected()
            else:
                self._counts.disconnects += 1

    async def _read_live(self, sub: AsyncSocket) -> None:
        for _ in range(_MESSAGES_A_TURN):
            if self._sequencer.held >= self._unread_batches_max:
                return
            frames = await _next_of(sub)
            if frames is None:
                return
            self._last_heard = self._clock.now()
            try:
                number, payload = wire.live(frames)
            except wire.NotDecodable as error:
                self._tell_malformed(error)
                continue
            if number is not None:
                self._sequencer.live(number, payload)

    async def _read_replay(self, replay: _Replay) -> None:
        for _ in range(_MESSAGES_A_TURN):
            if self._sequencer.question is not replay.question:
                return
            frames = await _next_of(replay.socket)
            if frames is None:
                return
            replay.give_up_at = self._clock.now() + self._replay_seconds_max
            try:
                number, payload = wire.answer(frames)
            except wire.NotDecodable as error:
                self._tell_malformed(error)
                continue
            if number is None:
                self._sequencer.ended(replay.question, is_whole=True)
                self._end_replay()
                return
            self._sequencer.replayed(replay.question, number, payload)

    def _decode(self, ordered: Ordered) -> None:
        try:
            batch, troubles = self._decoder.decode(ordered.payload)
        except wire.NotDecodable as error:
            self._counts.undecodable_batches += 1
            self._unreadable += ordered.missed + 1
            self._tell(ordered.number, str(error))
            return
        if troubles:
            self._counts.undecodable_events += len(troubles)
            self._tell(ordered.number, troubles[0])
        self._counts.batches += 1
        self._counts.events += len(batch.events)
        missed, self._unreadable = ordered.missed + self._unreadable, 0
        self._ready.append(Received(ordered.number, batch, missed, ordered.incarnation))

    def _tell_malformed(self, error: Exception) -> None:
        self._counts.malformed += 1
        self._tell(None, str(error))

    def _tell(self, number: int | None, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            which = "a message" if number is None else f"batch {number}"
            told = "KV events: %s of %s cannot be read: %s (further ones are counted only)"
            log.warning(told, which, self.endpoint, why)

    def _new_socket(self, kind: int) -> AsyncSocket:
        assert self._context is not None
        made = self._context.socket(kind)
        made.set_hwm(self._unread_batches_max)
        return made

    def _close(self) -> None:
        self._end_replay()
        if self._sub is not None:
            if self._monitor is not None:
                self._sub.disable_monitor()
            self._sub.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        if self._context is not None and not sockets.is_in_process(
            self.endpoint, self.replay_endpoint
        ):
            self._context.term()
        self._context = self._sub = self._monitor = None


def _context_for(*endpoints: str | None) -> zmq.asyncio.Context:
    """Of its own; inproc is only within one, so that is the process's."""
    if sockets.is_in_process(*endpoints):
        return zmq.asyncio.Context(zmq.Context.instance())
    return zmq.asyncio.Context()


async def _next_of(of: AsyncSocket) -> list[bytes] | None:
    """A message that is there; None where there is none. Does not wait."""
    try:
        return await of.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
