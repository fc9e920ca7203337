"""A bound on bytes a second, for work that must leave the disk to others. Pure."""

from __future__ import annotations

from tiering.clock import Clock

BURST_SECONDS = 1.0


class RateLimit:
    """`bytes_per_second`, or no limit at all with 0. What was left unused for up to BURST_SECONDS
    may be used at once."""

    def __init__(self, bytes_per_second: float, clock: Clock) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._paid_until = clock.now()

    def take(self, count_bytes: int) -> float:
        """Take `count_bytes`; how many seconds to wait before they are used."""
        if self._rate <= 0:
            return 0.0
        now = self._clock.now()
        begin = max(self._paid_until, now - BURST_SECONDS)
        self._paid_until = begin + count_bytes / self._rate
        return max(0.0, begin - now)
