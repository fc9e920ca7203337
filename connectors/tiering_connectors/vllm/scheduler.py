"""The scheduler half: what vLLM asks of it and tells it, in vLLM's terms.

Owns the requests that are tracked and the jobs at the workers; what can be loaded is found by
`finding`, what is stored decided by `storing`, and who is where is the core's business. Called by
vLLM on the scheduler's thread; nothing here waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tiering.clock import Clock
from tiering.device.base import BlockMap
from tiering.engine import Engine
from tiering_connectors.vllm.announcing import SILENCE, Silence
from tiering_connectors.vllm.finding import Finder
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.jobs import Job, JobBook
from tiering_connectors.vllm.meter import TransferMeter, host_now
from tiering_connectors.vllm.orders import Acknowledgements, CopyJob, StepOrders
from tiering_connectors.vllm.params import RequestLimits, TierKind
from tiering_connectors.vllm.pauses import Pause, take_pause
from tiering_connectors.vllm.peering import Peering
from tiering_connectors.vllm.storing import NULL_BLOCK, Storer
from tiering_connectors.vllm.tracked import KeyMaker, Stores, Tracked
from tiering_connectors.vllm.versions import block_tables

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SchedulerHalf:
    """One for each engine (for each data-parallel replica). `tiers`: what a request may choose
    the secondary tiers by. `meter` is told of copies and lookups, `announcing` of what may come to
    the tiers. `pause` is what a step does that has nothing else to do."""

    def __init__(
        self,
        engine: Engine,
        geometry: Geometry,
        offload_prompt_only: bool,
        clock: Clock,
        tiers: Sequence[TierKind] = (),
        announcing: Silence = SILENCE,
        pause: Pause = take_pause,
    ) -> None:
        self.meter = TransferMeter()
        self._pause = pause
        self._clock = clock
        self._engine = engine
        self._core = engine.core
        self._geometry = geometry
        self._tiers = tiers
        self._jobs = JobBook(geometry.world)
        self._keys = KeyMaker(geometry)
        self._announcing = announcing
        self._finder = Finder(engine, geometry, announcing)
        self._storer = Storer(
            engine.core, geometry, self._jobs, self.meter, offload_prompt_only, announcing
        )
        self._peering = Peering(engine.core)
        self._requests: dict[str, Tracked] = {}
        # Those that may have something to store.
        self._storing: set[str] = set()
        self._step = StepOrders()
        self._loading_blocks: set[int] = set()

    # Looking up

    def matched(self, request: Request, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be loaded, or None: ask again next step."""
        tracked = self._track(request)
        tracked.stores = Stores()
        self._storing.add(tracked.owner)
        tracked.is_stale = False
        tracked.local = local_tokens
        if tracked.is_loading or tracked.is_finished:
            return None
        if tracked.has_failed or request.skip_reading_prefix_cache:
            return 0
        began = self._clock.now()
        self._keys.extend(tracked.keys, request.block_hashes)
        found = self._finder.find(tracked, local_tokens)
        now = self._clock.now()
        self.meter.looked_up(now - began)
        if found is None:
            tracked.asked_at = tracked.asked_at or began
        elif tracked.asked_at:
            self.meter.answered(now - tracked.asked_at)
            tracked.asked_at = 0.0
        return found

    # Loading

    def allocated(
        self, request: Request, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """vLLM has blocks, by group, for the tokens that `matched` promised, or wants none."""
        tracked = self._track(request)
        if not external_tokens:
            if not tracked.is_loading:
                self._core.release(tracked.owner)
                self._core.peers.release(tracked.owner)
            return
        end = tracked.local + external_tokens
        slots = self._finder.claim(tracked, end)
        parts, targets = self._load_parts(tracked.local, end, block_ids, slots or {})
        self._loading_blocks |= targets
        if slots is None or parts is None:
            # Cannot happen while vLLM allocates right after it asks; if it does, compute.
            self.meter.load_failed()
            self._step.lost[tracked.owner] = sorted(targets)
            tracked.has_failed = True
            self._core.release(tracked.owner)
            return
        job = self._jobs.add_load(tracked.owner)
        tracked.is_loading = True
        in_host = tracked.load.host_end - tracked.local if tracked.load else 0
        tracked.loaded_from_host = min(max(0, in_host), external_tokens)
        self._step.loads.append(CopyJob(job.job_id, parts, tracked.owner))

    def _load_parts(
        self,
        local: int,
        end: int,
        block_ids: Sequence[Sequence[int]],
        slots: dict[tuple[int, int], int],
    ) -> tuple[tuple[BlockMap, ...] | None, set[int]]:
        """What to copy to each block that the request was given for the tokens from `local` to
        `end`, or None if the slots do not cover all of them; and those blocks."""
        parts: list[BlockMap] = []
        targets: set[int] = set()
        is_covered = True
        for at, group in enumerate(self._geometry.groups):
            size, per_chunk = group.tokens_per_block, group.blocks_per_chunk
            first, stop = -(-local // size), end // size
            given = np.asarray(block_ids[at][first:stop], dtype=np.int32)
            wanted = np.flatnonzero(given != NULL_BLOCK).astype(np.int32)
            blocks, places = given[wanted], wanted + np.int32(first)
            targets.update(block_ids[at][first:])
            chunks = (places // per_chunk).tolist()
            into = [slots.get((at, chunk), -1) for chunk in chunks]
            is_covered = is_covered and len(given) == stop - first and -1 not in into
            if into:
                positions = places % per_chunk
                parts.append(BlockMap(blocks, np.array(into, dtype=np.int32), positions, at))
        targets.discard(NULL_BLOCK)
        return (tuple(parts) if is_covered else None), targets

    def loaded_from_host(self, request: Request) -> int:
        """Of the tokens being loaded for `request`, those that the host tier had already."""
        tracked = self._requests.get(request.request_id)
        return 0 if tracked is None else tracked.loaded_from_host

    # Storing

    def plan_step(self, output: SchedulerOutput) -> StepOrders:
        """This step's orders to the workers."""
        self._announcing.look_for_device_reset()
        if self._only_waits_for_writes:
            self._pause()
        self._engine.pump()
        step, self._step = self._step, StepOrders()
        scheduled = output.num_scheduled_tokens
        # A decoding step has many requests, and mostly none that has anything left to store.
        for request_id in scheduled if self._storing else ():
            if request_id in self._storing:
                tracked, tokens = self._requests[request_id], scheduled[request_id]
                if self._storer.is_due(tracked, tokens):
                    self._plan_store(tracked, tokens, output, step)
        # Taken before the stores of this step, which cannot be overwritten by it.
        new = self._new_blocks(output)
        started = {job.job_id for job in step.stores}
        step.fence = [job_id for job_id in self._jobs.reading(new) if job_id not in started]
        self._engine.pump()
        return step

    def _plan_store(
        self, tracked: Tracked, tokens: int, output: SchedulerOutput, step: StepOrders
    ) -> None:
        table = block_tables(output.kv_connector_block_state, tracked.owner)
        if table is None:
            return
        self._keys.extend(tracked.keys, tracked.request.block_hashes)
        job = self._storer.plan(tracked, tokens, table)
        if job is not None:
            step.stores.append(job)
        if self._storer.is_over(tracked):
            self._storing.discard(tracked.owner)

    def _new_blocks(self, output: SchedulerOutput) -> set[int]:
        """Device blocks that this step, or a load of this step, may write to for the first
        time. Shared prefix blocks are not among them: nobody writes to those."""
        new, self._loading_blocks = self._loading_blocks, set()
        for request in output.scheduled_new_reqs:
            for group, blocks in zip(self._geometry.groups, request.block_ids, strict=True):
                new.update(blocks[request.num_computed_tokens // group.tokens_per_block :])
        for given in output.scheduled_cached_reqs.new_block_ids:
            if given is not None:
                new.update(*given)
        new.discard(NULL_BLOCK)
        return new

    # Ending

    def acknowledged(self, told: Acknowledgements) -> None:
        """What the workers have ended."""
        for job in self._jobs.settle(told):
            self._measure(job)
            if not job.owner:
                (self._core.unfilled if job.has_failed else self._core.filled)(job.slots)
                continue
            self._core.release(job.owner)
            self._core.peers.release(job.owner)
            tracked = self._requests.get(job.owner)
            if tracked is not None:
                tracked.is_loading = False
                tracked.has_failed |= job.has_failed
                if tracked.is_finished:
                    self._forget(job.owner)
        self._peering.go_on()
        self._engine.pump()

    def distrust_stores(self) -> None:
        """What the copies under way have read may be wrong: nobody will see it."""
        self._jobs.fail_stores()

    def _measure(self, job: Job) -> None:
        if job.has_failed:
            (self.meter.load_failed if job.owner else self.meter.store_failed)()
        else:
            note = self.meter.loaded if job.owner else self.meter.stored
            note(job.copied_bytes, job.seconds)

    def finished(self, request: Request) -> None:
        """The request is over; a load under way keeps its pins until it has ended."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            self._peering.never_began(request.kv_transfer_params)
        else:
            tracked.is_finished = True
            self._peering.end(tracked.roles, tracked.kept)
            if not tracked.is_loading:
                self._forget(request.request_id)
        self._engine.pump()

    def reset(self) -> None:
        """Nothing stored until now will be found again, in any tier."""
        self._announcing.look_for_device_reset()
        self._keys.mask = secrets.randbits(256)
        for tracked in self._requests.values():
            tracked.keys = self._no_keys()
            tracked.is_stale = True
        self._core.reset()
        self._peering.forget()
        self._engine.pump()
        self._announcing.masked(self._keys.mask)

    def counters(self) -> dict[str, int]:
        """What the core has counted so far."""
        return self._core.counters.snapshot()

    def host_now(self) -> dict[str, int]:
        """The state of the host tier, as gauges, and what was told of it so far."""
        return host_now(self._core) | self._announcing.counters()

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must keep stepping though nothing is scheduled: to hear of copies
        that end, or because chunks could not all be given to the tiers at once, or because there
        is, or soon will be, something to announce."""
        if len(self._jobs) or self._core.needs_turns:
            return True
        announcing = self._announcing
        return announcing.needs_steps or (announcing.is_heard and self._core.writes_end)

    @property
    def _only_waits_for_writes(self) -> bool:
        """Whether no request, no copy and no event is there that should not wait."""
        is_busy = self._requests or len(self._jobs) or self._announcing.needs_steps
        return not is_busy and self._core.writes_end

    def _forget(self, owner: str) -> None:
        del self._requests[owner]
        self._storing.discard(owner)
        self._core.close(owner)

    def _track(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            limits = RequestLimits.of(request.kv_transfer_params, self._tiers)
            tracked = Tracked(request, limits, self._no_keys())
            self._requests[tracked.owner] = tracked
            self._announcing.request_came()
            self._core.open(tracked.owner)
            if limits.load_tiers is not None:
                self._core.restrict(tracked.owner, limits.load_tiers)
            tracked.roles = self._peering.begin(tracked.owner, request.kv_transfer_params)
        return tracked

    def _no_keys(self) -> list[list[bytes]]:
        return [[] for _ in self._geometry.groups]

    def __repr__(self) -> str:
        return f"<SchedulerHalf {len(self._requests)} requests, {len(self._jobs)} jobs out>"
