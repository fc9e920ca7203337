"""The only bridge between the core, which is synchronous, and the loop that does the I/O.

`submit(steps)` and `drain() -> news`, batches of plain data, never waiting. `LoopPortal`
works inside the caller's own loop, `ThreadPortal` runs a loop in a thread of its own; for one in a
process of its own see `tiering.process.portal`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

from tiering.errors import ClosedError
from tiering.pipeline.transfers import Transfers
from tiering.residency.plan import News, Step, failed
from tiering.tiers.base import Tier

log = logging.getLogger("tiering")

Item = TypeVar("Item")


class Portal(Protocol):
    """What the core's owner sees of it. One thread submits and drains."""

    def submit(self, steps: Sequence[Step]) -> None:
        """Have `steps` carried out; returns at once. ClosedError if nothing can be now: then
        none of them was taken."""
        ...

    def drain(self) -> list[News]:
        """What has come back since the last call, oldest first; returns at once."""
        ...

    @property
    def restarts(self) -> int:
        """How often the tiers were made and opened again because their loop had ended by
        itself."""
        ...


class TierView(Protocol):
    """What is told of a tier, wherever it is."""

    @property
    def name(self) -> str:
        """See Tier."""
        ...

    def stats(self) -> dict[str, int]:
        """See Tier; never waits."""
        ...


class OwnLoopPortal(Portal, Protocol):
    """A portal that has a loop of its own, from `start` to `close`."""

    @property
    def tiers(self) -> Sequence[TierView]:
        """The tiers behind it, once it was started."""
        ...

    def start(self) -> None:
        """Open the tiers; raises what they raise. Blocks until they are open."""
        ...

    def close(self, drain_seconds: float) -> bool:
        """Give what is under way `drain_seconds` to end, then close the tiers. False if the loop
        hangs in a tier even so: then it is left behind, and the host tier must stay mapped."""
        ...


class LoopPortal:
    """For a program: everything on its own loop, between `async with` and its end.

    `on_arrival` is called on the loop, soon after news has come back, however much.
    """

    restarts = 0

    def __init__(
        self,
        tiers: Sequence[Tier],
        row: Callable[[int], memoryview],
        on_arrival: Callable[[], None],
    ) -> None:
        self._news: list[News] = []
        self._on_arrival = on_arrival
        self._transfers = Transfers(tiers, row, self._take)

    async def __aenter__(self) -> LoopPortal:
        await self._transfers.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._transfers.__aexit__(kind, error, trace)

    def submit(self, steps: Sequence[Step]) -> None:
        self._transfers.start(steps)

    def drain(self) -> list[News]:
        news, self._news = self._news, []
        return news

    async def finish(self, deadline_seconds: float) -> int:
        """Wait for what is under way, cancel the rest; how many were cancelled."""
        return await self._transfers.drain(deadline_seconds)

    def _take(self, news: News) -> None:
        self._news.append(news)
        if len(self._news) == 1:
            asyncio.get_running_loop().call_soon(self._on_arrival)


class ThreadPortal:
    """For a caller without a loop: the loop runs in a daemon thread, from `start` to `close`.

    Whatever number of steps is submitted at once, the loop is woken once; news is collected
    without waking anybody. The thread never holds up the end of the process. A bug that ends the
    loop ends it for good.
    """

    restarts = 0

    def __init__(self, tiers: Sequence[Tier], row: Callable[[int], memoryview]) -> None:
        self.tiers = tiers
        self._row = row
        self._steps: deque[Step] = deque()
        self._news: deque[News] = deque()
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._drain_seconds = 0.0
        self._transfers: Transfers | None = None
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiering-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def submit(self, steps: Sequence[Step]) -> None:
        if self._loop is None or not self._thread.is_alive():
            raise ClosedError("the portal's loop is not running")
        self._steps.extend(steps)
        if steps and not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._take_steps)

    def drain(self) -> list[News]:
        is_over = self._loop is not None and not self._thread.is_alive()
        news = _emptied(self._news)
        if is_over:
            # Handed in while the loop was ending.
            news += map(failed, _emptied(self._steps))
        return news

    def close(self, drain_seconds: float) -> bool:
        if self._loop is None or not self._thread.is_alive():
            return True
        self._drain_seconds = drain_seconds
        self._loop.call_soon_threadsafe(self._set_stop)
        self._thread.join(drain_seconds + 1.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                log.exception("the tiers' loop ended: secondary tiers are out of use")
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        async with Transfers(self.tiers, self._row, self._news.append) as transfers:
            self._transfers = transfers
            self._loop = asyncio.get_running_loop()
            self._started.set()
            await self._stop.wait()
            late = await transfers.drain(self._drain_seconds)
            if late:
                log.warning("%d transfers were cut off at shutdown", late)

    def _set_stop(self) -> None:
        if self._stop is not None:
            self._stop.set()

    def _take_steps(self) -> None:
        # First the flag, then the steps: a step put in after this is woken for again.
        self._is_woken = False
        steps = _emptied(self._steps)
        if self._transfers is not None:
            self._transfers.start(steps)


def _emptied(queue: deque[Item]) -> list[Item]:
    """All that is in `queue`, taken out one by one: another thread may be adding."""
    items = []
    while queue:
        items.append(queue.popleft())
    return items
