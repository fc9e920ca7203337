"""Least recently used, whole accesses at a time, the tail of a prefix before its head.

Keys are kept in one list per access, head first, and accesses in order of age, so a batch of any
size is placed with a few C-level calls and victims are read from the end of the oldest list. A
key that has moved on leaves its old entry behind; entries are stale when `_access_of` names
another list, and a list is rebuilt when more than half of it is, so stale entries never outnumber
live ones by more than `_SLACK` a list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

from tiering.policy.base import EvictionPolicy

_SLACK = 16


class LruPolicy(EvictionPolicy):
    """See the module's docstring. A child is never more recent than its parent, because a request
    reports the whole prefix that it uses under one access."""

    def __init__(self) -> None:
        self._access_of: dict[bytes, int] = {}
        self._entries: dict[int, list[bytes]] = {}
        self._live: dict[int, int] = {}
        self._accesses: list[int] = []

    def add(self, keys: Sequence[bytes], access: int) -> None:
        self._place(keys, access)

    def touch(self, keys: Sequence[bytes], access: int) -> None:
        self._place(keys, access)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._leave(map(self._access_of.pop, keys))

    def pick(self, count: int, evictable: Callable[[bytes], bool]) -> list[bytes]:
        victims: list[bytes] = []
        if count < 1:
            return victims
        access_of = self._access_of
        for access in self._accesses:
            entries = self._entries[access]
            while entries and access_of.get(entries[-1]) != access:
                entries.pop()
            for key in reversed(entries):
                if access_of.get(key) == access and evictable(key):
                    victims.append(key)
                    if len(victims) == count:
                        return victims
        return victims

    def order(self) -> list[bytes]:
        return self.pick(len(self._access_of), lambda _: True)

    def _place(self, keys: Sequence[bytes], access: int) -> None:
        access_of = self._access_of
        came_from = list(map(access_of.get, keys))
        moving = [key for key, before in zip(keys, came_from, strict=True) if before != access]
        if not moving:
            return
        left = [before for before in came_from if before is not None and before != access]
        if access not in self._entries:
            insort(self._accesses, access)
            self._entries[access] = []
            self._live[access] = 0
        elif len(self._entries[access]) > self._live[access]:
            # A key may come back to the list it once left: no second entry for it.
            self._rebuild(access)
        access_of.update(zip(moving, repeat(access)))
        self._entries[access].extend(moving)
        self._live[access] += len(moving)
        self._leave(left)

    def _leave(self, accesses: Iterable[int]) -> None:
        """One key has left each of `accesses`, which may repeat."""
        for access, leavers in Counter(accesses).items():
            live = self._live[access] = self._live[access] - leavers
            if live == 0:
                del self._entries[access], self._live[access]
                del self._accesses[bisect_left(self._accesses, access)]
            elif len(self._entries[access]) > 2 * live + _SLACK:
                self._rebuild(access)

    def _rebuild(self, access: int) -> None:
        access_of = self._access_of
        self._entries[access] = [k for k in self._entries[access] if access_of.get(k) == access]

    def __repr__(self) -> str:
        return f"<LruPolicy {len(self._access_of)} keys of {len(self._accesses)} accesses>"
