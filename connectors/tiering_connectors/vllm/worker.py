"""The worker half: carries out copy jobs for one rank and acknowledges them.

Owns the rank's copier and the futures of its jobs. Called by vLLM on the worker's main thread, in
its order of a step: fence, loads, stores, results. Only `fence` waits. Whatever becomes of a job,
it is acknowledged exactly once, and a request whose load failed is reported with its blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tiering.device.base import DeviceCopier
from tiering_connectors.vllm.orders import Acknowledgements, CopyJob, StepOrders

if TYPE_CHECKING:
    import torch

log = logging.getLogger("tiering")


class WorkerHalf:
    """`copier` copies this rank's blocks."""

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier
        self._stores: dict[int, Future[None]] = {}
        self._loads: dict[int, tuple[CopyJob, Future[None]]] = {}
        self._acknowledgements = Acknowledgements()
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()

    def fence(self, step: StepOrders) -> None:
        """Wait for stores whose source this step may overwrite. Copies always end."""
        for job_id in step.fence:
            store = self._stores.get(job_id)
            if store is not None:
                store.exception()

    def start_loads(self, step: StepOrders) -> None:
        for job in step.loads:
            self._loads[job.job_id] = (job, self._copier.scatter(job.blocks))
        for request_id, blocks in step.lost.items():
            self._loaded.add(request_id)
            self._bad_blocks.update(blocks)

    def start_stores(self, step: StepOrders) -> None:
        """The step's forward has ended: what it computed is final."""
        for job in step.stores:
            self._stores[job.job_id] = self._copier.gather(job.blocks)

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call, well or badly."""
        for job_id, (job, future) in list(self._loads.items()):
            if future.done():
                del self._loads[job_id]
                self._loaded.add(job.request_id)
                if not self._acknowledge(job_id, future):
                    self._bad_blocks.update(job.blocks.blocks.tolist())
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_bad_blocks(self) -> set[int]:
        """Device blocks of the requests just returned whose content must be computed instead."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_acknowledgements(self) -> Acknowledgements | None:
        for job_id, future in list(self._stores.items()):
            if future.done():
                del self._stores[job_id]
                self._acknowledge(job_id, future)
        if not self._acknowledgements.ended:
            return None
        told, self._acknowledgements = self._acknowledgements, Acknowledgements()
        return told

    def close(self) -> None:
        self._copier.close()

    def _acknowledge(self, job_id: int, future: Future[None]) -> bool:
        self._acknowledgements.ended[job_id] = 1
        error = future.exception()
        if error is not None:
            self._acknowledgements.failed.add(job_id)
            log.warning("%s", error)
        return error is None


def device_type(kv_caches: Mapping[str, torch.Tensor]) -> str:
    """The one kind of device that all of a worker's KV cache is on."""
    kinds: Sequence[str] = sorted({tensor.device.type for tensor in kv_caches.values()})
    if len(kinds) != 1:
        raise ValueError(f"a KV cache on {kinds or 'no device'}: one device was expected")
    return kinds[0]
