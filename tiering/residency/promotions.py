"""Which chunks are on their way from the secondary tiers to the host tier, and what became of them.

Owns the Promote steps that are out. Every chunk that is started is counted once more when it ends,
under one name: late as soon as anyone's deadline has passed, else by what the tier said. Its slot
stays with the reader until the step's final outcome. Part of the core; same owner, same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

from tiering.events import ChunksRemoved, ChunksStored, Event
from tiering.metrics import Counters
from tiering.residency.holds import Holds
from tiering.residency.index import HostIndex
from tiering.residency.known import KnownKeys
from tiering.residency.plan import Outcome, Promote, Verdict, keys_with
from tiering.residency.state import SlotArray

COUNTERS = (
    "promotions_started",
    "promotions_succeeded",
    "promotions_missing",
    "promotions_damaged",
    "promotions_failed",
    "promotions_late",
)

_COUNTER = {
    Verdict.HIT: "promotions_succeeded",
    Verdict.MISS: "promotions_missing",
    Verdict.DAMAGED: "promotions_damaged",
    Verdict.LATE: "promotions_late",
}


class PromotionBook:
    """One for each core."""

    def __init__(
        self,
        index: HostIndex,
        holds: Holds,
        known: Mapping[int, KnownKeys],
        counters: Counters,
        next_id: Callable[[], int],
    ) -> None:
        self._index = index
        self._holds = holds
        self._known = known
        self._counters = counters
        self._next_id = next_id
        self._out: dict[int, Promote] = {}
        # The slots of steps that are out whose chunks are counted as late already.
        self._late: set[int] = set()

    @property
    def steps_out(self) -> int:
        return len(self._out)

    def start(
        self, tier: int, keys: Sequence[bytes], slots: SlotArray, seconds: float, peer: bytes
    ) -> Promote:
        """Have `keys` read from `tier`, from its `peer` if it is of peers, into `slots`, reserved
        for them."""
        step = Promote(self._next_id(), tier, tuple(keys), tuple(slots.tolist()), seconds, peer)
        self._out[step.id] = step
        self._counters.add("promotions_started", len(keys))
        return step

    def is_mine(self, step_id: int) -> bool:
        return step_id in self._out

    def give_up(self, slots: Sequence[int]) -> None:
        """Somebody's deadline has passed for `slots`: those that are being promoted are late."""
        for step in self._out.values():
            self._count_late(set(slots).intersection(step.slots))

    def settle(self, outcome: Outcome) -> list[Event]:
        """Take in an outcome of one of these steps: what it says of the tier."""
        step = self._out[outcome.id]
        if not outcome.final:
            # The shell's own deadline: nobody should wait, but the slots stay with the reader.
            self._holds.lose(step.slots, step.tier)
            self._count_late(step.slots)
            return []
        del self._out[outcome.id]
        self._count(step, outcome)
        good = [verdict is Verdict.HIT for verdict in outcome.verdicts]
        known = self._known.get(step.tier)
        if all(good):
            self._index.fill(step.slots)
            return [ChunksStored(step.tier, step.keys)] if known is not None else []
        bad = [slot for slot, is_good in zip(step.slots, good, strict=True) if not is_good]
        self._holds.lose(bad, step.tier)
        self._index.fill(list(compress(step.slots, good)))
        self._index.fail(bad)
        if known is None:
            return []
        gone = (*keys_with(step, outcome, Verdict.MISS), *keys_with(step, outcome, Verdict.DAMAGED))
        known.discard(gone)
        read = tuple(compress(step.keys, good))
        told = ((ChunksStored, read), (ChunksRemoved, gone))
        return [event(step.tier, keys) for event, keys in told if keys]

    def _count_late(self, slots: Iterable[int]) -> None:
        fresh = set(slots).difference(self._late)
        self._late.update(fresh)
        self._counters.add("promotions_late", len(fresh))

    def _count(self, step: Promote, outcome: Outcome) -> None:
        verdicts = outcome.verdicts
        if self._late:
            pairs = zip(step.slots, verdicts, strict=True)
            verdicts = tuple(verdict for slot, verdict in pairs if slot not in self._late)
            self._late.difference_update(step.slots)
        self._counters.tally(verdicts, _COUNTER, "promotions_failed")
