"""A portal and a copier that do nothing until a test says so, and then do it for real.

What may be written at any time while it is under way is spoilt at once, so that whoever reads too
early reads garbage; what must not change while it is under way is compared when it ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from tiering.device.base import BlockMap, DeviceCopier, HostPages
from tiering.errors import CopyError
from tiering.layout import ShareLayout
from tiering.residency.plan import (
    Cascade,
    Contains,
    Drop,
    Found,
    Hide,
    Keep,
    News,
    Outcome,
    Promote,
    Release,
    Removed,
    Show,
    Step,
    Survey,
    Touch,
    Verdict,
)

GARBAGE = 0xDD
GATHER, SCATTER = "gather", "scatter"
_AT_ONCE = Touch | Survey | Show | Hide | Release


class GatedPortal:
    """Tiers that are dicts, over `rows`: uint8, `(slots, row_bytes)`. `steps` are under way; of
    so many promotions as `reads_to_fail` says the middle one of the chunks fails."""

    restarts = 0

    def __init__(self, rows: npt.NDArray[np.uint8], tiers: int) -> None:
        self.rows = rows
        self.stored: list[dict[bytes, bytes]] = [{} for _ in range(tiers)]
        self.steps: list[Step] = []
        self.submitted: list[Step] = []
        self.reads_to_fail = 0
        self._sources: dict[int, bytes] = {}
        self._outcomes: list[News] = []

    def submit(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Promote):
                self.rows[list(step.slots)] = GARBAGE
            elif isinstance(step, Cascade):
                self._sources[step.id] = self.rows[list(step.slots)].tobytes()
        self.submitted += steps
        self.steps += [step for step in steps if not isinstance(step, _AT_ONCE)]
        for step in steps:
            if isinstance(step, Survey):
                found = tuple(self.stored[step.tier])
                self._outcomes += [Found(step.tier, found), Outcome(step.id, ())]
        # Nothing comes of these, and nobody waits for them.
        hints = [step for step in steps if isinstance(step, Touch | Show | Hide | Release)]
        self._outcomes += [Outcome(step.id, ()) for step in hints]

    def drain(self) -> list[News]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def evict(self, tier: int, keys: Collection[bytes]) -> None:
        """They have to make room."""
        for key in keys:
            del self.stored[tier][key]
        self._outcomes.append(Removed(tier, tuple(keys)))

    def late(self, step: Promote) -> None:
        """Its deadline is over, but the tier is still at it."""
        verdicts = (Verdict.LATE,) * len(step.keys)
        self._outcomes.append(Outcome(step.id, verdicts, final=False))

    def finish(self, step: Step, failing: Collection[int] = ()) -> None:
        """Carry `step` out, but for the keys at the indices `failing`."""
        self.steps.remove(step)
        if isinstance(step, Promote) and self.reads_to_fail and not failing:
            self.reads_to_fail -= 1
            failing = {len(step.keys) // 2}
        act = {
            Contains: self._ask,
            Promote: self._read,
            Cascade: self._write,
            Drop: self._delete,
            Keep: lambda step, i: Verdict.HIT,
        }
        if isinstance(step, Cascade):
            source = self._sources.pop(step.id)
            assert source == self.rows[list(step.slots)].tobytes(), "written to while it was read"
        verdicts = tuple(
            Verdict.FAILED if i in failing else act[type(step)](step, i)
            for i in range(len(step.keys))
        )
        self._outcomes.append(Outcome(step.id, verdicts))

    def finish_all(self) -> None:
        for step in list(self.steps):
            self.finish(step)

    def _ask(self, step: Any, i: int) -> Verdict:
        return Verdict.HIT if step.keys[i] in self.stored[step.tier] else Verdict.MISS

    def _read(self, step: Any, i: int) -> Verdict:
        payload = self.stored[step.tier].get(step.keys[i])
        if payload is None:
            return Verdict.MISS
        self.rows[step.slots[i]] = np.frombuffer(payload, np.uint8)
        return Verdict.HIT

    def _write(self, step: Any, i: int) -> Verdict:
        if step.keys[i] in self.stored[step.tier]:
            return Verdict.ALREADY_THERE
        self.stored[step.tier][step.keys[i]] = self.rows[step.slots[i]].tobytes()
        return Verdict.STORED

    def _delete(self, step: Any, i: int) -> Verdict:
        gone = self.stored[step.tier].pop(step.keys[i], None)
        return Verdict.MISS if gone is None else Verdict.DELETED


class _GatedFuture(Future[None]):
    """Waiting for it makes it, and all before it in its direction, happen."""

    def __init__(self, finish: Callable[[Future[None]], None]) -> None:
        super().__init__()
        self._finish = finish

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._finish(self)
        return super().exception(timeout)


class GatedCopier(DeviceCopier):
    """Copies between `pages`, one uint8 `(num_blocks, page_bytes)` a layer, and `share`, uint8
    `(slots, share_bytes)`, each when `run` says so or when somebody waits for it."""

    def __init__(
        self,
        pages: Sequence[npt.NDArray[np.uint8]],
        share: npt.NDArray[np.uint8],
        blocks_per_chunk: int,
    ) -> None:
        widths = tuple(layer.shape[1] for layer in pages)
        self._groups = [HostPages(pages, ShareLayout(widths, blocks_per_chunk))]
        self._share = share
        self.queues: dict[str, deque[tuple[BlockMap, Future[None]]]] = {
            GATHER: deque(),
            SCATTER: deque(),
        }
        self.to_fail: Counter[str] = Counter()
        self.waits = 0

    @classmethod
    def of(cls, groups: Sequence[HostPages], share: npt.NDArray[np.uint8]) -> GatedCopier:
        """For several KV cache groups."""
        copier = cls(groups[0].pages, share, groups[0].layout.blocks_per_chunk)
        copier._groups = list(groups)
        return copier

    def gather(self, blocks: BlockMap) -> Future[None]:
        return self._queued(GATHER, blocks)

    def scatter(self, blocks: BlockMap) -> Future[None]:
        for layer in self._groups[blocks.group].pages:
            layer[blocks.blocks] = GARBAGE
        return self._queued(SCATTER, blocks)

    def close(self) -> None:
        for direction in self.queues:
            self.run_all(direction)

    def being_read(self) -> set[int]:
        """Device blocks of stores that have not ended."""
        return {b for blocks, _ in self.queues[GATHER] for b in blocks.blocks.tolist()}

    def run(self, direction: str) -> None:
        """The oldest copy of `direction` happens; or fails, if `to_fail` says so."""
        blocks, future = self.queues[direction].popleft()
        if self.to_fail[direction]:
            self.to_fail[direction] -= 1
            future.set_exception(CopyError(f"{direction} was told to fail"))
            return
        group = self._groups[blocks.group]
        for layer, part in zip(group.pages, self._parts(group.layout), strict=True):
            if direction == GATHER:
                part[blocks.slots, blocks.positions] = layer[blocks.blocks]
            else:
                layer[blocks.blocks] = part[blocks.slots, blocks.positions]
        future.set_result(None)

    def run_all(self, direction: str) -> None:
        while self.queues[direction]:
            self.run(direction)

    def _parts(self, layout: ShareLayout) -> list[npt.NDArray[np.uint8]]:
        """Each layer's part of the share: `(slots, blocks_per_chunk, page_bytes)`."""
        parts = []
        for at, page in zip(layout.layer_offsets, layout.page_bytes, strict=True):
            part = self._share[:, at : at + page * layout.blocks_per_chunk]
            parts.append(part.reshape(len(part), layout.blocks_per_chunk, page))
        assert all(np.shares_memory(part, self._share) for part in parts)
        return parts

    def _queued(self, direction: str, blocks: BlockMap) -> Future[None]:
        future = _GatedFuture(lambda waited_for: self._finish(direction, waited_for))
        self.queues[direction].append((blocks, future))
        return future

    def _finish(self, direction: str, future: Future[None]) -> None:
        self.waits += 1
        while not future.done():
            self.run(direction)
