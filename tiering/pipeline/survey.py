"""Survey: every key that a tier holds, a batch at a time, slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tiering.errors import ClosedError, TierError
from tiering.pipeline.removals import Removals
from tiering.pipeline.verdicts import Judge
from tiering.residency.plan import Found, News, Outcome, Survey, Verdict
from tiering.tiers.base import Tier

PAUSE_SECONDS = 0.05
"""Between two batches: nobody waits for this, and loads and stores need the same threads."""


async def survey(
    step: Survey, tier: Tier, removals: Removals, judge: Judge, report: Callable[[News], None]
) -> Outcome:
    """Carry out `step`. What goes while a batch is on its way is not reported as found."""
    try:
        with removals.watch() as gone:
            async for keys in tier.scan():
                if found := tuple(key for key in keys if key not in gone):
                    report(Found(step.tier, found))
                await asyncio.sleep(PAUSE_SECONDS)
                gone.clear()
    except (TierError, ClosedError) as error:
        judge.tell(error)
        return Outcome(step.id, (Verdict.FAILED,))
    return Outcome(step.id, ())
