"""The scheduler half: what a request can load, what to store of it, and when a copy has ended.

Owns what the connector knows of each request and the jobs at the workers; who is where is the
core's business. Called by vLLM on the scheduler's thread; nothing here waits. A promise to vLLM
is kept by pins: what `matched` has promoted stays until it is copied or the request ends.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiering.device.base import BlockMap
from tiering.engine import Engine
from tiering.keys import GROUP_BYTES
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.jobs import JobBook
from tiering_connectors.vllm.orders import Acknowledgements, CopyJob, StepOrders

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

GROUP = 0


@dataclass(slots=True)
class _Tracked:
    """`keys` are those of the full chunks hashed so far. `first`: the chunk at which the hold, if
    there is one, begins. `stored`: chunks before it have been cared for. `local_tokens`: what the
    device had when vLLM last asked. `host_end`: chunks before it were in the host tier then.
    `refused_at` and `deferred_at`: the core's count of changes when it had no room, to store or
    to hold; not tried again before it changes. `is_stale`: its blocks are from before a reset."""

    request: Request
    keys: list[bytes] = field(default_factory=list)
    first: int = 0
    stored: int = 0
    refused_at: int = -1
    deferred_at: int = -1
    local_tokens: int = 0
    host_end: int = 0
    loaded_from_host: int = 0
    is_loading: bool = False
    is_stale: bool = False
    has_failed: bool = False
    is_finished: bool = False


class SchedulerHalf:
    """One for each engine (for each data-parallel replica)."""

    def __init__(self, engine: Engine, geometry: Geometry, offload_prompt_only: bool) -> None:
        self._engine = engine
        self._core = engine.core
        self._geometry = geometry
        self._prompt_only = offload_prompt_only
        self._jobs = JobBook(geometry.ranks)
        self._requests: dict[str, _Tracked] = {}
        self._step = StepOrders()
        self._loading_blocks: set[int] = set()
        # Mixed into every hash after a reset, so that nothing stored before is found again.
        self._mask = 0

    # Looking up

    def matched(self, request: Request, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be loaded, or None: ask again next step."""
        tracked = self._track(request)
        tracked.stored = 0
        tracked.is_stale = False
        tracked.local_tokens = local_tokens
        if tracked.is_loading or tracked.is_finished:
            return None
        if tracked.has_failed or request.skip_reading_prefix_cache:
            return 0
        geometry = self._geometry
        # At least one token is always computed: its logits are what the request is for.
        limit = (request.num_tokens - 1) // geometry.tokens_per_block * geometry.tokens_per_block
        first = local_tokens // geometry.tokens_per_chunk
        wanted = self._keys(tracked)[first : -(-limit // geometry.tokens_per_chunk)]
        chunks = self._found(tracked, first, wanted)
        if chunks is None:
            return None
        end = min((first + chunks) * geometry.tokens_per_chunk, limit)
        if end <= local_tokens:
            self._core.release(request.request_id)
            return 0
        return end - local_tokens

    def _found(self, tracked: _Tracked, first: int, keys: list[bytes]) -> int | None:
        """How many of `keys`, the chain from chunk `first` on, are or were made ready."""
        core, owner = self._core, tracked.request.request_id
        self._engine.pump()
        if core.is_holding(owner):
            if first >= tracked.first:
                held = core.held(owner)
                return None if held is None else max(0, tracked.first + held - first)
            core.release(owner)
        if core.is_asking(owner) or (
            tracked.deferred_at == core.changes and core.seconds_left(owner) > 0
        ):
            return None
        match = core.match(keys, owner)
        if match.is_open:
            core.ask(owner, keys)
        elif match.reach == match.host:
            # Nothing to wait for: pinned when there are blocks to copy to.
            core.release(owner)
            tracked.host_end = first + match.host
            return match.host
        elif core.hold(owner, keys):
            tracked.first = first
            tracked.host_end = first + match.host
        else:
            tracked.deferred_at = core.changes
        self._engine.pump()
        return core.held(owner) if core.is_holding(owner) else None

    # Loading

    def allocated(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        """vLLM has blocks for the tokens that `matched` promised, or wants none of them."""
        owner = request.request_id
        tracked = self._track(request)
        if not external_tokens:
            if not tracked.is_loading:
                self._core.release(owner)
            return
        size = self._geometry.tokens_per_block
        start = tracked.local_tokens // size
        end = (tracked.local_tokens + external_tokens) // size
        self._loading_blocks.update(block_ids[start:])
        first, slots = self._claimed(tracked, start, end)
        blocks = np.arange(start, end)
        chunks = blocks // self._geometry.blocks_per_chunk - first
        if end > start and chunks[-1] >= len(slots):
            # Cannot happen while vLLM allocates right after it asks; if it does, compute.
            self._step.lost[owner] = block_ids[start:end]
            tracked.has_failed = True
            self._core.release(owner)
            return
        positions = blocks % self._geometry.blocks_per_chunk
        device = np.asarray(block_ids[start:end], dtype=np.int32)
        slot_of = np.asarray(slots, dtype=np.int32)
        block_map = BlockMap(device, slot_of[chunks], positions.astype(np.int32))
        job = self._jobs.add_load(owner)
        tracked.is_loading = True
        in_host = tracked.host_end * self._geometry.tokens_per_chunk - tracked.local_tokens
        tracked.loaded_from_host = min(max(0, in_host), external_tokens)
        self._step.loads.append(CopyJob(job.job_id, block_map, owner))

    def _claimed(self, tracked: _Tracked, start: int, end: int) -> tuple[int, list[int]]:
        """The first chunk of the hold, and its slots."""
        core, owner = self._core, tracked.request.request_id
        per_chunk = self._geometry.blocks_per_chunk
        if not core.is_holding(owner):
            tracked.first = start // per_chunk
            core.hold_ready(owner, self._keys(tracked)[tracked.first : -(-end // per_chunk)])
        core.used(owner, tracked.keys)
        return tracked.first, core.claim(owner)

    def loaded_from_host(self, request: Request) -> int:
        """Of the tokens being loaded for `request`, those that the host tier had already."""
        tracked = self._requests.get(request.request_id)
        return 0 if tracked is None else tracked.loaded_from_host

    # Storing

    def plan_step(self, output: SchedulerOutput) -> StepOrders:
        """This step's orders to the workers."""
        self._engine.pump()
        step, self._step = self._step, StepOrders()
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._plan_store(tracked, tokens, output, step)
        # Taken before the stores of this step, which cannot be overwritten by it.
        new = self._new_blocks(output)
        started = {job.job_id for job in step.stores}
        step.fence = [job_id for job_id in self._jobs.reading(new) if job_id not in started]
        self._engine.pump()
        return step

    def _plan_store(
        self, tracked: _Tracked, tokens: int, output: SchedulerOutput, step: StepOrders
    ) -> None:
        if tracked.is_stale:
            return
        request, per_chunk = tracked.request, self._geometry.blocks_per_chunk
        computed = request.num_computed_tokens + tokens
        if self._prompt_only:
            computed = min(computed, request.num_prompt_tokens)
        full = computed // self._geometry.tokens_per_chunk
        if full <= tracked.stored or tracked.refused_at == self._core.changes:
            return
        keys = self._keys(tracked)[:full]
        if len(keys) <= tracked.stored:
            return
        reservation = self._core.reserve(request.request_id, keys, tracked.stored)
        tracked.stored = reservation.end
        is_refused = reservation.end < len(keys)
        tracked.refused_at = self._core.changes if is_refused else -1
        if not reservation.slots:
            return
        state = output.kv_connector_block_state
        table = state.get_block_ids(request.request_id) if state is not None else None
        if table is None:
            self._core.unfilled(reservation.slots)
            return
        offsets = np.arange(per_chunk)
        where = (np.asarray(reservation.indices)[:, None] * per_chunk + offsets).ravel()
        device = np.asarray(table[GROUP], dtype=np.int32)[where]
        slots = np.repeat(np.asarray(reservation.slots, dtype=np.int32), per_chunk)
        positions = np.tile(offsets.astype(np.int32), len(reservation.slots))
        job = self._jobs.add_store(reservation.slots, device.tolist())
        step.stores.append(CopyJob(job.job_id, BlockMap(device, slots, positions)))

    def _new_blocks(self, output: SchedulerOutput) -> set[int]:
        """Device blocks that this step, or a load of this step, may write to for the first
        time. Shared prefix blocks are not among them: nobody writes to those."""
        new, self._loading_blocks = self._loading_blocks, set()
        size = self._geometry.tokens_per_block
        for request in output.scheduled_new_reqs:
            new.update(request.block_ids[GROUP][request.num_computed_tokens // size :])
        cached = output.scheduled_cached_reqs
        for block_ids in cached.new_block_ids:
            if block_ids is not None:
                new.update(block_ids[GROUP])
        return new

    # Ending

    def acknowledged(self, told: Acknowledgements) -> None:
        """What the workers have ended."""
        for job in self._jobs.settle(told):
            if not job.owner:
                (self._core.unfilled if job.has_failed else self._core.filled)(job.slots)
                continue
            self._core.release(job.owner)
            tracked = self._requests.get(job.owner)
            if tracked is not None:
                tracked.is_loading = False
                tracked.has_failed |= job.has_failed
                if tracked.is_finished:
                    self._forget(job.owner)
        self._engine.pump()

    def finished(self, request: Request) -> None:
        """The request is over; a load under way keeps its pins until it has ended."""
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            tracked.is_finished = True
            if not tracked.is_loading:
                self._forget(request.request_id)

    def reset(self) -> None:
        """Nothing stored until now will be found again, in any tier."""
        self._mask = secrets.randbits(256)
        for tracked in self._requests.values():
            tracked.keys = []
            tracked.is_stale = True
        self._core.reset()
        self._engine.pump()

    def counters(self) -> dict[str, int]:
        """What the core has counted so far."""
        return self._core.counters.snapshot()

    @property
    def needs_steps(self) -> bool:
        """Whether the engine must keep stepping though nothing is scheduled: to hear of copies
        that end, or because chunks could not all be given to the tiers at once."""
        return bool(len(self._jobs)) or self._core.needs_turns

    def _forget(self, owner: str) -> None:
        del self._requests[owner]
        self._core.close(owner)

    def _track(self, request: Request) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = _Tracked(request)
            self._core.open(request.request_id)
        return tracked

    def _keys(self, tracked: _Tracked) -> list[bytes]:
        """The keys of all full chunks that vLLM has hashed: each the hash of its last block."""
        stride = self._geometry.blocks_per_chunk * self._geometry.hashes_per_block
        hashes = tracked.request.block_hashes
        if len(hashes) // stride > len(tracked.keys):
            group = GROUP.to_bytes(GROUP_BYTES, "big")
            fresh: list[bytes] = list(hashes[len(tracked.keys) * stride + stride - 1 :: stride])
            if self._mask:
                fresh = [_masked(block_hash, self._mask) for block_hash in fresh]
            tracked.keys += [block_hash + group for block_hash in fresh]
        return tracked.keys

    def __repr__(self) -> str:
        return f"<SchedulerHalf {len(self._requests)} requests, {len(self._jobs)} jobs out>"


def _masked(block_hash: bytes, mask: int) -> bytes:
    size = len(block_hash)
    mixed = int.from_bytes(block_hash, "big") ^ (mask & ((1 << 8 * size) - 1))
    return mixed.to_bytes(size, "big")
