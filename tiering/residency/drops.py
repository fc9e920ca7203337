"""Which chunks the secondary tiers are being asked to remove. Part of the core; same owner, same
rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tiering.events import ChunksRemoved
from tiering.metrics import Counters
from tiering.residency.known import KnownKeys
from tiering.residency.plan import Drop, Outcome, Verdict


class DropBook:
    """One for each core."""

    def __init__(
        self, known: Mapping[int, KnownKeys], counters: Counters, next_id: Callable[[], int]
    ) -> None:
        self._known = known
        self._counters = counters
        self._next_id = next_id
        self._out: dict[int, Drop] = {}

    @property
    def steps_out(self) -> int:
        return len(self._out)

    def is_mine(self, step_id: int) -> bool:
        return step_id in self._out

    def drop(self, keys: Sequence[bytes]) -> list[Drop]:
        """Remove `keys` from every tier."""
        steps = [Drop(self._next_id(), tier, tuple(keys)) for tier in self._known]
        for step in steps:
            self._known[step.tier].discard(keys)
            self._out[step.id] = step
        return steps

    def settle(self, outcome: Outcome) -> list[ChunksRemoved]:
        """Take in an outcome: what is not there any more, or was not."""
        step = self._out.pop(outcome.id)
        self._counters.add("drops_failed", outcome.verdicts.count(Verdict.FAILED))
        told = zip(step.keys, outcome.verdicts, strict=True)
        gone = tuple(key for key, verdict in told if verdict is not Verdict.FAILED)
        return [ChunksRemoved(step.tier, gone)] if gone else []
