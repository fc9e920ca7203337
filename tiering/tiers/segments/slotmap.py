"""The map from keys to slots of a segment tier, at 8 bytes a slot.

A hash table of slot numbers only, over the list that has the key of each slot anyway: a dict with
its own entries and numbers would double the memory of the index. Pure; used by the index only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class SlotMap:
    """Finds slots by `keys[slot]`, which must be there, unchanged, from `put` to `remove`."""

    def __init__(self, keys: Sequence[bytes | None], slots_max: int) -> None:
        self._keys = keys
        # Half full at most, so that a search is short and always comes to an end. 0 is empty.
        self._size = 2 * slots_max + 1
        self._table = array("i", [0]) * self._size
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: bytes) -> int:
        """The slot of `key`, -1 without one."""
        return self._table[self._search(key)] - 1

    def put(self, key: bytes, slot: int) -> bool:
        """Map `key` to `slot`; False, and nothing done, where it has one."""
        at = self._search(key)
        if self._table[at]:
            return False
        self._table[at] = slot + 1
        self._count += 1
        return True

    def remove(self, key: bytes) -> int:
        """Forget `key`, and say which slot it had; -1 without one."""
        keys, table, size = self._keys, self._table, self._size
        hole = self._search(key)
        removed = table[hole] - 1
        if removed < 0:
            return removed
        # What follows without a gap moves up, unless that is before the place its search begins.
        at = hole
        while entry := table[at := (at + 1) % size]:
            home = hash(keys[entry - 1]) % size
            if (at - home) % size >= (at - hole) % size:
                table[hole] = entry
                hole = at
        table[hole] = 0
        self._count -= 1
        return removed

    def _search(self, key: bytes) -> int:
        """Where `key` is in the table, or would be."""
        keys, table, size = self._keys, self._table, self._size
        at = hash(key) % size
        while (entry := table[at]) and keys[entry - 1] != key:
            at = (at + 1) % size
        return at
