"""The conformance suite of transports, for pytest: subclass `TransportContract` and name a maker.

For authors of transports; needs pytest and pytest-asyncio (auto mode). Every row says by its
content what it is, so a wrong one cannot pass for a right one. What kills and stops does so to a
process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import random
import re
import threading
from abc import ABC
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tiering.errors import ClosedError, PeerError
from tiering.peers.messages import Offer, Reference
from tiering.peers.transports.base import Failed, Link, Moved, Outcome, Served, Transport
from tiering.testing.producer import SESSION, TOKEN, Producer
from tiering.testing.rowspace import RowSpace, holds

HANG_SECONDS = 60.0
KIB, MIB = 1 << 10, 1 << 20


def buffers(count: int, row_bytes: int) -> list[memoryview]:
    return [memoryview(bytearray(row_bytes)) for _ in range(count)]


def own_threads() -> set[str]:
    """Threads but for those of the loop's default executor, which are not the transport's."""
    return {each.name for each in threading.enumerate() if not each.name.startswith("asyncio_")}


def descriptors() -> Counter[str]:
    """What this process has open, by what it is."""
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[re.sub(r":\[\d+\]", "", os.readlink(path))] += 1
        except FileNotFoundError:
            continue  # gone since
    return found


def mapped_rows() -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count("kv-tiering-rows")


class TransportContract(ABC):
    """`maker` is `module:function` of what makes a transport of `Served`, here and in other
    processes; one that gives up what is quiet for two seconds: a busy machine may be for one."""

    maker: str

    reads_from_the_stopped: bool
    """Whether rows of an engine that is stopped can still be read: its memory is at hand."""

    checks_tokens: bool
    """Whether who serves can tell who has a session's token, and end its links. Where it cannot,
    what an offer says is as good as a token."""

    def make(self, served: Served) -> Transport:
        module, _, function = self.maker.partition(":")
        made = getattr(importlib.import_module(module), function)(served)
        assert isinstance(made, Transport)
        return made

    @asynccontextmanager
    async def opened(self, rows: int, row_bytes: int) -> AsyncIterator[tuple[Transport, RowSpace]]:
        """One engine, which has admitted SESSION with TOKEN."""
        space = RowSpace(rows, row_bytes)
        transport = self.make(space.served)
        await transport.open()
        try:
            transport.admit(SESSION, TOKEN)
            yield transport, space
        finally:
            async with asyncio.timeout(HANG_SECONDS):
                await transport.close()
            space.close()

    @asynccontextmanager
    async def linked(self, rows: int, row_bytes: int) -> AsyncIterator[tuple[Link, RowSpace]]:
        """A link of one engine to another, and what the other serves."""
        async with (
            self.opened(rows, row_bytes) as (theirs, space),
            self.opened(1, row_bytes) as (ours, _),
        ):
            link = await ours.connect(theirs.offer(), SESSION, TOKEN)
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    yield link, space
            finally:
                await link.close()

    @asynccontextmanager
    async def linked_to(self, producer: Producer, row_bytes: int) -> AsyncIterator[Link]:
        async with self.opened(1, row_bytes) as (ours, _):
            link = await ours.connect(producer.offer, SESSION, TOKEN)
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    yield link
            finally:
                await link.close()

    @staticmethod
    async def until_failed(link: Link, reference: Reference, row_bytes: int) -> None:
        """Read until the link has noticed that its other end is gone."""
        (into,) = buffers(1, row_bytes)
        for _ in range(1000):
            (outcome,) = await link.read([reference], [into])
            if isinstance(outcome, Failed):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the link still reads")

    @staticmethod
    def require_right(
        references: Sequence[Reference],
        into: Sequence[memoryview],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Every HIT is the row that was asked for."""
        for reference, buffer, outcome in zip(references, into, outcomes, strict=True):
            if outcome is Moved.HIT:
                assert holds(reference, buffer), reference

    # Right bytes

    @pytest.mark.parametrize("row_bytes", [1, 4096, 64 * KIB, 256 * KIB, MIB + 4096, 4 * MIB])
    @pytest.mark.parametrize("count", [1, 2, 9])
    async def test_rows_come_whole(self, row_bytes: int, count: int) -> None:
        async with self.linked(count, row_bytes) as (link, space):
            order = random.Random(count).sample(range(count), count)
            references, into = list(map(space.reference, order)), buffers(count, row_bytes)
            outcomes = await link.read(references, into)
            assert outcomes == [Moved.HIT] * count
            self.require_right(references, into, outcomes)

    async def test_a_large_batch_comes_whole(self) -> None:
        async with self.linked(48, MIB) as (link, space):
            references, into = list(map(space.reference, range(48))), buffers(48, MIB)
            outcomes = await link.read(references, into)
            assert outcomes == [Moved.HIT] * 48
            self.require_right(references, into, outcomes)

    async def test_many_small_rows_come_whole(self) -> None:
        async with self.linked(5000, 512) as (link, space):
            references, into = list(map(space.reference, range(5000))), buffers(5000, 512)
            outcomes = await link.read(references, into)
            assert outcomes == [Moved.HIT] * 5000
            self.require_right(references, into, outcomes)

    async def test_the_same_row_comes_as_often_as_it_is_asked_for(self) -> None:
        async with self.linked(2, 4096) as (link, space):
            references, into = [space.reference(1)] * 3, buffers(3, 4096)
            assert await link.read(references, into) == [Moved.HIT] * 3
            self.require_right(references, into, [Moved.HIT] * 3)

    async def test_no_rows_are_no_trouble(self) -> None:
        async with self.linked(1, 4096) as (link, _):
            assert await link.read([], []) == []

    async def test_reads_at_the_same_time_do_not_mix(self) -> None:
        async with self.linked(64, 64 * KIB) as (link, space):
            chance = random.Random(0)

            async def read() -> None:
                for _ in range(5):
                    count = chance.randrange(1, 9)
                    references = [space.reference(chance.randrange(64)) for _ in range(count)]
                    into = buffers(count, 64 * KIB)
                    outcomes = await link.read(references, into)
                    assert outcomes == [Moved.HIT] * count
                    self.require_right(references, into, outcomes)

            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(read())

    # Slots that were given away

    async def test_a_row_of_another_generation_is_stale_and_its_neighbours_come(self) -> None:
        async with self.linked(4, 64 * KIB) as (link, space):
            before = list(map(space.reference, range(4)))
            space.refill(1)
            later = Reference(3, before[3].generation + 1)
            missing = Reference(4, 1)
            far = Reference(2**32 - 1, 2**64 - 1)
            references = [before[0], before[1], before[2], later, missing, far, before[3]]
            into = buffers(7, 64 * KIB)
            outcomes = await link.read(references, into)
            hit, stale = Moved.HIT, Moved.STALE
            assert outcomes == [hit, stale, hit, stale, stale, stale, hit]
            self.require_right(references, into, outcomes)

    async def test_a_slot_that_is_given_away_meanwhile_is_never_taken_for_its_old_chunk(
        self,
    ) -> None:
        """The rows are large, and given away at random moments: most of them while they move."""
        chance = random.Random(2)
        async with self.linked(2, 4 * MIB) as (link, space):
            known = list(map(space.reference, range(2)))
            seen: Counter[Outcome] = Counter()
            ended = threading.Event()

            def reuse() -> None:
                while not ended.wait(chance.choice((0.001, 0.003, 0.01, 0.1, 0.3))):
                    for slot in range(2):
                        known[slot] = space.refill(slot)

            writer = threading.Thread(target=reuse)
            writer.start()
            try:
                into = buffers(2, 4 * MIB)
                for _ in range(2000):
                    references = list(known)
                    outcomes = await link.read(references, into)
                    self.require_right(references, into, outcomes)
                    seen.update(outcomes)
                    if seen[Moved.STALE] >= 20 and seen[Moved.HIT]:
                        break
            finally:
                ended.set()
                writer.join()
            assert set(seen) == {Moved.HIT, Moved.STALE}

    def test_a_process_that_has_served_ends_well(self) -> None:
        """What a transport has loaded does not bring the interpreter down at its exit."""
        with Producer(self.maker, 4, MIB) as producer:
            assert producer.process.stdin is not None
            producer.process.stdin.close()
            assert producer.process.wait(60) == 0

    # Peers that are gone, stopped, or do not know us

    async def test_a_peer_that_is_killed_costs_its_rows_and_no_wrong_byte(self) -> None:
        with Producer(self.maker, 64, MIB) as producer:
            async with self.linked_to(producer, MIB) as link:
                references, into = [Reference(slot, 1) for slot in range(64)], buffers(64, MIB)
                assert await link.read(references[:1], into[:1]) == [Moved.HIT]
                reading = asyncio.gather(*(link.read(references, into) for _ in range(3)))
                await asyncio.sleep(0.005)
                producer.kill()
                for outcomes in await reading:
                    self.require_right(references, into, outcomes)
                await self.until_failed(link, references[0], MIB)

    async def test_a_peer_that_is_stopped_is_given_up(self) -> None:
        with Producer(self.maker, 64, MIB) as producer:
            async with self.linked_to(producer, MIB) as link:
                references, into = [Reference(slot, 1) for slot in range(64)], buffers(64, MIB)
                assert await link.read(references[:1], into[:1]) == [Moved.HIT]
                producer.stop()
                outcomes = await link.read(references, into)
                self.require_right(references, into, outcomes)
                expected = {Moved.HIT} if self.reads_from_the_stopped else {Failed}
                assert {each if each is Moved.HIT else type(each) for each in outcomes} == expected
                snapshot = [bytes(buffer) for buffer in into]
                producer.go_on()
                await asyncio.sleep(0.3)
                assert [bytes(buffer) for buffer in into] == snapshot

    async def test_a_stopped_peer_cannot_be_linked_to(self) -> None:
        with Producer(self.maker, 1, 4096) as producer:
            producer.stop()
            async with self.opened(1, 4096) as (ours, _), asyncio.timeout(HANG_SECONDS):
                with pytest.raises(PeerError):
                    await ours.connect(producer.offer, SESSION, TOKEN)

    async def test_who_has_another_token_or_session_is_not_let_in(self) -> None:
        async with (
            self.opened(1, 4096) as (theirs, _),
            self.opened(1, 4096) as (ours, _),
            asyncio.timeout(HANG_SECONDS),
        ):
            for session, token in ((SESSION, bytes(32)), (bytes(16), TOKEN), (SESSION, b"")):
                if self.checks_tokens:
                    with pytest.raises(PeerError):
                        await ours.connect(theirs.offer(), session, token)
            await (await ours.connect(theirs.offer(), SESSION, TOKEN)).close()

    async def test_a_session_that_is_dismissed_loses_its_links_and_no_other_does(self) -> None:
        other = bytes(16)
        async with (
            self.opened(1, 4096) as (theirs, space),
            self.opened(1, 4096) as (ours, _),
            asyncio.timeout(HANG_SECONDS),
        ):
            if not self.checks_tokens:
                theirs.dismiss(SESSION)
                theirs.dismiss(SESSION)
                return
            theirs.admit(other, bytes(32))
            dismissed = await ours.connect(theirs.offer(), SESSION, TOKEN)
            kept = await ours.connect(theirs.offer(), other, bytes(32))
            theirs.dismiss(SESSION)
            (into,) = buffers(1, 4096)
            await self.until_failed(dismissed, space.reference(0), 4096)
            assert await kept.read([space.reference(0)], [into]) == [Moved.HIT]
            with pytest.raises(PeerError):
                await ours.connect(theirs.offer(), SESSION, TOKEN)
            theirs.dismiss(SESSION)
            await dismissed.close()
            await kept.close()

    async def test_an_offer_that_leads_nowhere_is_an_error_that_says_so(self) -> None:
        async with self.opened(1, 4096) as (ours, _), asyncio.timeout(HANG_SECONDS):
            for address in ("", "nowhere", "127.0.0.1:1", "\0" * 200):
                details = ours.offer().details if self.checks_tokens else address.encode()
                offer = Offer(ours.name, address, details)
                with pytest.raises(PeerError):
                    await ours.connect(offer, SESSION, TOKEN)

    async def test_rows_of_another_size_are_no_peers(self) -> None:
        async with (
            self.opened(1, 8192) as (theirs, _),
            self.opened(1, 4096) as (ours, _),
            asyncio.timeout(HANG_SECONDS),
        ):
            with pytest.raises(PeerError, match="8192"):
                await ours.connect(theirs.offer(), SESSION, TOKEN)

    # Buffers, and ends

    async def test_a_cancelled_read_touches_no_buffer_afterwards(self) -> None:
        chance = random.Random(1)
        async with self.linked(32, MIB) as (link, space):
            references = list(map(space.reference, range(32)))
            for _ in range(12):
                into = buffers(32, MIB)
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(link.read(references, into))
                    await asyncio.sleep(chance.choice((0, 0, 0.0005, 0.002, 0.005)))
                    task.cancel()
                    await asyncio.wait([task])
                snapshot = [bytes(buffer) for buffer in into]
                await asyncio.sleep(0.02)
                assert [bytes(buffer) for buffer in into] == snapshot
            outcomes = await link.read(references, into)
            assert outcomes == [Moved.HIT] * 32
            self.require_right(references, into, outcomes)

    async def test_buffers_that_do_not_fit_are_the_callers_fault(self) -> None:
        async with self.linked(2, 4096) as (link, space):
            references = [space.reference(0), space.reference(1)]
            for wrong in (
                buffers(1, 4096),
                buffers(2, 4095),
                [memoryview(bytes(4096)), *buffers(1, 4096)],
            ):
                with pytest.raises(ValueError, match="buffer"):
                    await link.read(references, wrong)

    async def test_a_closed_link_reads_nothing(self) -> None:
        async with self.linked(8, MIB) as (link, space):
            references, into = list(map(space.reference, range(8))), buffers(8, MIB)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(link.read(references, into))
                await asyncio.sleep(0)
                await link.close()
                snapshot = [bytes(buffer) for buffer in into]
            self.require_right(references, into, reading.result())
            assert [bytes(buffer) for buffer in into] == snapshot
            with pytest.raises(ClosedError):
                await link.read(references, into)
            await link.close()

    async def test_nothing_is_left_behind(self) -> None:
        async with self.linked(1, MIB):
            pass  # what a library keeps for good
        gc.collect()
        threads, files, mappings = own_threads(), descriptors(), mapped_rows()
        for _ in range(2):
            async with self.linked(40, MIB) as (link, space):
                references, into = list(map(space.reference, range(40))), buffers(40, MIB)
                await link.read(references, into)
                assert descriptors() != files
            del link, space
        gc.collect()
        assert own_threads() == threads
        now = descriptors()
        assert now == files, now - files
        assert mapped_rows() == mappings

    async def test_what_is_not_open_serves_and_links_nothing(self) -> None:
        space = RowSpace(1, 4096)
        transport = self.make(space.served)
        with pytest.raises(ClosedError):
            transport.admit(SESSION, TOKEN)
        await transport.open()
        offer = transport.offer()
        await transport.close()
        await transport.close()
        with pytest.raises(ClosedError):
            await transport.connect(offer, SESSION, TOKEN)
        space.close()
