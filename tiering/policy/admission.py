"""Which chunks are worth storing: all of them, or those that several requests have asked for.

Sans-IO and not thread-safe: owned by `residency`. Each request reports its chain once, in order,
head first, and the part that is new when it grows; then one question decides what of a chain may
be stored now. The answer is a prefix, because a chunk whose parent is not stored is never found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice, repeat


class AdmissionPolicy(ABC):
    """What an implementor must write; nothing here has a default. Both calls are O(batch)."""

    @abstractmethod
    def seen(self, keys: Sequence[bytes]) -> None:
        """A request asks for `keys`, in prefix order; each request says so once for each key."""

    @abstractmethod
    def admits(self, keys: Sequence[bytes]) -> int:
        """How many leading `keys` may be stored now. Changes nothing."""


class AdmitAll(AdmissionPolicy):
    """Everything is stored the first time it is computed."""

    def seen(self, keys: Sequence[bytes]) -> None:
        pass

    def admits(self, keys: Sequence[bytes]) -> int:
        return len(keys)

    def __repr__(self) -> str:
        return "<AdmitAll>"


class SeenOften(AdmissionPolicy):
    """Stores what `threshold` requests have asked for, the one that stores it included.

    Counts at most `entries_max` keys; beyond that the keys that were not asked for longest are
    forgotten, and of one request's the tail before the head, so a prefix is never counted higher
    at its end than at its head.
    """

    def __init__(self, threshold: int, entries_max: int) -> None:
        if threshold < 1 or entries_max < 1:
            raise ValueError(f"{threshold=}, {entries_max=}: must be at least 1")
        self._threshold = threshold
        self._entries_max = entries_max
        self._counts: dict[bytes, int] = {}

    def seen(self, keys: Sequence[bytes]) -> None:
        counts = self._counts
        # The head last, so that it is the youngest: a dict keeps the order of insertion.
        for key in reversed(keys[: self._entries_max]):
            counts[key] = counts.pop(key, 0) + 1
        for key in list(islice(counts, max(0, len(counts) - self._entries_max))):
            del counts[key]

    def admits(self, keys: Sequence[bytes]) -> int:
        counts = list(map(self._counts.get, keys, repeat(0)))
        if not counts or min(counts) >= self._threshold:
            return len(keys)
        return next(i for i, count in enumerate(counts) if count < self._threshold)

    def __repr__(self) -> str:
        return f"<SeenOften {self._threshold} times, {len(self._counts)} keys>"
