"""Adaptive replacement: recency and frequency, balanced by what would have been found again.

After Megiddo and Modha's ARC. Chunks that one access has used (T1) and that several have (T2) each
go by recency; the keys of chunks gone from either (B1, B2) are kept as ghosts, and a ghost that
comes back moves the target for T1's size towards what would have kept it. So a scan, which is used
once, does not take the room of what is used again and again.

Where it departs from the paper, for the sake of prefixes: T2 gives up a chunk only where that is
older than all of T1, and a chunk enters T2 only with its ancestors. So no chunk goes before one
that continues it. Every `remove` leaves a ghost, since the contract tells no reason for it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, islice

from tiering.policy.base import EvictionPolicy

# Keys at a time that the caller is asked about.
_LOOK_AT = 64


class ArcPolicy(EvictionPolicy):
    """See the module's docstring. There are never more ghosts than `capacity`, the slots that
    there are, and of those of T1 no more than it leaves of them."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"{capacity=}: must be at least 1")
        self._capacity = capacity
        self._once, self._often = _Recency(), _Recency()
        # The access that used a key last, by key; the first to be forgotten first.
        self._once_ghosts: dict[bytes, int] = {}
        self._often_ghosts: dict[bytes, int] = {}
        self._once_target = 0.0

    def add(self, keys: Sequence[bytes], access: int) -> None:
        once, often = self._once_ghosts, self._often_ghosts
        ghosts = {key for key in keys if key in once or key in often}
        again = 0
        if ghosts:
            self._learn(ghosts, access)
            if not self._once.has(access):
                is_first = (i for i, key in enumerate(keys) if not self._was_used(key, access))
                again = next(is_first, len(keys))
            for key in ghosts:
                once.pop(key, None)
                often.pop(key, None)
        self._often.add(keys[:again], access)
        self._once.add(keys[again:], access)
        self._forget_ghosts()

    def touch(self, keys: Sequence[bytes], access: int) -> None:
        once = self._once.access_of
        again = [key for key in keys if key in once]
        if self._once.has(access):
            # The head of what this access uses is there; nothing goes before it.
            self._once.move(again, access)
            self._often.move([key for key in keys if key not in once], access)
        elif again:
            self._once.discard(again)
            often = self._often.access_of
            self._often.discard([key for key in keys if key in often])
            self._often.add(keys, access)
        else:
            self._often.move(keys, access)
        self._forget_ghosts()

    def remove(self, keys: Sequence[bytes]) -> None:
        once = self._once.access_of
        of_once = [key for key in keys if key in once]
        of_often = [key for key in keys if key not in once] if len(of_once) < len(keys) else []
        self._once_ghosts.update(zip(of_once, self._once.discard(of_once), strict=True))
        self._often_ghosts.update(zip(of_often, self._often.discard(of_often), strict=True))
        self._forget_ghosts()

    def pick(self, count: int, evictable: Callable[[Sequence[bytes]], list[bool]]) -> list[bytes]:
        victims: list[bytes] = []
        once_left = len(self._once)
        once, often = self._once.oldest(evictable), self._often.oldest(evictable)
        from_once, from_often = next(once, None), next(often, None)
        while len(victims) < count:
            if from_once is not None and (
                from_often is None or once_left > self._once_target or from_once[0] <= from_often[0]
            ):
                victims.append(from_once[1])
                once_left -= 1
                from_once = next(once, None)
            elif from_often is not None:
                victims.append(from_often[1])
                from_often = next(often, None)
            else:
                break
        return victims

    def order(self) -> list[bytes]:
        return self.pick(len(self._once) + len(self._often), lambda keys: [True] * len(keys))

    def _was_used(self, key: bytes, access: int) -> bool:
        """Whether another access than this one is known to have used `key`, now a ghost."""
        return key in self._often_ghosts or self._once_ghosts.get(key, access) != access

    def _learn(self, keys: Iterable[bytes], access: int) -> None:
        """Move the target towards the list that would have kept the ghosts among `keys`."""
        once, often = self._once_ghosts, self._often_ghosts
        once_hits = sum(once.get(key, access) != access for key in keys)
        often_hits = sum(often.get(key, access) != access for key in keys)
        if once_hits:
            self._once_target += once_hits * max(1.0, len(often) / len(once))
        if often_hits:
            self._once_target -= often_hits * max(1.0, len(once) / len(often))
        self._once_target = min(max(self._once_target, 0.0), float(self._capacity))

    def _forget_ghosts(self) -> None:
        _forget_oldest(self._once_ghosts, self._capacity - len(self._once))
        _forget_oldest(self._often_ghosts, self._capacity - len(self._once_ghosts))

    def __repr__(self) -> str:
        ghosts = len(self._once_ghosts), len(self._often_ghosts)
        told = f"{len(self._once)} once, {len(self._often)} often, ghosts of each {ghosts}"
        return f"<ArcPolicy {told}, target {self._once_target:.0f} of {self._capacity}>"


class _Recency:
    """Keys by the access that used them last, and within one in prefix order, head first."""

    def __init__(self) -> None:
        self.access_of: dict[bytes, int] = {}
        self._keys_of: dict[int, dict[bytes, None]] = {}
        self._accesses: list[int] = []

    def __len__(self) -> int:
        return len(self.access_of)

    def has(self, access: int) -> bool:
        """Whether `access` was the last to use any key here."""
        return access in self._keys_of

    def add(self, keys: Sequence[bytes], access: int) -> None:
        """`keys`, none of them here, were used by `access`."""
        if not keys:
            return
        if access not in self._keys_of:
            insort(self._accesses, access)
            self._keys_of[access] = {}
        self.access_of.update(dict.fromkeys(keys, access))
        self._keys_of[access].update(dict.fromkeys(keys))

    def move(self, keys: Sequence[bytes], access: int) -> None:
        """`keys`, all here, were used by `access`; those that it used before stay in place."""
        access_of = self.access_of
        moving = [key for key in keys if access_of[key] != access]
        self.discard(moving)
        self.add(moving, access)

    def discard(self, keys: Sequence[bytes]) -> list[int]:
        """`keys`, all here, are not any more: the accesses that used them last."""
        accesses = list(map(self.access_of.pop, keys))
        if keys and accesses == [accesses[0]] * len(self._keys_of[accesses[0]]):
            self._end(accesses[0])  # All that it has, at once.
            return accesses
        for key, access in zip(keys, accesses, strict=True):
            among = self._keys_of[access]
            # From the end if it is there: unlike `del`, that leaves no gap for `reversed`.
            last, _ = among.popitem()
            if last != key:
                del among[key]
                among[last] = None
            if not among:
                self._end(access)
        return accesses

    def _end(self, access: int) -> None:
        del self._keys_of[access]
        del self._accesses[bisect_left(self._accesses, access)]

    def oldest(
        self, evictable: Callable[[Sequence[bytes]], list[bool]]
    ) -> Iterator[tuple[int, bytes]]:
        """Accesses and keys, in the order in which they would go."""
        for access in self._accesses:
            keys = reversed(self._keys_of[access])
            while some := list(islice(keys, _LOOK_AT)):
                for key in compress(some, evictable(some)):
                    yield access, key


def _forget_oldest(ghosts: dict[bytes, int], kept_max: int) -> None:
    for key in list(islice(ghosts, max(0, len(ghosts) - max(0, kept_max)))):
        del ghosts[key]
