"""Which engines are to be asked now, and whose turn it is. Pure; a clock is handed in.

An engine that refuses is left alone for a second, then two, up to BACK_OFF_SECONDS_MAX, until it
answers again; one that says it is not well is, until it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiering.clock import Clock
from tiering.proxy.engines import Engine

BACK_OFF_SECONDS = 1.0
BACK_OFF_SECONDS_MAX = 16.0


@dataclass(slots=True)
class _State:
    is_well: bool = True
    refusals: int = 0
    until: float = 0.0


class Standing:
    """Of all engines: those that were never heard of are usable."""

    def __init__(self, engines: Sequence[Engine], clock: Clock) -> None:
        self._clock = clock
        self._states = {engine: _State() for engine in engines}

    def is_usable(self, engine: Engine) -> bool:
        state = self._states[engine]
        return state.is_well and self._clock.now() >= state.until

    def answered(self, engine: Engine) -> None:
        """It has done what it was asked for."""
        self._states[engine].refusals = 0
        self._states[engine].until = 0.0

    def refused(self, engine: Engine) -> None:
        """It could not be reached, or would not."""
        state = self._states[engine]
        now = self._clock.now()
        if now < state.until:
            # Requests that were under way together: one refusal.
            return
        seconds = BACK_OFF_SECONDS * 2.0 ** min(state.refusals, 16)
        state.until = now + min(seconds, BACK_OFF_SECONDS_MAX)
        state.refusals += 1

    def probed(self, engine: Engine, is_well: bool) -> None:
        """It was asked how it is."""
        self._states[engine].is_well = is_well

    def __repr__(self) -> str:
        out = [str(engine) for engine in self._states if not self.is_usable(engine)]
        return f"<Standing of {len(self._states)} engines, out: {', '.join(out) or 'none'}>"


class Turns:
    """Who is next among engines for the same thing."""

    def __init__(self, engines: Sequence[Engine], standing: Standing) -> None:
        self._engines = tuple(engines)
        self._standing = standing
        self._next = 0

    def take(self) -> list[Engine]:
        """All usable ones, the one whose turn it is first; the others are for when it fails."""
        at = self._next
        order = self._engines[at:] + self._engines[:at]
        usable = [engine for engine in order if self._standing.is_usable(engine)]
        if usable:
            self._next = (self._engines.index(usable[0]) + 1) % len(self._engines)
        return usable

    def take_any(self) -> list[Engine]:
        """As `take`, and behind those the ones that are not usable: better than nobody."""
        usable = self.take()
        return usable + [engine for engine in self._engines if engine not in usable]
