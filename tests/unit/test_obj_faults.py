"""The object tier over a real client and a server that fails as it is told: what it sends, counted
at the server, and what becomes of chunks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest

from s3_servers import ACCESS_KEY, Served
from scripted_s3 import Asked, Fault, ScriptedS3, slow_down
from tiering.clock import MonotonicClock
from tiering.config import BucketConfig
from tiering.errors import DamagedChunk
from tiering.testing.examples import (
    CHUNK_BYTES,
    blank,
    example_namespace,
    key_number,
    payload_of,
    stored,
)
from tiering.testing.ports import free_port
from tiering.tiers.base import Failed, Read, Write
from tiering.tiers.obj.names import ObjNames
from tiering.tiers.obj.parts import ObjLimits
from tiering.tiers.obj.s3 import S3Store
from tiering.tiers.obj.tier import ObjTier
from tiering.tiers.wrappers.breaker import State
from tiering.tiers.wrappers.guarded import GuardedTier

NAMESPACE = example_namespace()
NAMES = ObjNames("kv", NAMESPACE.directory, 0)
KEYS = [key_number(i) for i in range(1000)]
HANG_SECONDS = 60.0
PATIENT = ObjLimits(requests_max=16)
QUICK = ObjLimits(requests_max=16, load_deadline_seconds=2.0, store_deadline_seconds=2.0)


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as scripted:
        yield scripted


def make_tier(
    server: ScriptedS3, limits: ObjLimits = PATIENT, read_timeout_seconds: float = 30.0
) -> ObjTier:
    config = Served(server.endpoint).store_config()
    store = S3Store(BucketConfig(**config, read_timeout_seconds=read_timeout_seconds))
    return ObjTier("obj:bucket/kv", store, "kv", NAMESPACE, CHUNK_BYTES, limits=limits)


@asynccontextmanager
async def opened(
    server: ScriptedS3, limits: ObjLimits = PATIENT, read_timeout_seconds: float = 30.0
) -> AsyncIterator[ObjTier]:
    tier = make_tier(server, limits, read_timeout_seconds)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


async def filled(server: ScriptedS3, keys: Sequence[bytes]) -> None:
    """Another engine has put `keys`."""
    async with opened(server) as tier:
        await stored(tier, keys)


def since(server: ScriptedS3, before: Counter[str]) -> dict[str, int]:
    return dict(server.count() - before)


# What is sent


async def test_a_warm_path_is_one_request_a_chunk_and_no_head(server: ScriptedS3) -> None:
    await filled(server, KEYS[:100])
    async with opened(server) as tier:
        before = server.count()
        assert await tier.contains(KEYS[:100]) == [Read.HIT] * 100
        assert since(server, before) == {}
        buffers = blank(100)
        assert await tier.read(KEYS[:100], buffers) == [Read.HIT] * 100
        assert [bytes(buffer) for buffer in buffers] == [payload_of(key) for key in KEYS[:100]]
        assert since(server, before) == {"get": 100}
        await stored(tier, KEYS[100:132])
        asked = since(server, before)
        assert asked.pop("list") <= 2
        assert asked == {"get": 100, "put": 32}
        stats = tier.stats()
        told = {verb: stats[f"requests_{verb}"] for verb in ("get", "put", "list")}
    assert server.count()["head"] == 0
    assert told["get"] == 100 + 1  # and config.json
    assert told["put"] == 32
    assert server.under_way_max <= 16


@pytest.mark.slow
@pytest.mark.parametrize("reach", [0, 700, 1000])
async def test_a_cold_lookup_of_a_thousand_chunks_is_a_dozen_lists(
    server: ScriptedS3, reach: int
) -> None:
    await filled(server, KEYS[:reach])
    for at in range(1001):
        server.objects[f"{NAMES.chunks}000/{at}"] = b""
    server.script = lambda asked: (
        Fault(delay_seconds=0.5) if asked.query.get("max-keys") == "1000" else None
    )
    async with opened(server) as tier:
        before = server.count()
        found = await tier.contains(KEYS)
        assert found == [Read.HIT] * reach + [Read.MISS] * (1000 - reach)
        asked = since(server, before)
        assert set(asked) == {"list"}
        assert asked["list"] <= 13  # a page of the walk may be among them


@pytest.mark.slow
async def test_what_does_not_fit_is_deleted_many_at_a_time(server: ScriptedS3) -> None:
    await filled(server, KEYS[:300])
    limits = ObjLimits(
        requests_max=16,
        max_bytes=100 * (4096 + CHUNK_BYTES),
        lease_seconds=60.0,
        lease_settle_seconds=0.01,
    )
    gone: list[bytes] = []
    is_within = asyncio.Event()

    def removed(keys: Sequence[bytes]) -> None:
        gone.extend(keys)
        if len(gone) >= 200:
            is_within.set()

    tier = make_tier(server, limits)
    tier.watch(removed)
    await tier.open()
    await is_within.wait()
    await stored(tier, KEYS[300:350])
    stats = tier.stats()
    await tier.close()
    chunks = [name for name in server.objects if name.endswith(".bin")]
    assert len(chunks) <= 100
    assert stats["evicted"] == len(gone) == 350 - len(chunks)
    assert server.count()["delete"] <= 15
    assert b'"holder":""' in server.objects[NAMES.lease]


# Wrong bodies


@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        (Fault(truncate_after=5000), "lengths"),
        (Fault(length_off=7), "lengths"),
        # The client itself asks again where a connection that it had kept turns out to be gone.
        (Fault(length_off=-7), None),
        (Fault(reset=True), None),
        (Fault(status=500, code="InternalError"), "requests_failed"),
        (Fault(stall_after=100), "requests_failed"),
    ],
)
async def test_a_get_that_goes_wrong_once_is_sent_again(
    server: ScriptedS3, fault: Fault, counter: str | None
) -> None:
    await filled(server, KEYS[:2])
    stalls = fault.stall_after is not None
    async with opened(server, read_timeout_seconds=1.0 if stalls else 30.0) as tier:
        server.next(fault, verb="get")
        before, buffers = server.count(), blank(2)
        assert await tier.read(KEYS[:2], buffers) == [Read.HIT] * 2
        assert [bytes(buffer) for buffer in buffers] == [payload_of(key) for key in KEYS[:2]]
        assert since(server, before) == {"get": 3}
        assert counter is None or tier.stats()[counter] == 1
        server.let_go()


async def test_a_body_that_is_never_whole_is_a_miss_and_stays(server: ScriptedS3) -> None:
    await filled(server, KEYS[:1])
    async with opened(server) as tier:
        server.next(*[Fault(truncate_after=5000)] * 2, verb="get")
        assert await tier.read(KEYS[:1], blank(1)) == [Read.MISS]
        assert tier.stats()["lengths"] == 2
        assert NAMES.chunk(KEYS[0]) in server.objects
        assert await tier.read(KEYS[:1], blank(1)) == [Read.HIT]


async def test_wrong_bytes_are_deleted_and_what_is_said_of_them_is_not_believed(
    server: ScriptedS3,
) -> None:
    await filled(server, KEYS[:3])
    name = NAMES.chunk(KEYS[1])
    content = bytearray(server.objects[name])
    content[6000] ^= 4
    server.objects[name] = bytes(content)
    async with opened(server) as tier:
        server.script = lambda asked: Fault(etag='"0123"') if asked.verb == "get" else None
        outcomes = await tier.read(KEYS[:3], blank(3))
        assert outcomes[::2] == [Read.HIT] * 2
        assert isinstance(outcomes[1], Failed)
        assert isinstance(outcomes[1].error, DamagedChunk)
        assert name not in server.objects
        assert tier.stats()["damaged_checksum"] == 1


# A store that is not well


@pytest.mark.slow
async def test_under_throttling_loads_end_in_time_and_requests_become_fewer(
    server: ScriptedS3,
) -> None:
    """In seconds where the scenario in virtual time takes a minute."""
    await filled(server, KEYS[:64])
    chance = random.Random(3)
    is_throttling = False

    def script(asked: Asked) -> Fault | None:
        if is_throttling and chance.random() < 0.3:
            return slow_down()
        return Fault(delay_seconds=0.02)

    async with opened(server, QUICK) as tier:
        server.script = script
        assert await tier.read(KEYS[:32], blank(32)) == [Read.HIT] * 32
        outcomes: Counter[object] = Counter()

        async def load_until(is_so: Callable[[], bool]) -> None:
            async with asyncio.timeout(HANG_SECONDS):
                while not is_so():
                    outcomes.update(await tier.read(KEYS[:32], blank(32)))

        is_throttling = True
        await load_until(lambda: outcomes[Read.BUSY] > 0 and tier.stats()["now_limit"] <= 8)
        is_throttling = False
        await load_until(lambda: tier.stats()["now_limit"] == 16)
        assert set(outcomes) <= {Read.HIT, Read.BUSY}
        assert tier.stats()["throttled"] > 0
        assert await tier.read(KEYS[:32], blank(32)) == [Read.HIT] * 32


@pytest.mark.slow
async def test_retry_after_is_waited_for(server: ScriptedS3) -> None:
    await filled(server, KEYS[:8])
    async with opened(server) as tier:
        server.next(slow_down("1"), verb="get")
        before = len(server.asked)
        assert await tier.read(KEYS[:1], blank(1)) == [Read.HIT]
        first, second = server.asked[before:]
        assert second.began - first.began >= 1.0
        assert (first.status, second.status) == (503, 200)


@pytest.mark.slow
async def test_a_store_that_stalls_holds_up_nobody_beyond_the_deadline(
    server: ScriptedS3,
) -> None:
    await filled(server, KEYS[:40])
    async with opened(server, QUICK, read_timeout_seconds=1.0) as tier:
        server.script = lambda asked: Fault(stall_after=0) if asked.verb == "get" else None
        async with asyncio.timeout(HANG_SECONDS):
            outcomes = await tier.read(KEYS[:40], blank(40))
        assert Read.HIT not in outcomes
        assert any(isinstance(outcome, Failed) for outcome in outcomes)
        server.let_go()
        server.script = lambda asked: None
        assert await tier.read(KEYS[:40], blank(40)) == [Read.HIT] * 40


async def test_credentials_that_end_take_the_tier_out_until_others_are_accepted(
    server: ScriptedS3,
) -> None:
    await filled(server, KEYS[:20])
    tier = GuardedTier(make_tier(server), MonotonicClock(), retry_seconds=(0.05, 0.2))
    await tier.open()
    server.accepted = set()
    before = server.count()
    outcomes = await tier.read(KEYS[:20], blank(20))
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    assert "access_key" in str(outcomes[0])
    assert tier.state.loads is not State.CLOSED
    # Each was sent once: keys from the configuration cannot be renewed.
    assert since(server, before) == {"get": 20}
    (refused,) = await tier.write([KEYS[50]], blank(1))
    assert refused is Write.REFUSED or isinstance(refused, Failed)
    server.accepted = {ACCESS_KEY}
    outcome: object = None
    while outcome is not Read.HIT:
        await asyncio.sleep(0.02)
        (outcome,) = await tier.read(KEYS[:1], blank(1))
    assert tier.state.loads is State.CLOSED
    await tier.close()


async def test_a_server_that_is_gone_fails_chunks_and_is_back_by_itself() -> None:
    server, again = ScriptedS3(), ScriptedS3()
    server.port = again.port = free_port()
    with server:
        await filled(server, KEYS[:10])
        tier = make_tier(server)
        await tier.open()
    outcomes = await tier.read(KEYS[:10], blank(10))
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    again.objects = server.objects
    with again:
        assert await tier.read(KEYS[:10], blank(10)) == [Read.HIT] * 10
        await tier.close()
