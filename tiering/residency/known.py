"""What the core believes a secondary tier to hold: a hint, bounded, corrected by every answer.

A key is in the set because the tier said so or because we stored it there; it leaves when the tier
says otherwise. The set never decides that bytes are right: a read does. When it is full, the keys
that were confirmed longest ago are forgotten, which costs one question when they are next wanted.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import takewhile

KNOWN_KEYS_MAX = 1_000_000


class KnownKeys:
    """Owned by the core; one for each secondary tier."""

    def __init__(self, keys_max: int = KNOWN_KEYS_MAX) -> None:
        self._keys: dict[bytes, None] = {}
        self._keys_max = keys_max

    def add(self, keys: Iterable[bytes]) -> None:
        self._keys.update(dict.fromkeys(keys))
        excess = len(self._keys) - self._keys_max
        if excess > 0:
            oldest = iter(self._keys)
            for key in [next(oldest) for _ in range(excess)]:
                del self._keys[key]

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()

    def prefix(self, keys: Iterable[bytes], absent: Container[bytes]) -> int:
        """How many leading `keys` are in the set and not in `absent`."""
        known = self._keys
        return sum(1 for _ in takewhile(lambda key: key in known and key not in absent, keys))

    def among(self, keys: Iterable[bytes], absent: Container[bytes]) -> list[bytes]:
        """Those of `keys` that are in the set and not in `absent`."""
        known = self._keys
        return [key for key in keys if key in known and key not in absent]

    def unknown(self, keys: Iterable[bytes], absent: Container[bytes] = ()) -> list[bytes]:
        """Those of `keys` that are neither in the set nor in `absent`."""
        known = self._keys
        return [key for key in keys if key not in known and key not in absent]
