"""What a tier evicts, told of in the order in which it matters.

A tier says that a chunk is gone as soon as nobody can read it any more. A step that wrote or read
that chunk just before may report only after that: then it is told of once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tiering.residency.plan import News, Removed


class Removals:
    """Of one tier, by its number. Lives on the loop."""

    def __init__(self, tier: int, report: Callable[[News], None]) -> None:
        self._tier = tier
        self._report = report
        self._watches: list[set[bytes]] = []

    def tell(self, keys: Sequence[bytes]) -> None:
        """For the tier: `keys` are gone."""
        if keys:
            self._report(Removed(self._tier, tuple(keys)))
            for watch in self._watches:
                watch.update(keys)

    @contextmanager
    def watch(self) -> Iterator[set[bytes]]:
        """What goes during the block."""
        gone: set[bytes] = set()
        self._watches.append(gone)
        try:
            yield gone
        finally:
            # By identity: two watches may have seen the same.
            self._watches = [watch for watch in self._watches if watch is not gone]

    @contextmanager
    def seen_by(self, keys: Sequence[bytes]) -> Iterator[None]:
        """Say again which of `keys` have gone during the block, at whose end a step reports."""
        with self.watch() as gone:
            yield
        if gone and (again := tuple(key for key in keys if key in gone)):
            self._report(Removed(self._tier, again))
