"""`TieredOffloadingWorker`: a rank's copies as vLLM's OffloadingWorker.

Owns nothing but the translation; what is done is done in `copies`.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from tiering_connectors.vllm.offloading.copies import RankCopies
from tiering_connectors.vllm.offloading.envelopes import rows_of


class TieredOffloadingWorker(OffloadingWorker):
    """`on_shutdown` unmaps the host tier. For what each method must do, see vLLM's base class."""

    def __init__(self, copies: RankCopies, on_shutdown: Callable[[], None]) -> None:
        self._copies = copies
        self._on_shutdown = on_shutdown

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._copies.store(job_id, src_spec, rows_of(dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._copies.load(job_id, rows_of(src_spec), dst_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Never a failure: vLLM would take it for a bug."""
        return [
            TransferResult(job.job_id, True, job.size_bytes, job.seconds)
            for job in self._copies.take_ended()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._copies.wait(job_ids)

    def shutdown(self) -> None:
        self._copies.close()
        self._on_shutdown()

    def __repr__(self) -> str:
        return f"<TieredOffloadingWorker {self._copies!r}>"
