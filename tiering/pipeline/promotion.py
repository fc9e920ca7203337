"""Promotion: a batch of chunks from a secondary tier into slots of the host tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tiering.pipeline.verdicts import Judge
from tiering.residency.plan import Outcome, Promote, Verdict
from tiering.tiers.base import Reading


async def promote(
    step: Promote,
    tier: Reading,
    row: Callable[[int], memoryview],
    judge: Judge,
    report: Callable[[Outcome], None],
) -> None:
    """Carry out `step`; at its deadline say LATE, and go on: the slots belong to the tier until
    it answers, and only then comes the final outcome."""
    buffers = [row(slot) for slot in step.slots]
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(
            judge.verdicts(len(step.keys), lambda: tier.read(step.keys, buffers))
        )
        await asyncio.wait({reading}, timeout=step.deadline_seconds)
        if not reading.done():
            report(Outcome(step.id, (Verdict.LATE,) * len(step.keys), final=False))
    report(Outcome(step.id, reading.result()))
