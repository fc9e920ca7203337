"""Whom to leave alone for now, because something went wrong: for a while that doubles each time.

Owns what is remembered of each. Sans-IO, one owner.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 30.0
_REMEMBERED_MAX = 4096

Whom = TypeVar("Whom", bound=Hashable)


@dataclass(slots=True)
class _Trouble:
    """Why somebody is left alone, until when, and for how long at the next trouble."""

    reason: str
    until: float
    again_seconds: float


class Troubles(Generic[Whom]):
    """Of as many as there is room for: those whose last trouble is longest ago are forgotten."""

    def __init__(self) -> None:
        self._troubles: dict[Whom, _Trouble] = {}

    def __len__(self) -> int:
        return len(self._troubles)

    def add(self, whom: Whom, reason: str, now: float, seconds: float | None = None) -> None:
        """Leave `whom` alone from `now` on, for `seconds` if they are given."""
        before = self._troubles.pop(whom, None)
        if seconds is None:
            seconds = RETRY_SECONDS_MIN if before is None else before.again_seconds
        again = min(2 * seconds, RETRY_SECONDS_MAX)
        self._troubles[whom] = _Trouble(reason, now + seconds, again)
        while len(self._troubles) > _REMEMBERED_MAX:
            del self._troubles[next(iter(self._troubles))]

    def why_not(self, whom: Whom, now: float) -> str | None:
        """Why `whom` is left alone now, in words; None where there is no reason."""
        trouble = self._troubles.get(whom)
        if trouble is None or now >= trouble.until:
            return None
        return f"{trouble.reason}; tried again in {trouble.until - now:.1f} seconds"

    def forget(self, whom: Whom) -> None:
        self._troubles.pop(whom, None)
