"""Whoever awaits work that has his memory comes back when it has ended, however he is cancelled."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from tiering.underway import to_the_end


async def cancelled_again_and_again(
    work: asyncio.Future[int], on_cancel: Callable[[], object] | None = None
) -> asyncio.Task[int]:
    """Somebody who awaits `work` to the end, and has been cancelled three times."""
    waiting = asyncio.get_running_loop().create_task(to_the_end(work, on_cancel))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    return waiting


async def test_it_gives_and_raises_what_the_work_does() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(work.set_result, 5)
    assert await to_the_end(work) == 5
    assert await to_the_end(work) == 5
    work = asyncio.get_running_loop().create_future()
    work.set_exception(KeyError("bug"))
    with pytest.raises(KeyError):
        await to_the_end(work)


async def test_however_often_cancelled_it_waits_for_the_end() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = await cancelled_again_and_again(work)
    assert not waiting.done()
    assert not work.done(), "it is not the waiting's to cancel"
    work.set_result(5)
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_each_cancellation_is_told_and_may_end_it() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    told: list[None] = []
    waiting = await cancelled_again_and_again(work, lambda: told.append(None))
    work.set_result(5)
    await asyncio.wait([waiting])
    assert len(told) == 3
    work = asyncio.get_running_loop().create_future()
    waiting = await cancelled_again_and_again(work, work.cancel)
    has_ended = waiting.cancelled()
    work.cancel()
    assert has_ended


async def test_nobody_hears_that_work_failed_after_it_was_cancelled() -> None:
    loop = asyncio.get_running_loop()
    heard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: heard.append(context))
    work: asyncio.Future[int] = loop.create_future()
    waiting = await cancelled_again_and_again(work)
    work.set_exception(OSError("the connection is closed"))
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    del work, waiting
    gc.collect()
    assert heard == []
