"""Connections that are used again and again, by requests that fail in every way and are called off:
whatever is received is what was asked for, and nobody's buffer is touched afterwards."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from s3_servers import self_signed, server_context
from scripted_s3 import Asked, Fault, ScriptedS3, slow_down
from tiering.config import BucketConfig
from tiering.tiers.obj.s3 import S3Store
from tiering.tiers.obj.store import StoreError

SIZES = (1, 100, 4096, 70_000, 300_000, 1 << 20)
NAMES = [f"object{at}" for at in range(20)]
# Above it an object goes in parts.
SINGLE_PUT_BYTES = 400_000
LANES, REQUESTS = 8, 60


def content(name: str) -> bytes:
    size = SIZES[NAMES.index(name) % len(SIZES)]
    return random.Random(name).randbytes(size)


def cut(buffer: bytes | bytearray, chance: random.Random) -> list[memoryview]:
    at = chance.randrange(len(buffer) + 1)
    return [memoryview(buffer)[:at], memoryview(buffer)[at:]]


def faults(chance: random.Random) -> Fault | None:
    at = chance.random()
    if at < 0.03:
        return Fault(reset=True)
    if at < 0.06:
        return slow_down()
    if at < 0.09:
        return Fault(truncate_after=chance.randrange(5000))
    if at < 0.11:
        return Fault(length_off=chance.choice([-1, 1, 5]))
    return Fault(delay_seconds=chance.random() * 0.02) if at < 0.2 else None


async def one(store: S3Store, chance: random.Random) -> str:
    """What became of a GET or a PUT of one object, whose bytes never change."""
    name = chance.choice(NAMES)
    wanted = content(name)
    found = bytearray(b"\xaa" * len(wanted))

    async def moved() -> str:
        if chance.random() < 0.3:
            await store.put(name, cut(wanted, chance))
            return "put"
        assert await store.get(name, cut(found, chance))
        assert found == wanted
        return "got"

    moving = asyncio.ensure_future(moved())
    if chance.random() < 0.35:
        await asyncio.sleep(chance.random() * chance.choice([0.0005, 0.005, 0.02]))
        moving.cancel()
    try:
        return await moving
    except StoreError as error:
        return type(error).__name__
    except asyncio.CancelledError:
        left = bytes(found)
        await asyncio.sleep(0.01)
        assert found == left
        return "cancelled"


@pytest.mark.slow
@pytest.mark.parametrize("over_tls", [False, True])
async def test_what_is_received_is_what_was_asked_for(over_tls: bool, tmp_path: Path) -> None:
    chance = random.Random(7)
    certificate, key = self_signed(tmp_path)
    became: Counter[str] = Counter()

    def script(asked: Asked) -> Fault | None:
        fault = faults(chance)
        cuts = fault is not None and (fault.truncate_after is not None or fault.length_off)
        return None if cuts and asked.verb != "get" else fault

    async def lane() -> None:
        for _ in range(REQUESTS):
            became[await one(store, chance)] += 1

    with ScriptedS3(tls=server_context(certificate, key) if over_tls else None) as server:
        server.objects |= {name: content(name) for name in NAMES}
        config = BucketConfig(
            bucket=server.bucket,
            endpoint_override=server.endpoint,
            access_key="a",  # type: ignore[arg-type]
            secret_key="b",  # type: ignore[arg-type]
            ca_bundle=str(certificate) if over_tls else "",
        )
        store = S3Store(config, single_put_bytes=SINGLE_PUT_BYTES)
        await store.open()
        server.script = script
        await asyncio.gather(*(lane() for _ in range(LANES)))
        server.script = lambda asked: None
        for name in NAMES:
            found = bytearray(len(content(name)))
            assert await store.get(name, [memoryview(found)])
            assert found == content(name)
        await store.close()
    assert min(became[kind] for kind in ("got", "put", "cancelled", "LengthError")) > 0
