"""The worker half: carries out copy jobs for one rank and acknowledges them.

Owns the rank's copier and the futures of its jobs. Called by vLLM on the worker's main thread, in
its order of a step: fence, loads, stores, results. Only `fence` waits, and not for ever. Whatever
becomes of a job, it is acknowledged exactly once, when nothing of it is under way any more, and a
request whose load failed is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from tiering.clock import Clock
from tiering.device.base import BlockMap, DeviceCopier
from tiering.errors import DeviceLostError
from tiering_connectors.vllm.orders import Acknowledgements, CopyJob, StepOrders

log = logging.getLogger("tiering")

FENCE_SECONDS = 60.0
"""Longer than any copy takes: the device hangs, or the server's own work before the copy does."""


@dataclass(slots=True)
class Loaded:
    """Requests whose loads have ended since the last look, well or badly; those of them that
    ended badly, and the device blocks whose content must be computed instead."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)

    def fail(self, request_id: str, blocks: set[int]) -> None:
        self.failed.add(request_id)
        self.bad_blocks |= blocks


@dataclass(slots=True)
class _Copy:
    """A job under way: one future for each part. `ended_at`: when the last that has ended did.
    `is_spoilt`: its source was given up before it was read."""

    job: CopyJob
    started_at: float
    ended_at: float
    futures: list[Future[None]]
    is_spoilt: bool = False

    @property
    def is_over(self) -> bool:
        return all(future.done() for future in self.futures)

    def error(self, timeout_seconds: float | None = None) -> BaseException | None:
        """Waits for all of it; TimeoutError if a part takes longer."""
        errors = [future.exception(timeout_seconds) for future in self.futures]
        return next((error for error in errors if error is not None), None)


class WorkerHalf:
    """`copier` copies this rank's blocks, of `block_bytes` by group. Of the `replicas` neighbouring
    ranks that hold the same bytes and have one share together, this is number `replica`: it
    stores its part of them."""

    def __init__(
        self,
        copier: DeviceCopier,
        block_bytes: Sequence[int],
        clock: Clock,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self._copier = copier
        self._block_bytes = block_bytes
        self._clock = clock
        self._replica = replica
        self._replicas = replicas
        self._stores: dict[int, _Copy] = {}
        self._loads: dict[int, _Copy] = {}
        self._acknowledgements = Acknowledgements()
        self._loaded = Loaded()

    def fence(self, step: StepOrders) -> None:
        """Wait for stores whose source this step may overwrite. One that hangs is given up after
        FENCE_SECONDS: what it may yet read is wrong, so it will have failed, if it ever ends."""
        for job_id in step.fence:
            store = self._stores.get(job_id)
            if store is None or store.is_spoilt:
                continue
            try:
                store.error(FENCE_SECONDS)
            except TimeoutError:
                store.is_spoilt = True
                log.error(
                    "store job %d has not ended within %g seconds, and its blocks are needed: the "
                    "server goes on, and what it stores is not used",
                    job_id,
                    FENCE_SECONDS,
                )

    def start_loads(self, step: StepOrders) -> None:
        for job in step.loads:
            self._loads[job.job_id] = self._start(self._copier.scatter, job)
        for request_id, blocks in step.lost.items():
            self._loaded.requests.add(request_id)
            self._loaded.fail(request_id, set(blocks))

    def start_stores(self, step: StepOrders) -> None:
        """The step's forward has ended: what it computed is final."""
        for job in step.stores:
            own = replace(job, parts=tuple(filter(len, map(self._own_part, job.parts))))
            self._stores[job.job_id] = self._start(self._copier.gather, own)

    def take_loaded(self) -> Loaded:
        for job_id, load in list(self._loads.items()):
            if load.is_over:
                del self._loads[job_id]
                self._loaded.requests.add(load.job.request_id)
                if not self._acknowledge(load):
                    self._loaded.fail(load.job.request_id, load.job.blocks)
        loaded, self._loaded = self._loaded, Loaded()
        return loaded

    def take_acknowledgements(self) -> Acknowledgements | None:
        for job_id, store in list(self._stores.items()):
            if store.is_over:
                del self._stores[job_id]
                self._acknowledge(store)
        if not self._acknowledgements.ended:
            return None
        told, self._acknowledgements = self._acknowledgements, Acknowledgements()
        return told

    def close(self) -> None:
        self._copier.close()

    def _own_part(self, part: BlockMap) -> BlockMap:
        """Every replica has all of it, so each copies a part, and nobody twice."""
        if self._replicas == 1:
            return part
        mine = slice(self._replica, None, self._replicas)
        return BlockMap(part.blocks[mine], part.slots[mine], part.positions[mine], part.group)

    def _start(self, start: Callable[[BlockMap], Future[None]], job: CopyJob) -> _Copy:
        now = self._clock.now()
        copy = _Copy(job, now, now, [start(part) for part in job.parts])

        def note_end(_: Future[None]) -> None:
            copy.ended_at = self._clock.now()

        for future in copy.futures:
            future.add_done_callback(note_end)
        return copy

    def _acknowledge(self, copy: _Copy) -> bool:
        error = copy.error()
        copied = sum(len(part) * self._block_bytes[part.group] for part in copy.job.parts)
        seconds = copy.ended_at - copy.started_at
        has_failed = error is not None or copy.is_spoilt
        self._acknowledgements.add(copy.job.job_id, copied, seconds, has_failed)
        if error is not None:
            # What is wrong with a device that is lost was told when it was.
            level = logging.DEBUG if isinstance(error, DeviceLostError) else logging.WARNING
            log.log(level, "%s", _told(copy.job, error))
        return not has_failed


def _told(job: CopyJob, error: BaseException) -> str:
    whose = f" for request {job.request_id}" if job.request_id else ""
    return f"copy job {job.job_id}{whose}: {error}"
