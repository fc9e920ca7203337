"""The life of a slot: every state, every event, and the one table of what follows what.

Everything that changes the state of a slot goes through `Slots.move`, which refuses what the
table does not list and then leaves all of the batch as it was. Pins are counts beside the state:
a slot with a pin is never freed. What there is of each is counted as it changes, so that nothing
here depends on how many slots there are. Owned by `residency.index`; works on batches of slots.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from tiering_kernels.keytable import ABSENT, KeyBatch
from tiering_kernels.slots import ILLEGAL, Book, Names, open_changes

SlotArray = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]
"""Of each slot how often it was taken for a chunk: whoever reads its bytes without asking the core
knows by it that they are still the same chunk's. It is raised before anything is written."""

# In place of the slot of a key that is in none.
NOWHERE = ABSENT


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

_FOLLOWING = {
    event: bytes(TRANSITIONS.get((state, event), ILLEGAL) for state in SlotState)
    for event in SlotEvent
}
_NAMES = Names(len(SlotState), SlotState.FREE, SlotState.READY, SlotState.DOOMED)


class IllegalTransition(AssertionError):
    """A bug in the core: a slot was moved in a way that its table does not list."""


class PinKind(enum.IntEnum):
    """Who keeps a slot: requests that load, or cascades to secondary tiers."""

    LOAD = 0
    WRITE = 1


class Slots:
    """States, pins and keys of all slots of the host tier. Slots of one call must differ.

    `states` and the pins are for reading; they change by `move`, `pin` and `unpin` only.
    """

    def __init__(self, count: int, generations: Generations | None = None) -> None:
        self._generations = np.zeros(count, np.uint64) if generations is None else generations
        self._book = Book(count, _NAMES)
        self._changes = open_changes(self._book)
        self.states = self._book.states[:count]
        self.load_pins, self.write_pins = self._book.pins
        self.keys: list[bytes | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def evictable(self) -> int:
        """How many are READY and have no pin."""
        return int(self._book.evictable[0])

    def held(self, kind: PinKind) -> int:
        """How many have a pin of this kind."""
        return int(self._book.held[kind])

    def census(self) -> dict[SlotState, int]:
        return dict(zip(SlotState, self._book.of_state.tolist(), strict=True))

    def take(self, keys: Sequence[bytes]) -> SlotArray:
        """One free slot for each key, FILLING from now on. There must be enough."""
        if len(keys) > len(self._free):
            raise IllegalTransition(f"{len(keys)} slots wanted, {len(self._free)} are free")
        cut = len(self._free) - len(keys)
        taken = self._free[cut:]
        taken.reverse()
        slots = np.array(taken, np.int64)
        self.move(slots, SlotEvent.RESERVE)
        self._generations[slots] += 1
        del self._free[cut:]
        for slot, key in zip(taken, keys, strict=True):
            self.keys[slot] = key
        return slots

    def move(self, slots: Sequence[int] | SlotArray, event: SlotEvent) -> None:
        """Apply `event` to every slot, or to none and raise IllegalTransition."""
        where = np.ascontiguousarray(slots, np.int64)
        freed = self._changes.move(where, _FOLLOWING[event])
        if freed is None:
            raise IllegalTransition(self._why_not(where, event))
        for slot in (gone := freed.tolist()):
            self.keys[slot] = None
        self._free += gone

    def _why_not(self, slots: SlotArray, event: SlotEvent) -> str:
        states = [SlotState(state) for state in self.states_of(slots).tolist()]
        if all((state, event) in TRANSITIONS for state in states):
            return f"{event.name} would free slots that are pinned"
        names = sorted({state.name for state in states})
        return f"{event.name} of slots that are {', '.join(names)}"

    def pin(self, slots: Sequence[int] | SlotArray, kind: PinKind) -> None:
        """Put a pin of this kind on each slot."""
        self._changes.pin(np.ascontiguousarray(slots, np.int64), kind)

    def unpin(self, slots: Sequence[int] | SlotArray, kind: PinKind) -> None:
        """Take a pin of this kind off each slot; a doomed slot is freed with its last pin."""
        gone = self._changes.unpin(np.ascontiguousarray(slots, np.int64), kind)
        if gone is None:
            raise IllegalTransition("a pin was given back twice")
        if len(gone):
            self.move(gone, SlotEvent.RELEASE)

    def generations_of(self, slots: Sequence[int] | SlotArray) -> Generations:
        """The generation of each of `slots`, none of them NOWHERE."""
        generations: Generations = self._generations[np.asarray(slots, np.int64)]
        return generations

    def keys_of(self, slots: SlotArray) -> KeyBatch:
        """The keys of slots that are not FREE."""
        return KeyBatch(map(cast("list[bytes]", self.keys).__getitem__, slots.tolist()))

    def state_of(self, slot: int) -> int:
        """The state of `slot`, a SlotState; FREE for NOWHERE."""
        return int(self._book.states[slot])

    def states_of(self, slots: Sequence[int] | SlotArray) -> npt.NDArray[np.uint8]:
        """The state of each of `slots`; FREE for NOWHERE."""
        states: npt.NDArray[np.uint8] = self._book.states[np.asarray(slots, np.int64)]
        return states

    def are(self, state: SlotState, slots: Sequence[int] | SlotArray) -> npt.NDArray[np.bool_]:
        """Of each of `slots`, whether it is in `state`."""
        are: npt.NDArray[np.bool_] = self.states_of(slots) == int(state)
        return are

    def may_go(self, slots: SlotArray) -> npt.NDArray[np.bool_]:
        """Of each of `slots`, whether it may be evicted."""
        is_idle = (self.load_pins[slots] | self.write_pins[slots]) == 0
        may: npt.NDArray[np.bool_] = self.are(SlotState.READY, slots) & is_idle
        return may
