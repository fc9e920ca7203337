"""One engine at a time may delete, and a dead one's turn ends."""

from __future__ import annotations

import asyncio
import random

import pytest

from memory_store import Bucket, MemoryStore
from tiering.tiers.obj.lease import CLOCKS_APART_SECONDS_MAX, Lease, LeaseKeeper, Note, Step
from tiering.tiers.obj.pacing import Pacer
from tiering.tiers.obj.store import NotNowError
from virtual import clock, make_store, simulated, today

NAME = "kv/model_0123456789ab/lease.json"
THEIRS = Note("them", 4, 7, 1000.0)


def test_nobodys_is_taken_and_ones_own_renewed() -> None:
    lease = Lease("me", 60.0)
    assert lease.found(None, 0.0, 0.0) is Step.TAKE
    mine = lease.note(0.0)
    assert mine == Note("me", 1, 0, 60.0)
    lease.held(0.0)
    assert lease.is_held(59.9)
    assert not lease.is_held(60.0)
    assert lease.found(mine, 20.0, 20.0) is Step.RENEW
    assert lease.note(20.0) == Note("me", 1, 1, 80.0)


def test_what_was_given_up_is_taken_at_once() -> None:
    lease = Lease("me", 60.0)
    assert lease.found(Note("", 4, 7, 0.0), 0.0, 900.0) is Step.TAKE
    assert lease.note(900.0) == Note("me", 5, 0, 960.0)


def test_anothers_is_waited_for_while_it_changes() -> None:
    lease = Lease("me", 60.0)
    for renewal in range(10):
        note = Note("them", 4, renewal, 60.0 * renewal)
        assert lease.found(note, 80.0 * renewal, 80.0 * renewal) is Step.WAIT


def test_one_that_does_not_change_any_more_is_a_dead_ones() -> None:
    lease = Lease("me", 60.0)
    assert lease.found(THEIRS, 0.0, 0.0) is Step.WAIT
    assert lease.found(THEIRS, 89.0, 0.0) is Step.WAIT
    assert lease.found(THEIRS, 90.0, 0.0) is Step.TAKE
    assert lease.note(0.0).incarnation == 5


def test_clocks_may_differ_and_an_ancient_note_is_nobodys() -> None:
    margin = CLOCKS_APART_SECONDS_MAX
    assert Lease("me", 60.0).found(THEIRS, 0.0, 1000.0 + margin) is Step.WAIT
    assert Lease("me", 60.0).found(THEIRS, 0.0, 1001.0 + margin) is Step.TAKE


def test_finding_anothers_ends_ones_own() -> None:
    lease = Lease("me", 60.0)
    lease.found(None, 0.0, 0.0)
    lease.held(0.0)
    assert lease.found(THEIRS, 1.0, 0.0) is Step.WAIT
    assert not lease.is_held(1.0)
    assert lease.given_up() is None


# In a bucket


def make_keeper(me: str, store: MemoryStore) -> LeaseKeeper:
    pacer = Pacer(4, clock(), random.Random(0))
    return LeaseKeeper(
        store,
        NAME,
        Lease(me, 60.0),
        pacer,
        clock(),
        today(),
        every_seconds=20.0,
        settle_seconds=2.0,
    )


async def made_store(bucket: Bucket, *, heeds_conditions: bool = True) -> MemoryStore:
    store = make_store(bucket)
    store.heeds_conditions = heeds_conditions
    await store.open()
    return store


@pytest.mark.parametrize("heeds_conditions", [True, False])
def test_of_many_who_want_it_one_has_it(heeds_conditions: bool) -> None:
    async def main() -> None:
        bucket, chance = Bucket(), random.Random(1)
        keepers = [
            make_keeper(f"engine {i}", await made_store(bucket, heeds_conditions=heeds_conditions))
            for i in range(5)
        ]

        async def run(keeper: LeaseKeeper) -> None:
            await asyncio.sleep(chance.random())
            await keeper.run(lambda: None)

        tasks = [asyncio.ensure_future(run(keeper)) for keeper in keepers]
        held = []
        for _ in range(60):
            await asyncio.sleep(5.0)
            held.append(sum(keeper.is_held for keeper in keepers))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert held == [1] * 60

    simulated(main)


def test_a_dead_holders_lease_goes_to_another_and_a_closed_ones_at_once() -> None:
    async def main() -> None:
        bucket = Bucket()
        first = make_keeper("first", await made_store(bucket))
        second = make_keeper("second", await made_store(bucket))
        await first.tend()
        assert first.is_held
        told: list[float] = []
        running = asyncio.ensure_future(second.run(lambda: told.append(clock().now())))
        await asyncio.sleep(150.0)
        assert not first.is_held
        assert second.is_held
        assert len(told) == 1
        assert 60.0 < told[0] < 130.0
        running.cancel()
        await asyncio.wait({running})
        await second.give_up()
        assert not second.is_held
        await first.tend()
        assert first.is_held

    simulated(main)


def test_a_lease_that_cannot_be_renewed_runs_out() -> None:
    async def main() -> None:
        store = await made_store(Bucket())
        keeper = make_keeper("me", store)
        running = asyncio.ensure_future(keeper.run(lambda: None))
        await asyncio.sleep(30.0)
        assert keeper.is_held
        store.script = lambda verb, name: NotNowError("500")
        await asyncio.sleep(61.0)
        assert not keeper.is_held
        store.script = lambda verb, name: None
        await asyncio.sleep(60.0)
        assert keeper.is_held
        running.cancel()
        await asyncio.wait({running})

    simulated(main)


def test_a_store_that_hangs_does_not_hold_up_the_end() -> None:
    async def main() -> None:
        store = await made_store(Bucket())
        keeper = make_keeper("me", store)
        await keeper.tend()
        store.seconds, began = 1000.0, clock().now()
        await keeper.give_up()
        assert clock().now() - began < 2.0
        assert not keeper.is_held
        assert store.asked[-1][0] == "put"

    simulated(main)


def test_what_is_no_note_is_written_over() -> None:
    async def main() -> None:
        bucket = Bucket({NAME: b"not json"}, {NAME: 0.0})
        keeper = make_keeper("me", await made_store(bucket))
        await keeper.tend()
        assert keeper.is_held
        assert b'"holder":"me"' in bucket.objects[NAME]

    simulated(main)
