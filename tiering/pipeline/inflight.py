"""One flight at a time for each (tier, key): who wants the same chunk waits for the one before.

Keeps a delete from overtaking the write before it, and a write from running twice. Belongs to one
event loop. Waits never form a cycle, because a flight takes all its keys at once or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager


class Inflight:
    """Owned by `Transfers`."""

    def __init__(self) -> None:
        self._flights: dict[tuple[int, bytes], asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @asynccontextmanager
    async def flight(self, tier: int, keys: Sequence[bytes]) -> AsyncIterator[None]:
        """Have `keys` of `tier` to oneself."""
        names = [(tier, key) for key in keys]
        await self.landing(tier, keys)
        landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flights.update(dict.fromkeys(names, landed))
        try:
            yield
        finally:
            for name in names:
                del self._flights[name]
            landed.set_result(None)

    async def landing(self, tier: int, keys: Sequence[bytes]) -> None:
        """Until nobody has any of `keys` of `tier`; no await lies between that and the return."""
        names = [(tier, key) for key in keys]
        while busy := {f for name in names if (f := self._flights.get(name)) is not None}:
            await asyncio.wait(busy)
