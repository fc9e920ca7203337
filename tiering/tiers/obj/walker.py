"""When the whole namespace is listed: at start, now and then, and when somebody needs it.

Owns the one walk under way. A walk takes a fifth of the time at most, so that a large bucket's
pages do not hold up loads, and walks a twentieth of it. Used on the tier's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from tiering.clock import Clock
from tiering.tiers.obj.lifecycle import Bound
from tiering.tiers.obj.lookup import Lookup
from tiering.tiers.obj.store import StoreError

log = logging.getLogger("tiering")

_REST = 4.0
_REST_BETWEEN_WALKS = 19.0
_AFTER_FAILURE_SECONDS = 30.0


class Walker:
    """`bound`, where there is one, sees what each walk shows. `every_seconds`: from the end of one
    walk to the next, more or less by a tenth."""

    def __init__(
        self,
        lookup: Lookup,
        bound: Bound | None,
        clock: Clock,
        chance: random.Random,
        every_seconds: float,
    ) -> None:
        self._lookup = lookup
        self._bound = bound
        self._clock = clock
        self._chance = chance
        self._every_seconds = every_seconds
        self._walking: asyncio.Task[bool] | None = None
        self._is_wanted = asyncio.Event()
        self._seconds = 0.0
        self.walks = self.walks_failed = 0

    def __repr__(self) -> str:
        return f"<Walker {self.walks} walks, {self.walks_failed} broke off>"

    async def begin(self, seconds_max: float) -> None:
        """Start the first walk, and wait until it has shown a page, which for a small namespace is
        all: then nothing needs to be searched for. At most `seconds_max`."""
        shown = asyncio.Event()
        walking = self._start(shown.set)
        walking.add_done_callback(lambda _: shown.set())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds_max):
                await shown.wait()

    async def run(self) -> None:
        """Walk now and then, until cancelled, from the end of what `begin` began; `bound` is kept
        to after each."""
        has_walked = self._walking is not None and await self._end_of(self._walking)
        while True:
            if self._bound is not None:
                await self._bound.trim()
            pause = max(self._every_seconds, _REST_BETWEEN_WALKS * self._seconds)
            if not has_walked:
                pause = min(pause, _AFTER_FAILURE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause * self._chance.uniform(0.9, 1.1)):
                    await self._is_wanted.wait()
            has_walked = await self.walk()

    def want(self) -> None:
        """Have the next walk begin without waiting for its time."""
        self._is_wanted.set()

    async def walk(self) -> bool:
        """Walk, or wait for the walk under way; whether everything was shown."""
        self._is_wanted.clear()
        walking = self._walking
        if walking is None or walking.done():
            walking = self._start(lambda: None)
        return await self._end_of(walking)

    async def close(self) -> None:
        if self._walking is not None:
            self._walking.cancel()
            await asyncio.wait({self._walking})

    async def _end_of(self, walking: asyncio.Task[bool]) -> bool:
        await asyncio.wait({walking})
        return walking.result()

    def _start(self, shown: Callable[[], object]) -> asyncio.Task[bool]:
        # Not in a TaskGroup: several may wait for it, and a cancelled one must not end it.
        self._walking = asyncio.get_running_loop().create_task(self._walk(shown))
        return self._walking

    async def _walk(self, shown: Callable[[], object]) -> bool:
        began = self._clock.now()
        try:
            await self._pages(shown)
        except StoreError as error:
            self.walks_failed += 1
            log.debug("%r: a walk broke off: %s", self._lookup, error)
            return False
        finally:
            self._seconds = self._clock.now() - began
        self.walks += 1
        return True

    async def _pages(self, shown: Callable[[], object]) -> None:
        if self._bound is not None:
            await self._bound.walk_begins()
        async with contextlib.aclosing(self._lookup.walk()) as pages:
            page_began = self._clock.now()
            async for chunks in pages:
                if self._bound is not None:
                    self._bound.page(chunks)
                shown()
                await asyncio.sleep(_REST * (self._clock.now() - page_began))
                page_began = self._clock.now()
        if self._bound is not None:
            self._bound.walk_ends()
