"""Batches in order, each once, out of a live stream with gaps and the replays that fill them.

Sans-IO: is told what came, says what is to be asked. Knows an old publisher from a new one: numbers
that go back, or another batch under a number that was seen, are a restart. To notice that also
behind a gap, a replay is asked for from the last number that is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

REMEMBERED_BATCHES_MAX = 4096
"""Of how many the content is remembered, to know repetitions from restarts."""
ROUNDS_MAX = 16
"""Replays in a row for what is still missing after one."""


class Ordered(NamedTuple):
    """`missed` batches directly before this one could not be had; before the first of an
    `incarnation` of the publisher that is all of its numbers below."""

    number: int
    payload: bytes
    missed: int
    incarnation: int


@dataclass(eq=False, slots=True)
class Question:
    """A replay that is wanted: of `start` and all after it. `first` and `last` were answered;
    `known_to` is what was expected next when it was put."""

    start: int
    known_to: int | None
    first: int | None = None
    last: int | None = None

    @property
    def is_behind(self) -> bool:
        """Whether who answered has not yet sent what was known already: it is another one."""
        known_to, last = self.known_to, self.last
        return known_to is not None and last is not None and last < known_to - 1


class Sequencer:
    """For one publisher at a time. `can_ask`: there is somebody who answers replays."""

    def __init__(self, can_ask: bool) -> None:
        self._can_ask = can_ask
        self._next: int | None = None
        self._last_live: int | None = None
        self._held: dict[int, bytes] = {}
        self._known: dict[int, int] = {}
        self._ready: list[Ordered] = []
        self._rounds = 0
        self._must_prove = False
        self.question: Question | None = None
        self.incarnation = 0
        self.repeated = 0
        self.missed = 0

    @property
    def held(self) -> int:
        """Batches that wait for what is before them."""
        return len(self._held)

    def take(self) -> list[Ordered]:
        """What has its place by now, in order."""
        ready, self._ready = self._ready, []
        return ready

    def live(self, number: int, payload: bytes) -> None:
        """A batch came from the publisher."""
        is_same = self._is_same(number, payload)
        went_back = self._last_live is not None and number <= self._last_live
        if not went_back:
            self._last_live = number
        if is_same:
            self.repeated += 1
            return
        if is_same is False or went_back:
            self._give_up()
            self._start_anew()
            self._last_live = number
        elif self._next is not None and number < self._next:
            # A replay ran ahead by more than is remembered.
            self.repeated += 1
            return
        self._take_in(number, payload)
        self._ask_or_give_up()

    def reconnected(self) -> None:
        """The connection is new, so the publisher may be: it is taken for a new one unless it
        still has a batch that is known."""
        self._must_prove = self._next is not None
        self.probe()

    def probe(self) -> None:
        """Ask whether anything came after the last batch that is known."""
        if self._can_ask and self.question is None:
            self._ask()

    def replayed(self, question: Question, number: int, payload: bytes) -> None:
        """An answer to `question`; ignored where that is not the open one any more."""
        if question is not self.question:
            return
        is_first = question.first is None
        question.last = number
        if is_first:
            question.first = number
        is_same = self._is_same(number, payload)
        if is_same:
            self._must_prove = False
        elif is_same is False or (is_first and self._must_prove):
            self._start_anew()
            return
        if is_same or (self._next is not None and number < self._next):
            return
        if not is_first:
            self._take_in(number, payload)
            return
        # It answers in order: what is before its first is not to be had.
        self._give_up(number)
        self._deliver(number, payload)
        self._drain()

    def ended(self, question: Question, is_whole: bool) -> None:
        """All of the answer is here; or no more of it is coming, where not `is_whole`."""
        if question is not self.question:
            return
        self.question = None
        if is_whole and self._next is not None:
            if question.first is None and question.start > 0:
                # The batch before is not even known there. Of what is?
                self.question = Question(0, self._next)
                return
            if question.is_behind:
                self._start_anew()
                return
        if not self._held:
            self._rounds = 0
        elif self._next != question.known_to and self._rounds < ROUNDS_MAX:
            self._rounds += 1
            self._ask()
        else:
            self._rounds = 0
            self._give_up()

    # Parts of the above

    def _is_same(self, number: int, payload: bytes) -> bool | None:
        """Whether it is what was there under that number before; None where that is not known."""
        if number in self._held:
            return self._held[number] == payload
        known = self._known.get(number)
        return None if known is None else known == hash(payload)

    def _take_in(self, number: int, payload: bytes) -> None:
        if self._next is None and number == 0:
            self._next = 0
        if number != self._next:
            self._held[number] = payload
            return
        self._deliver(number, payload)
        self._drain()

    def _drain(self) -> None:
        while self._next is not None and self._next in self._held:
            self._deliver(self._next, self._held.pop(self._next))

    def _deliver(self, number: int, payload: bytes) -> None:
        missed = number - (self._next or 0)
        self.missed += missed
        self._ready.append(Ordered(number, payload, missed, self.incarnation))
        self._next = number + 1
        self._known[number] = hash(payload)
        if len(self._known) > REMEMBERED_BATCHES_MAX:
            del self._known[next(iter(self._known))]

    def _ask_or_give_up(self) -> None:
        if self._held and not self._can_ask:
            self._give_up()
        elif self._held and self.question is None:
            self._ask()

    def _ask(self) -> None:
        self.question = Question(max((self._next or 0) - 1, 0), self._next)

    def _give_up(self, before: int | None = None) -> None:
        """Pass on what is held, below `before`, without what is missing between."""
        for number in sorted(self._held):
            if before is not None and number >= before:
                break
            self._deliver(number, self._held.pop(number))

    def _start_anew(self) -> None:
        self.incarnation += 1
        self._next = None
        self._last_live = None
        self._held.clear()
        self._known.clear()
        self._rounds = 0
        self._must_prove = False
        self.question = Question(0, None) if self._can_ask else None
