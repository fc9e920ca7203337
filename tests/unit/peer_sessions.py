"""Two sessions with one another and nothing between them, for tests: frames go across when the test
says so, and time is a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from peer_frames import KEY, introduction
from tiering.peers.agreement import Introduction
from tiering.peers.auth import SharedKey
from tiering.peers.session import Event, Frames, Patience, Session

PATIENCE = Patience(
    handshake_seconds_max=5.0,
    heartbeat_seconds=1.0,
    silence_seconds_max=4.0,
    answer_seconds_max=10.0,
    pin_seconds_max=60.0,
    rounds_max=4,
)


class Pair:
    """`asks` has dialled `serves`. What each has said, and what became of it, in order."""

    def __init__(
        self,
        asks: Introduction | None = None,
        serves: Introduction | None = None,
        keys: tuple[SharedKey, SharedKey] = (KEY, KEY),
        patience: Patience = PATIENCE,
    ) -> None:
        self.now = 100.0
        asking = introduction(1) if asks is None else asks
        serving = introduction(2) if serves is None else serves
        self.asks = Session(asking, keys[0], "dialling", self.now, patience)
        self.serves = Session(serving, keys[1], "dialled", self.now, patience)
        self.heard: dict[Session, list[Event]] = {self.asks: [], self.serves: []}
        self.said: list[tuple[Session, Frames]] = []

    def across(self, of: Session) -> list[Event]:
        """Bring what `of` has to say to the other; gives what that came to."""
        events: list[Event] = []
        for frames in of.take():
            self.said.append((of, frames))
            events += self.other(of).received(frames, self.now)
        self.heard[self.other(of)] += events
        return events

    def settle(self) -> None:
        """Until neither has anything to say."""
        for _ in range(20):
            before = len(self.said)
            self.across(self.asks)
            self.across(self.serves)
            if len(self.said) == before:
                return
        raise AssertionError("they talk for ever")

    def opened(self) -> Pair:
        self.settle()
        return self

    def wait(self, seconds: float, of: Sequence[Session] | None = None) -> list[Event]:
        """So much later, what the clock comes to for each of `of`, or for both."""
        self.now += seconds
        events: list[Event] = []
        for session in of or (self.asks, self.serves):
            news = session.tick(self.now)
            self.heard[session] += news
            events += news
        return events

    def other(self, of: Session) -> Session:
        return self.serves if of is self.asks else self.asks


def patient(**changed: float) -> Patience:
    return dataclasses.replace(PATIENCE, **changed)
