"""One rank's copy jobs: carries them out, and tells the ledger before it tells vLLM.

Owns the rank's jobs and their futures. Called on the worker's main thread; only `wait` waits.
vLLM's OffloadingConnector takes a job that failed for a bug and ends the engine, so:

* a store always ends well for vLLM, and the ledger says what became of each row; the scheduler's
  half drops what is not whole;
* a load that failed cannot be made up for, since vLLM goes on with the device blocks as they are.
  It raises, and the engine ends rather than answer from wrong bytes. A copy within host memory
  fails only where an index is wrong, that is, for a bug; one to a device where that has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tiering.clock import Clock
from tiering.device.base import BlockMap, ByteArray, DeviceCopier, IntArray
from tiering.errors import ClosedError, CopyError, DeviceLostError
from tiering_connectors.vllm.offloading.ledger import Ledger, Told
from tiering_connectors.vllm.offloading.rows import Rows

log = logging.getLogger("tiering")

WAIT_SECONDS = 60.0
"""Longer than any copy takes: the device hangs, or the server's own work before the copy does."""


class DeviceBlocks(Protocol):
    """What is used of vLLM's GPULoadStoreSpec: blocks of the groups, one after another, and the
    index within its request of each group's first one."""

    block_ids: npt.NDArray[np.int32]
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ended:
    job_id: int
    size_bytes: int
    seconds: float


@dataclass(slots=True)
class _Job:
    """A load has a number, a store has none. `broken`: rows that a store cannot fill whole, or all
    of them where its source was given up before it was read."""

    rows: Rows
    began: float
    copies: list[Future[None]] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    size_bytes: int = 0
    is_given_up: bool = False


class RankCopies:
    """`block_bytes[g]` is what a block of the g-th group takes of `share`, what this rank keeps of
    each row: uint8, shape `(rows, share_bytes)`."""

    def __init__(
        self,
        copier: DeviceCopier,
        ledger: Ledger,
        rank: int,
        share: ByteArray,
        block_bytes: Sequence[int],
        blocks_per_chunk: int,
        clock: Clock,
    ) -> None:
        self._copier = copier
        self._ledger: Ledger | None = ledger
        self._rank = rank
        self._share: ByteArray | None = share
        self._block_bytes = tuple(block_bytes)
        self._blocks_per_chunk = blocks_per_chunk
        self._clock = clock
        self._jobs: dict[int, _Job] = {}
        self._loads_ended: set[int] = set()
        self._loads_told = 0

    def store(self, job_id: int, source: DeviceBlocks, rows: Rows) -> None:
        job = self._jobs[job_id] = _Job(rows, self._clock.now())
        for group, slots, first, blocks in _by_group(rows, source):
            offset = first % self._blocks_per_chunk
            if len(slots) * self._blocks_per_chunk - offset != len(blocks):
                # vLLM leaves out blocks that it no longer has, and does not say which.
                job.broken += slots.tolist()
                continue
            if offset:
                job.broken.append(int(slots[0]))
            copy = self._copier.gather(self._block_map(group, slots, offset, blocks))
            self._add(job, group, len(blocks), self._clearing(copy, group, slots))

    def load(self, job_id: int, rows: Rows, target: DeviceBlocks) -> None:
        job = self._jobs[job_id] = _Job(rows, self._clock.now())
        for group, slots, first, blocks in _by_group(rows, target):
            offset = first % self._blocks_per_chunk
            copy = self._copier.scatter(self._block_map(group, slots, offset, blocks))
            self._add(job, group, len(blocks), copy)

    def take_ended(self) -> list[Ended]:
        """Jobs that have ended since the last call; CopyError for a load that failed."""
        ended = []
        for job_id, job in list(self._jobs.items()):
            if all(copy.done() for copy in job.copies):
                del self._jobs[job_id]
                (self._end_load if job.rows.number else self._end_store)(job)
                ended.append(Ended(job_id, job.size_bytes, self._clock.now() - job.began))
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Until the copies of these jobs have ended; `take_ended` has them then. A store that hangs
        is given up after WAIT_SECONDS: it will have failed, if it ever ends."""
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is None or job.is_given_up:
                continue
            try:
                for copy in job.copies:
                    copy.exception(WAIT_SECONDS)
            except TimeoutError:
                job.is_given_up = True
                if not job.rows.number:
                    job.broken += job.rows.slots.tolist()
                log.error(
                    "job %d has not ended within %g seconds, and its blocks are needed: the server "
                    "goes on, and what it stores is not used",
                    job_id,
                    WAIT_SECONDS,
                )

    def close(self) -> None:
        self._copier.close()
        # Whoever still has a view of the host tier keeps it mapped.
        self._ledger = self._share = None

    def _block_map(self, group: int, slots: IntArray, offset: int, blocks: IntArray) -> BlockMap:
        """`blocks` follow one another, the first of them at place `offset` of the first slot."""
        places = np.arange(offset, offset + len(blocks), dtype=np.int32)
        chunks, positions = np.divmod(places, np.int32(self._blocks_per_chunk))
        return BlockMap(blocks, slots[chunks], positions, group)

    def _add(self, job: _Job, group: int, blocks: int, copy: Future[None]) -> None:
        job.copies.append(copy)
        job.size_bytes += blocks * self._block_bytes[group]

    def _clearing(self, copy: Future[None], group: int, slots: IntArray) -> Future[None]:
        """After `copy`, on its thread: what it leaves of `slots` is zero, not of an earlier chunk,
        so that equal chunks are equal rows and no tier is given bytes of another request."""
        share = self._share
        used = self._block_bytes[group] * self._blocks_per_chunk
        if share is None or used == share.shape[1]:
            return copy
        cleared: Future[None] = Future()

        def clear(ended: Future[None]) -> None:
            error = ended.exception()
            if error is not None:
                cleared.set_exception(error)
                return
            share[slots, used:] = 0
            cleared.set_result(None)

        copy.add_done_callback(clear)
        return cleared

    def _end_store(self, job: _Job) -> None:
        ledger = self._require_ledger()
        errors = [error for copy in job.copies if (error := copy.exception()) is not None]
        for error in errors:
            # What is wrong with a device that is lost was told when it was.
            level = logging.DEBUG if isinstance(error, DeviceLostError) else logging.WARNING
            log.log(level, "%s: the chunks are not stored", error)
        ledger.tell(self._rank, job.rows.slots, Told.FAILED if errors else Told.WHOLE)
        ledger.tell(self._rank, job.broken, Told.FAILED)

    def _end_load(self, job: _Job) -> None:
        for copy in job.copies:
            error = copy.exception()
            if error is not None:
                raise CopyError(
                    f"{error}. vLLM's OffloadingConnector cannot be told, and would answer from "
                    "wrong bytes; TieredConnector has such tokens computed"
                ) from error
        self._loads_ended.add(job.rows.number)
        while self._loads_told + 1 in self._loads_ended:
            self._loads_told += 1
            self._loads_ended.discard(self._loads_told)
        self._require_ledger().tell_loads(self._rank, self._loads_told)

    def _require_ledger(self) -> Ledger:
        if self._ledger is None:
            raise ClosedError("the worker was shut down")
        return self._ledger

    def __repr__(self) -> str:
        return f"<RankCopies {self._rank}: {len(self._jobs)} jobs, {self._copier!r}>"


def _by_group(rows: Rows, device: DeviceBlocks) -> Iterator[tuple[int, IntArray, int, IntArray]]:
    """For each group that has any: its number, its slots, the index in its request of the first
    device block, and the device blocks."""
    slot = block = 0
    facts = zip(rows.chunks, device.group_sizes, device.block_indices, strict=True)
    for group, (chunks, blocks, first) in enumerate(facts):
        if chunks:
            yield (
                group,
                rows.slots[slot : slot + chunks],
                first,
                device.block_ids[block : block + blocks],
            )
        slot, block = slot + chunks, block + blocks
