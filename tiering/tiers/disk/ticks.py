"""Recency as one number: microseconds since 1970, so that it means the same to every process and
after a restart. Owned by one tier, used on its event loop."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.clock import Clock


class Ticks:
    """Gives each use of a prefix its ticks: later uses larger ones, and within one use the head
    the largest, so that eviction by tick takes the tail of a prefix before its head."""

    def __init__(self, clock: Clock) -> None:
        """`clock` counts from 1970. Where it goes back, ticks go on from the last one."""
        self._clock = clock
        self._last = 0

    def after(self, tick: int) -> None:
        """`tick` was given before, by whoever was here then: the clock may have gone back."""
        self._last = max(self._last, tick)

    def of(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """The ticks of `keys`, used now, head first."""
        top = max(self._last + len(keys), int(self._clock.now() * 1e6))
        self._last = top
        return {key: top - at for at, key in enumerate(keys)}
