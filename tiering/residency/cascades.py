"""Which chunks are on their way from the host tier to the secondary tiers, and which still wait.

Owns the write pins. Writes may pin all of the host tier but the reserve, so that a slow or hung
tier cannot take it all; what has to wait is not pinned, and is counted as skipped if it is evicted
first. Sans-IO: makes Cascade steps and takes in their outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from tiering.clock import Clock
from tiering.metrics import Counters
from tiering.residency.index import HostIndex
from tiering.residency.known import KnownKeys
from tiering.residency.plan import Cascade, Outcome, Verdict, keys_with

STORAGE_MEDIUM = "STORAGE"
CHUNKS_IN_STEP_MAX = 64

_COUNTER = {
    Verdict.STORED: "cascades_stored",
    Verdict.ALREADY_THERE: "cascades_already_there",
    Verdict.FULL: "cascades_full",
    Verdict.REFUSED: "cascades_refused",
}


class CascadeBook:
    """Part of the core; same owner, same rules."""

    def __init__(
        self,
        index: HostIndex,
        known: Sequence[KnownKeys],
        counters: Counters,
        next_id: Callable[[], int],
        pinned_max: int,
        clock: Clock,
        silence_seconds_max: float,
    ) -> None:
        self._index = index
        self._known = known
        self._counters = counters
        self._next_id = next_id
        self._pinned_max = pinned_max
        self._clock = clock
        self._silence_seconds_max = silence_seconds_max
        self._moved_at = clock.now()
        self._waiting: list[dict[bytes, None]] = [{} for _ in known]
        self._out: dict[int, Cascade] = {}
        self._flying: list[set[bytes]] = [set() for _ in known]
        # Bounded by the slots there are: what was evicted from them cannot be offered.
        self._untaken: list[dict[bytes, None]] = [{} for _ in known]

    @property
    def steps_out(self) -> int:
        return len(self._out)

    @property
    def waiting(self) -> int:
        """Chunks that no step has been made for yet, over all tiers."""
        return sum(map(len, self._waiting))

    @property
    def needs_turns(self) -> bool:
        """Whether chunks wait for room, and writes do end: `settle` lets them go. Not for ever:
        a tier from which nothing is heard for `silence_seconds_max` is not waited for."""
        silence = self._clock.now() - self._moved_at
        return bool(self.waiting) and silence < self._silence_seconds_max

    def is_under_way(self, key: bytes) -> bool:
        """Whether `key` waits to be written to some tier, or is being written."""
        return any(key in waiting for waiting in self._waiting) or any(
            key in flying for flying in self._flying
        )

    def unwritten(self) -> list[bytes]:
        """The keys that a tier is still to be given, once for each tier."""
        return [key for waiting in self._waiting for key in waiting]

    def want(self, keys: Sequence[bytes]) -> list[Cascade]:
        """`keys` became readable in the host tier: to every tier not known to hold them."""
        self._moved_at = self._clock.now()
        for waiting, known in zip(self._waiting, self._known, strict=True):
            waiting.update(dict.fromkeys(known.unknown(keys)))
        return self._issue()

    def want_again(self, keys: Sequence[bytes]) -> list[Cascade]:
        """`keys` were used: those that a tier did not take when they were offered are offered
        again, as long as they are in the host tier."""
        found = False
        for waiting, untaken in zip(self._waiting, self._untaken, strict=True):
            again = [key for key in keys if key in untaken] if untaken else []
            for key in again:
                del untaken[key]
            waiting.update(dict.fromkeys(self._index.ready(again)))
            found = found or bool(again)
        return self._issue() if found else []

    def is_mine(self, step_id: int) -> bool:
        return step_id in self._out

    def settle(self, outcome: Outcome) -> tuple[list[bytes], list[Cascade]]:
        """Keys that a tier took, and the steps for which there is room now."""
        self._moved_at = self._clock.now()
        step = self._out.pop(outcome.id)
        slots = self._index.slots
        slots.unpin(step.slots, slots.write_pins)
        self._flying[step.tier].difference_update(step.keys)
        self._counters.tally(outcome.verdicts, _COUNTER, "cascades_failed")
        stored = keys_with(step, outcome, Verdict.STORED)
        self._known[step.tier].add(stored)
        self._known[step.tier].add(keys_with(step, outcome, Verdict.ALREADY_THERE))
        untaken = self._untaken[step.tier]
        for verdict in (Verdict.FULL, Verdict.REFUSED, Verdict.FAILED):
            untaken.update(dict.fromkeys(keys_with(step, outcome, verdict)))
        for key in list(islice(untaken, max(0, len(untaken) - len(slots)))):
            del untaken[key]
        return stored, self._issue()

    def clear(self) -> None:
        """Nothing waits any more; what is under way keeps its pins until its outcome."""
        for keys in (*self._waiting, *self._untaken):
            keys.clear()

    def _issue(self) -> list[Cascade]:
        steps = []
        slots = self._index.slots
        room = self._pinned_max - int(np.count_nonzero(slots.write_pins))
        for tier, waiting in enumerate(self._waiting):
            while waiting and room > 0:
                batch = list(islice(waiting, room))
                for key in batch:
                    del waiting[key]
                here = self._index.ready(batch)
                self._counters.add("cascades_skipped", len(batch) - len(here))
                slots.write_pins[np.array(list(here.values()), dtype=np.intp)] += 1
                room -= len(here)
                chunks = list(here.items())
                for start in range(0, len(chunks), CHUNKS_IN_STEP_MAX):
                    keys, where = zip(*chunks[start : start + CHUNKS_IN_STEP_MAX], strict=True)
                    step = Cascade(self._next_id(), tier, keys, where)
                    self._out[step.id] = step
                    self._flying[tier].update(keys)
                    steps.append(step)
        return steps
