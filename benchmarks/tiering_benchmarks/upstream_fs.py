"""vLLM's own fs tier, `FileSystemTierManager`, driven as its scheduler drives it, to compare with.

One job for each batch, as vLLM makes one for each request and step; its default threads. The
caller is woken when a job is done, so vLLM pays neither for polling nor for waiting until the
next step. It never removes a file: what the next pass replaces is unlinked before, outside the
time, as an external cleaner would, because the tier skips names that exist; so its writes pay for
no eviction, while ours do. Importing this imports vLLM.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs import io, manager
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from tiering_benchmarks.tiers_run import Batch, Cost, Plan, Region, WrongAnswer, timed

_CONTEXT = ReqContext("bench")
_STEP_END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class _RingingDeque(deque[Any]):
    """Where vLLM's pool leaves finished jobs; sets `bell` for each."""

    def __init__(self, bell: threading.Event) -> None:
        super().__init__()
        self._bell = bell

    def append(self, item: Any, /) -> None:
        super().append(item)
        self._bell.set()


class _RingingQueue(SimpleQueue[Any]):
    """Where vLLM's lookup thread leaves its answers; sets `bell` for each batch."""

    bell: threading.Event

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self.bell.set()


class UpstreamFs:
    """A `tiering_benchmarks.tiers_run.Side`."""

    name = "vllm"
    passes_to_fill = 1
    keeps_bytes = True

    def __init__(self, directory: Path, plan: Plan, region: Region) -> None:
        self.directory = directory
        self._jobs = plan.jobs
        self._held: list[OffloadKey] = []
        self._numbers = itertools.count()
        self._bell = threading.Event()
        self._tier = FileSystemTierManager(cast("Any", _SPEC), region.view, "fs", str(directory))
        self._tier._pool._finished_q = _RingingDeque(self._bell)
        answers = _RingingQueue()
        answers.bell = self._bell
        self._tier._lookup_manager._pending_results = answers

    def about(self) -> str:
        native = io._HAS_FSIO_C and manager._HAS_BATCH_LOOKUP_C
        path = "direct" if self._tier._use_o_direct else "buffered"
        return f"FileSystemTierManager: {path}, {'its C extension' if native else 'pure Python'}"

    def write(self, batches: Sequence[Batch]) -> Cost:
        jobs = [self._job(batch, is_promotion=False) for batch in batches]
        self._held += [key for job in jobs for key in job.keys]
        return timed(lambda: self._work(jobs, self._tier.submit_store))

    def read(self, batches: Sequence[Batch]) -> Cost:
        jobs = [self._job(batch, is_promotion=True) for batch in batches]
        return timed(lambda: self._work(jobs, self._tier.submit_load))

    def exists(self, batches: Sequence[Sequence[bytes]], expected: Sequence[bool]) -> Cost:
        answers: list[list[LookupResult]] = []
        cost = timed(lambda: answers.extend(self._looked_up(keys) for keys in batches))
        wanted = [LookupResult.HIT if there else LookupResult.MISS for there in expected]
        for answer in answers:
            if answer != wanted[: len(answer)]:
                raise WrongAnswer(f"vLLM's tier was wrong about what it holds: {answer}")
        return cost

    def make_room(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(_unlink, map(self._tier.file_mapper.get_file_name, self._held)))
        self._held = []

    def close(self) -> None:
        self._tier.shutdown()

    def _job(self, batch: Batch, is_promotion: bool) -> TransferJob:
        keys = cast("list[OffloadKey]", batch.keys)
        rows = np.array(batch.rows)
        return TransferJob(next(self._numbers), keys, rows, is_promotion, _CONTEXT)

    def _work(self, jobs: Sequence[TransferJob], submit: Any) -> None:
        """All of `jobs`, so many at once as the plan says."""
        left = iter(jobs)
        for job in itertools.islice(left, self._jobs):
            submit(job)
        done = 0
        while done < len(jobs):
            self._bell.wait()
            self._bell.clear()
            for result in self._tier.get_finished_jobs():
                if not result.success:
                    raise WrongAnswer(f"a job of vLLM's tier failed: {result}")
                done += 1
                for job in itertools.islice(left, 1):
                    submit(job)

    def _looked_up(self, keys: Sequence[bytes]) -> list[LookupResult]:
        """A request's keys in one step, and their verdicts in the next."""
        wanted = cast("Sequence[OffloadKey]", keys)
        lookup = self._tier.lookup
        self._bell.clear()
        for key in wanted:
            lookup(key, _CONTEXT)
        self._tier.on_schedule_end(_STEP_END)
        self._bell.wait()
        results = [lookup(key, _CONTEXT) for key in wanted]
        self._tier.on_request_finished(_CONTEXT)
        return results


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


# As much of vLLM's offloading spec as its fs tier and file mapper look at.
_SPEC = SimpleNamespace(
    blocks_per_chunk=1,
    kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    config=SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=("layer.0",))],
        model=SimpleNamespace(name="tiering-bench", dtype="uint8"),
        cache=SimpleNamespace(tokens_per_hash=16),
        parallel=SimpleNamespace(
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            rank=0,
            is_parallelism_agnostic=True,
        ),
        canonical_layout=False,
        replicated_layout=False,
    ),
)
