"""When the secondary tiers are asked for everything that they hold, and what they answered.

For whoever keeps an index of it: at start, since a tier may hold much from before, and from time to
time, since other engines and cleaners remove chunks without a word. Owns the Survey steps. Part of
the core; same owner, same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from tiering.clock import Clock
from tiering.events import SurveyBegan, SurveyEnded
from tiering.residency.plan import Outcome, Survey

SURVEY_SECONDS = 600.0
"""From the end of one survey of a tier to the next."""


class SurveyBook:
    """One for each core. `tiers`: which are surveyed."""

    def __init__(self, tiers: Collection[int], next_id: Callable[[], int], clock: Clock) -> None:
        self._due_at = dict.fromkeys(sorted(set(tiers)), clock.now())
        self._next_id = next_id
        self._clock = clock
        self._out: dict[int, Survey] = {}
        self._look_at = clock.now() if self._due_at else float("inf")

    def due(self) -> list[Survey]:
        """Those to begin now."""
        now = self._clock.now()
        if now < self._look_at:
            return []
        steps = [Survey(self._next_id(), tier) for tier, at in self._due_at.items() if at <= now]
        for step in steps:
            self._out[step.id] = step
            del self._due_at[step.tier]
        self._look_at = min(self._due_at.values(), default=float("inf"))
        return steps

    def is_mine(self, step_id: int) -> bool:
        return step_id in self._out

    def settle(self, outcome: Outcome) -> SurveyEnded:
        """A survey is over."""
        step = self._out.pop(outcome.id)
        self._due_at[step.tier] = self._clock.now() + SURVEY_SECONDS
        self._look_at = min(self._due_at.values())
        return SurveyEnded(step.tier, is_whole=not outcome.verdicts)


def began(steps: Collection[Survey]) -> list[SurveyBegan]:
    """What is told of `steps` when they are handed out."""
    return [SurveyBegan(step.tier) for step in steps]
