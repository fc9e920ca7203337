"""Answers to those who missed something: the replay side of a publisher.

Used by the publisher's thread only. Each client's requests are answered in their order, all clients
in turn, a bounded number of batches at a time, so that live batches never wait for a replay. A
client that does not read is waited for, not answered with holes, and given up after a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tiering.clock import Clock
from tiering.events.history import History
from tiering.events.sockets import Socket, zmq
from tiering.events.wire import END_OF_REPLAY, NotDecodable, number_in, packed

REQUESTS_MAX = 64
"""That wait at one time; further ones are ignored, and asked again by whoever needs them."""
REQUEST_BYTES_MAX = 1024
STALLED_SECONDS_MAX = 10.0

_REQUEST_FRAMES = 3
_REQUESTS_A_TURN = 64
_ANSWERS_A_TURN = 64


@dataclass(slots=True)
class _Client:
    """`starts`: the first number of each request. Of the one being answered, `next_number` is what
    comes next and `last` where it ends; None where it has not begun."""

    starts: deque[int] = field(default_factory=deque)
    next_number: int | None = None
    last: int = -1
    moved_at: float = 0.0
    is_stalled: bool = False


class Replays:
    """Over a ROUTER that is bound already, and that it does not close. The counters may be read
    from any thread."""

    def __init__(self, router: Socket, topic: bytes, history: History, clock: Clock) -> None:
        self._router = router
        # Else answers to a client that reads slowly would be dropped without a word.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._topic = topic
        self._history = history
        self._clock = clock
        self.served = 0
        self.refused = 0
        self.broken_off = 0
        self.malformed = 0
        self._clients: dict[bytes, _Client] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a request is still to be answered."""
        return bool(self._clients)

    @property
    def is_stalled(self) -> bool:
        """Whether nothing can be answered until some client reads."""
        return self.is_waiting and all(client.is_stalled for client in self._clients.values())

    def turn(self) -> None:
        """Take in what is asked, and answer some of it."""
        for _ in range(_REQUESTS_A_TURN):
            try:
                self._take(self._router.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        for identity, client in list(self._clients.items()):
            if not self._serve(identity, client):
                del self._clients[identity]

    def _take(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != _REQUEST_FRAMES or frames[1]:
                raise NotDecodable("no request")
            start = number_in(frames[2])
        except NotDecodable:
            self.malformed += 1
            return
        if sum(len(client.starts) for client in self._clients.values()) >= REQUESTS_MAX:
            self.refused += 1
            return
        client = self._clients.setdefault(frames[0], _Client(moved_at=self._clock.now()))
        client.starts.append(start)

    def _serve(self, identity: bytes, client: _Client) -> bool:
        """False once nothing is left to do for the client, or it is gone."""
        try:
            for _ in range(_ANSWERS_A_TURN):
                self._answer(identity, client)
                client.moved_at, client.is_stalled = self._clock.now(), False
                if not client.starts:
                    return False
        except zmq.Again:
            client.is_stalled = True
            if self._clock.now() - client.moved_at < STALLED_SECONDS_MAX:
                return True
        except zmq.ZMQError:
            pass  # most likely it has gone
        else:
            return True
        self.broken_off += len(client.starts)
        return False

    def _answer(self, identity: bytes, client: _Client) -> None:
        """One batch, or the end. Raises zmq.Again, and then nothing was sent."""
        if client.next_number is None:
            newest = self._history.newest
            client.next_number = client.starts[0]
            client.last = -1 if newest is None else newest
        found = self._history.at_or_after(client.next_number)
        if found is None or found[0] > client.last:
            self._send(identity, b"", END_OF_REPLAY, b"")
            client.starts.popleft()
            client.next_number = None
            self.served += 1
            return
        number, payload = found
        self._send(identity, self._topic, packed(number), payload)
        client.next_number = number + 1

    def _send(self, identity: bytes, *frames: bytes) -> None:
        self._router.send_multipart((identity, b"", *frames), zmq.NOBLOCK)
