"""A namespace keeps to its bytes: the least recently used goes, and the tail before the head."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest

from memory_store import Bucket, MemoryStore
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import blank, key_number, payload_of, stored, views
from tiering.tiers.base import Read, Write
from tiering.tiers.obj.lifecycle import Oldest
from tiering.tiers.obj.names import ObjNames
from tiering.tiers.obj.pacing import Pacer
from tiering.tiers.obj.parts import ObjLimits
from tiering.tiers.obj.recency import Recency
from tiering.tiers.obj.store import LengthError, NotNowError
from tiering.tiers.obj.tier import ObjTier
from tiering.tiers.obj.uses import UseNotes
from virtual import NAMESPACE, OBJECT_BYTES, TODAY, clock, make_store, opened, simulated, today

KEYS = [key_number(i) for i in range(400)]
NEW_KEYS = [key_number(i) for i in range(20_000, 20_004)]


def limits(objects: int) -> ObjLimits:
    return ObjLimits(requests_max=8, max_bytes=objects * OBJECT_BYTES)


def chunks_in(bucket: Bucket) -> int:
    return sum(name.endswith(".bin") for name in bucket.objects)


async def held(tier: ObjTier) -> None:
    """Wait until `tier` has the lease and knows what is there."""
    await asyncio.sleep(10.0)
    assert tier.stats()["now_lease_held"] == 1


async def put(tier: ObjTier, keys: list[bytes]) -> list[object]:
    return list(await tier.write(keys, views([payload_of(key) for key in keys])))


def test_later_uses_are_more_recent_and_heads_more_than_tails() -> None:
    recency = Recency(ManualClock())
    recency.used(KEYS[:3])
    recency.used(KEYS[2:4])
    ticks = recency.of(KEYS[:5]).tolist()
    assert ticks[2] > ticks[3] > ticks[0] > ticks[1]
    assert ticks[4] < 0
    recency.gone(KEYS[:1])
    assert recency.of(KEYS[:1]).tolist()[0] < 0


def test_the_uses_that_are_remembered_are_bounded_and_the_last_ones_stay() -> None:
    recency = Recency(ManualClock(), keys_max=20)
    for at in range(100):
        recency.used([KEYS[at]])
    known = [tick >= 0 for tick in recency.of(KEYS[:100]).tolist()]
    assert 10 <= sum(known) <= 22
    assert all(known[-10:])


def test_the_oldest_of_a_walk_come_first() -> None:
    oldest = Oldest(keys_max=3)
    oldest.begin()
    ages = [50, 20, 90, 10, 70, 30, 80, 40, 60]
    for at in range(0, 9, 3):
        oldest.add([(age, b"%d" % age) for age in ages[at : at + 3]])
    assert oldest.take(9) == []
    oldest.end()
    assert oldest.take(2) == [(10, b"10"), (20, b"20")]
    assert oldest.take(2) == [(30, b"30")]
    assert oldest.take(2) == []


def test_a_full_namespace_gives_up_the_least_recently_used() -> None:
    async def main() -> None:
        bucket = Bucket()
        gone: list[bytes] = []
        async with opened(make_store(bucket), limits(40)) as tier:
            tier.watch(gone.extend)
            await held(tier)
            for at in range(0, 40, 8):
                await stored(tier, KEYS[at : at + 8])
                await asyncio.sleep(5.0)
            await tier.touch(KEYS[:8])
            await tier.read(KEYS[8:12], blank(4))
            await asyncio.sleep(5.0)
            for at in range(40, 100, 4):
                await stored(tier, KEYS[at : at + 4])
                assert chunks_in(bucket) <= 40
            assert await tier.contains(KEYS[8:12]) == [Read.MISS] * 4
            # What went first was neither touched nor read, and of each write its tail.
            assert gone[:4] == KEYS[15:11:-1]
            assert gone[4:12] == KEYS[23:15:-1]
            assert set(gone[:28]).isdisjoint(KEYS[:12])
            assert gone.index(KEYS[7]) < gone.index(KEYS[0])
            assert tier.stats()["evicted"] == len(gone)
            assert tier.stats()["now_bytes"] <= 40 * OBJECT_BYTES

    simulated(main)


def test_what_others_have_put_is_brought_back_under_the_bound() -> None:
    async def main() -> None:
        bucket = Bucket()
        async with opened(make_store(bucket)) as unbound:
            for at in range(0, 100, 10):
                await stored(unbound, KEYS[at : at + 10])
                await asyncio.sleep(10.0)
        async with opened(make_store(bucket), limits(50)) as tier:
            assert chunks_in(bucket) == 100
            await held(tier)
            assert chunks_in(bucket) == 50
            assert await tier.contains(KEYS[50:100]) == [Read.HIT] * 50

    simulated(main)


def test_a_restart_goes_by_when_objects_were_put() -> None:
    async def main() -> None:
        bucket = Bucket()
        async with opened(make_store(bucket)) as first:
            for at in range(10):
                await stored(first, KEYS[at : at + 1])
                await asyncio.sleep(10.0)
        async with opened(make_store(bucket), limits(10)) as tier:
            await held(tier)
            await tier.touch(KEYS[:1])
            await stored(tier, KEYS[20:22])
            there = await tier.contains(KEYS[:10])
            assert there == [Read.HIT, *[Read.MISS] * 2, *[Read.HIT] * 7]

    simulated(main)


def test_only_the_holder_of_the_lease_deletes() -> None:
    async def main() -> None:
        bucket = Bucket()
        stores = make_store(bucket), make_store(bucket)
        async with opened(stores[0], limits(20)) as one:
            await held(one)
            async with opened(stores[1], limits(20)) as other:
                await asyncio.sleep(30.0)
                for at in range(0, 60, 10):
                    await stored(other, KEYS[at : at + 10])
                assert (one.stats()["now_lease_held"], other.stats()["now_lease_held"]) == (1, 0)
                assert stores[1].counts["delete"] == 0
                assert chunks_in(bucket) == 60
                await asyncio.sleep(700.0)
                assert chunks_in(bucket) <= 20
                assert other.stats()["evicted"] == 0

    simulated(main)


def test_another_takes_over_from_a_holder_that_died() -> None:
    async def main() -> None:
        bucket = Bucket()
        dead = make_store(bucket)
        async with opened(dead, limits(20)) as one:
            await held(one)
            dead.script = lambda verb, name: NotNowError("cut off")
            async with opened(make_store(bucket), limits(20)) as other:
                await stored(other, KEYS[:40])
                await asyncio.sleep(200.0)
                assert other.stats()["now_lease_held"] == 1
                assert chunks_in(bucket) <= 20

    simulated(main)


def test_where_nothing_can_be_deleted_there_is_no_room() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = make_store(bucket)

        def no_deletes(verb: str, name: str) -> Exception | None:
            return NotNowError("500") if verb == "delete" else None

        async with opened(store, limits(10)) as tier:
            await held(tier)
            await stored(tier, KEYS[:8])
            store.script = no_deletes
            outcomes = await put(tier, KEYS[8:14])
            assert outcomes == [Write.STORED] * 2 + [Write.FULL] * 4
            assert tier.stats()["evict_errors"] > 0
            store.script = lambda verb, name: None
            assert await put(tier, KEYS[10:14]) == [Write.STORED] * 4
            assert chunks_in(bucket) <= 10

    simulated(main)


@pytest.mark.slow
def test_a_store_does_not_wait_for_the_listing_of_a_large_namespace() -> None:
    """It takes minutes, stores hold the host tier's slots meanwhile, and what hangs for so long
    takes the tier out of service, loads too."""

    async def main() -> None:
        bucket, names = Bucket(), ObjNames("kv", NAMESPACE.directory, 0)
        content = bytes(OBJECT_BYTES)
        bucket.objects = {names.chunk(key_number(at)): content for at in range(10_000)}
        bucket.modified = dict.fromkeys(bucket.objects, TODAY)
        store = make_store(bucket)
        async with opened(store, limits(10_000)) as tier:
            await held(tier)
            store.seconds = 4.0
            assert tier._opened is not None
            assert tier._opened.bound is not None
            # The oldest of the last listing have all gone, or were used since.
            tier._opened.bound._oldest.take(10_000)
            began = clock().now()
            assert await put(tier, NEW_KEYS) == [Write.FULL] * 4
            assert clock().now() - began < 30.0
            await asyncio.sleep(300.0)
            assert await put(tier, NEW_KEYS) == [Write.STORED] * 4
            assert chunks_in(bucket) <= 10_000

    simulated(main)


class SlowDeletes(MemoryStore):
    """One whose deletions take some seconds each, whatever else does."""

    delete_seconds = 3.0

    async def delete(self, names: Sequence[str]) -> list[str]:
        await asyncio.sleep(self.delete_seconds)
        return await super().delete(names)


def overfull(objects: int) -> Bucket:
    """What is left where `max_bytes` has been made smaller."""
    bucket, names = Bucket(), ObjNames("kv", NAMESPACE.directory, 0)
    for at in range(objects):
        name = names.chunk(key_number(at))
        bucket.objects[name], bucket.modified[name] = bytes(OBJECT_BYTES), TODAY - at
    return bucket


def test_a_store_does_not_wait_until_all_that_is_too_much_is_gone() -> None:
    async def main() -> None:
        store = SlowDeletes(overfull(4500))
        few = ObjLimits(requests_max=8, max_bytes=100 * OBJECT_BYTES, store_deadline_seconds=5.0)
        store.today = today().now
        async with opened(store, few) as tier:
            await asyncio.sleep(3.0)
            assert tier.stats()["now_lease_held"] == 1
            began = clock().now()
            assert await put(tier, NEW_KEYS) == [Write.FULL] * 4
            assert clock().now() - began == pytest.approx(5.0, abs=0.1)
            await asyncio.sleep(30.0)
            assert chunks_in(store.bucket) == 100
            assert await put(tier, NEW_KEYS) == [Write.STORED] * 4

    simulated(main)


def test_closing_waits_for_no_deletion_that_hangs() -> None:
    async def main() -> None:
        store = SlowDeletes(overfull(200))
        store.today, store.delete_seconds = today().now, 1e6
        tier: ObjTier
        async with opened(store, limits(100)) as tier:
            await asyncio.sleep(3.0)
            writing = asyncio.ensure_future(put(tier, NEW_KEYS))
            await asyncio.sleep(1.0)
            writing.cancel()
            await asyncio.wait({writing})
            began = clock().now()
        assert clock().now() - began < 2.0

    simulated(main)


def test_many_writes_at_once_keep_to_the_bound() -> None:
    async def main() -> None:
        bucket = Bucket()
        async with opened(make_store(bucket), limits(30)) as tier:
            await held(tier)
            async with asyncio.TaskGroup() as group:
                for at in range(0, 200, 10):
                    group.create_task(put(tier, KEYS[at : at + 10]))
            assert chunks_in(bucket) <= 30
            stats = tier.stats()
            assert stats["stored"] - stats["evicted"] == chunks_in(bucket)

    simulated(main)


@pytest.mark.parametrize("bounded", [True, False])
def test_without_a_bound_nothing_is_deleted_and_no_lease_taken(bounded: bool) -> None:
    async def main() -> None:
        bucket = Bucket()
        store: MemoryStore = make_store(bucket)
        async with opened(store, limits(400) if bounded else ObjLimits(requests_max=8)) as tier:
            await asyncio.sleep(30.0)
            await stored(tier, KEYS)
            has_lease = any(name.endswith("lease.json") for name in bucket.objects)
            assert has_lease is bounded
            assert ("now_lease_held" in tier.stats()) is bounded
        assert store.counts["delete"] == 0

    simulated(main)


# What others use


def test_what_only_another_engine_uses_stays() -> None:
    async def main() -> None:
        bucket = Bucket()
        bounds = ObjLimits(requests_max=8, max_bytes=40 * OBJECT_BYTES, walk_seconds=60.0)
        async with opened(make_store(bucket), bounds) as one:
            await held(one)
            for at in range(0, 40, 4):
                await stored(one, KEYS[at : at + 4])
                await asyncio.sleep(1.0)
            async with opened(make_store(bucket), bounds) as other:
                await other.read(KEYS[:8], blank(8))
                await asyncio.sleep(150.0)
                assert [name for name in bucket.objects if "/used/" in name]
                await stored(one, KEYS[100:116])
                assert await one.contains(KEYS[:8]) == [Read.HIT] * 8
                assert Read.MISS in await one.contains(KEYS[8:24])

    simulated(main)


def test_notes_of_engines_that_are_gone_are_deleted() -> None:
    async def main() -> None:
        bucket = Bucket()
        bounds = ObjLimits(max_bytes=40 * OBJECT_BYTES, walk_seconds=1800.0)
        note = ObjNames("kv", NAMESPACE.directory, 0).use_note("abc")
        bucket.objects[note], bucket.modified[note] = b"no note", TODAY
        async with opened(make_store(bucket), bounds) as tier:
            await held(tier)
            await asyncio.sleep(3600.0)
            assert note in bucket.objects
            await asyncio.sleep(86400.0)
            assert note not in bucket.objects

    simulated(main)


def make_notes(store: MemoryStore, me: str, recency: Recency) -> UseNotes:
    names = ObjNames("kv", NAMESPACE.directory, 0)
    pacer = Pacer(4, clock(), random.Random(0))
    return UseNotes(store, names, me, recency, pacer, clock(), today())


def test_a_note_says_what_was_used_twice_and_is_read_once() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        await store.open()
        theirs, ours = Recency(today()), Recency(today())
        telling, hearing = make_notes(store, "a", theirs), make_notes(store, "b", ours)
        await telling.leave()
        assert not store.bucket.objects
        theirs.used(KEYS[:3])
        await telling.leave()
        theirs.used(KEYS[5:6])
        await asyncio.sleep(1.0)
        await telling.leave()
        for _ in range(3):
            await hearing.gather()
        assert ours.of(KEYS[:6]).tolist() == theirs.of(KEYS[:6]).tolist()
        assert store.counts["get"] == 1
        await asyncio.sleep(1.0)
        theirs.used(KEYS[7:8])
        await telling.leave()
        later = Recency(today())
        await make_notes(store, "c", later).gather()
        assert [tick >= 0 for tick in later.of(KEYS[:8]).tolist()] == [
            *[False] * 5,
            *[True, False, True],
        ]

    simulated(main)


def test_a_note_that_is_broken_or_from_the_future_changes_nothing() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        await store.open()
        ours = Recency(today())
        ours.used(KEYS[:1])
        before = ours.of(KEYS[:3]).tolist()
        bad = [
            b"no msgpack",
            msgspec.msgpack.encode([KEYS[:2], ["x", "y"]]),
            msgspec.msgpack.encode([KEYS[:2], [1 << 62, 1 << 61]]),
            msgspec.msgpack.encode([[b"", b"x" * 200], [1, 2]]),
            msgspec.msgpack.encode([KEYS[:1], [5]]),
        ]
        for at, body in enumerate(bad):
            name = f"kv/{NAMESPACE.directory}/used/{at}.msgpack"
            store.bucket.objects[name], store.bucket.modified[name] = body, TODAY
        await make_notes(store, "b", ours).gather()
        assert ours.of(KEYS[:3]).tolist() == before

    simulated(main)


def test_a_note_that_is_replaced_while_it_is_read_takes_no_other_along() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        await store.open()
        ours = Recency(today())
        for at, engine in enumerate("abc"):
            theirs = Recency(today())
            theirs.used(KEYS[at : at + 1])
            await make_notes(store, engine, theirs).leave()

        def script(verb: str, name: str) -> Exception | None:
            if verb == "get" and name.endswith("/a.msgpack"):
                return LengthError("an object is 70 bytes long, not 60")
            return None

        store.script = script
        hearing = make_notes(store, "d", ours)
        await hearing.gather()
        assert [tick >= 0 for tick in ours.of(KEYS[:3]).tolist()] == [False, True, True]
        # What came in its place is heard of with the next listing.
        store.script = lambda verb, name: None
        name = next(name for name in store.bucket.objects if name.endswith("/a.msgpack"))
        store.bucket.modified[name] += 1.0
        await hearing.gather()
        assert [tick >= 0 for tick in ours.of(KEYS[:3]).tolist()] == [True] * 3

    simulated(main)
