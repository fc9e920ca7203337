"""Which chunks a tier has, and which of them a survey of it has not met.

A survey names all that a tier holds, in pieces, while chunks come and go. What was there before it
began and has been heard of by nobody when it ends is not there. Nothing here takes time that grows
with the number of chunks, but for a survey that was broken off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from tiering.events.chunks import HOST
from tiering.events.descriptions import Run
from tiering.events.runs import Runs


class Holdings:
    """Of one tier."""

    def __init__(self) -> None:
        # Values are the same object for all that came at once, and mean nothing else.
        self._fresh: dict[bytes, object] = {}
        # From before the survey under way, or, if none is, before the last one, which has not met
        # them.
        self._older: dict[bytes, object] = {}
        self._is_surveyed = False

    def __len__(self) -> int:
        return len(self._fresh) + len(self._older)

    def __contains__(self, key: bytes) -> bool:
        return key in self._fresh or key in self._older

    def keys(self) -> list[bytes]:
        return [*self._fresh, *self._older]

    def add(self, keys: Sequence[bytes]) -> list[bytes]:
        """They are there; those of which that is news."""
        fresh, older = self._fresh, self._older
        before, now = len(fresh), object()
        since = list(map(fresh.setdefault, keys, repeat(now)))
        news = list(keys)
        if len(fresh) - before < len(keys):
            added = zip(keys, since, strict=True)
            news = list(dict.fromkeys(key for key, at in added if at is now))
        if older:
            return [key for key in news if older.pop(key, None) is None]
        return news

    def discard(self, keys: Iterable[bytes]) -> list[bytes]:
        """They are not there; those of which that is news."""
        fresh, older, keys = self._fresh, self._older, list(keys)
        before = len(fresh)
        since = list(map(fresh.pop, keys, repeat(None)))
        if before - len(fresh) == len(keys):
            return keys
        return [
            key
            for key, at in zip(keys, since, strict=True)
            if at is not None or older.pop(key, None) is not None
        ]

    def clear(self) -> None:
        self._fresh.clear()
        self._older.clear()

    def begin_survey(self) -> None:
        if self._older:
            self._older.update(self._fresh)
        else:
            self._older = self._fresh
        self._fresh = {}
        self._is_surveyed = True

    def end_survey(self, *, is_whole: bool) -> None:
        self._is_surveyed = False
        if not is_whole:
            self._older.update(self._fresh)
            self._fresh, self._older = self._older, {}

    def take_lost(self, count: int) -> list[bytes]:
        """Up to `count` of those that the last survey has not met; they are not there any more."""
        if self._is_surveyed or not self._older:
            return []
        return [self._older.popitem()[0] for _ in range(min(count, len(self._older)))]

    @property
    def has_lost(self) -> bool:
        return not self._is_surveyed and bool(self._older)


class HostHoldings(Holdings):
    """Of host memory, which is not surveyed: and what is said of each chunk. Those of which nothing
    is said are held as by any other tier."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs()

    def __len__(self) -> int:
        return len(self.runs) + super().__len__()

    def __contains__(self, key: bytes) -> bool:
        return key in self.runs or super().__contains__(key)

    def keys(self) -> list[bytes]:
        return [*self.runs, *super().keys()]

    def add_run(self, run: Run) -> Sequence[bytes]:
        """All of it is there; those of which that is news."""
        news = self.runs.put(run)
        if super().__len__() and (bare := set(super().discard(news))):
            return [key for key in news if key not in bare]
        return news

    def add_some(self, keys: Sequence[bytes], runs: Iterable[Run]) -> list[bytes]:
        """They are there, and `runs` are made of some of them; those of which that is news."""
        news: set[bytes] = set()
        for run in runs:
            news.update(self.add_run(run))
        news.update(super().add([key for key in keys if key not in self.runs]))
        return [key for key in dict.fromkeys(keys) if key in news]

    def discard(self, keys: Iterable[bytes]) -> list[bytes]:
        keys, before = list(keys), len(self.runs)
        taken = self.runs.take(keys)
        if before - len(self.runs) == len(keys):
            return keys
        news: list[bytes] = []
        for key, run in zip(keys, taken, strict=True):
            news += super().discard((key,)) if run is None else (key,)
        return news

    def clear(self) -> None:
        super().clear()
        self.runs.clear()


class HeldSomewhere:
    """Of several tiers, by their numbers; those of equal `places` are one to whoever is told."""

    def __init__(self, places: Mapping[int, object]) -> None:
        self.host = HostHoldings()
        self.holdings = {tier: self.host if tier == HOST else Holdings() for tier in places}
        self._others = {
            tier: [self.holdings[at] for at in places if at != tier and places[at] == place]
            for tier, place in places.items()
        }

    def is_alone(self, tier: int) -> bool:
        """Whether no other tier is in its place."""
        return not self._others[tier]

    def nowhere_else(self, tier: int, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Those of `keys` that are in no other tier of the same place."""
        for others in self._others[tier]:
            keys = [key for key in keys if key not in others]
        return keys
