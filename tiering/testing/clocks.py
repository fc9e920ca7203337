"""A clock that stands still until a test moves it."""

from __future__ import annotations


class ManualClock:
    """Seconds since the test began, as the test says."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
