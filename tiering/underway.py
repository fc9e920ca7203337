"""What is under way, for whoever closes the thing that it is inside of, or has lent it memory, to
wait for. Of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Of = TypeVar("Of")


class UnderWay:
    """How many calls are inside: each is a block of `one`, and `end` waits until there is none."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()

    @contextmanager
    def one(self) -> Iterator[None]:
        """One call is inside during the block."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none.set()

    async def end(self) -> None:
        """Returns when nothing is inside; lets nobody in, keeps nobody out. May be waited for by
        several."""
        while self._count:
            self._none.clear()
            await self._none.wait()

    def __repr__(self) -> str:
        return f"<UnderWay {self._count}>"


async def to_the_end(work: asyncio.Future[Of], on_cancel: Callable[[], object] | None = None) -> Of:
    """What `work` gives or raises. Cancelled, however often, this raises CancelledError only when
    `work` has ended: it may have its caller's memory until then. `on_cancel`, called each time, may
    end it sooner."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    try:
        if cancelled is None:
            return work.result()
        if not work.cancelled():
            work.exception()  # nobody is to hear of it
        raise cancelled
    finally:
        # Or the error's traceback, which has the caller's buffers, would hold itself.
        cancelled = None
