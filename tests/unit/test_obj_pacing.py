"""Requests come when it is their turn, fewer when the store asks for fewer, and end in time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from tiering.tiers.obj.pacing import Lane, LateError, Pace, Pacer, RetryBudget
from tiering.tiers.obj.store import NotNowError, StoreError, ThrottledError
from virtual import clock, simulated


def make_pace(most: int = 16) -> Pace:
    return Pace(most, random.Random(0))


def fill(pace: Pace, now: float) -> int:
    """Begin as many as may be under way."""
    begun = 0
    while pace.may_begin(now):
        pace.begins()
        begun += 1
    return begun


# The pace


def test_as_many_are_under_way_as_were_asked_for() -> None:
    pace = make_pace()
    assert fill(pace, 0.0) == 16
    pace.answered()
    assert fill(pace, 0.0) == 1


def test_a_throttled_round_trip_halves_the_number_once() -> None:
    pace = make_pace()
    fill(pace, 0.0)
    for _ in range(16):
        pace.throttled(began=0.0, now=1.0, retry_after_seconds=None)
    assert pace.limit == 8
    fill(pace, 1.5)
    pace.throttled(began=1.5, now=2.0, retry_after_seconds=None)
    assert pace.limit == 4


def test_it_never_falls_below_one_and_then_pauses() -> None:
    pace = make_pace(2)
    for now in range(1, 5):
        pace.begins()
        pace.throttled(began=float(now), now=now + 0.5, retry_after_seconds=None)
    assert pace.limit == 1
    assert pace.quiet_until > 4.5
    assert not pace.may_begin(4.5)
    assert pace.may_begin(pace.quiet_until)


def test_it_grows_by_one_a_round_trip_up_to_what_was_asked_for() -> None:
    pace = make_pace(8)
    for _ in range(3):
        pace.begins()
        pace.throttled(began=float(_), now=_ + 0.5, retry_after_seconds=None)
    limits = []
    for _ in range(10):
        now = 100.0
        for _ in range(fill(pace, now)):
            pace.answered()
        limits.append(pace.limit)
    assert limits[-1] == 8
    assert all(after - before <= 1 for before, after in pairwise(limits))


def test_a_large_number_comes_back_within_as_many_round_trips_as_a_middling_one() -> None:
    pace = make_pace(640)
    for now in range(12):
        pace.begins()
        pace.throttled(began=float(now), now=now + 0.5, retry_after_seconds=None)
    for _ in range(40):
        for _ in range(fill(pace, 100.0)):
            pace.answered()
    assert pace.limit == 640


def test_all_wait_as_long_as_the_store_says() -> None:
    pace = make_pace()
    pace.begins()
    pace.throttled(began=0.0, now=1.0, retry_after_seconds=3.0)
    assert not pace.may_begin(3.9)
    assert pace.may_begin(1.0 + 3.0 * 1.1)
    pace.begins()
    pace.throttled(began=5.0, now=6.0, retry_after_seconds=86400.0)
    assert pace.may_begin(6.0 + 33.0)


def test_retries_are_a_tenth_of_what_succeeds() -> None:
    budget = RetryBudget(reserve=5)
    assert sum(budget.take() for _ in range(100)) == 5
    for _ in range(30):
        budget.succeeded()
    assert sum(budget.take() for _ in range(100)) in (2, 3)  # tenths do not add up exactly
    for _ in range(1000):
        budget.succeeded()
    assert sum(budget.take() for _ in range(100)) in (4, 5)


# The pacer


def make_pacer(most: int = 4) -> Pacer:
    return Pacer(most, clock(), random.Random(0))


def after(seconds: float, result: str = "done") -> Callable[[], Awaitable[str]]:
    async def request() -> str:
        await asyncio.sleep(seconds)
        return result

    return request


def failing(errors: list[StoreError]) -> Callable[[], Awaitable[str]]:
    """Raises each of `errors`, then succeeds."""

    async def request() -> str:
        await asyncio.sleep(0.01)
        if errors:
            raise errors.pop(0)
        return "done"

    return request


def test_loads_go_before_stores_and_stores_before_upkeep() -> None:
    async def main() -> list[str]:
        pacer, order = make_pacer(1), []

        async def one(lane: Lane, name: str) -> None:
            await pacer.run(lane, 100.0, after(1.0))
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for lane, name in [
                (Lane.UPKEEP, "first"),
                (Lane.UPKEEP, "walk"),
                (Lane.STORE, "store"),
                (Lane.LOAD, "load"),
                (Lane.LOAD, "next load"),
            ]:
                group.create_task(one(lane, name))
        return order

    assert simulated(main) == ["first", "load", "next load", "store", "walk"]


def test_loads_without_end_do_not_starve_the_others() -> None:
    async def main() -> None:
        pacer, loads = make_pacer(2), 0

        async def load() -> None:
            nonlocal loads
            while loads < 200:
                await pacer.run(Lane.LOAD, 1e6, after(1.0))
                loads += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(load())
            await asyncio.sleep(1.5)
            for lane in (Lane.STORE, Lane.UPKEEP, Lane.STORE):
                before = loads
                await pacer.run(lane, 1e6, after(1.0))
                assert loads - before <= 20

    simulated(main)


def test_what_fails_for_now_is_tried_again_and_what_fails_for_good_is_not() -> None:
    async def main() -> None:
        pacer = make_pacer()
        errors: list[StoreError] = [NotNowError("500"), ThrottledError("503")]
        assert await pacer.run(Lane.LOAD, 100.0, failing(errors)) == "done"
        assert pacer.counters["retries"] == 2
        errors = [StoreError("403"), StoreError("never")]
        with pytest.raises(StoreError, match="403"):
            await pacer.run(Lane.LOAD, 100.0, failing(errors))
        assert len(errors) == 1
        errors = [NotNowError(str(number)) for number in range(9)]
        with pytest.raises(NotNowError, match="3"):
            await pacer.run(Lane.LOAD, 100.0, failing(errors))

    simulated(main)


def test_no_request_is_repeated_once_the_budget_is_spent() -> None:
    async def main() -> None:
        pacer, sent = make_pacer(16), 0

        async def request() -> None:
            nonlocal sent
            sent += 1
            raise NotNowError("500")

        async def one() -> None:
            with pytest.raises(NotNowError):
                await pacer.run(Lane.LOAD, 1e6, request)

        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(one())
        assert sent == 210
        assert pacer.counters["retries"] == 10
        assert pacer.counters["retry_budget_spent"] > 150

    simulated(main)


def test_nobody_waits_beyond_the_deadline_for_a_turn() -> None:
    async def main() -> None:
        pacer = make_pacer(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(pacer.run(Lane.LOAD, 1000.0, after(50.0)))
            await asyncio.sleep(0)
            with pytest.raises(LateError) as late:
                await pacer.run(Lane.LOAD, 20.0, after(1.0))
            assert clock().now() == pytest.approx(20.0)
            assert not late.value.hangs
        assert await pacer.run(Lane.LOAD, 1000.0, after(1.0)) == "done"

    simulated(main)


def test_a_request_that_never_ends_is_called_off_and_called_hanging() -> None:
    async def main() -> None:
        pacer, ended = make_pacer(1), False

        async def hang() -> None:
            nonlocal ended
            try:
                await asyncio.sleep(1e9)
            finally:
                ended = True

        with pytest.raises(LateError) as late:
            await pacer.run(Lane.LOAD, 5.0, hang)
        assert late.value.hangs
        assert ended
        assert await pacer.run(Lane.LOAD, 10.0, after(1.0)) == "done"

    simulated(main)


def test_a_slow_request_is_not_called_hanging_where_others_are_answered() -> None:
    async def main() -> None:
        pacer = make_pacer(2)
        async with asyncio.TaskGroup() as group:
            group.create_task(pacer.run(Lane.LOAD, 100.0, after(3.0)))
            with pytest.raises(LateError) as late:
                await pacer.run(Lane.LOAD, 5.0, after(9.0))
        assert not late.value.hangs

    simulated(main)


def test_what_has_hardly_any_time_left_says_nothing_about_the_store() -> None:
    async def main() -> None:
        pacer = make_pacer(1)
        await asyncio.sleep(1.0)
        for deadline, hangs in ((0.5, False), (1.9, False), (10.0, True)):
            with pytest.raises(LateError) as late:
                await pacer.run(Lane.STORE, deadline, after(1e6))
            assert late.value.hangs == hangs

    simulated(main)


def test_no_pause_goes_beyond_the_deadline() -> None:
    async def main() -> None:
        pacer = make_pacer()
        with pytest.raises(ThrottledError):
            await pacer.run(Lane.LOAD, 5.0, failing([ThrottledError("503", 20.0)]))
        assert clock().now() < 1.0
        # The others wait as long as the store has asked.
        with pytest.raises(LateError):
            await pacer.run(Lane.LOAD, 15.0, after(0.0))
        assert await pacer.run(Lane.LOAD, 100.0, after(0.0)) == "done"
        assert 20.0 < clock().now() < 25.0

    simulated(main)


def test_whoever_is_cancelled_leaves_its_turn_to_the_next() -> None:
    async def main() -> None:
        for steps in range(6):
            pacer = make_pacer(1)
            first = asyncio.ensure_future(pacer.run(Lane.LOAD, 100.0, after(1.0)))
            second = asyncio.ensure_future(pacer.run(Lane.LOAD, 100.0, after(1.0)))
            await asyncio.sleep(0.999)
            for _ in range(steps):
                await asyncio.sleep(0.0004)
            second.cancel()
            await asyncio.wait({first, second})
            assert second.cancelled() or second.result() == "done"
            until = clock().now() + 50
            assert await pacer.run(Lane.LOAD, until, after(1.0)) == "done"

    simulated(main)
