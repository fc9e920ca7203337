"""The shell: runs every step as a task of one TaskGroup and reports its outcome.

Owns the tiers from open to close and the transfers under way. Lives on one event loop; `start`
and everything else is called from that loop. Only bugs raise out of a task: what a tier fails at
is a verdict. Every step gets its one final outcome, also if it is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import assert_never

from tiering.errors import ClosedError, TierError
from tiering.pipeline.cascade import cascade
from tiering.pipeline.inflight import Inflight
from tiering.pipeline.promotion import promote
from tiering.pipeline.removals import Removals
from tiering.pipeline.survey import survey
from tiering.pipeline.verdicts import Judge
from tiering.residency.plan import (
    Cascade,
    Contains,
    Drop,
    Hide,
    Keep,
    News,
    Outcome,
    Promote,
    Release,
    Show,
    Step,
    Survey,
    Touch,
    Verdict,
    failed,
)
from tiering.tiers.base import PeerTier, Reading, Tier


class Transfers:
    """`row(slot)` is the host tier's memory of one slot; `report` takes what comes back, on the
    loop. What a tier evicts is told of at once, and again after a step that had said otherwise."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        row: Callable[[int], memoryview],
        report: Callable[[News], None],
    ) -> None:
        self._tiers = tiers
        self._row = row
        self._report = report
        self._inflight = Inflight()
        self._removals = [Removals(at, report) for at in range(len(tiers))]
        self._judge = Judge()
        self._stack = AsyncExitStack()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Surveys, and what waits for peers: it would take longer than an end may.
        self._unhurried: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Transfers:
        """Open every tier; if one cannot be opened, those that were are closed again."""
        async with AsyncExitStack() as stack:
            for tier, removals in zip(self._tiers, self._removals, strict=True):
                tier.watch(removals.tell)
                await tier.open()
                stack.push_async_callback(tier.close)
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is under way (`drain` first bounds that), then close the tiers."""
        self._group = None
        await self._stack.__aexit__(kind, error, trace)

    def start(self, steps: Iterable[Step]) -> None:
        if self._group is None:
            raise ClosedError("the tiers are closed")
        for step in steps:
            task = self._group.create_task(self._run(step))
            tasks = self._unhurried if isinstance(step, Survey | Keep) else self._tasks
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def drain(self, deadline_seconds: float) -> int:
        """Wait for what is under way; cancel what is not done by then. How many were. Surveys
        and waits for peers are cancelled at once, and not counted."""
        for task in self._unhurried:
            task.cancel()
        if not self._tasks:
            return 0
        _, late = await asyncio.wait(set(self._tasks), timeout=deadline_seconds)
        for task in late:
            task.cancel()
        return len(late)

    async def _run(self, step: Step) -> None:
        try:
            await self._carry_out(step)
        except BaseException:
            # Cut off, or a bug: the tier has let go of the slots, and whoever waits is told so.
            self._report(failed(step))
            raise

    async def _carry_out(self, step: Step) -> None:
        tier = self._tiers[step.tier]
        if isinstance(step, Release):
            self._of_peers(step.tier).release(step.peer)
            self._report(Outcome(step.id, ()))
            return
        if isinstance(step, Contains):
            await self._ask(step, self._source(step))
            return
        if isinstance(step, Show | Hide | Keep):
            await self._for_peers(step)
            return
        if isinstance(step, Touch):
            await self._touch(step, tier)
            return
        removals = self._removals[step.tier]
        if isinstance(step, Survey):
            self._report(await survey(step, tier, removals, self._judge, self._report))
            return

        def ask(keys: Sequence[bytes]) -> Awaitable[Sequence[Verdict]]:
            return self._judge.verdicts(len(keys), lambda: tier.contains(keys))

        async with self._inflight.flight(step.tier, step.keys):
            if isinstance(step, Promote):
                async with removals.seen_by(step.keys, ask):
                    source = self._source(step)
                    await promote(step, source, self._row, self._judge, self._report)
            elif isinstance(step, Cascade):
                async with removals.seen_by(step.keys, ask):
                    self._report(await cascade(step, tier, self._row, self._judge))
            elif isinstance(step, Drop):
                await self._drop(step, tier)
            else:
                assert_never(step)

    def _source(self, step: Contains | Promote) -> Reading:
        """Where the step's chunks come from."""
        return self._of_peers(step.tier).at(step.peer) if step.peer else self._tiers[step.tier]

    def _of_peers(self, tier: int) -> PeerTier:
        found = self._tiers[tier]
        if not isinstance(found, PeerTier):
            raise AssertionError(f"tier {tier} is not one of peers")
        return found

    async def _for_peers(self, step: Show | Hide | Keep) -> None:
        tier = self._of_peers(step.tier)
        if isinstance(step, Keep):
            verdicts = await self._judge.verdicts(
                len(step.keys), lambda: tier.keep(step.kv_request_id, step.keys)
            )
            self._report(Outcome(step.id, verdicts))
            return
        if isinstance(step, Show):
            tier.show(step.keys, step.slots, step.generations)
        else:
            tier.hide(step.keys)
        self._report(Outcome(step.id, ()))

    async def _ask(self, step: Contains, tier: Reading) -> None:
        try:
            async with asyncio.timeout(step.deadline_seconds):
                # An answer given before a write or a delete ends would be out of date at once.
                await self._inflight.landing(step.tier, step.keys)
                verdicts = await self._judge.verdicts(
                    len(step.keys), lambda: tier.contains(step.keys)
                )
        except TimeoutError:
            verdicts = (Verdict.LATE,) * len(step.keys)
        self._report(Outcome(step.id, verdicts))

    async def _touch(self, step: Touch, tier: Tier) -> None:
        # A hint that is lost costs an eviction in another order: not worth a word.
        with contextlib.suppress(TierError, ClosedError):
            await tier.touch(step.keys)
        self._report(Outcome(step.id, ()))

    async def _drop(self, step: Drop, tier: Tier) -> None:
        verdicts = await self._judge.verdicts(len(step.keys), lambda: tier.delete(step.keys))
        self._report(Outcome(step.id, verdicts))

    def __repr__(self) -> str:
        state = "closed" if self._group is None else f"{len(self._tasks)} under way"
        return f"<Transfers {[tier.name for tier in self._tiers]} {state}>"
