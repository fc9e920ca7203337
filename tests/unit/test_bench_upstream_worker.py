"""The worker that lets vLLM's connector run on the CPU moves every block to its place and back."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCKS, CHUNKS, PER_CHUNK = 12, 5, 3
PAGE_BYTES = (8, 4, 16)
# The first two layers are of one KV cache group, the third of another.
GROUPS = ((0, 1), (2,))


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM and torch say of themselves while they load
        import tiering_benchmarks.upstream_worker  # noqa: F401


def setup_worker() -> tuple[Any, list[Any], list[Any]]:
    """A worker, its device's pages, each byte of them another, and empty host memory."""
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    from tiering_benchmarks.upstream_worker import CopyingWorker

    device = [
        np.random.default_rng(page).integers(-128, 128, (BLOCKS, page), np.int8)
        for page in PAGE_BYTES
    ]
    host = [np.zeros((CHUNKS, page * PER_CHUNK), np.uint8) for page in PAGE_BYTES]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.from_numpy(each), each.shape[1]) for each in device],
        [[CanonicalKVCacheRef(at, PAGE_BYTES[at]) for at in group] for group in GROUPS],
    )
    return CopyingWorker(caches, host, PER_CHUNK), device, host


def test_blocks_come_back_in_other_places() -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    worker, device, host = setup_worker()
    kept = [each.copy() for each in device]
    # Group 0: two whole chunks, in slots 4 and 1; group 1: the last block of one, in slot 2.
    stored = GPULoadStoreSpec([9, 3, 5, 0, 7, 1, 6], [6, 1], [3, 2])
    chunks = CPULoadStoreSpec([4, 1, 2])
    assert worker.submit_store(1, stored, chunks)
    for layer in GROUPS[0]:
        rows = host[layer].reshape(CHUNKS, PER_CHUNK, -1).view(np.int8)
        assert (rows[4] == kept[layer][[9, 3, 5]]).all()
        assert (rows[1] == kept[layer][[0, 7, 1]]).all()
        assert not rows[[0, 2, 3]].any()
    rows = host[2].reshape(CHUNKS, PER_CHUNK, -1).view(np.int8)
    assert (rows[2, 2] == kept[2][6]).all()
    assert not rows[2, :2].any()

    for each in device:
        each[:] = 0
    # From the midst of the first chunk on, as where the device has the prompt's head.
    loaded = GPULoadStoreSpec([2, 10, 8, 4, 11], [4, 1], [5, 2])
    assert worker.submit_load(2, chunks, loaded)
    for layer in GROUPS[0]:
        assert (device[layer][[2, 10, 8, 4]] == kept[layer][[5, 0, 7, 1]]).all()
        assert not device[layer][[0, 1, 3, 5, 6, 7, 9, 11]].any()
    assert (device[2][11] == kept[2][6]).all()

    ended = worker.get_finished()
    of_group = [sum(PAGE_BYTES[at] for at in group) for group in GROUPS]
    assert [(each.job_id, each.success, each.transfer_size) for each in ended] == [
        (1, True, 6 * of_group[0] + of_group[1]),
        (2, True, 4 * of_group[0] + of_group[1]),
    ]
    assert worker.get_finished() == []
