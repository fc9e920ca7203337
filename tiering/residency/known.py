"""What the core believes a secondary tier to hold: a hint, bounded, corrected by every answer.

A key is in the set because the tier said so or because we stored it there; it leaves when the tier
says otherwise. The set never decides that bytes are right: a read does. When it is full, the keys
that were confirmed longest ago are forgotten, a batch at a time, which costs one question when
they are next wanted. What a peer holds is known for one request, and as long as that lasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tiering_kernels.keytable import ABSENT, KeyBatch, open_table, select

KNOWN_KEYS_MAX = 1_000_000


class Holdings(Protocol):
    """What somebody is believed to hold, as a search needs it."""

    def holds(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Of each key, whether it is in the set."""
        ...

    def mark(self, keys: Sequence[bytes], marks: bytearray, found: int, missing: int) -> None:
        """See KeyTable.mark."""
        ...

    def add(self, keys: Sequence[bytes]) -> None:
        """They are."""
        ...


class Everything:
    """Holdings of a peer that is taken at its word: it has all that it is asked for."""

    def holds(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        return np.ones(len(keys), np.bool_)

    def mark(self, keys: Sequence[bytes], marks: bytearray, found: int, missing: int) -> None:
        marks[:] = marks.translate(_at_least(found))

    def add(self, keys: Sequence[bytes]) -> None:
        """Nothing to add."""


@lru_cache
def _at_least(found: int) -> bytes:
    """Of each mark the higher of it and `found`, for `translate`."""
    return bytes(max(mark, found) for mark in range(256))


class KnownKeys:
    """Owned by the core; one for each secondary tier, and one for each request and its peer."""

    def __init__(self, keys_max: int = KNOWN_KEYS_MAX) -> None:
        self._keys_max = keys_max
        # For each key the number of the batch that confirmed it last.
        self._batch_of = open_table()
        self._batches: deque[tuple[int, KeyBatch]] = deque()
        self._listed = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._batch_of)

    def add(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        batch = KeyBatch(keys)
        self._number += 1
        self._batch_of.put(batch, self._number)
        self._batches.append((self._number, batch))
        self._listed += len(batch)
        # A key that is confirmed again and again is listed as often, so lists have a bound, too.
        while len(self) > self._keys_max or self._listed > 2 * self._keys_max:
            number, oldest = self._batches.popleft()
            self._listed -= len(oldest)
            self.discard(select(oldest, self._batch_of.get(oldest) == number))

    def discard(self, keys: Sequence[bytes]) -> None:
        self._batch_of.pop(keys)

    def clear(self) -> None:
        self._batch_of = open_table()
        self._batches.clear()
        self._listed = 0

    def holds(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Of each key, whether it is in the set."""
        are: npt.NDArray[np.bool_] = self._batch_of.get(keys) != ABSENT
        return are

    def mark(self, keys: Sequence[bytes], marks: bytearray, found: int, missing: int) -> None:
        """See KeyTable.mark."""
        self._batch_of.mark(keys, marks, found, missing)

    def among(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of `keys` that are in the set."""
        return select(keys, self.holds(keys))

    def unknown(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of `keys` that are not in the set."""
        return select(keys, ~self.holds(keys))
