"""`TieredOffloadingManager`: the scheduler's half as vLLM's OffloadingManager.

Owns nothing but the translation; what is decided is decided in `half`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiering.residency.answers import Place
from tiering_connectors.vllm.offloading.envelopes import RowsSpec
from tiering_connectors.vllm.offloading.events import OffloadedEvents
from tiering_connectors.vllm.offloading.half import OffloadingHalf
from tiering_connectors.vllm.offloading.stats import Statistics

_RESULTS = {
    Place.ABSENT: LookupResult.MISS,
    Place.UNKNOWN: LookupResult.RETRY,
    Place.KNOWN: LookupResult.HIT_PENDING,
    Place.FILLING: LookupResult.HIT_PENDING,
    Place.READY: LookupResult.HIT,
}


class TieredOffloadingManager(OffloadingManager):
    """`allowed` says which secondary tiers a request may load from, None for all; `on_shutdown`
    ends the tiers; `events` has what is to be told, if anything is. For what each method must do,
    see vLLM's base class."""

    def __init__(
        self,
        half: OffloadingHalf,
        statistics: Statistics,
        allowed: Callable[[ReqContext], frozenset[int] | None],
        on_shutdown: Callable[[], None],
        events: OffloadedEvents | None = None,
    ) -> None:
        self._half = half
        self._statistics = statistics
        self._allowed = allowed
        self._on_shutdown = on_shutdown
        self._events = events

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._half.begin(req_context, self._allowed(req_context)):
            return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._half.end(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return _RESULTS[self._half.look_up(key, req_context)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        was_promoted = self._half.was_promoted(key, req_context)
        return CacheHitSource.DISK if was_promoted else CacheHitSource.HOST

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._half.touch(keys, req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return RowsSpec(self._half.load(keys, req_context))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._half.loaded(req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        stored = self._half.store(keys, req_context)
        if stored is None:
            return None
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key in stored.keys],
            store_spec=RowsSpec(stored.rows),
            evicted_keys=[OffloadKey(key) for key in stored.evicted],
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._half.stored(keys, req_context, success)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._half.end_step(context.new_req_ids)

    def has_pending_work(self) -> bool:
        if self._half.needs_steps:
            return True
        # vLLM asks for events in its steps.
        return self._events is not None and (self._events.has_news or self._half.writes_end)

    def reset_cache(self) -> None:
        self._half.reset()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return () if self._events is None else self._events.take()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._statistics.since(self._half.counters())

    def shutdown(self) -> None:
        self._on_shutdown()

    def __repr__(self) -> str:
        return f"<TieredOffloadingManager {self._half!r}>"
