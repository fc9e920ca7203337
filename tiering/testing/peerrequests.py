"""Requests of an engine that has chunks of peers, as a scheduler has them; for tests.

`PeerRequests` numbers them and takes them through the core, one step after another. What becomes
of the core's steps is its caller's, by `pump`: the engine may be simulated or over a real region.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tiering.residency.core import Residency
from tiering.tiers.peers.source import PeerSource


class PeerRequests:
    """Of one engine. `pump` takes outcomes in and hands steps out; `pause` gives the seconds to
    the scheduler's next step."""

    def __init__(
        self, core: Residency, pump: Callable[[], None], pause: Callable[[], float]
    ) -> None:
        self._core = core
        self._pump = pump
        self._pause = pause
        self._count = 0

    @contextmanager
    def opened(self, what: str) -> Iterator[str]:
        """A request, for the block; its owner."""
        self._count += 1
        owner = f"{what} {self._count}"
        self._core.open(owner)
        try:
            yield owner
        finally:
            self._core.close(owner)
            self._pump()

    async def hold(self, owner: str, keys: Sequence[bytes], whom: PeerSource) -> list[int]:
        """Slots of as many leading `keys` as can be had, from here or from `whom`: pinned until the
        request is over. None where a reset gave them back meanwhile."""
        core = self._core
        core.peers.ask(owner, whom.packed(), has_all=whom.is_prefiller)
        core.ask(owner, keys)
        self._pump()
        while core.is_asking(owner):
            await self.turn()
        reach = core.match(keys, owner).reach
        while not core.hold(owner, keys[:reach]):
            await self.turn()
        self._pump()
        while core.held(owner) is None:
            await self.turn()
        return core.claim(owner) if core.is_holding(owner) else []

    async def turn(self) -> None:
        """The scheduler's next step."""
        await asyncio.sleep(self._pause())
        self._pump()
