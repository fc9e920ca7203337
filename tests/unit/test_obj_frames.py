"""Headers are made and checked in a thread, many at a crossing, without a hold on buffers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tiering.testing.examples import key_number, payload_of, views
from tiering.tiers.disk.iopool import IoPool, Lane
from tiering.tiers.obj.frames import Frames
from tiering_kernels.chunkio import HEADER_BYTES

DIGEST = b"\x07" * 32
KEYS = [key_number(i) for i in range(20)]


class CountingPool(IoPool):
    """Counts its crossings."""

    crossings = 0

    async def run_spans(self, *args: object, **options: object) -> list[object]:
        self.crossings += 1
        return await super().run_spans(*args, **options)  # type: ignore[arg-type]


def header() -> memoryview:
    return memoryview(bytearray(HEADER_BYTES))


async def test_what_is_packed_checks_out_and_nothing_else_does() -> None:
    frames = Frames("obj:bucket", DIGEST)
    frames.start()
    (payload,) = views([payload_of(KEYS[0])])
    page = header()
    await frames.pack(page, KEYS[0], payload)
    assert await frames.check(page, KEYS[0], payload) is None
    assert await frames.check(page, KEYS[1], payload) == f"holds another key ({KEYS[0].hex()})"
    payload[0] ^= 1
    assert await frames.check(page, KEYS[0], payload) == "bad checksum"
    await frames.close()


async def test_what_gathers_while_the_thread_is_busy_crosses_at_once() -> None:
    pool, gate = CountingPool("frames", 1, 1), threading.Event()
    frames = Frames("obj:bucket", DIGEST, pool)
    frames.start()
    busy = [asyncio.ensure_future(pool.call(Lane.READ, gate.wait)) for _ in range(2)]
    payloads = views([payload_of(key) for key in KEYS])
    pages = [header() for _ in KEYS]
    packing = [
        asyncio.ensure_future(frames.pack(page, key, payload))
        for page, key, payload in zip(pages, KEYS, payloads, strict=True)
    ]
    await asyncio.sleep(0.01)
    gate.set()
    await asyncio.gather(*busy, *packing)
    assert pool.crossings <= 2
    for page, key, payload in zip(pages, KEYS, payloads, strict=True):
        assert await frames.check(page, key, payload) is None
    await frames.close()


async def test_whoever_is_cancelled_waits_for_the_thread_that_has_its_buffers() -> None:
    pool, gate = IoPool("frames", 1, 1), threading.Event()
    frames = Frames("obj:bucket", DIGEST, pool)
    frames.start()
    busy = [asyncio.ensure_future(pool.call(Lane.READ, gate.wait)) for _ in range(2)]
    memory = bytearray(payload_of(KEYS[0]))
    first = asyncio.ensure_future(frames.pack(header(), KEYS[0], memoryview(memory)))
    await asyncio.sleep(0.01)
    # This one has not been handed over yet, and is let go at once.
    second = asyncio.ensure_future(frames.pack(header(), KEYS[1], memoryview(memory)))
    await asyncio.sleep(0.01)
    for task in (first, second):
        task.cancel()
    await asyncio.sleep(0.01)
    assert (first.done(), second.done()) == (False, True)
    gate.set()
    await asyncio.gather(*busy)
    with pytest.raises(asyncio.CancelledError):
        await first
    del first, second, task
    await frames.close()
    memory.append(0)  # BufferError while anyone still has a view


async def test_an_error_is_its_callers_alone() -> None:
    frames = Frames("obj:bucket", DIGEST)
    frames.start()
    (payload,) = views([payload_of(KEYS[0])])
    outcomes = await asyncio.gather(
        frames.pack(header()[:8], KEYS[0], payload),
        frames.pack(header(), KEYS[0], payload),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], ValueError)
    assert outcomes[1] is None
    await frames.close()
