"""Our classes under the names and constructors of vLLM's, so that its own tests can drive them.

There are no workers and no device in those tests: every rank is taken to have filled every row at
once. The host tier is memory of this process. vLLM's secondary tiers, which its tests make and look
into, are reached through a portal that calls them as vLLM's manager would.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiering.config import EngineConfig
from tiering.engine import Engine
from tiering.events import HOST, ChunksRemoved, ChunksStored, Event
from tiering.residency.plan import Cascade, Contains, Outcome, Promote, Step, Touch, Verdict
from tiering.wiring import build_core
from tiering_connectors.vllm.meter import TransferMeter, host_now
from tiering_connectors.vllm.metrics import Growth
from tiering_connectors.vllm.offloading.envelopes import rows_of
from tiering_connectors.vllm.offloading.half import OffloadingHalf, Removals
from tiering_connectors.vllm.offloading.ledger import NOTE_BYTES, Ledger, Slots, Told
from tiering_connectors.vllm.offloading.lookups import Lookups
from tiering_connectors.vllm.offloading.manager import TieredOffloadingManager
from tiering_connectors.vllm.offloading.stats import Statistics

ROW = 4096
GROUPS = range(8)


class SecondsPass:
    """A clock that is a second further each time it is read: what is told once a second is told
    each time."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        self._seconds += 1.0
        return self._seconds


class FilledAtOnce(Ledger):
    """Every rank is done with a row as soon as it is told to fill it."""

    def begin(self, slots: Slots) -> None:
        super().begin(slots)
        self.tell(0, slots, Told.WHOLE)

    @property
    def loads_ended(self) -> int:
        return 1 << 60


class HostEvents:
    """What became of chunks in the host tier, as vLLM's events."""

    def __init__(self) -> None:
        self._told: list[OffloadingEvent] = []

    def publish(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ChunksStored | ChunksRemoved) and event.tier == HOST:
                is_gone = isinstance(event, ChunksRemoved)
                self._told.append(
                    OffloadingEvent(list(map(OffloadKey, event.keys)), Medium.CPU, is_gone)
                )

    def take(self) -> list[OffloadingEvent]:
        told, self._told = self._told, []
        return told


class TierPortal:
    """Carries steps out by vLLM's secondary tiers, on the spot, for one request after another."""

    restarts = 0

    def __init__(self, tiers: Sequence[SecondaryTierManager], contexts: dict[str, Any]) -> None:
        self._tiers = tiers
        self._contexts = contexts
        self._outcomes: list[Outcome] = []
        self._jobs: dict[tuple[int, int], tuple[Step, TransferJob]] = {}

    def submit(self, steps: Sequence[Step]) -> None:
        for step in steps:
            tier = self._tiers[step.tier]
            context = next(reversed(self._contexts.values()), ReqContext(""))
            if isinstance(step, Contains):
                told = [tier.lookup(key, context) for key in step.keys]
                verdicts = [Verdict.HIT if t is LookupResult.HIT else Verdict.MISS for t in told]
                self._outcomes.append(Outcome(step.id, tuple(verdicts)))
            elif isinstance(step, Promote | Cascade):
                is_promotion = isinstance(step, Promote)
                slots = np.array(step.slots, np.int32)
                job = TransferJob(step.id, list(step.keys), slots, is_promotion, context)
                self._jobs[step.tier, step.id] = (step, job)
                (tier.submit_load if is_promotion else tier.submit_store)(job)
            elif isinstance(step, Touch):
                tier.touch(step.keys, context)
                self._outcomes.append(Outcome(step.id, ()))

    def drain(self) -> list[Outcome]:
        for number, tier in enumerate(self._tiers):
            for result in tier.get_finished_jobs():
                step, _ = self._jobs.pop((number, result.job_id))
                self._outcomes.append(Outcome(step.id, _verdicts(step, result)))
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


def _verdicts(step: Step, result: JobResult) -> tuple[Verdict, ...]:
    good = Verdict.HIT if isinstance(step, Promote) else Verdict.STORED
    if result.success:
        return (good,) * len(step.keys)
    kept = set(result.successful_keys or ())
    return tuple(good if key in kept else Verdict.FAILED for key in step.keys)


class StandIn(TieredOffloadingManager):
    """`tiers` are vLLM's. Rows are told as vLLM's own class has them."""

    def __init__(self, slots: int, tiers: Sequence[SecondaryTierManager], **settings: Any) -> None:
        clock = SecondsPass()
        config = EngineConfig(cpu_bytes_to_use=1, load_deadline_seconds=1000.0, **settings)
        core = build_core(config, slots, len(tiers), clock)
        contexts: dict[str, Any] = {}
        rows = np.zeros((slots + NOTE_BYTES // ROW + 1, ROW), np.uint8)
        self._told = HostEvents()
        removals, meter = Removals(self._told), TransferMeter()
        half = OffloadingHalf(
            Engine(core, TierPortal(tiers, contexts), removals),
            removals,
            FilledAtOnce(rows, 1, 1),
            Lookups(core, len(tiers), clock, 1000.0),
            meter,
            GROUPS,
        )
        growth = Growth([], clock, meter, partial(host_now, core))
        self._contexts = contexts
        self._nameless = 0
        self.secondary_tiers = list(tiers)
        super().__init__(half, Statistics(growth, slots), self._tiers_for, lambda: None)

    def _tiers_for(self, context: ReqContext) -> frozenset[int] | None:
        self._contexts[context.req_id] = context
        allows = context.load_tier_filter.allows
        return frozenset(
            at for at, t in enumerate(self.secondary_tiers) if allows(t.medium, t.locality)
        )

    def _own(self, context: ReqContext) -> ReqContext:
        """vLLM's tests have one nameless request for all that they store. To us chunks of one
        request are one prefix; so each store is of a request of its own."""
        if context.req_id:
            return context
        self._nameless += 1
        context = ReqContext(f"nameless {self._nameless}")
        self.on_new_request(context)
        return context

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        """As far as the tiers here answer at once, so does this: the half would ask them for all
        keys of a scan at the end of the step. vLLM's tests do not always begin a request."""
        if req_context.req_id not in self._contexts:
            self.on_new_request(req_context)
        result = super().lookup(key, req_context)
        if result is LookupResult.RETRY:
            half, request = self._half, self._half._requests[req_context.req_id]
            half._core.ask(request.owner, [key])
            half._engine.pump()
            half._engine.pump()
            request.places[key] = half._core.places([key], request.owner)[0]
            result = super().lookup(key, req_context)
        return result

    def take_events(self) -> list[OffloadingEvent]:
        return self._told.take()

    def prepare_load(self, keys: Collection[Any], req_context: ReqContext) -> LoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        return CPULoadStoreSpec(rows_of(spec).slots.tolist())

    def prepare_store(
        self, keys: Collection[Any], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, self._own(req_context))
        if output is not None:
            output.store_spec = CPULoadStoreSpec(rows_of(output.store_spec).slots.tolist())
        return output


class CpuManager(StandIn):
    """For CPUOffloadingManager."""

    def __init__(
        self,
        num_chunks: int,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
    ) -> None:
        super().__init__(
            num_chunks,
            [],
            eviction_policy=cache_policy,
            cache_policy_module_path=cache_policy_module_path,
            store_threshold=store_threshold,
            max_tracker_size=max_tracker_size,
        )


class PrimaryTier:
    """For CPUPrimaryTierOffloadingManager: how large it is, and what is in it."""

    def __init__(self, num_chunks: int, mmap_region: Any, **settings: Any) -> None:
        self.num_chunks = num_chunks
        self.settings = settings
        self.owner: StandIn | None = None

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        assert self.owner is not None
        core = self.owner._half._core
        return LookupResult.HIT if core.index.ready([key]) else LookupResult.MISS


class TieredManager(StandIn):
    """For TieringOffloadingManager."""

    def __init__(self, primary_tier: PrimaryTier, secondary_tiers: list[Any] | None = None) -> None:
        super().__init__(primary_tier.num_chunks, secondary_tiers or [])
        self.primary_tier = primary_tier
        # Where vLLM's tests look to know whether a request has begun.
        self._req_state = self._half._requests
        primary_tier.owner = self
