"""Copy jobs that workers have been given and not all ranks have acknowledged yet.

Owns job ids, and which device blocks are still being read. Scheduler side, one owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tiering_connectors.vllm.orders import Acknowledgements


@dataclass(slots=True)
class Job:
    """A store fills `slots` from device `blocks`; a load has an `owner` and no slots."""

    job_id: int
    owner: str = ""
    slots: tuple[int, ...] = ()
    blocks: frozenset[int] = frozenset()
    ranks_ended: int = 0
    has_failed: bool = False
    copied_bytes: int = 0
    seconds: float = 0.0


class JobBook:
    """`ranks` workers carry out every job."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs: dict[int, Job] = {}
        self._ids = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add_load(self, owner: str) -> Job:
        return self._add(Job(self._next_id(), owner=owner))

    def add_store(self, slots: Iterable[int], blocks: Iterable[int]) -> Job:
        return self._add(Job(self._next_id(), slots=tuple(slots), blocks=frozenset(blocks)))

    def reading(self, blocks: set[int]) -> list[int]:
        """Ids of the stores that may still be reading one of the device `blocks`."""
        if not blocks:
            return []
        return [job.job_id for job in self._jobs.values() if not job.blocks.isdisjoint(blocks)]

    def fail_stores(self) -> None:
        """However they end on the ranks, the stores that are out have failed."""
        for job in self._jobs.values():
            job.has_failed |= not job.owner

    def settle(self, told: Acknowledgements) -> list[Job]:
        """The jobs that every rank has ended by now. Unknown jobs are ignored."""
        ended = []
        for job_id, ranks in told.ended.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.ranks_ended += ranks
            job.has_failed |= job_id in told.failed
            job.copied_bytes += told.copied_bytes.get(job_id, 0)
            job.seconds = max(job.seconds, told.seconds.get(job_id, 0.0))
            if job.ranks_ended >= self._ranks:
                ended.append(self._jobs.pop(job_id))
        return ended

    def _add(self, job: Job) -> Job:
        self._jobs[job.job_id] = job
        return job

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids
