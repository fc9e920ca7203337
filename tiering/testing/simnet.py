"""A network that is none: ZeroMQ's sockets as the control plane of peers uses them, in one loop.

A message is late, lost, doubled or held up as a simulated run wants; otherwise it comes once and
in order, as over TCP. A connection that is cut is made again by itself, under a name that its other
end has not seen before, and what was on its way is lost. Who sends to a name that is gone, or to
somebody who takes nothing for long, is told that it was not taken.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tiering.peers import sockets
from tiering.peers.addresses import Address
from tiering.testing.simprocess import Process, current

DELAYS_SECONDS = (0.0002, 0.0005, 0.001, 0.005, 0.02)
RETRY_SECONDS = (0.1, 0.3, 1.0)
LOOK_AGAIN_SECONDS = 0.1
LATE_SECONDS = (0.5, 3.0, 6.0, 12.0)

_TYPE = b"\xa4type"

Listener = Callable[[list[bytes]], None]


class Moment(enum.Enum):
    """When a fault may strike at a message."""

    SENT = "sent"
    CAME = "came"
    TAKEN = "taken"


class Fate(enum.Enum):
    """What becomes of a message that was just sent."""

    PASSES = "passes"
    IS_LOST = "is lost"
    COMES_TWICE = "comes twice"
    IS_LATE = "is late"


class Node:
    """One start of an engine, as the network knows it. `is_dark`: nothing comes from it, nor gets
    there, and nobody is told."""

    def __init__(self, host: str, process: Process) -> None:
        self.host = host
        self.process = process
        self.is_dark = False

    def __repr__(self) -> str:
        return f"<Node {self.process.name}{' dark' if self.is_dark else ''}>"


Told = Callable[[Moment, str, Node, Node], Fate]
"""Looks at each message: when, of which type, from whom, to whom."""


class SimNet:
    """One for a run. `told` may be set."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chance: random.Random) -> None:
        self.loop = loop
        self.chance = chance
        self.told: Told = lambda moment, kind, sender, receiver: Fate.PASSES
        self.routers: dict[Address, SimRouter] = {}
        self.connections: set[_Connection] = set()
        self._nodes: dict[Process, Node] = {}
        self._stalled: dict[frozenset[str], float] = {}

    def add(self, host: str, process: Process) -> Node:
        node = self._nodes[process] = Node(host, process)
        return node

    def node(self) -> Node:
        """Of the process that calls this."""
        return self._nodes[current()]

    def delay_seconds(self) -> float:
        return self.chance.choice(DELAYS_SECONDS) * self.chance.random()

    def stall(self, one: Node, other: Node, seconds: float) -> None:
        """Nothing gets from one host to the other for a while, and nothing is lost."""
        pair = frozenset((one.host, other.host))
        until = self.loop.time() + seconds
        self._stalled[pair] = max(until, self._stalled.get(pair, until))

    def is_passable(self, one: Node, other: Node) -> bool:
        until = self._stalled.get(frozenset((one.host, other.host)), 0.0)
        return not (one.is_dark or other.is_dark) and self.loop.time() >= until

    def cut(self, one: Node, other: Node) -> None:
        """Whatever connects the two breaks."""
        for each in self._between(one, other):
            each.cut()

    def crash(self, node: Node) -> None:
        """Its process is dead. What it had said may still arrive; then its connections break."""
        self._unbind(node)
        for each in self._of(node):
            if self.chance.random() < 0.5:
                each.end(node)
            else:
                each.cut()

    def darken(self, node: Node) -> None:
        """It has no power any more: nothing breaks, nothing comes."""
        node.is_dark = True
        self._unbind(node)

    def forget(self, node: Node) -> None:
        """Another engine is where `node` was: what still counts on it is told so."""
        for each in self._of(node):
            each.cut()

    def mend(self) -> None:
        self._stalled.clear()

    def _of(self, node: Node) -> list[_Connection]:
        return [each for each in self.connections_in_order() if node in each.ends]

    def _between(self, one: Node, other: Node) -> list[_Connection]:
        return [each for each in self._of(one) if other in each.ends]

    def connections_in_order(self) -> list[_Connection]:
        return sorted(self.connections, key=lambda each: each.number)

    def _unbind(self, node: Node) -> None:
        for at, router in list(self.routers.items()):
            if router.node is node:
                del self.routers[at]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of ZeroMQ, for control planes that are opened meanwhile."""
        before = sockets.Context, sockets.router, sockets.dealer
        made: tuple[Any, ...] = (
            _Context,
            lambda context, listener, ipv6: SimRouter(self, listener),
            lambda context, listener, ipv6: SimDealer(self, listener),
        )
        sockets.Context, sockets.router, sockets.dealer = made
        try:
            yield
        finally:
            sockets.Context, sockets.router, sockets.dealer = before


class _Context:
    def term(self) -> None:
        """Nothing is left to leave."""


class _Way:
    """One direction of a connection: in order, each message after its delay."""

    def __init__(self, net: SimNet, source: Node, target: Node, take: Listener) -> None:
        self._net = net
        self._source = source
        self._target = target
        self._take = take
        self._queue: deque[tuple[float, str, list[bytes]]] = deque()
        self._last = 0.0
        self._is_due = False
        self._emptied: Callable[[], None] | None = None
        self.is_over = False

    def put(self, frames: Sequence[bytes]) -> bool:
        if len(self._queue) >= 2 * sockets.QUEUED_MESSAGES_MAX:
            return False
        if self.is_over or self._source.is_dark or self._source.process.is_dead:
            return True
        net, kind = self._net, _kind_of(frames[0])
        fate = net.told(Moment.SENT, kind, self._source, self._target)
        if fate is Fate.IS_LOST or self.is_over:
            return True
        late = net.chance.choice(LATE_SECONDS) if fate is Fate.IS_LATE else 0.0
        self._last = max(self._last, net.loop.time() + net.delay_seconds() + late)
        for _ in range(2 if fate is Fate.COMES_TWICE else 1):
            self._queue.append((self._last, kind, list(frames)))
        self._pump_at(self._last)
        return True

    def when_empty(self, then: Callable[[], None]) -> None:
        self._emptied = then
        if not self._queue:
            then()

    def stop(self) -> None:
        self.is_over = True
        self._queue.clear()

    def _pump_at(self, when: float) -> None:
        if not self._is_due:
            self._is_due = True
            self._net.loop.call_at(when, self._pump, context=self._target.process.context)

    def _pump(self) -> None:
        self._is_due = False
        net, now = self._net, self._net.loop.time()
        while self._queue and self._queue[0][0] <= now:
            if not net.is_passable(self._source, self._target):
                self._pump_at(now + LOOK_AGAIN_SECONDS)
                return
            _, kind, frames = self._queue.popleft()
            net.told(Moment.CAME, kind, self._source, self._target)
            if self._target.process.is_stopped:
                self._queue.appendleft((now, kind, frames))
                break
            self._take(frames)  # though the connection may have broken behind it
            net.told(Moment.TAKEN, kind, self._source, self._target)
        if self._queue:
            self._pump_at(self._queue[0][0])
        elif self._emptied is not None:
            self._emptied()


def _kind_of(message: bytes) -> str:
    """What a message has under "type", which is the first of its fields."""
    at = message.index(_TYPE) + len(_TYPE)
    return message[at + 1 : at + 1 + (message[at] & 0x1F)].decode()


class _Connection:
    """Between a dealer and a router, until it is cut."""

    def __init__(self, net: SimNet, dealer: SimDealer, router: SimRouter, number: int) -> None:
        self.number = number
        self.name = number.to_bytes(5, "big")
        self.ends = (dealer.node, router.node)
        self._net = net
        self._dealer = dealer
        self._router = router
        self.up = _Way(net, dealer.node, router.node, self._at_router)
        self.down = _Way(net, router.node, dealer.node, dealer.take)
        router.names[self.name] = self
        net.connections.add(self)

    def cut(self) -> None:
        self.up.stop()
        self.down.stop()
        if self in self._net.connections:
            self._net.connections.discard(self)
            self._router.names.pop(self.name, None)
            self._dealer.lost(self)

    def end(self, node: Node) -> None:
        """`node` says nothing more: what it has said arrives, and then it is cut."""
        mine, theirs = (self.up, self.down) if node is self.ends[0] else (self.down, self.up)
        theirs.stop()
        mine.when_empty(self.cut)

    def _at_router(self, frames: list[bytes]) -> None:
        self._router.take([self.name, *frames])


class _Pipe:
    """What routers and dealers have in common. One belongs to the process that makes it."""

    def __init__(self, net: SimNet, listener: Listener) -> None:
        self.node = net.node()
        self._net = net
        self._listener = listener
        self.is_closed = False

    def take(self, frames: list[bytes]) -> None:
        if not self.is_closed:
            self._listener(frames)


class SimRouter(_Pipe):
    def __init__(self, net: SimNet, listener: Listener) -> None:
        super().__init__(net, listener)
        self.names: dict[bytes, _Connection] = {}

    def bind(self, key: str, address: Address, rank: int) -> Address:
        del key, rank
        assert address not in self._net.routers
        self._net.routers[address] = self
        return address

    def send(self, frames: Sequence[bytes]) -> bool:
        name, *rest = frames
        connection = self.names.get(name)
        return connection is not None and connection.down.put(rest)

    def close(self, linger_ms: int = 0) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._net._unbind(self.node)
            for connection in list(self.names.values()):
                connection.end(self.node) if linger_ms else connection.cut()


class SimDealer(_Pipe):
    def __init__(self, net: SimNet, listener: Listener) -> None:
        super().__init__(net, listener)
        self._at: Address | None = None
        self._connection: _Connection | None = None
        self._waiting: deque[Sequence[bytes]] = deque()

    def connect(self, address: Address) -> None:
        self._at = address
        self._later(self._net.delay_seconds())

    def send(self, frames: Sequence[bytes]) -> bool:
        if self._connection is not None:
            return self._connection.up.put(frames)
        if len(self._waiting) >= sockets.QUEUED_MESSAGES_MAX:
            return False
        self._waiting.append(tuple(frames))
        return True

    def close(self, linger_ms: int = 0) -> None:
        if not self.is_closed:
            self.is_closed = True
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.end(self.node) if linger_ms else connection.cut()

    def lost(self, connection: _Connection) -> None:
        if self._connection is connection:
            self._connection = None
        if not self.is_closed:
            self._later(self._net.chance.choice(RETRY_SECONDS))

    def _later(self, seconds: float) -> None:
        self._net.loop.call_later(seconds, self._attempt, context=self.node.process.context)

    def _attempt(self) -> None:
        if self.is_closed or self._connection is not None or self._at is None:
            return
        net = self._net
        router = net.routers.get(self._at)
        if (
            router is None
            or router.node.process.is_stopped
            or not net.is_passable(self.node, router.node)
        ):
            self._later(net.chance.choice(RETRY_SECONDS))
            return
        self._connection = _Connection(net, self, router, net.chance.getrandbits(40))
        while self._waiting and self._connection is not None:
            self._connection.up.put(self._waiting.popleft())
