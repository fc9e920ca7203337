"""As much of vLLM as the connector's halves can see, with all of its habits that matter to them.

Scheduling in vLLM's order (running first, preempting the last; then waiting), a block pool with
prefix cache and reuse, asynchronous loads, aborts that keep blocks until a load has ended, failed
loads computed again. "Computing" a token writes its stamp: a hash of all tokens up to it, the
epoch (the weights), layer and rank; after each step every token that counts as computed must have
its stamp. Copies and tiers are gated: nothing ends unless the test says so.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from gated import GATHER, SCATTER, GatedCopier, GatedPortal
from mini_blocks import BLOCK, BlockPool, Request
from tiering.engine import Engine
from tiering.events import NoEvents
from tiering.policy.lru import LruPolicy
from tiering.residency.core import Residency
from tiering.residency.state import SlotState
from tiering.testing.clocks import ManualClock
from tiering_connectors.vllm.geometry import Geometry, Region
from tiering_connectors.vllm.orders import Acknowledgements, StepOrders
from tiering_connectors.vllm.scheduler import SchedulerHalf
from tiering_connectors.vllm.worker import WorkerHalf

LAYERS = 2
DEADLINE_SECONDS = 10.0


class MiniVllm:
    """One engine, `ranks` workers. `step` is one turn of vLLM's loop."""

    def __init__(
        self,
        *,
        blocks_per_chunk: int = 1,
        ranks: int = 1,
        device_blocks: int = 32,
        slots: int = 8,
        tiers: int = 1,
        hashes_per_block: int = 1,
        prompt_only: bool = False,
        token_budget: int = 64,
        running_max: int = 4,
    ) -> None:
        page = BLOCK * 8
        self.geometry = Geometry(
            tokens_per_block=BLOCK,
            hashes_per_block=hashes_per_block,
            num_blocks=device_blocks,
            regions=(Region(0, page, page),) * LAYERS,
            blocks_per_chunk=blocks_per_chunk,
            ranks=ranks,
            group="full attention",
        )
        self.clock = ManualClock()
        share = self.geometry.share.share_bytes
        self.rows = np.full((slots, share * ranks), 0xEE, np.uint8)
        self.portal = GatedPortal(self.rows, tiers)
        self.core = Residency(slots, tiers, LruPolicy(), self.clock, DEADLINE_SECONDS)
        self.half = SchedulerHalf(
            Engine(self.core, self.portal, NoEvents()), self.geometry, prompt_only
        )
        self.pages = [
            [np.zeros((device_blocks, page), np.uint8) for _ in range(LAYERS)] for _ in range(ranks)
        ]
        self.copiers = [
            GatedCopier(pages, self.rows[:, rank * share : (rank + 1) * share], blocks_per_chunk)
            for rank, pages in enumerate(self.pages)
        ]
        self.workers = [WorkerHalf(copier) for copier in self.copiers]
        self.pool = BlockPool(device_blocks)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.draining: dict[str, Request] = {}
        self.finished: list[Request] = []
        self.loaded: Counter[str] = Counter()
        self.loaded_tokens: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.epoch = 0
        self._token_budget = token_budget
        self._running_max = running_max
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._issued: set[int] = set()
        self._acknowledged: Counter[int] = Counter()

    # What a front end does

    def add(self, request_id: str, tokens: Sequence[int], outputs: int = 1) -> Request:
        hash_tokens = BLOCK // self.geometry.hashes_per_block
        request = Request(request_id, list(tokens), outputs, hash_tokens)
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
            self._free(request)

    def reset(self) -> bool:
        """Everything is preempted and forgotten; with nobody loading, the weights change."""
        while self.running:
            self._preempt(self.running.pop())
        is_idle = not any(self.pool.users)
        if is_idle:
            self.pool.forget()
            self.epoch += 1
        self.half.reset()
        return is_idle

    def forget_device(self, request: Request | None = None, keep: int = 0) -> None:
        """The prefix cache loses all but the first `keep` blocks of `request`."""
        kept = (
            {}
            if request is None
            else {h: self.pool.cached[h] for h in map(request.block_hash, range(keep))}
        )
        self.pool.forget()
        for block_hash, block in kept.items():
            self.pool.cache(block, block_hash)

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
        bad: set[int] = set()
        told: Acknowledgements | None = None
        for rank, worker in enumerate(self.workers):
            mine = pickle.loads(pickle.dumps(orders))
            self._work(rank, worker, mine, output)
            loaded.update(worker.take_loaded())
            bad |= worker.take_bad_blocks()
            ended = worker.take_acknowledgements()
            if ended is not None:
                self._acknowledged.update(ended.ended)
                told = ended if told is None else told.merged(ended)
        self._compute_on(output)
        self._take_results(loaded, bad, told)
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
            if not self.core.steps_out:
                break
            self.release()
            self.step()
        self.step()
        slots = self.core.index.slots
        assert not slots.load_pins.any()
        assert not slots.write_pins.any()
        assert {SlotState(s) for s in slots.states.tolist()} <= {SlotState.FREE, SlotState.READY}
        assert not self.half.needs_steps
        assert repr(self.half) == "<SchedulerHalf 0 requests, 0 jobs out>"
        assert not self.core._holds.owners()
        assert self.core.is_settled
        assert not any(self.pool.users)
        assert self._acknowledged == dict.fromkeys(self._issued, self.geometry.ranks)

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
        assert set(holds.owners()) <= live
        assert all(count <= self.geometry.ranks for count in self._acknowledged.values())

    # Parts of a step

    def _schedule(self) -> Any:
        self._budget = self._token_budget
        self._scheduled: dict[str, int] = {}
        self._new: list[Any] = []
        self._cached_ids: list[tuple[list[int]] | None] = []
        has_preempted = False
        at = 0
        while at < len(self.running) and self._budget:
            request = self.running[at]
            tokens = min(request.num_tokens - request.num_computed_tokens, self._budget)
            fresh = self._extend(request, request.num_computed_tokens + tokens)
            while fresh is None:
                has_preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
                fresh = self._extend(request, request.num_computed_tokens + tokens)
            if fresh is None:
                break
            self._grant(request, tokens)
            self._cached_ids.append((fresh,) if fresh else None)
            at += 1
        if not has_preempted:
            self._admit()
        tables = {r.request_id: r.blocks for r in self.running}
        state = SimpleNamespace(
            get_block_ids=lambda name: (tables[name],) if name in self._scheduled else None
        )
        return SimpleNamespace(
            num_scheduled_tokens=self._scheduled,
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=self._cached_ids),
            kv_connector_block_state=state,
        )

    def _admit(self) -> None:
        # Those that hold blocks come first: nobody else could ever be given them.
        for request in sorted(self.waiting, key=lambda waiting: not waiting.blocks):
            if not self._budget or len(self.running) >= self._running_max:
                return
            if request.status == "LOADING" and not self._has_arrived(request):
                continue
            local: list[int] = []
            external = 0
            if not request.num_computed_tokens:
                local = self._local_hit(request)
                found = self.half.matched(request, len(local) * BLOCK)
                if found is None:
                    continue
                external = found
            total = request.num_computed_tokens + len(local) * BLOCK + external
            assert total < request.num_tokens
            tokens = 0 if external else min(request.num_tokens - total, self._budget)
            if not self._fits_whole(request, len(local)):
                return
            self.pool.share(local)
            request.blocks += local
            assert self._extend(request, total + tokens) is not None
            self.half.allocated(request, request.blocks if external else [], external)
            request.num_computed_tokens = total
            if external:
                request.status = "LOADING"
                self.loaded_tokens[request.request_id] += external
                continue
            self.waiting.remove(request)
            self.running.append(request)
            if request.is_resumed:
                self._cached_ids.append((list(request.blocks),))
            else:
                self._new.append(
                    SimpleNamespace(block_ids=(list(request.blocks),), num_computed_tokens=total)
                )
            self._grant(request, tokens)

    def _local_hit(self, request: Request) -> list[int]:
        blocks: list[int] = []
        for index in range((request.num_tokens - 1) // BLOCK):
            block = self.pool.cached.get(request.block_hash(index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _fits_whole(self, request: Request, local: int) -> bool:
        """Whoever is admitted finds room to the end of its tokens, even if nobody gives way."""
        promised = sum(
            max(0, -(-r.num_tokens // BLOCK) - len(r.blocks))
            for r in self.running + self.waiting
            if r.blocks and r is not request
        )
        shared = self._local_hit(request)[:local] if local else []
        idle = sum(not self.pool.users[block] for block in shared)
        wanted = -(-request.num_tokens // BLOCK) - local - len(request.blocks)
        return wanted + promised + idle <= len(self.pool.free)

    def _grant(self, request: Request, tokens: int) -> None:
        self._scheduled[request.request_id] = tokens
        self._budget -= tokens
        request.status = "RUNNING"
        self._cache_full(request, request.num_computed_tokens + tokens)

    def _extend(self, request: Request, tokens: int) -> list[int] | None:
        """The new blocks for `tokens` in all, or None."""
        count = max(0, -(-tokens // BLOCK) - len(request.blocks))
        if count > len(self.pool.free):
            return None
        fresh = self.pool.take(count)
        request.blocks += fresh
        return fresh

    def _cache_full(self, request: Request, tokens: int) -> None:
        for index in range(tokens // BLOCK):
            self.pool.cache(request.blocks[index], request.block_hash(index))

    def _preempt(self, request: Request) -> None:
        self.seen["preemptions"] += 1
        self._free(request)
        request.status, request.is_resumed = "PREEMPTED", True
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)

    def _free(self, request: Request) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []

    def _has_arrived(self, request: Request) -> bool:
        name = request.request_id
        if name not in self._received:
            return False
        self._received.remove(name)
        request.status = "PREEMPTED" if request.is_resumed else "WAITING"
        if name in self._failed:
            self._failed.remove(name)
            self.seen["failed loads"] += 1
            if not request.num_computed_tokens:
                self._free(request)
        self._cache_full(request, request.num_computed_tokens)
        return True

    def _work(self, rank: int, worker: WorkerHalf, orders: StepOrders, output: Any) -> None:
        worker.fence(orders)
        targets = {b for job in orders.loads for b in job.blocks.blocks.tolist()}
        for request in self._scheduled_requests(output):
            start = request.num_computed_tokens
            end = start + output.num_scheduled_tokens[request.request_id]
            stamps = request.stamps(start, end, self.epoch)
            targets |= set(request.blocks[start // BLOCK : -(-end // BLOCK)])
            for layer, pages in enumerate(self.pages[rank]):
                words = pages.view(np.uint64)
                for at, stamp in zip(range(start, end), stamps, strict=True):
                    words[request.blocks[at // BLOCK], at % BLOCK] = stamp + rank * LAYERS + layer
        assert not targets & self.copiers[rank].being_read(), "a store's source was written to"
        worker.start_loads(orders)
        worker.start_stores(orders)
        for request in self._scheduled_requests(output):
            self._verify(request, rank, output)

    def _verify(self, request: Request, rank: int, output: Any) -> None:
        end = request.num_computed_tokens + output.num_scheduled_tokens[request.request_id]
        wanted = np.array(request.stamps(0, end, self.epoch), np.uint64)
        for layer, pages in enumerate(self.pages[rank]):
            words = pages.view(np.uint64)[request.blocks].ravel()[:end]
            wrong = np.flatnonzero(words != wanted + np.uint64(rank * LAYERS + layer))
            assert not len(wrong), f"{request.request_id}: wrong KV at tokens {wrong.tolist()}"

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
                self._free(request)
                self.finished.append(request)

    def _take_results(
        self, loaded: Counter[str], bad: set[int], told: Acknowledgements | None
    ) -> None:
        for request in self.waiting:
            if request.status == "LOADING":
                reach = -(-request.num_computed_tokens // BLOCK)
                for index, block in enumerate(request.blocks[:reach]):
                    if block in bad:
                        request.num_computed_tokens = index * BLOCK
                        self._failed.add(request.request_id)
                        break
        if told is not None:
            self.half.acknowledged(told)
        self.loaded.update(loaded)
        for name in loaded:
            if self.loaded[name] % self.geometry.ranks:
                continue
            if name in self.draining:
                self._free(self.draining.pop(name))
            else:
                assert any(r.request_id == name and r.status == "LOADING" for r in self.waiting)
                self._received.add(name)
