"""What goes wrong between simulated peers, and at which step of their protocol.

Part of `tiering.testing.peersimulation`. A fault is armed for a kind of message, or a step of a
link, and strikes one of the two ends, or what is between them, when that comes by: as it is sent,
as it arrives, or when it has been taken in.
"""

from __future__ import annotations

import contextvars
import enum
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tiering.peers.messages import LIMITS_BYTES, Message
from tiering.peers.session import Session
from tiering.testing.simnet import Fate, Moment, Node, SimNet
from tiering.testing.simrows import SimRows

MESSAGES = tuple(LIMITS_BYTES)
LINK_STEPS = ("link", "rows")
STEPS = (*MESSAGES, *LINK_STEPS)
_OFTEN = {"rows": 5, "fetch": 3, "fetch_resp": 2, "transfer_done": 3, "abort": 4, "abort_ack": 3}
_SELDOM = {"heartbeat", "disconnect"}
STOP_SECONDS = (0.3, 2.0, 6.0, 15.0)
STALL_SECONDS = (0.3, 2.0, 6.0, 15.0)
ARMED_MAX = 12
_REPEATED = 6


class Fault(enum.Enum):
    KILL = "kill -9"
    POWER = "power loss"
    STOP = "stop"
    CUT = "cut"
    STALL = "stall"
    LOSE = "lose"
    DOUBLE = "double"
    DELAY = "delay"
    REPEAT = "repeat"


_FATES = {
    Fault.LOSE: Fate.IS_LOST,
    Fault.DOUBLE: Fate.COMES_TWICE,
    Fault.DELAY: Fate.IS_LATE,
}
_WEIGHTS = {
    Fault.KILL: 5,
    Fault.POWER: 2,
    Fault.STOP: 6,
    Fault.CUT: 3,
    Fault.STALL: 3,
    Fault.LOSE: 2,
    Fault.DOUBLE: 1,
    Fault.DELAY: 3,
    Fault.REPEAT: 3,
}


@dataclass(slots=True)
class _Armed:
    fault: Fault
    step: str
    moment: Moment
    hits_sender: bool
    passes: int

    def __str__(self) -> str:
        whom = "sender" if self.hits_sender else "other"
        return f"{self.fault.value} of {whom} at {self.step} {self.moment.value} +{self.passes}"


class PeerFaults:
    """`tell` takes what happens, for the trace."""

    def __init__(self, net: SimNet, rows: SimRows, tell: Callable[..., None]) -> None:
        self.strikes: Counter[tuple[str, str]] = Counter()
        self._net = net
        self._chance = random.Random(net.chance.random())
        self._tell = tell
        self._armed: list[_Armed] = []
        self._stopped: list[Node] = []
        self._is_repeating = False
        net.told = self._message
        rows.struck = self._link

    def arm(self) -> str:
        """Have something go wrong at some step; what."""
        chance = self._chance
        (fault,) = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        is_of_message = fault in _FATES or fault is Fault.REPEAT
        steps = MESSAGES if is_of_message else STEPS
        weights = [_OFTEN.get(step, 0.5 if step in _SELDOM else 1) for step in steps]
        (step,) = chance.choices(steps, weights)
        is_at_once = is_of_message or step in LINK_STEPS
        moment = (
            Moment.SENT
            if is_at_once
            else chance.choice((Moment.SENT, Moment.CAME, Moment.CAME, Moment.TAKEN))
        )
        passes = chance.choice((0, 0, 1, 3)) * (5 if step in ("rows", "heartbeat") else 1)
        armed = _Armed(fault, step, moment, chance.random() < 0.5, passes)
        self._armed = [*self._armed, armed][-ARMED_MAX:]
        return str(armed)

    def strike_now(self, one: Node, other: Node) -> None:
        """Whatever they are doing."""
        faults = (Fault.KILL, Fault.POWER, Fault.STOP, Fault.CUT, Fault.STALL)
        self._strike(self._chance.choice(faults), "any time", one, other)

    def mend(self) -> None:
        """Nothing more goes wrong; the dead stay dead."""
        self._armed.clear()
        self._is_repeating = False
        self._net.mend()
        for node in self._stopped:
            node.process.go_on()
        self._stopped.clear()

    def repeats(self) -> bool:
        """Whether a session says something again now."""
        return self._is_repeating and self._chance.random() < 0.3

    def _message(self, moment: Moment, kind: str, sender: Node, receiver: Node) -> Fate:
        for armed in self._due(kind, moment):
            if armed.fault in _FATES:
                self._count(armed.fault, kind, sender)
                return _FATES[armed.fault]
            ends = (sender, receiver) if armed.hits_sender else (receiver, sender)
            self._strike(armed.fault, kind, *ends)
        return Fate.PASSES

    def _link(self, step: str, serves: Node, reads: Node) -> None:
        for armed in self._due(step, Moment.SENT):
            self._strike(
                armed.fault, step, *((serves, reads) if armed.hits_sender else (reads, serves))
            )

    def _due(self, step: str, moment: Moment) -> Iterator[_Armed]:
        for armed in list(self._armed):
            if armed.step == step and armed.moment is moment:
                if armed.passes:
                    armed.passes -= 1
                else:
                    self._armed.remove(armed)
                    yield armed

    def _strike(self, fault: Fault, step: str, one: Node, other: Node) -> None:
        if one.process.is_dead or one is other:
            return
        self._count(fault, step, one)
        net, chance = self._net, self._chance
        match fault:
            case Fault.KILL:
                one.process.kill()
                net.crash(one)
            case Fault.POWER:
                one.process.kill()
                net.darken(one)
            case Fault.STOP:
                one.process.stop()
                self._stopped.append(one)
                self._later(chance.choice(STOP_SECONDS), one.process.go_on)
            case Fault.CUT:
                net.cut(one, other)
            case Fault.STALL:
                net.stall(one, other, chance.choice(STALL_SECONDS))
            case Fault.REPEAT:
                self._is_repeating = True
                self._later(chance.choice(STALL_SECONDS), self._repeat_no_more)
            case _:
                raise AssertionError(fault)

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        # Of no process: it may be one that is stopped in which this is called.
        self._net.loop.call_later(seconds, undo, context=contextvars.Context())

    def _repeat_no_more(self) -> None:
        self._is_repeating = False

    def _count(self, fault: Fault, step: str, one: Node) -> None:
        self.strikes[fault.value, step] += 1
        self._tell(fault.value, "at", step, one.process.name)


@contextmanager
def repeating(faults: PeerFaults) -> Iterator[None]:
    """Sessions say some of what they have said again, well sealed, as `faults` wants."""
    say = Session._say
    said: defaultdict[int, deque[Message]] = defaultdict(lambda: deque(maxlen=_REPEATED))

    def say_again(self: Session, message: Message, now: float) -> None:
        say(self, message, now)
        before = said[id(self)]
        before.append(message)
        if faults.repeats():
            say(self, before[0], now)
            say(self, before[-1], now)

    Session._say = say_again  # type: ignore[method-assign]
    try:
        yield
    finally:
        Session._say = say  # type: ignore[method-assign]
