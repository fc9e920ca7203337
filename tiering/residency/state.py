"""The life of a slot: every state, every event, and the one table of what follows what.

Everything that changes the state of a slot goes through `Slots.move`, which refuses what the
table does not list and then leaves all of the batch as it was. Pins are counts beside the state:
a slot with a pin is never freed. Owned by `residency.index`; vectorised over a batch of slots.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SlotArray = npt.NDArray[np.intp]


class SlotState(enum.IntEnum):
    """`FILLING`: a writer (device copy or promotion) may be touching the bytes. `ABANDONED`: the
    same, but nobody wants them. `READY`: whole and readable. `DOOMED`: no longer in the index,
    kept only for those who still read it."""

    FREE = 0
    FILLING = 1
    READY = 2
    ABANDONED = 3
    DOOMED = 4


class SlotEvent(enum.IntEnum):
    RESERVE = 0
    FILL = 1
    FAIL = 2
    EVICT = 3
    FORSAKE = 4
    RELEASE = 5


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.FILL): SlotState.READY,
    (SlotState.FILLING, SlotEvent.FAIL): SlotState.FREE,
    # Dropped or reset while a writer is at work: the bytes that still arrive are nobody's.
    (SlotState.FILLING, SlotEvent.FORSAKE): SlotState.ABANDONED,
    (SlotState.ABANDONED, SlotEvent.FILL): SlotState.FREE,
    (SlotState.ABANDONED, SlotEvent.FAIL): SlotState.FREE,
    (SlotState.READY, SlotEvent.EVICT): SlotState.FREE,
    # Dropped or reset while pinned: gone from the index, freed with its last pin.
    (SlotState.READY, SlotEvent.FORSAKE): SlotState.DOOMED,
    (SlotState.DOOMED, SlotEvent.RELEASE): SlotState.FREE,
}

_ILLEGAL = 255


def _as_array() -> npt.NDArray[np.uint8]:
    table = np.full((len(SlotState), len(SlotEvent)), _ILLEGAL, dtype=np.uint8)
    for (before, event), after in TRANSITIONS.items():
        table[before, event] = after
    return table


class IllegalTransition(AssertionError):
    """A bug in the core: a slot was moved in a way that its table does not list."""


class Slots:
    """States, pins and keys of all slots of the host tier. Slots of one call must differ.

    `load_pins` are held by requests that load, `write_pins` by cascades to secondary tiers.
    """

    _table = _as_array()

    def __init__(self, count: int) -> None:
        self.states = np.zeros(count, dtype=np.uint8)
        self.load_pins = np.zeros(count, dtype=np.int32)
        self.write_pins = np.zeros(count, dtype=np.int32)
        self.keys: list[bytes | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, keys: Sequence[bytes]) -> list[int]:
        """One free slot for each key, FILLING from now on. There must be enough."""
        if len(keys) > len(self._free):
            raise IllegalTransition(f"{len(keys)} slots wanted, {len(self._free)} are free")
        cut = len(self._free) - len(keys)
        taken = self._free[cut:]
        taken.reverse()
        self.move(taken, SlotEvent.RESERVE)
        del self._free[cut:]
        for slot, key in zip(taken, keys, strict=True):
            self.keys[slot] = key
        return taken

    def move(self, slots: Sequence[int] | SlotArray, event: SlotEvent) -> None:
        """Apply `event` to every slot, or to none and raise IllegalTransition."""
        where = np.asarray(slots, dtype=np.intp)
        if not len(where):
            return
        before = self.states[where]
        after = self._table[before, event]
        if (after == _ILLEGAL).any():
            states = sorted({SlotState(s).name for s in before.tolist()})
            raise IllegalTransition(f"{event.name} of slots that are {', '.join(states)}")
        freed = where[after == SlotState.FREE]
        if len(freed):
            pinned = self.load_pins[freed] + self.write_pins[freed]
            if pinned.any():
                raise IllegalTransition(
                    f"{event.name} would free {np.count_nonzero(pinned)} pinned slots"
                )
            for slot in freed.tolist():
                self.keys[slot] = None
            self._free.extend(freed.tolist())
        self.states[where] = after

    def are(self, state: SlotState, slots: Sequence[int] | SlotArray) -> npt.NDArray[np.bool_]:
        """Of each of `slots`, whether it is in `state`."""
        are: npt.NDArray[np.bool_] = self.states[np.asarray(slots, dtype=np.intp)] == state
        return are

    def ready_prefix(self, slots: Sequence[int]) -> int:
        """How many leading `slots` are READY."""
        ready = self.are(SlotState.READY, slots)
        return len(slots) if ready.all() else int(ready.argmin())

    def evictable(self) -> npt.NDArray[np.bool_]:
        """Of every slot, whether it may be evicted."""
        is_idle = (self.load_pins | self.write_pins) == 0
        may: npt.NDArray[np.bool_] = (self.states == SlotState.READY) & is_idle
        return may

    def unpin(self, slots: Sequence[int], pins: npt.NDArray[np.int32]) -> None:
        """Take one of `pins` off each slot; a doomed slot is freed with its last pin."""
        where = np.asarray(slots, dtype=np.intp)
        if not len(where):
            return
        if (pins[where] < 1).any():
            raise IllegalTransition("a pin was given back twice")
        pins[where] -= 1
        idle = (self.load_pins[where] + self.write_pins[where]) == 0
        self.move(where[idle & (self.states[where] == SlotState.DOOMED)], SlotEvent.RELEASE)

    def census(self) -> dict[SlotState, int]:
        counts = np.bincount(self.states, minlength=len(SlotState))
        return {state: int(counts[state]) for state in SlotState}
