"""How much of the host tier loads may hold, so that running stores always find room.

Loads (pinned prefixes and promotions) may hold at most `capacity - reserve` distinct slots at any
time. The reserve is an eighth of the tier: enough for the stores of a step, too little to be
missed by loads. Pure arithmetic over the pins in `Slots`, which stay the only count of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiering.residency.state import Slots

_RESERVE_SHARE = 8


class LoadBudget:
    """Owned by the core. `held` counts a slot once, however many requests share it."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        capacity = len(slots)
        self.reserve = max(1, capacity // _RESERVE_SHARE) if capacity > 1 else 0
        self.limit = capacity - self.reserve

    @property
    def held(self) -> int:
        return int(np.count_nonzero(self._slots.load_pins))

    @property
    def room(self) -> int:
        return max(0, self.limit - self.held)

    def fitting(self, found: Sequence[int | None]) -> int:
        """How many leading chunks, in these slots or not yet in any, can be held right now."""
        slots = self._slots
        may_go = slots.evictable()
        is_here = np.array([slot is not None for slot in found], dtype=np.bool_)
        here = np.array([slot for slot in found if slot is not None], dtype=np.intp)
        # A chunk in the prefix takes room either way: by being filled or by staying.
        takes_room, is_new = ~is_here, ~is_here
        takes_room[is_here] = may_go[here]
        is_new[is_here] = slots.load_pins[here] == 0
        there_is = slots.free + int(np.count_nonzero(may_go))
        return min(
            int(np.searchsorted(np.cumsum(is_new), self.room, side="right")),
            int(np.searchsorted(np.cumsum(takes_room), there_is, side="right")),
        )

    def __repr__(self) -> str:
        return f"<LoadBudget {self.held} of {self.limit} slots held, {self.reserve} in reserve>"
