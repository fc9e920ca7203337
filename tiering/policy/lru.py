"""Least recently used, whole accesses at a time, the tail of a prefix before its head.

Keys are kept in one list per access, head first, and accesses in order of age, so a batch of any
size is placed with a few calls and victims are read from the end of the oldest list. A key that
has moved on leaves its old entry behind; entries are stale when `_access_of` names another list,
and a list is rebuilt when more than half of it is, so stale entries never outnumber live ones by
more than `_SLACK` a list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import compress

import numpy as np

from tiering.policy.base import EvictionPolicy
from tiering_kernels.keytable import KeyBatch, Values, open_table, select

_SLACK = 16
_LOOK_MIN = 64


class LruPolicy(EvictionPolicy):
    """See the module's docstring. A child is never more recent than its parent, because a request
    reports the whole prefix that it uses under one access."""

    def __init__(self, capacity: int) -> None:
        del capacity  # A policy may need it; recency alone does not.
        self._access_of = open_table()
        self._entries: dict[int, list[bytes]] = {}
        self._live: dict[int, int] = {}
        self._accesses: list[int] = []

    def add(self, keys: Sequence[bytes], access: int) -> None:
        if access not in self._entries:
            insort(self._accesses, access)
            self._entries[access] = []
            self._live[access] = 0
        elif len(self._entries[access]) > self._live[access]:
            # A key may come back to the list it once left: no second entry for it.
            self._rebuild(access)
        self._access_of.put(keys, access)
        self._entries[access].extend(keys)
        self._live[access] += len(keys)

    def touch(self, keys: Sequence[bytes], access: int) -> None:
        came_from = self._access_of.get(keys)
        is_moving = came_from != access
        if is_moving.any():
            self.add(select(keys, is_moving), access)
            for before, start, end in _runs(came_from[is_moving]):
                self._leave(before, end - start)

    def remove(self, keys: Sequence[bytes]) -> None:
        for access, start, end in _runs(self._access_of.pop(keys)):
            entries = self._entries[access]
            # Victims leave from the end, as they were picked: then nothing stale stays.
            if entries[start - end :] == list(reversed(keys[start:end])):
                del entries[start - end :]
            self._leave(access, end - start)

    def pick(self, count: int, evictable: Callable[[Sequence[bytes]], list[bool]]) -> list[bytes]:
        victims: list[bytes] = []
        if count < 1:
            return victims
        for access in self._accesses:
            for keys in self._from_the_end(access, max(count, _LOOK_MIN)):
                victims += compress(keys, evictable(keys))
                if len(victims) >= count:
                    return victims[:count]
        return victims

    def order(self) -> list[bytes]:
        return self.pick(len(self._access_of), lambda keys: [True] * len(keys))

    def _from_the_end(self, access: int, size: int) -> Iterator[Sequence[bytes]]:
        """The keys of `access`, last first, up to `size` at a time. Drops stale ones at the end."""
        entries = self._entries[access]
        end = len(entries)
        while end:
            start = max(0, end - size)
            keys = KeyBatch(reversed(entries[start:end]))
            is_live = self._access_of.get(keys) == access
            end, was_end = start, end
            if is_live.all():
                yield keys
                continue
            if was_end == len(entries):
                stale = int(is_live.argmax()) if is_live.any() else len(keys)
                del entries[was_end - stale :]
            yield select(keys, is_live)

    def _leave(self, access: int, count: int) -> None:
        """So many keys have left `access`."""
        live = self._live[access] = self._live[access] - count
        if live == 0:
            del self._entries[access], self._live[access]
            del self._accesses[bisect_left(self._accesses, access)]
        elif len(self._entries[access]) > 2 * live + _SLACK:
            self._rebuild(access)

    def _rebuild(self, access: int) -> None:
        entries = KeyBatch(self._entries[access])
        self._entries[access] = list(select(entries, self._access_of.get(entries) == access))

    def __repr__(self) -> str:
        return f"<LruPolicy {len(self._access_of)} keys of {len(self._accesses)} accesses>"


def _runs(values: Values) -> list[tuple[int, int, int]]:
    """`(value, start, end)` of each run of equal ones."""
    if not len(values):
        return []
    if (values == values[0]).all():
        return [(int(values[0]), 0, len(values))]
    starts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
    firsts = values[starts].tolist()
    return list(zip(firsts, starts, [*starts[1:], len(values)], strict=True))
