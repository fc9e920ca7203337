"""Which questions to the secondary tiers are out, and what requests have learned from the answers.

Owns the Contains steps. A tier that said no, or did not say, is not asked again by the same
request. Part of the core; same owner, same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiering.metrics import Counters
from tiering.residency.finder import Finder
from tiering.residency.holds import Holds
from tiering.residency.plan import Contains, Outcome, Verdict, keys_with


class QuestionBook:
    """One for each core."""

    def __init__(
        self,
        finder: Finder,
        holds: Holds,
        counters: Counters,
        next_id: Callable[[], int],
    ) -> None:
        self._finder = finder
        self._holds = holds
        self._counters = counters
        self._next_id = next_id
        self._out: dict[int, tuple[Contains, str]] = {}

    @property
    def steps_out(self) -> int:
        return len(self._out)

    def is_mine(self, step_id: int) -> bool:
        return step_id in self._out

    def ask(self, owner: str, keys: Sequence[bytes]) -> list[Contains]:
        """One question to each tier for those of `keys` whose place is UNKNOWN; none while answers
        are out."""
        request = self._holds[owner]
        self._holds.start_clock(request)
        steps: list[Contains] = []
        if request.asks_out:
            return steps
        left = self._holds.seconds_left(request)
        for tier, wanted in self._finder.questions(keys, request):
            peer = request.peer_at(tier)
            steps.append(Contains(self._next_id(), tier, tuple(wanted), left, peer))
            self._out[steps[-1].id] = (steps[-1], owner)
        request.asks_out = len(steps)
        return steps

    def settle(self, outcome: Outcome) -> None:
        """Take in an answer."""
        step, owner = self._out[outcome.id]
        if outcome.final:
            del self._out[outcome.id]
        hits = keys_with(step, outcome, Verdict.HIT)
        misses = outcome.verdicts.count(Verdict.MISS)
        self._counters.add("lookups_failed", len(step.keys) - len(hits) - misses)
        request = self._holds.get(owner)
        if (known := self._finder.known(step.tier, request)) is not None:
            known.add(hits)
        if request is not None:
            others = set(step.keys).difference(hits) if hits else step.keys
            request.absent[step.tier].update(others)
            if outcome.final:
                request.asks_out -= 1
