"""Whether calls of one kind may enter a tier: a circuit breaker. Used by `GuardedTier` only.

Sans-IO: told the time and what came of the calls. Closed, all may enter; open, none; half-open,
after a pause that doubles with each failed trial, one call of each operation at a time, until one
proves that the tier works. Only payload that moved is proof: an index in memory answers questions
and deletes also while its disk is out, and so those neither close a breaker nor end a row of
errors.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence

from tiering.errors import DamagedChunk
from tiering.tiers.base import DeleteOutcome, Failed, Read, ReadOutcome, Write, WriteOutcome

log = logging.getLogger("tiering")

TRIALS_HUNG_MAX = 4
"""Trials that may hang in the tier at once: each may hold the buffers of a batch."""

PROOFS = (Read.HIT, Write.STORED)


class State(enum.Enum):
    """What a breaker lets in: everything, nothing, one call of each operation at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Entry(enum.Enum):
    """What a call is told that wants to enter."""

    REFUSED = "refused"
    FREE = "free"
    TRIAL = "trial"


class Breaker:
    """`subject` is how the log calls what it breaks, such as `fs:/mnt/kv: loads`."""

    def __init__(self, subject: str, errors_max: int, retry_seconds: tuple[float, float]) -> None:
        """Opens after `errors_max` errors in a row; `retry_seconds`: first and longest pause."""
        self._subject = subject
        self._errors_max = errors_max
        self._first_seconds, self._longest_seconds = retry_seconds
        self._pause_seconds = self._first_seconds
        self._retry_at: float | None = None
        self._tripped_at = 0.0
        self._tripped_by_stall = False
        self._errors_in_a_row = 0
        self._trials: set[str] = set()
        self._trials_hung = 0
        self.trips = 0

    def __repr__(self) -> str:
        told = "closed" if self._retry_at is None else f"tried again at {self._retry_at:.1f}"
        return f"<Breaker {self._subject}: {told}, {self.trips} trips>"

    def state(self, now: float) -> State:
        if self._retry_at is None:
            return State.CLOSED
        return State.OPEN if now < self._retry_at else State.HALF_OPEN

    def enter(self, operation: str, now: float) -> Entry:
        """A TRIAL has to `leave` again."""
        state = self.state(now)
        if state is State.CLOSED:
            return Entry.FREE
        taken = operation in self._trials or self._trials_hung >= TRIALS_HUNG_MAX
        if state is State.OPEN or taken:
            return Entry.REFUSED
        self._trials.add(operation)
        return Entry.TRIAL

    def leave(self, operation: str, *, hung: bool) -> None:
        """The trial of `operation` is over, whatever came of it; `hung` if it had stalled."""
        if hung:
            self._trials_hung -= 1
        else:
            self._trials.discard(operation)

    def stalled(self, operation: str, seconds: float, now: float, *, is_trial: bool) -> None:
        """A call of `operation`, of this kind or another, hangs; `is_trial` if it is ours."""
        if is_trial:
            self._trials.discard(operation)
            self._trials_hung += 1
        if is_trial or self._retry_at is None:
            self._trip(f"a {operation} has been hanging for {seconds:.1f} s", now)
            self._tripped_by_stall = True

    def unstalled(self, now: float) -> None:
        """All calls that hung have come back: no need to wait any longer with the next trial."""
        if self._retry_at is not None and self._tripped_by_stall:
            self._retry_at = min(self._retry_at, now)

    def came_back(
        self,
        outcomes: Sequence[ReadOutcome | WriteOutcome | DeleteOutcome],
        now: float,
        *,
        moves_payload: bool,
        is_trial: bool,
    ) -> None:
        """A call ended with `outcomes`; `moves_payload` for a read or a write."""
        if self._retry_at is not None and not is_trial:
            return  # It entered before the trip and tells nothing new.
        proved, row_max, reason = False, 0, ""
        for outcome in outcomes:
            if moves_payload and outcome in PROOFS:
                proved, self._errors_in_a_row = True, 0
            elif isinstance(outcome, Failed) and not isinstance(outcome.error, DamagedChunk):
                self._errors_in_a_row += 1
                row_max = max(row_max, self._errors_in_a_row)
                reason = outcome.error.reason
        if row_max >= self._errors_max:
            self._trip(f"{row_max} errors in a row, the last: {reason}", now)
        elif proved:
            self._close(now)
        elif Write.FULL in outcomes:
            self._trip("there is no room", now)
        elif reason and is_trial:
            self._trip(reason, now)

    def _trip(self, reason: str, now: float) -> None:
        state = self.state(now)
        if state is State.CLOSED:
            self.trips += 1
            self._tripped_at = now
            self._tripped_by_stall = False
            self._pause_seconds = self._first_seconds
            told = "%s: out of service: %s; tried again from time to time"
            log.warning(told, self._subject, reason)
        elif state is State.HALF_OPEN:
            self._pause_seconds = min(2 * self._pause_seconds, self._longest_seconds)
            log.debug("%s: still out of service: %s", self._subject, reason)
        else:
            return  # Another trial has failed just before.
        self._retry_at = now + self._pause_seconds

    def _close(self, now: float) -> None:
        if self._retry_at is None:
            return
        self._retry_at = None
        self._errors_in_a_row = 0
        seconds = now - self._tripped_at
        log.info("%s: in service again after %.0f s", self._subject, seconds)
