"""Our file system tier under the constructor and the calls of vLLM's FileSystemTierManager."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiering.config import EngineConfig
from tiering.testing.examples import example_namespace
from tiering.tiers.base import Read, Write
from tiering.tiers.disk.paths import FsPaths
from tiering.wiring import build_tiers

SECONDS = 60.0


class FsManager(SecondaryTierManager):
    """The tier on a loop in a thread of its own."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **keys: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        rows = np.asarray(primary_kv_view)
        self._rows = rows.reshape(len(rows), -1).view(np.uint8)
        entry = {"type": "fs", **{key: value for key, value in keys.items() if value is not None}}
        config = EngineConfig(cpu_bytes_to_use=1, secondary_tiers=[entry])  # type: ignore[arg-type]
        (self._tier,) = build_tiers(config, example_namespace(), self._rows.shape[1])
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._run(self._tier.open()).result(SECONDS)
        # By request, as vLLM's own tier keeps what it was told.
        self._asked: dict[tuple[str, bytes], None] = {}
        self._verdicts: dict[tuple[str, bytes], LookupResult] = {}
        paths = FsPaths(Path(keys["root_dir"]), example_namespace().directory, 0)
        self.file_mapper = SimpleNamespace(get_file_name=paths.chunk)
        # Where vLLM's tests look to know that a lookup has been answered.
        self._lookup_manager = SimpleNamespace(
            _pending_results=queue.SimpleQueue(), _lookup_batch=[]
        )
        self._jobs: list[tuple[TransferJob, Future[Any]]] = []

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        question = (req_context.req_id, key)
        if question in self._verdicts:
            return self._verdicts[question]
        self._asked[question] = None
        return LookupResult.RETRY

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        asked, self._asked = list(self._asked), {}
        told = self._run(self._tier.contains([key for _, key in asked])).result(SECONDS)
        for question, read in zip(asked, told, strict=True):
            self._verdicts[question] = LookupResult.HIT if read is Read.HIT else LookupResult.MISS
            self._lookup_manager._pending_results.put(question)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._start(job_metadata, self._tier.write)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._start(job_metadata, self._tier.read)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended = [(job, future) for job, future in self._jobs if future.done()]
        self._jobs = [(job, future) for job, future in self._jobs if not future.done()]
        for job, future in ended:
            good = {Read.HIT, Write.STORED, Write.ALREADY_THERE}
            kept = [
                key
                for key, told in zip(job.keys, future.result(), strict=True)
                if isinstance(told, Read | Write) and told in good
            ]
            for question in self._verdicts:
                if question[1] in job.keys and question[1] not in kept:
                    self._verdicts[question] = LookupResult.MISS
            yield JobResult(job.job_id, len(kept) == len(job.keys), kept or None)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        for _, future in self._jobs:
            future.result(SECONDS)

    def shutdown(self) -> None:
        self._run(self._tier.close()).result(SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, job: TransferJob, operation: Any) -> None:
        buffers = [memoryview(self._rows[slot]) for slot in job.chunk_ids.tolist()]
        self._jobs.append((job, self._run(operation(list(job.keys), buffers))))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
