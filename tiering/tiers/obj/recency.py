"""When chunks were used: the order in which a namespace gives them up.

Sans-IO; owned by one tier. Later uses have larger ticks, and within one use the head of a prefix
the largest, so that eviction by tick takes its tail first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tiering.clock import Clock
from tiering.tiers.disk.ticks import Ticks
from tiering_kernels.keytable import Values, open_table

USED_KEYS_MAX = 1_000_000
UNSAID_KEYS_MAX = 50_000


class Recency:
    """When what was used, in microseconds since 1970, about the last `keys_max` keys; of what this
    engine used itself, also which is yet to be said to others."""

    def __init__(self, today: Clock, keys_max: int = USED_KEYS_MAX) -> None:
        self._ticks = Ticks(today)
        self._half = max(1, keys_max // 2)
        self._young = open_table()
        self._old = open_table()
        self._unsaid: dict[bytes, int] = {}

    def used(self, keys: Sequence[bytes]) -> None:
        """`keys`, a prefix in order, now."""
        if not keys:
            return
        ticks = self._ticks.of(list(dict.fromkeys(keys)))
        self._put(list(ticks), np.fromiter(ticks.values(), np.int64, len(ticks)))
        if len(self._unsaid) < UNSAID_KEYS_MAX:
            self._unsaid |= ticks

    def learned(self, keys: Sequence[bytes], ticks: Values) -> None:
        """Others have used `keys`, which differ, then."""
        if len(keys):
            self._put(keys, np.maximum(ticks, self.of(keys)))

    def of(self, keys: Sequence[bytes]) -> Values:
        """The last use of each; ABSENT, which is less than any, where it is not known."""
        return np.maximum(self._young.get(keys), self._old.get(keys))

    def gone(self, keys: Sequence[bytes]) -> None:
        self._young.pop(keys)
        self._old.pop(keys)

    def unsaid(self) -> dict[bytes, int]:
        """What was used here since it was last `said`: at most UNSAID_KEYS_MAX and one call's."""
        return dict(self._unsaid)

    def said(self, used: Mapping[bytes, int]) -> None:
        """Others can know of `used`."""
        kept = self._unsaid.items()
        self._unsaid = {key: tick for key, tick in kept if used.get(key) != tick}

    def _put(self, keys: Sequence[bytes], ticks: Values) -> None:
        self._young.put(keys, ticks)
        if len(self._young) > self._half:
            self._young, self._old = open_table(), self._young
