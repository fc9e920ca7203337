"""Headers made and checked in a thread: what has gathered while it was busy crosses at once.

The checksum goes over the whole payload, a millisecond for 16 MiB, and lets go of the interpreter
lock meanwhile. Used from one event loop, between `start` and `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiering.tiers import frame
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.underway import to_the_end

_AT_ONCE_MAX = 16


@dataclass(slots=True, eq=False)
class _Work:
    """`call` is None once it has been made."""

    call: Callable[[], str | None] | None
    done: asyncio.Future[str | None]


class Frames:
    """For chunks of the namespace with `digest`. `pool` is for tests."""

    def __init__(self, name: str, digest: bytes, pool: IoPool | None = None) -> None:
        self._digest = digest
        self._pool = pool or IoPool(f"{name} frames", 1, 1)
        self._gathered: list[_Work] = []
        self._crossing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Frames {len(self._gathered)} to do, {self._pool!r}>"

    def start(self) -> None:
        self._pool.start()

    async def pack(self, header: memoryview, key: bytes, payload: memoryview) -> None:
        """Fill `header` for `payload` under `key`."""
        await self._do(lambda: frame.pack_header(header, key, self._digest, payload))

    async def check(self, header: memoryview, key: bytes, payload: memoryview) -> str | None:
        """None where they are what was stored under `key`, else what is wrong."""
        return await self._do(lambda: frame.check(header, key, self._digest, payload))

    async def close(self) -> None:
        if self._crossing is not None:
            await asyncio.wait({self._crossing})
        await self._pool.close()

    async def _do(self, call: Callable[[], str | None]) -> str | None:
        """What `call` returns. Cancelled, it comes back when no thread has its buffers."""
        loop = asyncio.get_running_loop()
        work = _Work(call, loop.create_future())
        del call
        self._gathered.append(work)
        if self._crossing is None or self._crossing.done():
            # Not in a TaskGroup: it does the work of several callers, of whom none owns it.
            self._crossing = loop.create_task(self._cross())

        def take_back() -> None:
            if work in self._gathered:
                self._gathered.remove(work)
                work.done.cancel()

        return await to_the_end(work.done, take_back)

    async def _cross(self) -> None:
        while self._gathered:
            batch, self._gathered = self._gathered, []

            def make(span: range, batch: list[_Work] = batch) -> list[Any]:
                return [_made(batch[at]) for at in span]

            results = await self._pool.run_spans(Lane.READ, make, len(batch), _AT_ONCE_MAX)
            for work, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    work.done.set_exception(result)
                else:
                    work.done.set_result(result)


def _made(work: _Work) -> str | Exception | None:
    """What the call returns or raises: others are done in the same crossing."""
    call, work.call = work.call, None
    try:
        if call is None:
            raise AssertionError("done twice")
        return call()
    except Exception as error:
        return error
