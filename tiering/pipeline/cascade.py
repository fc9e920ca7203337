"""Cascade: a batch of chunks from slots of the host tier into a secondary tier."""

from __future__ import annotations

from collections.abc import Callable

from tiering.pipeline.verdicts import Judge
from tiering.residency.plan import Cascade, Outcome
from tiering.tiers.base import Tier


async def cascade(
    step: Cascade, tier: Tier, row: Callable[[int], memoryview], judge: Judge
) -> Outcome:
    """Carry out `step`. There is no deadline: nobody waits for a write but its own pins, and the
    core bounds how many of those there are."""
    buffers = [row(slot) for slot in step.slots]
    verdicts = await judge.verdicts(len(step.keys), lambda: tier.write(step.keys, buffers))
    return Outcome(step.id, verdicts)
