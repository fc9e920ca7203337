"""Which peers this engine dials, by address: how many at once, and which to leave alone for now.

Owns the table of dialled sessions. An address that did not answer is left alone for a while that
doubles, one that refused us for longer: nothing about it changes by asking again. When a peer falls
silent, others on the same host are suspect until they are heard of: nothing new is asked of them,
and they are given little time to say a word (`hurry`). Sans-IO, one owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from tiering.peers.addresses import Address
from tiering.peers.messages import Ending
from tiering.peers.troubles import Troubles

REFUSED_SECONDS = 60.0


class Dialled(Protocol):
    """What the directory needs to know of a session."""

    @property
    def is_idle(self) -> bool: ...

    @property
    def used_at(self) -> float: ...

    def hurry(self, now: float) -> None: ...

    def heard_since(self, then: float) -> bool: ...


Of = TypeVar("Of", bound=Dialled)


class Directory(Generic[Of]):
    """`peers_max` sessions at a time. The caller makes them and ends them."""

    def __init__(self, peers_max: int) -> None:
        self.peers_max = peers_max
        self._sessions: dict[Address, Of] = {}
        self._troubles: Troubles[Address] = Troubles()
        self._suspects: dict[Address, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[tuple[Address, Of]]:
        return iter(list(self._sessions.items()))

    def get(self, at: Address) -> Of | None:
        return self._sessions.get(at)

    def why_not(self, at: Address, now: float) -> str | None:
        """Why nothing is to be asked at `at` now; None where there is no reason."""
        if (since := self._suspects.get(at)) is not None:
            session = self._sessions.get(at)
            if session is not None and not session.heard_since(since):
                return "another engine of its host has fallen silent, and nothing was heard of it"
            del self._suspects[at]
        return self._troubles.why_not(at, now)

    def room(self) -> tuple[Address, Of] | bool:
        """Whether one more may be dialled: True, False, or the session that is to be ended for it,
        the longest unused of those with nothing under way."""
        if len(self._sessions) < self.peers_max:
            return True
        idle = [(session.used_at, at) for at, session in self if session.is_idle]
        if not idle:
            return False
        at = min(idle)[1]
        return at, self._sessions[at]

    def add(self, at: Address, session: Of) -> None:
        """REQUIRES: room, and no session at `at`."""
        assert at not in self._sessions
        assert len(self._sessions) < self.peers_max
        self._sessions[at] = session

    def opened(self, at: Address) -> None:
        """The peer at `at` has been heard of: past troubles are forgotten."""
        self._troubles.forget(at)
        self._suspects.pop(at, None)

    def ended(
        self,
        at: Address,
        session: Of,
        ending: Ending,
        reason: str,
        now: float,
        *,
        is_told: bool = False,
    ) -> list[Of]:
        """`session` at `at` is over; `is_told`: the other side says so, and so has not fallen
        silent. Gives those that are suspect for it, already hurried."""
        if self._sessions.get(at) is session:
            del self._sessions[at]
        self._suspects.pop(at, None)
        if ending in ("closing", "unknown"):
            return []  # it stops, or has started anew: dial it again whenever it is wanted
        seconds = REFUSED_SECONDS if ending in ("refused", "malformed") else None
        self._troubles.add(at, reason, now, seconds)
        return self._suspect(at, now) if ending == "failed" and not is_told else []

    def _suspect(self, at: Address, now: float) -> list[Of]:
        siblings = [
            each for each in self if each[0].host == at.host and each[0] not in self._suspects
        ]
        for address, session in siblings:
            self._suspects[address] = now
            session.hurry(now)
        return [session for _, session in siblings]
