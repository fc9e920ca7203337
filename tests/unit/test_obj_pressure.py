"""A store that throttles, stalls or refuses: loads end in time, and the store is not stormed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from memory_store import Bucket, MemoryStore
from tiering.errors import TierError
from tiering.testing.examples import blank, key_number, payload_of, stored, views
from tiering.tiers.base import Failed, Read, Write
from tiering.tiers.obj.pacing import LateError
from tiering.tiers.obj.parts import ObjLimits
from tiering.tiers.obj.store import (
    CredentialsError,
    LengthError,
    NotNowError,
    Page,
    StoreError,
    ThrottledError,
)
from tiering.tiers.wrappers.breaker import State
from tiering.tiers.wrappers.guarded import GuardedTier
from virtual import clock, make_store, opened, simulated

KEYS = [key_number(i) for i in range(64)]
LIMITS = ObjLimits(requests_max=16, load_deadline_seconds=5.0, store_deadline_seconds=5.0)


@pytest.mark.slow
@pytest.mark.parametrize("retry_after", [None, 2.0])
def test_throttling_makes_requests_fewer_and_full_speed_comes_back(
    retry_after: float | None,
) -> None:
    async def main() -> None:
        chance, store = random.Random(7), make_store(Bucket(), 0.05)
        by_second: Counter[int] = Counter()
        begins, ends = 20.0, 80.0

        def script(verb: str, name: str) -> Exception | None:
            now = clock().now()
            by_second[int(now)] += 1
            if begins <= now < ends and chance.random() < 0.3:
                return ThrottledError("503 SlowDown", retry_after)
            return None

        waited: list[float] = []
        outcomes: Counter[object] = Counter()

        async def load() -> None:
            while clock().now() < 100.0:
                since = clock().now()
                found = await tier.read(KEYS[:16], blank(16))
                waited.append(clock().now() - since)
                outcomes.update(found)

        async with opened(store, LIMITS) as tier:
            await stored(tier, KEYS)
            store.script = script
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(load())
            stats = tier.stats()
        before = sum(by_second[second] for second in range(10, 20)) / 10
        during = sum(by_second[second] for second in range(30, 80)) / 50
        after = sum(by_second[second] for second in range(90, 100)) / 10
        assert during < before / 3
        assert after > 0.9 * before
        assert max(waited) < 5.5
        assert set(outcomes) <= {Read.HIT, Read.BUSY}
        assert outcomes[Read.BUSY] > 0
        assert stats["throttled"] > stats["retries"]
        assert stats["requests_failed"] == 0

    simulated(main)


def test_a_store_that_refuses_everything_is_hardly_asked() -> None:
    async def main() -> None:
        store = make_store(Bucket(), 0.01)
        async with opened(store, LIMITS) as tier:
            await stored(tier, KEYS)
            store.script = lambda verb, name: ThrottledError("503")
            before = len(store.asked)
            for _ in range(6):
                assert await tier.read(KEYS, blank(64)) == [Read.BUSY] * 64
            assert clock().now() < 40.0
            assert len(store.asked) - before < 6 * 30
            assert await tier.write([key_number(99)], blank(1)) == [Write.REFUSED]
            assert await tier.contains([key_number(98)]) == [Read.BUSY]
            assert await tier.contains(KEYS) == [Read.HIT] * 64

    simulated(main)


@pytest.mark.parametrize("operation", ["contains", "write", "delete"])
def test_a_search_in_many_rounds_ends_with_what_it_is_for(operation: str) -> None:
    """Of a prefix whose end is not there, against a store that takes its time for each LIST."""

    async def main() -> None:
        bucket = Bucket()
        store = make_store(bucket)
        async with opened(store, LIMITS) as tier, opened(make_store(bucket), LIMITS) as other:
            await stored(other, KEYS[:20])
            store.seconds = 2.0
            began = clock().now()
            if operation == "contains":
                assert await tier.contains(KEYS) == [Read.BUSY] * 64
            elif operation == "write":
                assert await tier.write(KEYS, blank(64)) == [Write.REFUSED] * 64
            else:
                # And one request that deletes them, whatever is known.
                await tier.delete(KEYS)
                began += 2.0
                assert not any(name.endswith(".bin") for name in bucket.objects)
            assert clock().now() - began == pytest.approx(5.0, abs=0.1)
            assert store.under_way == 0

    simulated(main)


def test_a_question_is_shared_for_as_long_as_each_can_wait() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        async with opened(store, LIMITS) as tier:
            store.seconds = 1.0
            lookup = tier._opened.lookup  # type: ignore[union-attr]
            now = clock().now()

            async def find(at: int, seconds: float) -> tuple[object, float]:
                (found,) = await lookup.find(KEYS[at : at + 1], now + seconds)
                return found, clock().now() - now

            # One that cannot wait for the answer to another's.
            long, short = await asyncio.gather(find(0, 9.0), find(0, 0.5))
            assert long == (False, pytest.approx(1.0))
            assert (isinstance(short[0], LateError), short[1]) == (True, pytest.approx(0.5))
            # One that can wait for longer than the other whose question it is.
            now, before = clock().now(), len(store.asked)
            short, long = await asyncio.gather(find(1, 0.5), find(1, 9.0))
            assert (isinstance(short[0], LateError), short[1]) == (True, pytest.approx(0.5))
            assert long == (False, pytest.approx(1.5))
            assert len(store.asked) - before == 2
            # And two that can.
            now, before = clock().now(), len(store.asked)
            assert await asyncio.gather(find(2, 9.0), find(2, 9.5)) == [(False, 1.0)] * 2
            assert len(store.asked) - before == 1

    simulated(main)


def test_what_hangs_ends_at_its_deadline_and_is_a_failure() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        async with opened(store, LIMITS) as tier:
            await stored(tier, KEYS[:20])
            store.seconds = 1e6
            began = clock().now()
            outcomes = await tier.read(KEYS[:20], blank(20))
            assert clock().now() - began == pytest.approx(5.0, abs=0.1)
            assert store.under_way == 0
            failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
            # The others waited for a turn; nobody knows of them.
            assert len(failed) == 16
            assert "does not answer" in failed[0].error.reason
            assert outcomes.count(Read.BUSY) == 4
            (outcome,) = await tier.write([KEYS[50]], blank(1))
            assert isinstance(outcome, Failed)
            assert tier.stats()["write_errors"] == 1
            store.seconds = 0.01
            assert await tier.read(KEYS[:20], blank(20)) == [Read.HIT] * 20

    simulated(main)


@pytest.mark.parametrize("error", [StoreError("403"), NotNowError("500"), CredentialsError("old")])
def test_a_put_that_fails_is_an_outcome(error: StoreError) -> None:
    async def main() -> None:
        store = make_store(Bucket())
        async with opened(store, LIMITS) as tier:
            store.script = lambda verb, name: error if verb == "put" else None
            outcomes = await tier.write(KEYS[:2], views([payload_of(key) for key in KEYS[:2]]))
            for outcome in outcomes:
                assert isinstance(outcome, Failed)
                assert str(error) in outcome.error.reason
            assert tier.stats()["write_errors"] == 2
            store.script = lambda verb, name: None
            await stored(tier, KEYS[:2])

    simulated(main)


def test_credentials_that_ran_out_take_the_tier_out_until_they_are_there_again() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        async with opened(store, LIMITS) as inner:
            await stored(inner, KEYS)
        tier = GuardedTier(inner, clock())
        await tier.open()
        store.script = lambda verb, name: CredentialsError("ExpiredToken")
        outcomes = await tier.read(KEYS[:16], blank(16))
        assert all(isinstance(outcome, Failed) for outcome in outcomes)
        assert tier.state.loads is State.OPEN
        before = len(store.asked)
        assert await tier.read(KEYS[:16], blank(16)) == [Read.MISS] * 16
        assert len(store.asked) == before
        await asyncio.sleep(60.0)
        assert isinstance((await tier.read(KEYS[:1], blank(1)))[0], Failed)
        store.script = lambda verb, name: None
        await asyncio.sleep(60.0)
        assert await tier.read(KEYS[:1], blank(1)) == [Read.HIT]
        assert tier.state.loads is State.CLOSED
        await tier.close()

    simulated(main)


def test_throttling_does_not_take_the_tier_out() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        async with opened(store, LIMITS) as inner:
            await stored(inner, KEYS)
        tier = GuardedTier(inner, clock())
        await tier.open()
        store.script = lambda verb, name: ThrottledError("503")
        for _ in range(4):
            assert set(await tier.read(KEYS, blank(64))) == {Read.BUSY}
        assert tier.state == (State.CLOSED, State.CLOSED)
        await tier.close()

    simulated(main)


def test_a_lookup_that_fails_says_so_for_the_chunks_that_it_was_about() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        async with opened(store, LIMITS) as tier:
            await stored(tier, KEYS[:4])
            store.script = lambda verb, name: StoreError("403 AccessDenied")
            outcomes = await tier.contains(KEYS[:8])
            assert outcomes[:4] == [Read.HIT] * 4
            for outcome in outcomes[4:]:
                assert isinstance(outcome, Failed)
                assert "AccessDenied" in outcome.error.reason
            with pytest.raises(TierError, match="cannot list the chunks: 403 AccessDenied"):
                async for _ in tier.scan():
                    pass

    simulated(main)


def test_a_walk_that_breaks_off_is_walked_again() -> None:
    async def main() -> None:
        bucket = Bucket()
        async with opened(make_store(bucket)) as other:
            await stored(other, KEYS[:8])
        store = make_store(bucket)
        store.script = lambda verb, name: NotNowError("500") if verb == "list" else None
        async with opened(store, LIMITS) as tier:
            assert tier.stats()["walks_failed"] == 1
            assert tier.stats()["now_chunks"] == 0
            store.script = lambda verb, name: None
            await asyncio.sleep(60.0)
            assert tier.stats()["walks"] == 1
            assert tier.stats()["now_chunks"] == 8

    simulated(main)


def test_a_question_about_a_short_body_ends_at_the_deadline_of_its_load() -> None:
    async def main() -> None:
        store = make_store(Bucket())
        async with opened(store, LIMITS) as tier:
            await stored(tier, KEYS[:1])

            def script(verb: str, name: str) -> Exception | None:
                if store.counts["get"] == before + 2:
                    store.seconds = 1000.0
                return LengthError("ended early") if verb == "get" else None

            before, store.script, store.seconds = store.counts["get"], script, 1.5
            began = clock().now()
            (outcome,) = await tier.read(KEYS[:1], blank(1))
            assert isinstance(outcome, Failed)
            assert clock().now() - began < LIMITS.load_deadline_seconds + 0.1
            assert store.asked[-1][0] == "list"

    simulated(main)


@pytest.mark.parametrize("ends", [True, False])
def test_a_store_that_throttles_at_start_is_asked_until_the_deadline_and_not_stormed(
    ends: bool,
) -> None:
    async def main() -> None:
        store = make_store(Bucket())

        def script(verb: str, name: str) -> Exception | None:
            return None if ends and clock().now() > 3.0 else ThrottledError("503 SlowDown")

        store.script = script
        if ends:
            async with opened(store, LIMITS) as tier:
                await stored(tier, KEYS[:1])
        else:
            with pytest.raises(TierError, match="cannot be opened: not done by its deadline"):
                async with opened(store, LIMITS):
                    pass
            assert clock().now() < LIMITS.load_deadline_seconds + 0.1
        assert len(store.asked) < 40

    simulated(main)


@pytest.mark.parametrize("load_deadline_seconds", [5.0, 3600.0])
def test_the_first_listing_holds_up_no_start_beyond_the_same_deadline(
    load_deadline_seconds: float,
) -> None:
    class Hanging(MemoryStore):
        """As long as it lists anything."""

        async def page(self, prefix: str, **asked: Any) -> Page:
            await asyncio.sleep(1e6)
            raise AssertionError

    async def main() -> None:
        store = Hanging()
        limits = ObjLimits(requests_max=4, load_deadline_seconds=load_deadline_seconds)
        seconds = min(load_deadline_seconds, 30.0)

        def script(verb: str, name: str) -> Exception | None:
            return None if clock().now() > 0.7 * seconds else ThrottledError("503 SlowDown")

        store.script = script
        async with opened(store, limits) as tier:
            assert clock().now() == pytest.approx(seconds, abs=0.1)
            assert tier.stats()["walks"] == 0

    simulated(main)


def test_a_listing_that_goes_in_circles_breaks_off() -> None:
    class Circling(MemoryStore):
        """Says the same of where to go on each time, as stores do that do not know how."""

        async def page(self, prefix: str, **asked: Any) -> Page:
            return Page((await super().page(prefix, **asked)).objects, "again")

    async def main() -> None:
        async with opened(Circling(), LIMITS) as tier:
            await asyncio.sleep(5.0)
            assert tier.stats()["walks_failed"] == 1
            with pytest.raises(TierError, match="goes in circles"):
                async for _ in tier.scan():
                    pass

    simulated(main)
