"""The conformance suite of tiers, for pytest: subclass `TierContract` and give four methods.

For authors of backends and wrappers; needs pytest, pytest-asyncio (auto mode) and hypothesis. It
writes, damages and deletes under the keys it makes, so give it a place of its own. The raw
helpers bypass the tier, so that writing is never tested by reading alone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tiering.errors import ClosedError, DamagedChunk
from tiering.testing.examples import (
    CHUNK_BYTES,
    blank,
    key_number,
    payload_of,
    scanned,
    stored,
    views,
)
from tiering.testing.machine import TierMachine
from tiering.tiers.base import Delete, Failed, Read, Tier, Write


class TierContract(ABC):
    """What every tier owes its callers, whatever it stores in."""

    shareable = True
    """Whether two open tiers may have one `where`, and see at once what is put there."""

    @abstractmethod
    def make_tier(self, where: Path) -> Tier:
        """A closed tier for chunks of CHUNK_BYTES. Two with one `where` share their content."""

    @abstractmethod
    def raw_get(self, where: Path, key: bytes) -> bytes | None:
        """The payload stored under `key`, without the tier's help; None where there is none."""

    @abstractmethod
    def raw_put(self, where: Path, key: bytes, payload: bytes) -> None:
        """Store `payload` under `key` as the tier would, without its help."""

    @abstractmethod
    def raw_damage(self, where: Path, key: bytes) -> None:
        """Change one bit of what is stored under `key`."""

    @asynccontextmanager
    async def opened(self, where: Path) -> AsyncIterator[Tier]:
        tier = self.make_tier(where)
        await tier.open()
        try:
            yield tier
        finally:
            await tier.close()

    @pytest.mark.parametrize("count", [0, 1, 100])
    async def test_batches_of_any_size_come_back_as_stored(
        self, tmp_path: Path, count: int
    ) -> None:
        keys = [key_number(i, group=i % 3) for i in range(count)]
        async with self.opened(tmp_path) as tier:
            await stored(tier, keys)
            buffers = blank(count)
            assert await tier.contains(keys) == [Read.HIT] * count
            assert await tier.read(keys, buffers) == [Read.HIT] * count
        assert [bytes(buffer) for buffer in buffers] == [payload_of(key) for key in keys]

    async def test_what_is_written_is_what_lies_there(self, tmp_path: Path) -> None:
        key = key_number(1)
        async with self.opened(tmp_path) as tier:
            await stored(tier, [key])
        assert self.raw_get(tmp_path, key) == payload_of(key)
        assert self.raw_get(tmp_path, key_number(2)) is None

    async def test_what_lies_there_is_what_is_read(self, tmp_path: Path) -> None:
        key = key_number(1)
        if not self.shareable:
            self.raw_put(tmp_path, key, payload_of(key))
        async with self.opened(tmp_path) as tier:
            if self.shareable:
                self.raw_put(tmp_path, key, payload_of(key))
            (buffer,) = blank(1)
            assert await tier.contains([key]) == [Read.HIT]
            assert await tier.read([key], [buffer]) == [Read.HIT]
        assert buffer == payload_of(key)

    async def test_outcomes_are_in_the_order_of_the_keys(self, tmp_path: Path) -> None:
        keys = [key_number(i) for i in range(40)]
        async with self.opened(tmp_path) as tier:
            await stored(tier, keys[::2])
            expected = [Read.HIT, Read.MISS] * 20
            buffers = blank(40)
            assert await tier.contains(keys) == expected
            assert await tier.read(keys, buffers) == expected
            outcomes = await tier.write(keys, views([payload_of(key) for key in keys]))
            assert outcomes == [Write.ALREADY_THERE, Write.STORED] * 20
            assert await tier.delete([*keys[:2], key_number(99)]) == [
                Delete.DELETED,
                Delete.DELETED,
                Delete.MISSING,
            ]
        assert [bytes(b) for b in buffers[::2]] == [payload_of(key) for key in keys[::2]]

    async def test_a_chunk_already_there_is_left_alone(self, tmp_path: Path) -> None:
        key = key_number(1)
        async with self.opened(tmp_path) as tier:
            await stored(tier, [key])
            assert await tier.write([key], blank(1)) == [Write.ALREADY_THERE]
        assert self.raw_get(tmp_path, key) == payload_of(key)

    async def test_a_write_keeps_nothing_of_the_callers_buffers(self, tmp_path: Path) -> None:
        key = key_number(1)
        memory = bytearray(payload_of(key))
        view = memoryview(memory)
        async with self.opened(tmp_path) as tier:
            await tier.write([key], [view])
            view.release()
            memory.append(0)  # BufferError while anyone still has a view
            memory[:] = bytes(len(memory))
            (buffer,) = blank(1)
            assert await tier.read([key], [buffer]) == [Read.HIT]
        assert buffer == payload_of(key)

    async def test_a_read_keeps_nothing_of_the_callers_buffers(self, tmp_path: Path) -> None:
        keys = [key_number(i) for i in range(3)]
        async with self.opened(tmp_path) as tier:
            await stored(tier, keys[:2])
            self.raw_damage(tmp_path, keys[1])
            memories = [bytearray(CHUNK_BYTES) for _ in keys]
            buffers = [memoryview(memory) for memory in memories]
            outcomes = await tier.read(keys, buffers)
            for memory, buffer in zip(memories, buffers, strict=True):
                buffer.release()
                memory.append(0)  # BufferError while anyone still has a view
        assert outcomes[0] is Read.HIT
        assert outcomes[2] is Read.MISS

    async def test_a_deleted_chunk_is_a_miss(self, tmp_path: Path) -> None:
        key = key_number(1)
        async with self.opened(tmp_path) as tier:
            await stored(tier, [key])
            assert await tier.delete([key]) == [Delete.DELETED]
            assert await tier.contains([key]) == [Read.MISS]
            assert await tier.read([key], blank(1)) == [Read.MISS]
            assert await tier.delete([key]) == [Delete.MISSING]
            await stored(tier, [key])
        assert self.raw_get(tmp_path, key) == payload_of(key)

    async def test_a_damaged_chunk_fails_alone_and_is_a_miss_from_then_on(
        self, tmp_path: Path
    ) -> None:
        keys = [key_number(i) for i in range(20)]
        async with self.opened(tmp_path) as tier:
            await stored(tier, keys)
            self.raw_damage(tmp_path, keys[7])
            buffers = blank(20)
            outcomes = await tier.read(keys, buffers)
            failed = outcomes.pop(7)
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, DamagedChunk)
            assert (failed.error.tier, failed.error.key) == (tier.name, keys[7])
            assert outcomes == [Read.HIT] * 19
            assert await tier.contains([keys[7]]) == [Read.MISS]
            assert await tier.read([keys[7]], blank(1)) == [Read.MISS]
            await stored(tier, [keys[7]])
            assert await tier.read([keys[7]], [buffers[7]]) == [Read.HIT]
        assert [bytes(buffer) for buffer in buffers] == [payload_of(key) for key in keys]

    async def test_scan_gives_each_key_held_once(self, tmp_path: Path) -> None:
        keys = [key_number(i, group=i % 2) for i in range(30)]
        async with self.opened(tmp_path) as tier:
            assert await scanned(tier) == []
            await stored(tier, keys)
            await tier.delete(keys[:5])
            assert await scanned(tier) == sorted(keys[5:])

    async def test_a_tier_opened_again_finds_everything(self, tmp_path: Path) -> None:
        keys = [key_number(i) for i in range(10)]
        async with self.opened(tmp_path) as tier:
            await stored(tier, keys)
        async with self.opened(tmp_path) as tier:
            buffers = blank(10)
            assert await scanned(tier) == sorted(keys)
            assert await tier.read(keys, buffers) == [Read.HIT] * 10
        assert [bytes(buffer) for buffer in buffers] == [payload_of(key) for key in keys]

    async def test_nothing_works_outside_open_and_close(self, tmp_path: Path) -> None:
        tier, key = self.make_tier(tmp_path), key_number(1)
        uses: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: tier.contains([key]),
            lambda: tier.read([key], blank(1)),
            lambda: tier.write([key], blank(1)),
            lambda: tier.delete([key]),
            lambda: scanned(tier),
        ]
        for use in uses:
            with pytest.raises(ClosedError):
                await use()
        await tier.open()
        await tier.close()
        await tier.close()
        for use in uses:
            with pytest.raises(ClosedError):
                await use()

    async def test_close_finishes_what_is_under_way(self, tmp_path: Path) -> None:
        keys = [key_number(i) for i in range(60)]
        tier = self.make_tier(tmp_path)
        await tier.open()
        writing = asyncio.create_task(tier.write(keys, views([payload_of(k) for k in keys])))
        await asyncio.sleep(0)  # so that the write has begun
        await tier.close()
        assert await writing == [Write.STORED] * 60
        assert all(self.raw_get(tmp_path, key) == payload_of(key) for key in keys)

    @pytest.mark.parametrize("seed", range(12))
    async def test_a_cancelled_read_touches_no_buffer_afterwards(
        self, tmp_path: Path, seed: int
    ) -> None:
        keys = [key_number(i) for i in range(150)]
        memories = [bytearray(CHUNK_BYTES) for _ in keys]
        buffers = [memoryview(memory) for memory in memories]
        async with self.opened(tmp_path) as tier:
            await stored(tier, keys)
            reading = asyncio.create_task(tier.read(keys, buffers))
            await cancelled_somewhere(reading, random.Random(seed))
            for buffer in buffers:
                buffer[:] = b"\x55" * CHUNK_BYTES
                buffer.release()
        assert all(memory == b"\x55" * CHUNK_BYTES for memory in memories)
        for memory in memories:
            memory.append(0)  # BufferError while anyone still has a view

    @pytest.mark.parametrize("seed", range(12))
    async def test_a_cancelled_write_touches_no_buffer_afterwards(
        self, tmp_path: Path, seed: int
    ) -> None:
        keys = [key_number(i) for i in range(150)]
        buffers = views([payload_of(key) for key in keys])
        async with self.opened(tmp_path) as tier:
            writing = asyncio.create_task(tier.write(keys, buffers))
            await cancelled_somewhere(writing, random.Random(seed))
            for buffer in buffers:
                buffer[:] = b"\x55" * CHUNK_BYTES
        async with self.opened(tmp_path) as tier:
            found = blank(150)
            outcomes = await tier.read(keys, found)
        assert set(outcomes) <= {Read.HIT, Read.MISS}
        for key, outcome, buffer in zip(keys, outcomes, found, strict=True):
            assert outcome is Read.MISS or buffer == payload_of(key)

    async def test_a_tier_goes_on_after_a_cancelled_call(self, tmp_path: Path) -> None:
        keys = [key_number(i) for i in range(50)]
        async with self.opened(tmp_path) as tier:
            for seed in range(8):
                payloads = views([payload_of(key) for key in keys])
                writing = asyncio.create_task(tier.write(keys, payloads))
                await cancelled_somewhere(writing, random.Random(seed))
            outcomes = await tier.write(keys, views([payload_of(key) for key in keys]))
            assert set(outcomes) <= {Write.STORED, Write.ALREADY_THERE}
            assert await tier.read(keys, blank(50)) == [Read.HIT] * 50

    async def test_one_key_under_many_hands_is_whole_or_missing(self, tmp_path: Path) -> None:
        key = key_number(1)
        seen: set[Read] = set()

        async def hand(tier: Tier, chance: random.Random) -> None:
            for _ in range(25):
                act = chance.choice(("read", "read", "write", "delete"))
                if act == "write":
                    (outcome,) = await tier.write([key], views([payload_of(key)]))
                    assert outcome in (Write.STORED, Write.ALREADY_THERE)
                elif act == "delete":
                    (gone,) = await tier.delete([key])
                    assert gone in (Delete.DELETED, Delete.MISSING)
                else:
                    (buffer,) = blank(1)
                    (found,) = await tier.read([key], [buffer])
                    assert found is Read.MISS or (found is Read.HIT and buffer == payload_of(key))
                    seen.add(found)

        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(self.opened(tmp_path))
            other = one
            if self.shareable:
                other = await stack.enter_async_context(self.opened(tmp_path))
            await asyncio.gather(
                *(hand(t, random.Random(i)) for i in range(4) for t in (one, other))
            )
        assert seen == {Read.HIT, Read.MISS}, "the hands never met"

    def test_it_behaves_as_a_dict_does(self, tmp_path: Path) -> None:
        runs = itertools.count()
        make_tier = self.make_tier

        class Machine(TierMachine):
            def __init__(self) -> None:
                where = tmp_path / f"run{next(runs)}"
                super().__init__(lambda: make_tier(where))

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=15, stateful_step_count=15, deadline=None, database=None
            ),
        )


async def cancelled_somewhere(task: asyncio.Task[Any], chance: random.Random) -> None:
    """Cancel `task` at a random point, once or twice, and wait until it has come back."""
    for _ in range(chance.choice((0, 1, 2, 5))):
        await asyncio.sleep(0)
    await asyncio.sleep(chance.choice((0, 0.0005, 0.002, 0.005)))
    task.cancel()
    if chance.random() < 0.5:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
