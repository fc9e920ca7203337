"""What the scheduler half tells the worker halves each step, and what they tell it back.

Plain data, pickled between vLLM's processes inside the classes of `metadata`. A copy job is named
by an id that is unique within an engine; every rank carries it out and every rank acknowledges
it, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tiering.device.base import BlockMap


def blocks_of(parts: Iterable[BlockMap]) -> set[int]:
    """The device blocks of all `parts`."""
    return {block for part in parts for block in part.blocks.tolist()}


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copy all of `parts`, one for each KV cache group at most; for a load, `request_id` is who
    waits for it."""

    job_id: int
    parts: tuple[BlockMap, ...]
    request_id: str = ""

    @property
    def blocks(self) -> set[int]:
        """The device blocks that it reads or writes."""
        return blocks_of(self.parts)


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
    """How many ranks have ended each job, the jobs that failed on one of them, and what they
    copied: the bytes of all ranks together, and the seconds of the slowest."""

    ended: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    copied_bytes: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, job_id: int, copied_bytes: int, seconds: float, has_failed: bool) -> None:
        """One rank has ended a job."""
        self.ended[job_id] = 1
        self.copied_bytes[job_id] = copied_bytes
        self.seconds[job_id] = seconds
        if has_failed:
            self.failed.add(job_id)

    def merged(self, other: Acknowledgements) -> Acknowledgements:
        """Of these ranks and those of `other` together."""
        ended, copied, seconds = dict(self.ended), dict(self.copied_bytes), dict(self.seconds)
        for job_id, ranks in other.ended.items():
            ended[job_id] = ended.get(job_id, 0) + ranks
            copied[job_id] = copied.get(job_id, 0) + other.copied_bytes.get(job_id, 0)
            seconds[job_id] = max(seconds.get(job_id, 0.0), other.seconds.get(job_id, 0.0))
        return Acknowledgements(ended, self.failed | other.failed, copied, seconds)
