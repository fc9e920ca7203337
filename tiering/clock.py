"""The only place that reads time. Everything else is handed a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds. May be called from any thread."""

    def now(self) -> float:
        """Seconds since a point that the clock says."""
        ...


class MonotonicClock:
    """The machine's monotonic clock: from an arbitrary point, never going back."""

    def now(self) -> float:
        return time.monotonic()


class UnixClock:
    """Seconds since 1970, for what must mean the same to other processes and after a restart.
    It may go back, so nothing waits by it."""

    def now(self) -> float:
        return time.time()
