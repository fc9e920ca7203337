"""What a lookup, a load and a store cost in requests, and what becomes of wrong bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from memory_store import Bucket, MemoryStore
from tiering.errors import ConfigError, DamagedChunk, TierError
from tiering.testing.examples import blank, key_number, payload_of, scanned, stored, views
from tiering.tiers.base import Delete, Failed, Read, Write
from tiering.tiers.obj.names import ObjNames
from tiering.tiers.obj.parts import ObjLimits
from tiering.tiers.obj.store import LengthError
from virtual import CHUNK_BYTES, NAMESPACE, OBJECT_BYTES, make_store, opened, simulated

KEYS = [key_number(i) for i in range(1000)]
NAMES = ObjNames("kv", NAMESPACE.directory, 0)


async def filled(bucket: Bucket, keys: Sequence[bytes]) -> None:
    """Another engine has put `keys`."""
    async with opened(make_store(bucket)) as tier:
        await stored(tier, keys)


def unseen(bucket: Bucket, count: int = 3000) -> MemoryStore:
    """A store whose walk has far to go: names before those of our chunks come first."""
    for at in range(count):
        bucket.objects[f"{NAMES.chunks}000/{at:06d}"] = b""
        bucket.modified[f"{NAMES.chunks}000/{at:06d}"] = 0.0
    store = make_store(bucket)
    store.seconds = 1.0
    return store


def since(store: MemoryStore, before: int) -> dict[str, int]:
    """Requests by verb since the first `before`, without the walk's."""
    asked = [(verb, name) for verb, name in store.asked[before:] if name != NAMES.chunks]
    return {verb: sum(each == verb for each, _ in asked) for verb in {verb for verb, _ in asked}}


# Few requests


def test_what_a_walk_has_shown_costs_no_request() -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:600])
        store = make_store(bucket)
        async with opened(store) as tier:
            before = len(store.asked)
            assert await tier.contains(KEYS[:600]) == [Read.HIT] * 600
            assert len(store.asked) == before
            assert await tier.read(KEYS[:4], blank(4)) == [Read.HIT] * 4
            assert since(store, before) == {"get": 4}

    simulated(main)


@pytest.mark.slow
@pytest.mark.parametrize("reach", [0, 1, 2, 499, 500, 999, 1000])
def test_a_cold_lookup_of_a_thousand_takes_a_dozen_requests_at_most(reach: int) -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:reach])
        store = unseen(bucket)
        async with opened(store) as tier:
            before = len(store.asked)
            found = await tier.contains(KEYS)
            assert found == [Read.HIT] * reach + [Read.MISS] * (1000 - reach)
            asked = since(store, before)
            assert set(asked) == {"list"}
            assert asked["list"] <= (2 if reach in (0, 1000) else 12)
            before = len(store.asked)
            assert await tier.contains(KEYS) == found
            assert since(store, before) == {}

    simulated(main)


def test_each_group_of_a_lookup_is_a_chain_of_its_own_and_all_are_searched_at_once() -> None:
    async def main() -> None:
        bucket = Bucket()
        full = [key_number(i, group=0) for i in range(100)]
        window = [key_number(i, group=1) for i in range(100)]
        await filled(bucket, full[:70] + window[60:])
        store = unseen(bucket)
        async with opened(store) as tier:
            before = len(store.asked)
            mixed = [key for pair in zip(full, window, strict=True) for key in pair]
            found = await tier.contains(mixed)
            assert found[::2] == [Read.HIT] * 70 + [Read.MISS] * 30
            assert found[1::2] == [Read.MISS] * 60 + [Read.HIT] * 40
            assert since(store, before)["list"] <= 2 * 9
            assert store.under_way_max > 2

    simulated(main)


def test_lookups_of_one_chain_at_once_share_what_they_ask() -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:300])
        store = unseen(bucket)
        async with opened(store) as tier:
            before = len(store.asked)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(tier.contains(KEYS)) for _ in range(20)]
                gone = group.create_task(tier.contains(KEYS))
                await asyncio.sleep(0.5)
                gone.cancel()
            expected = [Read.HIT] * 300 + [Read.MISS] * 700
            assert all(task.result() == expected for task in tasks)
            assert since(store, before)["list"] <= 12

    simulated(main)


def test_no_is_asked_again_after_a_while_and_forgotten_at_our_own_put() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = make_store(bucket)
        async with opened(store) as tier:
            assert await tier.contains(KEYS[:10]) == [Read.MISS] * 10
            await filled(bucket, KEYS[:4])
            assert await tier.contains(KEYS[:10]) == [Read.MISS] * 10
            await stored(tier, KEYS[8:10])
            assert await tier.contains(KEYS[8:10]) == [Read.HIT] * 2
            await asyncio.sleep(5.0)
            assert await tier.contains(KEYS[:8]) == [Read.HIT] * 4 + [Read.MISS] * 4

    simulated(main)


def test_what_others_have_stored_is_not_sent_again() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = make_store(bucket)
        async with opened(store) as tier:
            await filled(bucket, KEYS[:200])
            before = len(store.asked)
            outcomes = await tier.write(KEYS[:300], views([payload_of(k) for k in KEYS[:300]]))
            assert outcomes == [Write.ALREADY_THERE] * 200 + [Write.STORED] * 100
            asked = since(store, before)
            assert asked["put"] == 100
            assert asked["list"] <= 11
            assert set(asked) == {"put", "list"}
            assert tier.stats()["already_there"] == 200

    simulated(main)


def test_a_get_is_believed_before_all_else() -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:2])
        async with opened(make_store(bucket)) as tier:
            del bucket.objects[NAMES.chunk(KEYS[0])]
            assert await tier.contains(KEYS[:2]) == [Read.HIT] * 2
            assert await tier.read(KEYS[:2], blank(2)) == [Read.MISS, Read.HIT]
            assert await tier.contains(KEYS[:2]) == [Read.MISS, Read.HIT]
            await filled(bucket, KEYS[:1])
            assert await tier.read(KEYS[:1], blank(1)) == [Read.HIT]
            assert await tier.contains(KEYS[:1]) == [Read.HIT]

    simulated(main)


def test_walks_go_on_and_forget_what_others_have_deleted() -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:6])
        store = make_store(bucket)
        async with opened(store, ObjLimits(walk_seconds=100.0)) as tier:
            for key in KEYS[:2]:
                del bucket.objects[NAMES.chunk(key)]
            await filled(bucket, KEYS[10:12])
            before = len(store.asked)
            await asyncio.sleep(115.0)
            assert store.asked[before:] == [("list", NAMES.chunks)]
            assert tier.stats()["walks"] == 2
            assert await tier.contains(KEYS[2:6] + KEYS[10:12]) == [Read.HIT] * 6
            assert store.asked[before:] == [("list", NAMES.chunks)]
            assert await tier.contains(KEYS[:2]) == [Read.MISS] * 2

    simulated(main)


def test_a_delete_is_one_request_and_says_what_was_there() -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:500])
        store = make_store(bucket)
        async with opened(store) as tier:
            before = len(store.asked)
            outcomes = await tier.delete(KEYS[:600])
            assert outcomes == [Delete.DELETED] * 500 + [Delete.MISSING] * 100
            assert since(store, before)["delete"] == 1
            assert await scanned(tier) == []

    simulated(main)


# Wrong bytes


@pytest.mark.parametrize(
    ("at", "cause"),
    [(0, "magic"), (11, "version"), (24, "namespace"), (56, "key"), (5000, "checksum")],
)
def test_a_frame_that_is_wrong_is_deleted_and_counted_by_cause(at: int, cause: str) -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:3])
        name = NAMES.chunk(KEYS[1])
        content = bytearray(bucket.objects[name])
        content[at] ^= 1
        bucket.objects[name] = bytes(content)
        store = make_store(bucket)
        async with opened(store) as tier:
            outcomes = await tier.read(KEYS[:3], blank(3))
            assert outcomes[::2] == [Read.HIT] * 2
            failed = outcomes[1]
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, DamagedChunk)
            assert name in str(failed.error)
            assert name not in bucket.objects
            assert tier.stats()[f"damaged_{cause}"] == 1
            assert tier.stats()["refetched"] == 1
            assert tier.stats()["read_errors"] == 0
            assert await tier.contains(KEYS[:3]) == [Read.HIT, Read.MISS, Read.HIT]

    simulated(main)


def test_what_was_wrong_only_on_its_way_is_read_again() -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:1])
        store = make_store(bucket)
        right = bucket.objects[NAMES.chunk(KEYS[0])]
        async with opened(store) as tier:

            def once(verb: str, name: str) -> Exception | None:
                bucket.objects[NAMES.chunk(KEYS[0])] = right
                return None

            bucket.objects[NAMES.chunk(KEYS[0])] = right[:-1] + bytes([right[-1] ^ 1])
            store.script = lambda verb, name: None
            reading = asyncio.ensure_future(tier.read(KEYS[:1], blank(1)))
            await asyncio.sleep(0.015)
            store.script = once
            assert await reading == [Read.HIT]
            assert tier.stats()["refetched"] == 1

    simulated(main)


def test_an_object_of_another_size_is_no_chunk() -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:2])
        name = NAMES.chunk(KEYS[0])
        async with opened(make_store(bucket)) as tier:
            bucket.objects[name] = bucket.objects[name][:-1]
            (outcome,) = await tier.read(KEYS[:1], blank(1))
            assert isinstance(outcome, Failed)
            assert isinstance(outcome.error, DamagedChunk)
            assert name not in bucket.objects
            stats = tier.stats()
            assert (stats["damaged_size"], stats["lengths"]) == (1, 2)
        bucket.objects[name] = b"short"
        async with opened(make_store(bucket)) as tier:
            assert await tier.contains(KEYS[:2]) == [Read.MISS, Read.HIT]
            assert await scanned(tier) == KEYS[1:2]
            await stored(tier, KEYS[:1])
            assert await tier.read(KEYS[:1], blank(1)) == [Read.HIT]

    simulated(main)


@pytest.mark.parametrize(("times", "outcome"), [(1, Read.HIT), (2, Read.MISS)])
def test_a_body_that_ends_early_is_asked_for_twice(times: int, outcome: Read) -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:1])
        store = make_store(bucket)
        async with opened(store) as tier:
            errors = [LengthError("ended early")] * times
            store.script = lambda verb, _: errors.pop() if verb == "get" and errors else None
            before = len(store.asked)
            assert await tier.read(KEYS[:1], blank(1)) == [outcome]
            assert tier.stats()["lengths"] == times
            assert since(store, before)["get"] == 2
            assert NAMES.chunk(KEYS[0]) in bucket.objects
            await asyncio.sleep(6.0)
            assert await tier.contains(KEYS[:1]) == [Read.HIT]

    simulated(main)


def test_what_cannot_be_a_key_fails_alone() -> None:
    async def main() -> None:
        async with opened(make_store(Bucket())) as tier:
            keys = [KEYS[0], b"key", KEYS[1]]
            outcomes = await tier.write(keys, blank(3))
            assert outcomes[::2] == [Write.STORED] * 2
            for part in (
                outcomes,
                await tier.read(keys, blank(3)),
                await tier.contains(keys),
                await tier.delete(keys),
            ):
                assert isinstance(part[1], Failed)
                assert "a key has" in part[1].error.reason

    simulated(main)


# Opening and closing


def test_a_namespace_describes_itself_once() -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, [])
        assert json.loads(bucket.objects[NAMES.config]) == NAMESPACE.describe()
        store = make_store(bucket)
        async with opened(store):
            assert store.counts["put"] == 0

    simulated(main)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"no json"])
def test_a_namespace_that_describes_another_run_is_refused(content: bytes) -> None:
    async def main() -> None:
        bucket = Bucket({NAMES.config: content}, {NAMES.config: 0.0})
        store = make_store(bucket)
        with pytest.raises(ConfigError) as refused:
            async with opened(store, where="secondary_tiers[2]"):
                pass
        assert refused.value.path == "secondary_tiers[2].prefix"
        assert NAMES.config in str(refused.value)
        assert "another prefix" in refused.value.remedy
        assert not store.is_open

    simulated(main)


def test_engines_that_start_at_once_agree() -> None:
    async def main() -> None:
        bucket = Bucket()

        async def start() -> None:
            async with opened(make_store(bucket)):
                await asyncio.sleep(1.0)

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(start())

    simulated(main)


def test_a_store_that_fails_while_it_is_opened_is_closed_again() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        store.script = lambda verb, name: LengthError("odd")
        with pytest.raises(TierError, match="cannot be opened: odd"):
            async with opened(store):
                pass
        assert not store.is_open

    simulated(main)


def test_stats_outlive_the_tier_and_begin_anew() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = make_store(bucket)
        async with opened(store) as tier:
            await stored(tier, KEYS[:3])
            open_stats = tier.stats()
        stats = tier.stats()
        assert stats == open_stats
        assert (stats["stored"], stats["now_chunks"]) == (3, 3)
        assert stats["now_bytes"] == 3 * OBJECT_BYTES
        assert stats["requests_put"] == 4
        assert stats["now_limit"] == 8
        assert "requests_head" not in stats

    simulated(main)


def test_a_read_fills_what_it_is_given() -> None:
    async def main() -> None:
        bucket = Bucket()
        await filled(bucket, KEYS[:1])
        async with opened(make_store(bucket)) as tier:
            (buffer,) = blank(1)
            assert await tier.read(KEYS[:1], [buffer]) == [Read.HIT]
            assert buffer == payload_of(KEYS[0])
            with pytest.raises(ValueError, match="a buffer of 1 bytes"):
                await tier.read(KEYS[:1], [memoryview(bytearray(1))])
            assert len(buffer) == CHUNK_BYTES

    simulated(main)
