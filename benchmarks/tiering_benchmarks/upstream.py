"""vLLM's own offloading managers, driven as vLLM's scheduler drives them, to compare with.

The sequence of calls is that of vLLM 0.32's offloading scheduler for a model with full attention,
without the scheduler's own books. The secondary tier is vLLM's example tier, which keeps only
names. Importing this imports vLLM; only `control` does, and only when asked to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

STEP_END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class _Region:
    """As much of vLLM's shared region as its manager touches: rows of one byte."""

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(self._slots)).cast("B", (self._slots, 1))

    def cleanup(self) -> None:
        pass


class UpstreamManager:
    """A `tiering_benchmarks.control.Side`: with `tiers` = 0 vLLM's CPUOffloadingManager, else its
    TieringOffloadingManager; LRU, events on."""

    def __init__(self, slots: int, tiers: int) -> None:
        self._contexts: dict[str, ReqContext] = {}
        self._tiers: list[ExampleSecondaryTierManager] = []
        self._manager: OffloadingManager
        if not tiers:
            self._manager = CPUOffloadingManager(slots, "lru", enable_events=True)
            return
        region = cast("Any", _Region(slots))
        primary = CPUPrimaryTierOffloadingManager(slots, region, "lru", enable_events=True)
        view = primary.get_kv_memoryview()
        # The example tier only hands its specification on.
        spec = cast("Any", None)
        self._tiers = [ExampleSecondaryTierManager(spec, view, "example") for _ in range(tiers)]
        self._manager = TieringOffloadingManager(
            primary, cast("list[SecondaryTierManager]", self._tiers)
        )

    def match(self, request: str, keys: Sequence[bytes]) -> Iterator[None]:
        context = self._begin(request)
        yield
        self._look_up(keys, context)
        yield
        self._manager.on_request_finished(context)
        yield

    def load(self, request: str, keys: Sequence[bytes]) -> Iterator[None]:
        context = self._contexts[request] = self._begin(request)
        yield
        self._manager.prepare_load(_offload_keys(keys), context)
        yield

    def loaded(self, request: str, keys: Sequence[bytes]) -> Iterator[None]:
        context = self._contexts.pop(request)
        self._manager.complete_load(_offload_keys(keys), context)
        yield
        self._manager.on_request_finished(context)
        yield

    def store(self, request: str, keys: Sequence[bytes]) -> Iterator[None]:
        context = self._contexts[request] = self._begin(request)
        yield
        output = self._manager.prepare_store(_offload_keys(keys), context)
        yield
        if output is None or len(output.keys_to_store) != len(keys):
            raise AssertionError(f"vLLM's manager had no room for {len(keys)} chunks")

    def stored(self, request: str, keys: Sequence[bytes]) -> Iterator[None]:
        context = self._contexts.pop(request)
        self._manager.complete_store(_offload_keys(keys), context)
        yield
        self._manager.on_request_finished(context)
        yield

    def written(self) -> Iterator[None]:
        """One step's end hands them over, the next one's takes in that they are done."""
        self._manager.on_schedule_end(STEP_END)
        yield
        self._manager.on_schedule_end(STEP_END)
        yield
        list(self._manager.take_events())

    def promote(self, request: str, keys: Sequence[bytes]) -> Iterator[None]:
        context = self._contexts[request] = self._begin(request)
        yield
        self._look_up(keys, context)
        yield
        self._manager.on_schedule_end(STEP_END)
        yield

    def promoted(self, request: str, keys: Sequence[bytes]) -> Iterator[None]:
        """The example tier was done at once: the next step's end takes the news in."""
        self._manager.on_schedule_end(STEP_END)
        yield
        context = self._contexts.pop(request)
        for key in (keys[0], keys[-1]):
            if self._manager.lookup(OffloadKey(key), context) is not LookupResult.HIT:
                raise AssertionError(f"vLLM's manager did not promote {len(keys)} chunks")
        self._manager.on_request_finished(context)
        yield

    def idle(self) -> Iterator[None]:
        self._manager.on_schedule_end(STEP_END)
        yield

    def learn(self, keys: Sequence[bytes]) -> None:
        for tier in self._tiers:
            tier.chunks.update(dict.fromkeys(_offload_keys(keys), True))

    def close(self) -> None:
        self._contexts.clear()

    def _begin(self, request: str) -> ReqContext:
        context = ReqContext(request)
        self._manager.on_new_request(context)
        return context

    def _look_up(self, keys: Sequence[bytes], context: ReqContext) -> None:
        """As the scheduler looks for the longest prefix: on to the first miss."""
        lookup, miss = self._manager.lookup, LookupResult.MISS
        for key in _offload_keys(keys):
            if lookup(key, context) is miss:
                break


def _offload_keys(keys: Sequence[bytes]) -> Sequence[OffloadKey]:
    """The same, to the type checker: a key of ours has the form of vLLM's."""
    return cast("Sequence[OffloadKey]", keys)
