"""What the scheduler half tells the worker halves each step, and what they tell it back.

Plain data, pickled between vLLM's processes inside the classes of `metadata`. A copy job is named
by an id that is unique within an engine; every rank carries it out and every rank acknowledges
it, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tiering.device.base import BlockMap


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copy `blocks`; for a load, `request_id` is who waits for it."""

    job_id: int
    blocks: BlockMap
    request_id: str = ""


@dataclass(slots=True)
class StepOrders:
    """One step's orders. `fence`: stores that must have ended before this step's forward, since
    it may overwrite their source. `lost`: device blocks, by request, that were promised and
    cannot be loaded."""

    loads: list[CopyJob] = field(default_factory=list)
    stores: list[CopyJob] = field(default_factory=list)
    fence: list[int] = field(default_factory=list)
    lost: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Acknowledgements:
    """How many ranks have ended each job, and the jobs that failed on one of them."""

    ended: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def merged(self, other: Acknowledgements) -> Acknowledgements:
        """Of these ranks and those of `other` together."""
        ended = dict(self.ended)
        for job_id, ranks in other.ended.items():
            ended[job_id] = ended.get(job_id, 0) + ranks
        return Acknowledgements(ended, self.failed | other.failed)
