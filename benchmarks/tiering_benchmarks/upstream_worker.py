"""vLLM's own offloading specs with a worker that runs on its CPU backend, to compare with.

vLLM 0.32 refuses to offload unless the device is CUDA or XPU. Only its copies need one: scheduler,
managers and tiers are used here as they are, and the worker that is added copies within the call,
one numpy assignment for each tensor. Imported by vLLM, in the processes of a server that is told
so by `spec_module_path`; importing this imports vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

ByteArray = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int32]


class Places(NamedTuple):
    """Of one KV cache group in a transfer: device blocks, and where each is in host memory."""

    group: int
    blocks: IntArray
    chunks: IntArray
    positions: IntArray


def places_of(
    device: GPULoadStoreSpec, chunks: IntArray, blocks_per_chunk: int
) -> Iterator[Places]:
    """`chunks` are those of all groups, one group's after another's. A group's first block may
    be in the midst of its first chunk."""
    block = chunk = 0
    for group, (count, first) in enumerate(
        zip(device.group_sizes, device.block_indices, strict=True)
    ):
        if not count:
            continue
        at = np.arange(count) + first % blocks_per_chunk
        used = int(at[-1]) // blocks_per_chunk + 1
        yield Places(
            group,
            device.block_ids[block : block + count],
            chunks[chunk : chunk + used][at // blocks_per_chunk],
            at % blocks_per_chunk,
        )
        block, chunk = block + count, chunk + used


class CopyingWorker(OffloadingWorker):
    """`host[t]` is tensor t's part of host memory: `(chunks, bytes of a block * blocks_per_chunk)`.

    Every transfer has ended when its submission returns.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        host: Sequence[ByteArray],
        blocks_per_chunk: int,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._on_shutdown = on_shutdown
        self._ended: list[TransferResult] = []
        self._groups = [[ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs]
        self._device: list[ByteArray] = []
        self._host: list[ByteArray] = []
        for each, part in zip(kv_caches.tensors, host, strict=True):
            page = each.page_size_bytes
            self._device.append(each.tensor.numpy().view("uint8").reshape(-1, page))
            self._host.append(part.reshape(len(part), blocks_per_chunk, page))

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._move(job_id, src_spec, dst_spec, to_host=True)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._move(job_id, dst_spec, src_spec, to_host=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        # Whoever still has a view of it keeps the shared region mapped.
        self._host, self._device = [], []
        self._on_shutdown()

    def _move(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, to_host: bool
    ) -> None:
        assert isinstance(host, BlockIDsLoadStoreSpec)
        began = time.perf_counter()
        size_bytes = 0
        for place in places_of(device, host.block_ids, self._blocks_per_chunk):
            for tensor in self._groups[place.group]:
                pages, rows = self._device[tensor], self._host[tensor]
                if to_host:
                    rows[place.chunks, place.positions] = pages[place.blocks]
                else:
                    pages[place.blocks] = rows[place.chunks, place.positions]
                size_bytes += len(place.blocks) * pages.shape[1]
        seconds = time.perf_counter() - began
        self._ended.append(TransferResult(job_id, True, size_bytes, seconds))


class CopyingHostSpec(CPUOffloadingSpec):
    """vLLM's host memory alone, private to the worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        host = [
            np.zeros((self.num_chunks, each.page_size_bytes * self.blocks_per_chunk), np.uint8)
            for each in kv_caches.tensors
        ]
        return CopyingWorker(kv_caches, host, self.blocks_per_chunk)


class CopyingTieringSpec(TieringOffloadingSpec):
    """vLLM's host memory with its secondary tiers below, shared with the scheduler's process."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        host = [
            region.create_next_worker_view(each.page_size_bytes * self.blocks_per_chunk)
            .numpy()
            .view("uint8")
            for each in kv_caches.tensors
        ]
        return CopyingWorker(kv_caches, host, self.blocks_per_chunk, region.cleanup)
