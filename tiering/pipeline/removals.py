"""What a tier evicts, told of in the order in which it matters.

A tier says that a chunk is gone as soon as nobody can read it any more. A step that wrote or read
that chunk may report after that, and nobody knows whether what it says was true before or is now,
as when it stored the chunk anew: then the tier is asked, and what is not there is told of once
more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from tiering.residency.plan import News, Removed, Verdict


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

    @asynccontextmanager
    async def seen_by(
        self,
        keys: Sequence[bytes],
        ask: Callable[[Sequence[bytes]], Awaitable[Sequence[Verdict]]],
    ) -> AsyncIterator[None]:
        """Say again which of `keys` have gone during the block, at whose end a step reports, and
        are not there, as `ask` has it from the tier."""
        with self.watch() as gone:
            yield
        if not gone or not (doubtful := [key for key in keys if key in gone]):
            return
        verdicts = await ask(doubtful)
        told = zip(doubtful, verdicts, strict=True)
        if again := tuple(key for key, verdict in told if verdict is not Verdict.HIT):
            self._report(Removed(self._tier, again))
