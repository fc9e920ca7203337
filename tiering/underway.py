"""What is under way inside of something, for whoever closes it to wait for. Of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


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
