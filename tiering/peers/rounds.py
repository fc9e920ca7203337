"""The rounds of one session: what was asked, and what may still be said about it.

A round is one question of a request, its number rises within a session and is never used again.
`Asked` is the consumer's side: an answer counts if its round is open and waits for that kind of
answer, and only once. `Served` is the producer's: it knows which rounds still have chunks pinned.
Sans-IO; owned by `session`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tiering.peers.messages import Fetch, FetchResp, Lookup, LookupResp


class Round(NamedTuple):
    """Names one question: of which request, and the how manieth of its session."""

    kv_request_id: str
    round_seq: int


class Waits(enum.Enum):
    """What the consumer waits for: an answer, or that the producer has let go."""

    FOR_HITS = "for hits"
    FOR_PLACES = "for places"
    FOR_RELEASE = "for release"


@dataclass(slots=True)
class _Open:
    waits: Waits
    keys: int
    give_up_at: float


class Asked:
    """What this engine has asked. `rounds_max` are open at a time."""

    def __init__(self, rounds_max: int) -> None:
        self.rounds_max = rounds_max
        self.ignored = 0
        self._open: dict[Round, _Open] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, of: Round) -> bool:
        return of in self._open

    def __iter__(self) -> Iterator[Round]:
        return iter(self._open)

    def begin(self, kv_request_id: str, waits: Waits, keys: int, give_up_at: float) -> Round | None:
        """A new round; None where as many are open as may be."""
        if len(self._open) >= self.rounds_max:
            return None
        self._last += 1
        made = Round(kv_request_id, self._last)
        self._open[made] = _Open(waits, keys, give_up_at)
        return made

    def answered(self, message: LookupResp | FetchResp) -> Round | None:
        """The round that `message` is the answer to, which is over then; None where it is late,
        a duplicate, or about another number of keys, and is to be ignored."""
        of = Round(message.kv_request_id, message.round_seq)
        waits = Waits.FOR_HITS if isinstance(message, LookupResp) else Waits.FOR_PLACES
        found = self._open.get(of)
        if found is None or found.waits is not waits or found.keys != len(message.hits):
            self.ignored += 1
            return None
        del self._open[of]
        return of

    def abandon(self, of: Round, give_up_at: float) -> bool:
        """Wait for nothing but the release of `of`; whether it was open."""
        found = self._open.get(of)
        if found is None or found.waits is Waits.FOR_RELEASE:
            return False
        found.waits, found.give_up_at = Waits.FOR_RELEASE, give_up_at
        return True

    def released(self, of: Round) -> bool:
        """The producer has let go of `of`; whether that was waited for."""
        found = self._open.get(of)
        if found is None or found.waits is not Waits.FOR_RELEASE:
            self.ignored += 1
            return False
        del self._open[of]
        return True

    def overdue(self, now: float) -> list[tuple[Round, Waits]]:
        return [(of, each.waits) for of, each in self._open.items() if now >= each.give_up_at]

    def wait_on(self, of: Round, give_up_at: float) -> None:
        """REQUIRES: `of` is open."""
        self._open[of].give_up_at = give_up_at

    def forget(self, of: Round) -> None:
        self._open.pop(of, None)


@dataclass(slots=True)
class _Serving:
    question: Lookup | Fetch
    is_answered: bool
    give_up_at: float


class Served:
    """What the other engine has asked and what is pinned for it. At most `rounds_max` at a time."""

    def __init__(self, rounds_max: int) -> None:
        self.rounds_max = rounds_max
        self.ignored = 0
        self._open: dict[Round, _Serving] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= self.rounds_max

    def begin(self, question: Lookup | Fetch) -> Round | None:
        """A new round; None where its number was there before: a duplicate, or an old one. How long
        its answer may take is for who asks to say."""
        if question.round_seq <= self._last:
            self.ignored += 1
            return None
        self._last = question.round_seq
        made = Round(question.kv_request_id, question.round_seq)
        self._open[made] = _Serving(question, False, math.inf)
        return made

    def question(self, of: Round) -> Lookup | Fetch | None:
        """What was asked in `of`, where it still waits for its answer."""
        found = self._open.get(of)
        return None if found is None or found.is_answered else found.question

    def answered(self, of: Round, give_up_at: float, *, pins: bool) -> None:
        """`of` has its answer; with `pins`, its chunks stay pinned until it is ended, at
        `give_up_at` at the latest."""
        if pins:
            self._open[of].is_answered, self._open[of].give_up_at = True, give_up_at
        else:
            del self._open[of]

    def end(self, of: Round) -> bool:
        """Whether `of` was open; it is over then."""
        if self._open.pop(of, None) is None:
            self.ignored += 1
            return False
        return True

    def overdue(self, now: float) -> list[Round]:
        return [of for of, each in self._open.items() if now >= each.give_up_at]

    def end_all(self) -> list[Round]:
        ended = list(self._open)
        self._open.clear()
        return ended
