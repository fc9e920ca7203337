"""Which chunks are on their way from the host tier to the secondary tiers, and which still wait.

Owns the write pins. Writes may pin all of the host tier but the reserve, so that a slow or hung
tier cannot take it all; what has to wait is not pinned, and is counted as skipped if it is evicted
first. Sans-IO: makes Cascade steps and takes in their outcomes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from tiering.clock import Clock
from tiering.events import ChunksStored
from tiering.metrics import Counters
from tiering.residency.index import HostIndex
from tiering.residency.known import KnownKeys
from tiering.residency.plan import Cascade, Outcome, Verdict, keys_with
from tiering.residency.state import PinKind, SlotArray, SlotState
from tiering_kernels.keytable import KeyBatch, select

CHUNKS_IN_STEP_MAX = 64

COUNTERS = (
    "cascades_offered",
    "cascades_stored",
    "cascades_already_there",
    "cascades_full",
    "cascades_refused",
    "cascades_failed",
    "cascades_skipped",
)

_COUNTER = {
    Verdict.ALREADY_THERE: "cascades_already_there",
    Verdict.FULL: "cascades_full",
    Verdict.REFUSED: "cascades_refused",
}


class CascadeBook:
    """Part of the core; same owner, same rules."""

    def __init__(
        self,
        index: HostIndex,
        known: Mapping[int, KnownKeys],
        counters: Counters,
        next_id: Callable[[], int],
        pinned_max: int,
        clock: Clock,
        silence_seconds_max: float,
    ) -> None:
        self._index = index
        self._known = known
        self._counters = counters
        self._next_id = next_id
        self._pinned_max = pinned_max
        self._clock = clock
        self._silence_seconds_max = silence_seconds_max
        self._moved_at = clock.now()
        # By tier, as the rest of these.
        self._waiting: dict[int, dict[bytes, None]] = {tier: {} for tier in known}
        self._out: dict[int, Cascade] = {}
        # By how many steps at once: a chunk stored anew after a reset or a drop is written again
        # while its old write is still under way.
        self._flying: dict[int, Counter[bytes]] = {tier: Counter() for tier in known}
        # Bounded by the slots there are: what was evicted from them cannot be offered.
        self._untaken: dict[int, dict[bytes, None]] = {tier: {} for tier in known}

    @property
    def steps_out(self) -> int:
        return len(self._out)

    @property
    def waiting(self) -> int:
        """Chunks that no step has been made for yet, over all tiers."""
        return sum(map(len, self._waiting.values()))

    @property
    def under_way(self) -> int:
        """Chunks that wait or are being written, over all tiers."""
        return self.waiting + sum(len(step.keys) for step in self._out.values())

    @property
    def needs_turns(self) -> bool:
        """Whether chunks wait for room, and writes do end: `settle` lets them go. Not for ever:
        a tier from which nothing is heard for `silence_seconds_max` is not waited for."""
        return bool(self.waiting) and not self._is_silent

    @property
    def writes_end(self) -> bool:
        """Whether chunks wait or are being written, and writes do end."""
        return bool(self.waiting or self._out) and not self._is_silent

    @property
    def _is_silent(self) -> bool:
        return self._clock.now() - self._moved_at >= self._silence_seconds_max

    def is_under_way(self, key: bytes) -> bool:
        """Whether `key` waits to be written to some tier, or is being written."""
        return any(key in some for some in self._unsettled)

    def last_under_way(self, keys: Sequence[bytes]) -> bytes | None:
        """The last of `keys` for which `is_under_way`; None where all are settled."""
        busy = [some.keys() for some in self._unsettled if some]
        if all(some.isdisjoint(keys) for some in busy):
            return None
        return next(filter(self.is_under_way, reversed(keys)))

    def unwritten(self) -> list[bytes]:
        """The keys that a tier is still to be given, once for each tier."""
        return [key for waiting in self._waiting.values() for key in waiting]

    def nowhere_else(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of `keys` that no tier is known to hold."""
        for known in self._known.values():
            keys = known.unknown(keys)
        return keys

    def want(self, keys: Sequence[bytes], slots: SlotArray) -> list[Cascade]:
        """`keys` became readable in `slots`: to every tier not known to hold them."""
        self._moved_at = self._clock.now()
        steps: list[Cascade] = []
        for tier, known in self._known.items():
            is_new = ~known.holds(keys)
            wanted = select(keys, is_new)
            if not self._waiting[tier] and len(wanted) <= self._room:
                self._counters.add("cascades_offered", len(wanted))
                steps += self._send(tier, wanted, slots[is_new])
            else:
                self._offer(tier, wanted)
        return steps + self._issue()

    def want_again(self, keys: Sequence[bytes]) -> list[Cascade]:
        """`keys` were used: those that a tier did not take when they were offered are offered
        again, as long as they are in the host tier."""
        found = False
        for tier, untaken in self._untaken.items():
            again = [key for key in keys if key in untaken] if untaken else []
            if not again:
                continue
            for key in again:
                del untaken[key]
            self._offer(tier, self._index.ready(again))
            found = True
        return self._issue() if found else []

    def is_mine(self, step_id: int) -> bool:
        return step_id in self._out

    def settle(self, outcome: Outcome) -> tuple[ChunksStored | None, list[Cascade]]:
        """What a tier holds now, and the steps for which there is room."""
        self._moved_at = self._clock.now()
        step = self._out.pop(outcome.id)
        self._index.slots.unpin(step.slots, PinKind.WRITE)
        self._landed(step)
        stored = keys_with(step, outcome, Verdict.STORED)
        self._known[step.tier].add(stored)
        self._counters.add("cascades_stored", len(stored))
        there = () if len(stored) == len(step.keys) else self._settle_unstored(step, outcome)
        held = tuple(stored) if not there else (*stored, *there)
        return (ChunksStored(step.tier, held) if held else None), self._issue()

    def _landed(self, step: Cascade) -> None:
        flying = self._flying[step.tier]
        for key in step.keys:
            if flying[key] > 1:
                flying[key] -= 1
            else:
                flying.pop(key)

    def _settle_unstored(self, step: Cascade, outcome: Outcome) -> Sequence[bytes]:
        """Those that the tier had already."""
        there = keys_with(step, outcome, Verdict.ALREADY_THERE)
        self._known[step.tier].add(there)
        others = tuple(verdict for verdict in outcome.verdicts if verdict is not Verdict.STORED)
        self._counters.tally(others, _COUNTER, "cascades_failed")
        untaken = self._untaken[step.tier]
        for verdict in (Verdict.FULL, Verdict.REFUSED, Verdict.FAILED):
            untaken.update(dict.fromkeys(keys_with(step, outcome, verdict)))
        for key in list(islice(untaken, max(0, len(untaken) - len(self._index.slots)))):
            del untaken[key]
        return there

    def clear(self) -> None:
        """Nothing waits any more; what is under way keeps its pins until its outcome."""
        self._counters.add("cascades_skipped", self.waiting)
        for keys in (*self._waiting.values(), *self._untaken.values()):
            keys.clear()

    @property
    def _unsettled(self) -> Iterator[Mapping[bytes, object]]:
        """What waits and what is being written, for each tier."""
        yield from self._waiting.values()
        yield from self._flying.values()

    @property
    def _room(self) -> int:
        """How many more slots writes may pin."""
        return self._pinned_max - self._index.slots.held(PinKind.WRITE)

    def _offer(self, tier: int, keys: Iterable[bytes]) -> None:
        waiting = self._waiting[tier]
        before = len(waiting)
        waiting.update(dict.fromkeys(keys))
        self._counters.add("cascades_offered", len(waiting) - before)

    def _issue(self) -> list[Cascade]:
        """Steps for what waits, as far as there is room."""
        steps: list[Cascade] = []
        for tier, waiting in self._waiting.items():
            while waiting and (room := self._room) > 0:
                batch = KeyBatch(islice(waiting, room))
                for key in batch:
                    del waiting[key]
                slots = self._index.lookup(batch)
                is_here = self._index.slots.are(SlotState.READY, slots)
                here = select(batch, is_here)
                self._counters.add("cascades_skipped", len(batch) - len(here))
                steps += self._send(tier, here, slots[is_here])
        return steps

    def _send(self, tier: int, keys: Sequence[bytes], slots: SlotArray) -> Iterator[Cascade]:
        """Steps that write `keys` from `slots`, which are pinned until the outcomes."""
        self._index.slots.pin(slots, PinKind.WRITE)
        self._flying[tier].update(keys)
        where = slots.tolist()
        for start in range(0, len(keys), CHUNKS_IN_STEP_MAX):
            part = slice(start, start + CHUNKS_IN_STEP_MAX)
            step = Cascade(self._next_id(), tier, tuple(keys[part]), tuple(where[part]))
            self._out[step.id] = step
            yield step
