"""The only place that reads time. Everything else is handed a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. May be called from any thread."""

    def now(self) -> float:
        """Seconds since an arbitrary point, never going back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()
