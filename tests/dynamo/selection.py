"""The core of NVIDIA Dynamo's router, in this process: reads KV events, says how far tokens reach.

`Router` owns one `SelectionService`, which is what `dynamo.frontend --router-mode kv` decides with:
the same listener, decoder, filter and indexes. It subscribes to any publisher of vLLM's format.
One event loop; needs `ai-dynamo-runtime` and no service. Nothing here knows what the events mean.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

MODEL = "m"
PATIENCE_SECONDS = 30.0
POLL_SECONDS = 0.005

NO_SERVER = "http://127.0.0.1:1"
"""Where requests would go; none are sent."""


class Reach(NamedTuple):
    """Blocks from the beginning of a prompt that a worker has: on the device; then on the device
    or in host memory; then in storage as well. Each counts the ones before it."""

    device: int
    host: int
    storage: int


NOTHING = Reach(0, 0, 0)

Reaches = Mapping[tuple[int, int], Reach]
"""By worker and data-parallel rank."""


class NeverSeen(AssertionError):
    """What was waited for did not come; says what was seen last."""


class Router:
    """All workers serve one model, in blocks of `block` tokens."""

    def __init__(self, service: Any, block: int) -> None:
        self._service = service
        self._block = block

    async def follow(self, worker: int, *endpoints: str, replay: str | None = None) -> None:
        """Read `worker`'s events, of data-parallel rank i from `endpoints[i]`. What was published
        before is had from `replay`, as soon as a live batch shows that something is missing."""
        record: dict[str, Any] = {
            "worker_id": worker,
            "model_name": MODEL,
            "endpoint": NO_SERVER,
            "block_size": self._block,
        }
        if len(endpoints) == 1:
            record["kv_events_endpoint"] = endpoints[0]
        else:
            record["data_parallel_size"] = len(endpoints)
            record["kv_events_endpoints"] = dict(enumerate(endpoints))
        if replay is not None:
            record["replay_endpoint"] = replay
        answer = await self._service.upsert_worker(record)
        assert answer["lifecycle"] == "schedulable", answer

    async def forget(self, worker: int) -> None:
        """Stop reading `worker`'s events and drop what they told."""
        await self._service.delete_worker(worker)

    async def reach(self, tokens: Sequence[int], **request: Any) -> dict[tuple[int, int], Reach]:
        """How far each worker has `tokens`; `request` may have `lora_name` and `cache_salt`."""
        asked = {"model_name": MODEL, "token_ids": list(tokens), **request}
        answer = await self._service.overlap_scores(asked)
        return {
            (told["worker_id"], told["dp_rank"]): Reach(
                told["device_blocks"], told["host_pinned_blocks"], told["disk_blocks"]
            )
            for told in answer["workers"]
        }

    async def until(
        self,
        tokens: Sequence[int],
        holds: Callable[[Reaches], bool],
        seconds: float = PATIENCE_SECONDS,
        **request: Any,
    ) -> dict[tuple[int, int], Reach]:
        """`reach`, once it `holds`; NeverSeen if it does not for `seconds`."""
        deadline = time.monotonic() + seconds
        while not holds(seen := await self.reach(tokens, **request)):
            if time.monotonic() > deadline:
                raise NeverSeen(f"{seen} is all that is seen after {seconds:g} s")
            await asyncio.sleep(POLL_SECONDS)
        return seen

    async def chosen(self, tokens: Sequence[int]) -> int:
        """The worker that a request for `tokens` would be sent to."""
        answer = await self._service.select({"model_name": MODEL, "token_ids": list(tokens)})
        worker: int = answer["worker_id"]
        return worker


@asynccontextmanager
async def running_router(block: int) -> AsyncIterator[Router]:
    """A router; at the end it and what it reads with are gone."""
    # It logs from a thread of its own to the real standard output, and reads this once.
    os.environ.setdefault("DYN_LOG", "warn")
    from dynamo._core import SelectionService

    # With one thread a tier's events are applied in order, whatever prompt they belong to.
    service = SelectionService(indexer_threads=1)
    try:
        yield Router(service, block)
    finally:
        await service.shutdown_async()


seeds = itertools.count(1)
"""For whoever needs a number that nobody else has."""
