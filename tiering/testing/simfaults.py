"""What goes wrong in a simulated run: faults of the disk, for a while, drawn at random.

Part of `tiering.testing.simulation`. Owns which faults are on and when each ends.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from typing import Any

from tiering.errors import TierError
from tiering.testing.faults import FaultyIo, Rule
from tiering.testing.memory import MemoryTier
from tiering.testing.simworld import Place, SimEngine

READ_ERRORS = (
    *(errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOTCONN, errno.EACCES, errno.ENOENT),
)
# A disk that denies what it has would be given more than its bound, and nobody could tell.
SIZE_ERRORS = tuple(number for number in READ_ERRORS if number != errno.ENOENT)
WRITE_ERRORS = (*(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ESTALE),)
SECONDS = (0.1, 0.5, 2.0, 10.0)
CHECK_SECONDS = 25.0
"""Within that after its end a fault is taken back, since the run looks between its steps."""
HANG_SECONDS = (0.1, 1.0, 6.0, 20.0)


class Faults:
    """`operations` are those of a ChunkIo that the tiers use; none for tiers in memory."""

    def __init__(self, operations: Sequence[str], chance: random.Random) -> None:
        self._operations = operations
        self._chance = chance
        self._on: list[tuple[float, Callable[[], object]]] = []
        self._failing_until = 0.0
        self._held: set[tuple[int, str]] = set()

    def begin(self, now: float, place: Place, engine: SimEngine) -> str:
        """Some fault, from `now` on for a while: which."""
        if isinstance(engine.tier, MemoryTier):
            told, undo = self._of_memory(engine.tier)
        else:
            told, undo = self._of_io(place.io)
        end = now + self._chance.choice(SECONDS)
        self._failing_until = max(self._failing_until, end)
        self._on.append((end, undo))
        return told

    def may_fail(self, now: float) -> bool:
        """Whether something may fail, other than by not coming back."""
        return now <= self._failing_until + CHECK_SECONDS

    def hang(self, now: float, engine: SimEngine) -> str:
        """What does I/O for `engine` does not come back, for a while."""
        undo: Callable[[], object] = engine.pool.let_go
        told = "pool"
        if isinstance(tier := engine.tier, MemoryTier):
            told = self._chance.choice(("contains", "read", "write"))
            undo = self._hold(tier, told)
        else:
            engine.pool.hang()
        self._on.append((now + self._chance.choice(HANG_SECONDS), undo))
        return told

    def clean(self, place: Place) -> int:
        """Somebody removes chunks, or changes them, without a word: how many."""
        share, spoilt = self._chance.choice((0.2, 0.5, 1.0)), 0
        for path in sorted(place.root.rglob("*.bin")):
            if self._chance.random() < share:
                path.unlink()
                spoilt += 1
        for key in sorted(place.chunks):
            if self._chance.random() < share:
                payload, checksum = place.chunks.pop(key)
                spoilt += 1
                if self._chance.random() < 0.5:
                    place.chunks[key] = bytes([payload[0] ^ 1]) + payload[1:], checksum
        return spoilt

    def mend(self, until: float = float("inf")) -> None:
        """End the faults whose time is over by then."""
        over = [undo for end, undo in self._on if end <= until]
        self._on = [entry for entry in self._on if entry[0] > until]
        for undo in over:
            undo()

    def _of_io(self, io: FaultyIo) -> tuple[str, Callable[[], object]]:
        chance = self._chance
        operation = chance.choice(self._operations)
        share, dice = chance.choice((0.1, 0.5, 1.0)), random.Random(chance.random())
        options: dict[str, Any] = {
            "after": chance.choice((0, 0, 1, 5)),
            "times": chance.choice((1, 3, None)),
            "where": lambda name: dice.random() < share,
        }
        is_write = operation.startswith("write")
        kind = "fail" if operation == "sizes" else chance.choice(("fail", "fail", "short", "flip"))
        rule: Rule
        if kind == "fail":
            others = SIZE_ERRORS if operation == "sizes" else READ_ERRORS
            number = chance.choice(WRITE_ERRORS if is_write else others)
            rule = io.fail(operation, number, **options)
        elif kind == "flip":
            rule = io.flip(operation, **options)
        elif is_write:
            rule = io.short_write(operation, **options)
        else:
            rule = io.short_read(operation, **options)
        return f"{kind} {operation} {rule.answer} {share}", lambda: io.mend(rule)

    def _of_memory(self, tier: MemoryTier) -> tuple[str, Callable[[], object]]:
        operation = self._chance.choice(("contains", "read", "write", "delete"))
        tier.errors[operation] = TierError(tier.name, None, "told to fail")
        return operation, lambda: tier.errors.pop(operation, None)

    def _hold(self, tier: MemoryTier, operation: str) -> Callable[[], object]:
        held = (id(tier), operation)
        if held in self._held:
            return lambda: None
        self._held.add(held)
        tier.hold(operation)

        def let_go() -> None:
            self._held.discard(held)
            tier.let_go(operation)

        return let_go
