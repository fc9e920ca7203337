"""As much of vLLM as the connector's halves can see, with all of its habits that matter to them.

Scheduling in vLLM's order (running first, preempting the last; then waiting), steps cut where
recurrent states have to be final, a block pool with prefix cache and reuse, asynchronous loads,
aborts that keep blocks until a load has ended, failed loads computed again. After each step every
token that is still read must have its stamp, in every group and rank (`mini_device`). Copies and
tiers are gated: nothing ends unless the test says so.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from gated import GATHER, SCATTER, GatedCopier, GatedPortal
from mini_blocks import BlockPool, Request
from mini_device import RankDevice
from mini_groups import BLOCK, full, geometry_for, numbered
from mini_tables import Tables
from routers import Listener
from tiering.engine import Engine
from tiering.policy.admission import AdmissionPolicy
from tiering.policy.lru import LruPolicy
from tiering.residency.core import Residency
from tiering.residency.state import SlotState
from tiering.residency.surveys import SURVEY_SECONDS
from tiering.testing.clocks import ManualClock
from tiering_connectors.vllm.announcing import SILENCE
from tiering_connectors.vllm.groups import Group, Kind
from tiering_connectors.vllm.orders import Acknowledgements, StepOrders
from tiering_connectors.vllm.params import TierKind
from tiering_connectors.vllm.scheduler import SchedulerHalf
from tiering_connectors.vllm.worker import WorkerHalf

DEADLINE_SECONDS = 10.0


class MiniVllm:
    """One engine, `ranks` workers, `replicas` neighbours of which hold the same bytes. `step` is
    one turn of vLLM's loop. Those of `tiers` that are in `peers` are of peers. `groups` is one of
    all history, of chunks of `blocks_per_chunk`, unless given."""

    def __init__(
        self,
        *,
        groups: Sequence[Group] = (),
        replicas: int = 1,
        tier_kinds: Sequence[TierKind] = (),
        blocks_per_chunk: int = 1,
        ranks: int = 1,
        device_blocks: int = 32,
        slots: int = 8,
        tiers: int = 1,
        hashes_per_block: int = 1,
        prompt_only: bool = False,
        token_budget: int = 64,
        running_max: int = 4,
        is_listened_to: bool = True,
        peers: Sequence[int] = (),
        admission: AdmissionPolicy | None = None,
    ) -> None:
        # Block 0 is nobody's.
        device_blocks += 1
        self.geometry = geometry = geometry_for(
            numbered(groups or [full(per_chunk=blocks_per_chunk)]),
            BLOCK // hashes_per_block,
            device_blocks,
            ranks,
            replicas,
        )
        self.clock = ManualClock()
        self.rows = np.full((slots, geometry.row.payload_bytes), 0xEE, np.uint8)
        self.portal = GatedPortal(self.rows, tiers)
        self.core = Residency(
            slots,
            tiers,
            LruPolicy(slots),
            self.clock,
            DEADLINE_SECONDS,
            admission,
            surveyed=[tier for tier in range(tiers) if tier not in peers],
            peers=peers,
        )
        self.listener = Listener(geometry, tiers, slots, self.clock)
        announcing = self.listener.announcing if is_listened_to else SILENCE
        engine = Engine(self.core, self.portal, announcing)
        self.pauses = 0
        self.half = SchedulerHalf(
            engine, geometry, prompt_only, self.clock, tier_kinds, announcing, self._pause
        )
        self.devices, self.copiers, self.workers = [], [], []
        for rank in range(ranks):
            own = geometry.share_of(rank)
            share = self.rows[:, own * geometry.share_bytes :][:, : geometry.share_bytes]
            device = RankDevice(geometry, own)
            copier = GatedCopier.of(device.pages, share)
            self.devices.append(device)
            self.copiers.append(copier)
            self.workers.append(
                WorkerHalf(copier, geometry.block_bytes, self.clock, rank % replicas, replicas)
            )
        self.pool = BlockPool(device_blocks)
        self.tables = Tables(geometry.groups, self.pool, token_budget)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.draining: dict[str, Request] = {}
        self.finished: list[Request] = []
        self.loaded: Counter[str] = Counter()
        self.loaded_tokens: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.epoch = 0
        self._is_listened_to = is_listened_to
        self._token_budget = token_budget
        self._running_max = running_max
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._issued: set[int] = set()
        self._acknowledged: Counter[int] = Counter()

    def _pause(self) -> None:
        self.pauses += 1

    # What a front end does

    def add(
        self, request_id: str, tokens: Sequence[int], outputs: int = 1, **params: Any
    ) -> Request:
        """`params`: its `kv_transfer_params`."""
        request = Request(request_id, list(tokens), outputs, self.geometry.tokens_per_hash)
        request.kv_transfer_params = params or None
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        is_loading = request.status == "LOADING" and request.request_id not in self._received
        self._received.discard(request.request_id)
        self._failed.discard(request.request_id)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        request.status = "ABORTED"
        self.half.finished(request)
        if is_loading:
            self.seen["aborts while loading"] += 1
            self.draining[request.request_id] = request
        else:
            self.tables.free(request)

    def reset(self) -> bool:
        """Everything is preempted and forgotten; with nobody loading, the weights change."""
        while self.running:
            self._preempt(self.running.pop())
        is_idle = not any(self.pool.users)
        if is_idle:
            self.pool.forget()
            self.epoch += 1
            self.listener.device_was_reset()
        self.half.reset()
        self.listener.all_was_reset()
        return is_idle

    def forget_device(self, request: Request | None = None, keep: int = 0) -> None:
        """The prefix cache loses all but the first `keep` tokens of `request`."""
        kept = self.tables.cached_before(request, keep) if request is not None else {}
        self.pool.forget()
        for (group, block_hash), block in kept.items():
            self.pool.cache(block, group, block_hash)

    # A step

    def step(self) -> StepOrders:
        output = self._schedule()
        orders = self.half.plan_step(output)
        self.seen.update(
            loads=len(orders.loads), stores=len(orders.stores), fences=len(orders.fence)
        )
        new_jobs = {job.job_id for job in orders.stores + orders.loads}
        assert not new_jobs & self._issued
        assert not new_jobs & set(orders.fence)
        self._issued |= new_jobs
        loaded: Counter[str] = Counter()
        failed: set[str] = set()
        bad: set[int] = set()
        told: Acknowledgements | None = None
        for rank, worker in enumerate(self.workers):
            mine = pickle.loads(pickle.dumps(orders))
            self._work(rank, worker, mine, output)
            results = worker.take_loaded()
            loaded.update(results.requests)
            failed |= results.failed
            bad |= results.bad_blocks
            ended = worker.take_acknowledgements()
            if ended is not None:
                self._acknowledged.update(ended.ended)
                told = ended if told is None else told.merged(ended)
        self._compute_on(output)
        (self._take_bad_blocks(bad) if self._names_blocks else self._take_failed(failed))
        self._take_results(loaded, told)
        self.listener.listen()
        self.check()
        return orders

    def release(self) -> None:
        """Everything that waits at a gate happens."""
        self.portal.finish_all()
        for copier in self.copiers:
            copier.run_all(GATHER)
            copier.run_all(SCATTER)

    def run(self, steps_max: int = 200) -> None:
        """Until every request has ended, all gates open."""
        for _ in range(steps_max):
            if not (self.running or self.waiting or self.draining or self.half.needs_steps):
                break
            self.step()
            self.release()
        else:
            raise AssertionError(f"no end: {self.half!r} {self.core!r}")
        self.settle()

    def settle(self) -> None:
        """Let the tiers finish, then nothing may be left of anything."""
        for _ in range(100):
            if not (self.core.steps_out or self.portal.steps):
                break
            self.release()
            self.step()
        self.clock.advance(SURVEY_SECONDS)
        while self.half.needs_steps:
            self.step()
        self.step()
        self.step()
        if self._is_listened_to:
            self.listener.check_at_rest(self.core, self.portal)
        slots = self.core.index.slots
        assert not slots.load_pins.any()
        assert not slots.write_pins.any()
        assert {SlotState(s) for s in slots.states.tolist()} <= {SlotState.FREE, SlotState.READY}
        assert not self.half.needs_steps
        assert repr(self.half) == "<SchedulerHalf 0 requests, 0 jobs out>"
        assert not self.core._holds.owners()
        assert self.core.is_settled
        assert not any(self.pool.users)
        assert self._acknowledged == dict.fromkeys(self._issued, self.geometry.world)

    def check(self) -> None:
        """What holds after every step."""
        slots, holds = self.core.index.slots, self.core._holds
        census = slots.census()
        assert sum(census.values()) == len(slots)
        pins = np.zeros(len(slots), int)
        for owner in holds.owners():
            pins[holds[owner].slots] += 1
        assert pins.tolist() == slots.load_pins.tolist()
        live = {r.request_id for r in self.running + self.waiting} | set(self.draining)
        kept = {owner for owner in holds.owners() if owner.startswith("kept ")}
        assert set(holds.owners()) <= live | kept
        assert all(count <= self.geometry.world for count in self._acknowledged.values())

    # Parts of a step

    @property
    def _names_blocks(self) -> bool:
        """Whether a failed load is told by its blocks: of one group with all history, which can go
        on at any of them. Otherwise by its request."""
        return [group.kind for group in self.geometry.groups] == [Kind.FULL]

    def _schedule(self) -> Any:
        self._budget = self._token_budget
        self._scheduled: dict[str, int] = {}
        self._new: list[Any] = []
        self._cached_ids: list[tuple[list[int], ...] | None] = []
        has_preempted = False
        at = 0
        while at < len(self.running) and self._budget:
            request = self.running[at]
            start = request.num_computed_tokens
            tokens = self._cut(request, start, min(request.num_tokens - start, self._budget))
            if not tokens:
                at += 1
                continue
            fresh = self.tables.extend(request, start + tokens)
            while fresh is None:
                has_preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
                fresh = self.tables.extend(request, start + tokens)
            if fresh is None:
                break
            self._grant(request, tokens)
            self._cached_ids.append(tuple(fresh) if any(fresh) else None)
            at += 1
        if not has_preempted:
            self._admit()
        tables = {r.request_id: tuple(r.blocks) for r in self.running}
        state = SimpleNamespace(
            get_block_ids=lambda name: tables[name] if name in self._scheduled else None
        )
        return SimpleNamespace(
            num_scheduled_tokens=self._scheduled,
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=self._cached_ids),
            kv_connector_block_state=state,
        )

    def _cut(self, request: Request, start: int, tokens: int) -> int:
        """Where there are recurrent states, prefills end where states can be cached: at ends of
        blocks, and at the last one that a repeated prompt could go on at."""
        groups, size = self.geometry.groups, self.tables.align
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        has_states = any(group.kind is Kind.STATE for group in groups)
        if not has_states or start >= prefill_end:
            return tokens
        end = start + tokens
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or size <= self._token_budget:
                end = aligned
        if any(group.is_draft for group in groups):
            last = request.num_tokens // size * size - size
        else:
            last = (request.num_tokens - 1) // size * size
        next_end = (start // size + 1) * size if start % size else 0
        return min([stop for stop in (last, next_end) if start < stop < end], default=end) - start

    def _admit(self) -> None:
        # Those that hold blocks come first: nobody else could ever be given them.
        for request in sorted(self.waiting, key=lambda waiting: not waiting.blocks):
            if not self._budget or len(self.running) >= self._running_max:
                return
            if request.status == "LOADING" and not self._has_arrived(request):
                continue
            hit: list[list[int]] = [[] for _ in self.geometry.groups]
            local = external = 0
            if not request.num_computed_tokens:
                local, hit = self.tables.local_hit(request)
                found = self.half.matched(request, local)
                if found is None:
                    continue
                external = found
            total = request.num_computed_tokens + local + external
            assert total < request.num_tokens
            assert not external or total % self.tables.align == 0
            tokens = 0
            if not external:
                left = min(request.num_tokens - total, self._budget)
                tokens = self._cut(request, total, left)
                if not tokens:
                    return
            others = [r for r in self.running + self.waiting if r is not request]
            if not self.tables.fits_whole(request, hit, total, others):
                return
            if not request.num_computed_tokens:
                self.tables.adopt(request, hit, local, external)
            if not external:
                assert self.tables.extend(request, total + tokens) is not None
            self.half.allocated(request, request.blocks if external else (), external)
            request.num_computed_tokens = total
            if external:
                request.status = "LOADING"
                self.loaded_tokens[request.request_id] += external
                continue
            self.waiting.remove(request)
            self.running.append(request)
            blocks = tuple(list(table) for table in request.blocks)
            if request.is_resumed:
                self._cached_ids.append(blocks)
            else:
                self._new.append(SimpleNamespace(block_ids=blocks, num_computed_tokens=total))
            self._grant(request, tokens)

    def _grant(self, request: Request, tokens: int) -> None:
        self._scheduled[request.request_id] = tokens
        self._budget -= tokens
        request.status = "RUNNING"
        self.tables.cache(request, request.num_computed_tokens + tokens)

    def _preempt(self, request: Request) -> None:
        self.seen["preemptions"] += 1
        self.tables.free(request)
        request.status, request.is_resumed = "PREEMPTED", True
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def _has_arrived(self, request: Request) -> bool:
        name = request.request_id
        if name not in self._received:
            return False
        self._received.remove(name)
        request.status = "PREEMPTED" if request.is_resumed else "WAITING"
        if name in self._failed:
            self._failed.remove(name)
            self.seen["failed loads"] += 1
        if request.num_computed_tokens:
            self.tables.cache(request, request.num_computed_tokens)
        else:
            self.tables.free(request)
        return True

    def _work(self, rank: int, worker: WorkerHalf, orders: StepOrders, output: Any) -> None:
        worker.fence(orders)
        device = self.devices[rank]
        spans = [
            (r, r.num_computed_tokens, r.num_computed_tokens + self._scheduled[r.request_id])
            for r in self._scheduled_requests(output)
        ]
        targets = {block for job in orders.loads for block in job.blocks}
        # Looked at before anything is written: the copies of this step take no time.
        being_read = self.copiers[rank].being_read()
        for request, start, end in spans:
            targets |= device.compute(request, start, end, self.epoch)
        assert not targets & being_read, "a store's source was written to"
        worker.start_loads(orders)
        worker.start_stores(orders)
        for request, start, end in spans:
            device.check(request, start, end, self.epoch)

    def _scheduled_requests(self, output: Any) -> list[Request]:
        return [r for r in self.running if r.request_id in output.num_scheduled_tokens]

    def _compute_on(self, output: Any) -> None:
        for request in self._scheduled_requests(output):
            request.num_computed_tokens += output.num_scheduled_tokens[request.request_id]
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.tokens.append(1000 + request.num_tokens)
            request.hash_more()
            if request.num_tokens - request.num_prompt_tokens == request.outputs:
                self.running.remove(request)
                self.half.finished(request)
                self.tables.free(request)
                self.finished.append(request)

    def _take_bad_blocks(self, bad: set[int]) -> None:
        size = self.geometry.groups[0].tokens_per_block
        for request in self.waiting:
            if request.status == "LOADING":
                reach = -(-request.num_computed_tokens // size)
                for index, block in enumerate(request.blocks[0][:reach]):
                    if block in bad:
                        request.num_computed_tokens = index * size
                        self._failed.add(request.request_id)
                        break

    def _take_failed(self, failed: set[str]) -> None:
        for request in self.waiting:
            if request.status == "LOADING" and request.request_id in failed:
                request.num_computed_tokens = 0
                self._failed.add(request.request_id)

    def _take_results(self, loaded: Counter[str], told: Acknowledgements | None) -> None:
        if told is not None:
            self.half.acknowledged(told)
        self.loaded.update(loaded)
        for name in loaded:
            if self.loaded[name] % self.geometry.world:
                continue
            if name in self.draining:
                self.tables.free(self.draining.pop(name))
            else:
                assert any(r.request_id == name and r.status == "LOADING" for r in self.waiting)
                self._received.add(name)
