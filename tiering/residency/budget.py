"""How much of the host tier loads may hold, so that running stores always find room.

Loads (pinned prefixes and promotions) may hold at most `capacity - reserve` distinct slots at any
time. The reserve is an eighth of the tier: enough for the stores of a step, too little to be
missed by loads. What is kept for other engines is held as loads hold, and of that at most half:
nobody knows whether they come. Pure arithmetic over the pins in `Slots`, which stay the only count
of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tiering.residency.state import NOWHERE, PinKind, SlotArray, Slots

_RESERVE_SHARE = 8
_KEPT_SHARE = 2


class LoadBudget:
    """Owned by the core. `held` counts a slot once, however many requests share it."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        capacity = len(slots)
        self.reserve = max(1, capacity // _RESERVE_SHARE) if capacity > 1 else 0
        self.limit = capacity - self.reserve
        self.kept_limit = -(-self.limit // _KEPT_SHARE)

    @property
    def held(self) -> int:
        return self._slots.held(PinKind.LOAD)

    @property
    def room(self) -> int:
        return max(0, self.limit - self.held)

    def fitting(self, found: SlotArray) -> int:
        """How many leading chunks, in these slots or NOWHERE yet, can be held right now."""
        slots = self._slots
        room, there_is = self.room, slots.free + slots.evictable
        if len(found) <= min(room, there_is):
            return len(found)
        is_here = found != NOWHERE
        here = found[is_here]
        # A chunk in the prefix takes room either way: by being filled or by staying.
        takes_room, is_new = ~is_here, ~is_here
        takes_room[is_here] = slots.may_go(here)
        is_new[is_here] = slots.load_pins[here] == 0
        return min(
            int(np.searchsorted(np.cumsum(is_new), room, side="right")),
            int(np.searchsorted(np.cumsum(takes_room), there_is, side="right")),
        )

    def giving_way(self, kept: Iterable[SlotArray], fresh: SlotArray) -> int:
        """How many of those who hold the slots `kept` hold more than may be kept beside `fresh`,
        which are within it. The first of them stay."""
        slots = list(kept)
        if len(fresh) + sum(map(len, slots)) <= self.kept_limit:
            return 0
        is_kept = np.zeros(len(self._slots), np.bool_)
        is_kept[fresh] = True
        count = len(fresh)
        for number, each in enumerate(slots):
            count += len(each) - int(np.count_nonzero(is_kept[each]))
            if count > self.kept_limit:
                return len(slots) - number
            is_kept[each] = True
        return 0

    def __repr__(self) -> str:
        return f"<LoadBudget {self.held} of {self.limit} slots held, {self.reserve} in reserve>"
