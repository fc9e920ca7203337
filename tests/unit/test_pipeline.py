"""The shell over scripted tiers: deadlines, failures, flights and the end of it all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from tiering.errors import ClosedError, DamagedChunk, TierError
from tiering.pipeline.inflight import Inflight
from tiering.pipeline.transfers import Transfers
from tiering.residency.plan import (
    Cascade,
    Contains,
    Drop,
    Found,
    News,
    Outcome,
    Promote,
    Removed,
    Step,
    Survey,
    Verdict,
)
from tiering.testing.examples import CHUNK_BYTES, key_number, payload_of
from tiering.testing.memory import MemoryTier, checked
from tiering.tiers.base import Failed, Read, ReadOutcome, Write

A, B, C = (key_number(i) for i in range(3))
SOON, NEVER = 0.01, 60.0


async def turns(count: int = 20) -> None:
    """Let everything that can go on go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await turns(1)


class Shell:
    """Transfers over eight slots and two tiers; `outcomes` in the order of their coming."""

    def __init__(self) -> None:
        self.tiers = [MemoryTier(name="one"), MemoryTier(name="two")]
        self.slots = [bytearray(CHUNK_BYTES) for _ in range(8)]
        self.news: list[News] = []
        self.transfers = Transfers(
            self.tiers, lambda slot: memoryview(self.slots[slot]), self.news.append
        )

    @property
    def outcomes(self) -> list[Outcome]:
        return [each for each in self.news if isinstance(each, Outcome)]

    def keep(self, *keys: bytes) -> None:
        self.tiers[0].chunks.update({key: checked(payload_of(key)) for key in keys})

    def hold_in_slots(self, *keys: bytes) -> None:
        for slot, key in enumerate(keys):
            self.slots[slot][:] = payload_of(key)

    async def result(self, *steps: Step) -> list[Outcome]:
        """The outcomes that come of `steps`, once each has its final one."""
        before = len(self.outcomes)
        self.transfers.start(steps)
        await until(lambda: sum(o.final for o in self.outcomes[before:]) == len(steps))
        return self.outcomes[before:]


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    shell = Shell()
    async with shell.transfers:
        yield shell
        await shell.transfers.drain(0)  # A gate that a failed test left closed holds up nobody.


async def test_steps_move_chunks_and_say_what_became_of_each(shell: Shell) -> None:
    shell.hold_in_slots(A, B)
    shell.keep(B)
    (outcome,) = await shell.result(Cascade(1, 0, (A, B), (0, 1)))
    assert outcome == Outcome(1, (Verdict.STORED, Verdict.ALREADY_THERE))
    (outcome,) = await shell.result(Contains(2, 0, (A, C), NEVER))
    assert outcome == Outcome(2, (Verdict.HIT, Verdict.MISS))
    (outcome,) = await shell.result(Promote(3, 0, (C, A), (4, 5), NEVER))
    assert outcome == Outcome(3, (Verdict.MISS, Verdict.HIT))
    assert shell.slots[5] == payload_of(A)
    (outcome,) = await shell.result(Drop(4, 0, (A, C)))
    assert outcome == Outcome(4, (Verdict.DELETED, Verdict.MISS))
    assert set(shell.tiers[0].chunks) == {B}
    assert not shell.tiers[1].chunks


async def test_each_answer_of_a_tier_has_its_verdict(shell: Shell) -> None:
    error = TierError("one", A, "no such luck")
    damage = DamagedChunk("one", A, "a flipped bit")
    reads = {Read.BUSY: Verdict.BUSY, Failed(error): Verdict.FAILED}
    writes = {Write.FULL: Verdict.FULL, Write.REFUSED: Verdict.REFUSED}
    for answer, verdict in (reads | {Failed(damage): Verdict.DAMAGED}).items():
        shell.tiers[0].reads[A] = answer
        (outcome,) = await shell.result(Promote(1, 0, (A, B), (0, 1), NEVER))
        assert outcome.verdicts == (verdict, Verdict.MISS)
    for written, verdict in (writes | {Failed(error): Verdict.FAILED}).items():
        shell.tiers[0].writes[A] = written
        (outcome,) = await shell.result(Cascade(1, 0, (A,), (0,)))
        assert outcome.verdicts == (verdict,)


async def test_a_promotion_is_late_at_its_deadline_and_final_when_it_ends(shell: Shell) -> None:
    shell.keep(A, B)
    shell.tiers[0].hold("read")
    shell.transfers.start([Promote(7, 0, (A, B), (2, 3), SOON)])
    await until(lambda: shell.outcomes)
    late = Outcome(7, (Verdict.LATE, Verdict.LATE), final=False)
    assert shell.outcomes == [late]
    assert shell.slots[2] == bytes(CHUNK_BYTES)
    shell.tiers[0].let_go("read")
    await until(lambda: len(shell.outcomes) == 2)
    assert shell.outcomes == [late, Outcome(7, (Verdict.HIT, Verdict.HIT))]
    assert shell.slots[2] == payload_of(A)  # Until the final outcome the slots are the tier's.


async def test_after_the_final_outcome_no_slot_is_touched(shell: Shell) -> None:
    shell.keep(A)
    shell.tiers[0].hold("read")
    shell.transfers.start([Promote(1, 0, (A,), (0,), SOON)])
    await until(lambda: shell.outcomes)
    assert await shell.transfers.drain(0) == 1
    await turns()
    assert shell.outcomes[1:] == [Outcome(1, (Verdict.FAILED,))]
    shell.slots[0][:] = payload_of(B)
    shell.tiers[0].let_go("read")
    await turns()
    assert shell.slots[0] == payload_of(B)


async def test_a_question_without_an_answer_is_late_and_given_up(shell: Shell) -> None:
    shell.tiers[0].hold("contains")
    (outcome,) = await shell.result(Contains(1, 0, (A, B), SOON))
    assert outcome == Outcome(1, (Verdict.LATE, Verdict.LATE))
    shell.tiers[0].let_go("contains")
    await turns()
    assert len(shell.outcomes) == 1


async def test_a_write_has_no_deadline_and_holds_up_nobody_else(shell: Shell) -> None:
    shell.hold_in_slots(A)
    shell.tiers[0].hold("write")
    shell.transfers.start([Cascade(1, 0, (A,), (0,)), Cascade(2, 1, (A,), (0,))])
    await until(lambda: shell.outcomes)
    assert shell.outcomes == [Outcome(2, (Verdict.STORED,))]
    shell.tiers[0].let_go("write")
    await until(lambda: len(shell.outcomes) == 2)


@pytest.mark.parametrize("operation", ["contains", "read", "write", "delete"])
@pytest.mark.parametrize("error", [TierError("one", None, "gone"), ClosedError("one is closed")])
async def test_what_a_tier_raises_is_a_verdict_for_each_key_and_told_once(
    shell: Shell, caplog: pytest.LogCaptureFixture, operation: str, error: Exception
) -> None:
    steps: dict[str, Step] = {
        "contains": Contains(1, 0, (A, B), NEVER),
        "read": Promote(1, 0, (A, B), (0, 1), NEVER),
        "write": Cascade(1, 0, (A, B), (0, 1)),
        "delete": Drop(1, 0, (A, B)),
    }
    shell.tiers[0].errors[operation] = error
    with caplog.at_level(logging.DEBUG, "tiering"):
        for _ in range(3):
            (outcome,) = await shell.result(steps[operation])
            assert outcome == Outcome(1, (Verdict.FAILED, Verdict.FAILED))
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "DEBUG", "DEBUG"]
    assert str(error) in caplog.text
    del shell.tiers[0].errors[operation]
    (outcome,) = await shell.result(Contains(2, 0, (A,), NEVER))
    assert outcome == Outcome(2, (Verdict.MISS,))


async def test_each_tier_and_each_kind_of_failure_is_told_by_itself(
    shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [
        TierError("one", A, "first"),
        TierError("one", B, "same kind"),
        DamagedChunk("one", A, "other kind"),
        TierError("two", A, "other tier"),
    ]
    for failure in failures:
        shell.tiers[0].reads[A] = Failed(failure)
        await shell.result(Promote(1, 0, (A,), (0,), NEVER))
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 3
    assert "same kind" not in " ".join(warned)


async def test_one_flight_at_a_time_for_a_key_in_the_order_asked(shell: Shell) -> None:
    shell.hold_in_slots(A, B)
    tier = shell.tiers[0]
    tier.hold("write")
    shell.transfers.start(
        [
            Cascade(1, 0, (A, B), (0, 1)),
            Drop(2, 0, (B, C)),
            Contains(3, 0, (A,), NEVER),
            Promote(4, 0, (A,), (5,), NEVER),
            Promote(5, 0, (C,), (6,), NEVER),
        ]
    )
    await turns()
    assert tier.calls[1:] == [("write", (A, B)), ("read", (C,))]
    tier.let_go("write")
    await until(lambda: len(shell.outcomes) == 5)
    verdicts = {o.id: o.verdicts for o in shell.outcomes}
    assert verdicts[2] == (Verdict.DELETED, Verdict.MISS)  # After the write, not before it.
    assert verdicts[3] == (Verdict.HIT,)  # Asked after the write had ended.
    assert verdicts[4] == (Verdict.HIT,)
    assert shell.slots[5] == payload_of(A)
    assert B not in tier.chunks


async def test_a_tiers_keys_are_not_in_the_way_of_another_tiers(shell: Shell) -> None:
    shell.hold_in_slots(A)
    shell.tiers[0].hold("write")
    shell.transfers.start([Cascade(1, 0, (A,), (0,)), Drop(2, 1, (A,))])
    await until(lambda: shell.outcomes)
    assert shell.outcomes[0].id == 2
    shell.tiers[0].let_go("write")


async def test_flights_over_crossing_keys_all_land() -> None:
    inflight = Inflight()
    aloft: set[bytes] = set()

    async def fly(keys: tuple[bytes, ...]) -> None:
        async with inflight.flight(0, keys):
            assert aloft.isdisjoint(keys)
            aloft.update(keys)
            await turns(3)
            aloft.difference_update(keys)

    async with asyncio.timeout(60):
        crossing = [(A, B), (B, C), (C, A), (A,), (B, A), (A, B, C)] * 5
        await asyncio.gather(*map(fly, crossing))
    assert len(inflight) == 0


async def test_a_flight_that_is_cancelled_or_fails_is_not_waited_for_ever() -> None:
    inflight = Inflight()
    gate = asyncio.Event()

    async def fly() -> None:
        async with inflight.flight(0, (A,)):
            await gate.wait()

    flights = [asyncio.create_task(fly()) for _ in range(3)]
    await turns()
    flights[1].cancel()  # It waits for the first.
    await turns()
    flights[0].cancel()  # It is aloft.
    await turns()
    gate.set()
    await asyncio.wait(flights)
    assert [flight.cancelled() for flight in flights] == [True, True, False]
    assert len(inflight) == 0


async def test_drain_waits_for_what_ends_and_cancels_what_does_not(shell: Shell) -> None:
    assert await shell.transfers.drain(NEVER) == 0
    shell.hold_in_slots(A, B)
    shell.tiers[0].hold("write")
    shell.transfers.start([Cascade(1, 0, (A,), (0,)), Cascade(2, 1, (B,), (1,))])
    assert await shell.transfers.drain(SOON) == 1
    await turns()
    assert shell.outcomes == [Outcome(2, (Verdict.STORED,)), Outcome(1, (Verdict.FAILED,))]
    assert shell.tiers[0].chunks == {}


async def test_leaving_waits_for_what_is_under_way_and_closes_every_tier() -> None:
    shell = Shell()
    shell.hold_in_slots(A)
    async with shell.transfers:
        shell.transfers.start([Cascade(1, 0, (A,), (0,))])
    assert shell.outcomes == [Outcome(1, (Verdict.STORED,))]
    assert not any(tier.is_open for tier in shell.tiers)
    with pytest.raises(ClosedError, match="closed"):
        shell.transfers.start([Drop(2, 0, (A,))])


async def test_if_a_tier_cannot_be_opened_those_that_were_are_closed() -> None:
    shell = Shell()
    error = TierError("two", None, "cannot be opened")
    shell.tiers[1].errors["open"] = error
    with pytest.raises(TierError) as raised:
        async with shell.transfers:
            pytest.fail("it was entered")
    assert raised.value is error
    assert not shell.tiers[0].is_open
    assert [operation for operation, _ in shell.tiers[0].calls] == ["open", "close"]
    with pytest.raises(ClosedError):
        shell.transfers.start([])


class RaisingTier(MemoryTier):
    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        raise KeyError("a bug")


class ForgetfulTier(MemoryTier):
    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        return (await super().contains(keys))[1:]


@pytest.mark.parametrize(
    ("broken", "error"), [(RaisingTier, KeyError), (ForgetfulTier, AssertionError)]
)
async def test_a_bug_ends_the_shell_instead_of_hiding(
    broken: type[MemoryTier], error: type[Exception]
) -> None:
    shell = Shell()
    shell.tiers[0] = broken()

    async def ask() -> None:
        async with shell.transfers:
            shell.transfers.start([Contains(1, 0, (A,), NEVER)])
            await asyncio.sleep(NEVER)

    with pytest.raises(BaseExceptionGroup) as raised:
        await ask()
    assert raised.group_contains(error)
    assert shell.outcomes == [Outcome(1, (Verdict.FAILED,))]
    assert not any(tier.is_open for tier in shell.tiers)


# What tiers say unasked, and surveys


async def test_an_eviction_is_told_of_at_once(shell: Shell) -> None:
    shell.keep(A, B)
    shell.tiers[0].evict([B, C])
    assert shell.news == [Removed(0, (B,))]


@pytest.mark.parametrize("operation", ["write", "read"])
async def test_an_eviction_before_a_step_reports_is_told_of_again(
    shell: Shell, operation: str
) -> None:
    """Else the step's outcome, which comes later, would be believed."""
    shell.hold_in_slots(A, B)
    step: Step = Cascade(1, 0, (A, B), (0, 1))
    if operation == "read":
        step = Promote(1, 0, (A, B), (0, 1), NEVER)
        shell.keep(A, B)

    class Racing(MemoryTier):
        async def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Any]:
            outcomes = await super().write(keys, buffers)
            self.evict([B])
            return list(outcomes)

        async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Any]:
            outcomes = await super().read(keys, buffers)
            self.evict([B])
            return list(outcomes)

    shell.tiers[0].__class__ = Racing
    (outcome,) = await shell.result(step)
    assert set(outcome.verdicts) <= {Verdict.STORED, Verdict.HIT}
    await until(lambda: len(shell.news) == 3)
    assert shell.news == [Removed(0, (B,)), outcome, Removed(0, (B,))]


async def test_what_was_evicted_and_stored_anew_within_one_step_is_there(shell: Shell) -> None:
    """Else nobody would count on it before the next survey."""
    shell.hold_in_slots(A, B)
    shell.keep(B)

    class Renewing(MemoryTier):
        async def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Any]:
            self.evict([B])
            return list(await super().write(keys, buffers))

    shell.tiers[0].__class__ = Renewing
    (outcome,) = await shell.result(Cascade(1, 0, (A, B), (0, 1)))
    assert outcome.verdicts == (Verdict.STORED, Verdict.STORED)
    await shell.result(Survey(2, 0))
    assert shell.news[:2] == [Removed(0, (B,)), outcome]
    assert isinstance(shell.news[2], Found)


async def test_a_survey_names_all_that_is_there(shell: Shell) -> None:
    shell.keep(A, B)
    (outcome,) = await shell.result(Survey(1, 0))
    assert outcome == Outcome(1, ())
    assert shell.news == [Found(0, (A, B)), outcome]


async def test_what_goes_while_a_batch_is_on_its_way_is_not_found(shell: Shell) -> None:
    shell.keep(A, B)

    class Slow(MemoryTier):
        async def scan(self) -> AsyncIterator[list[bytes]]:
            listed = list(self.chunks)
            self.evict([A])
            yield listed

    shell.tiers[0].__class__ = Slow
    await shell.result(Survey(1, 0))
    assert shell.news[:2] == [Removed(0, (A,)), Found(0, (B,))]


async def test_a_survey_that_fails_says_so(shell: Shell) -> None:
    class Broken(MemoryTier):
        async def scan(self) -> AsyncIterator[list[bytes]]:
            yield [A]
            raise TierError(self.name, None, "cannot be listed")

    shell.tiers[0].__class__ = Broken
    (outcome,) = await shell.result(Survey(1, 0))
    assert outcome == Outcome(1, (Verdict.FAILED,))


async def test_nobody_waits_for_a_survey_at_the_end(shell: Shell) -> None:
    class Endless(MemoryTier):
        async def scan(self) -> AsyncIterator[list[bytes]]:
            while True:
                yield [A]

    shell.tiers[0].__class__ = Endless
    shell.transfers.start([Survey(1, 0)])
    await until(lambda: shell.news)
    assert await shell.transfers.drain(NEVER) == 0
    await until(lambda: Outcome(1, (Verdict.FAILED,)) in shell.news)
