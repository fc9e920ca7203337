"""From what a tier answers to what crosses the portal, failures told once.

A tier's exception is one verdict for each of its keys: nothing of it reaches the TaskGroup, where
it would end every other transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from tiering.errors import ClosedError, DamagedChunk, TierError
from tiering.residency.plan import Verdict
from tiering.tiers.base import Delete, DeleteOutcome, Failed, Read, ReadOutcome, Write, WriteOutcome

log = logging.getLogger("tiering")

_VERDICTS: dict[Read | Write | Delete, Verdict] = {
    Read.HIT: Verdict.HIT,
    Read.MISS: Verdict.MISS,
    Read.BUSY: Verdict.BUSY,
    Write.STORED: Verdict.STORED,
    Write.ALREADY_THERE: Verdict.ALREADY_THERE,
    Write.FULL: Verdict.FULL,
    Write.REFUSED: Verdict.REFUSED,
    Delete.DELETED: Verdict.DELETED,
    Delete.MISSING: Verdict.MISS,
}


class Judge:
    """Turns outcomes into verdicts. The first failure of each tier and kind is a warning, later
    ones are at debug level: the core counts them all."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    async def verdicts(
        self,
        count: int,
        operation: Callable[[], Awaitable[Sequence[ReadOutcome | WriteOutcome | DeleteOutcome]]],
    ) -> tuple[Verdict, ...]:
        """Run a tier's `operation` on `count` keys: one verdict for each, whatever happens."""
        try:
            outcomes = await operation()
        except (TierError, ClosedError) as error:
            self.tell(error)
            return (Verdict.FAILED,) * count
        if len(outcomes) != count:
            raise AssertionError(f"{len(outcomes)} outcomes for {count} keys")
        return tuple(map(self._verdict, outcomes))

    def _verdict(self, outcome: ReadOutcome | WriteOutcome | DeleteOutcome) -> Verdict:
        if not isinstance(outcome, Failed):
            return _VERDICTS[outcome]
        self.tell(outcome.error)
        return Verdict.DAMAGED if isinstance(outcome.error, DamagedChunk) else Verdict.FAILED

    def tell(self, error: TierError | ClosedError) -> None:
        """Log it, if it is the first of its kind."""
        kind = (getattr(error, "tier", ""), type(error).__name__)
        level = logging.DEBUG if kind in self._told else logging.WARNING
        self._told.add(kind)
        log.log(level, "%s (further ones of this kind are counted only)", error)
