"""The core by scenario: what is matched, held, stored, given up, and in which steps."""

from __future__ import annotations

import pytest

from tiering.events import HOST, ChunksRemoved, ChunksStored, SurveyBegan, SurveyEnded
from tiering.policy.lru import LruPolicy
from tiering.residency.answers import Match
from tiering.residency.core import Residency
from tiering.residency.plan import (
    Cascade,
    Contains,
    Drop,
    Found,
    Outcome,
    Promote,
    Removed,
    Step,
    Survey,
    Touch,
    Verdict,
    failed,
)
from tiering.residency.state import SlotState
from tiering.residency.surveys import SURVEY_SECONDS
from tiering.testing.clocks import ManualClock

DEADLINE = 30.0


class Rig:
    """A core whose steps are answered by the test."""

    def __init__(self, slots: int, tiers: int = 1) -> None:
        self.clock = ManualClock()
        self.core = Residency(slots, tiers, LruPolicy(slots), self.clock, DEADLINE)

    def steps(self, kind: type[Step]) -> list[Step]:
        steps = [
            step
            for step in self.core.take_steps()
            if kind is Touch or not isinstance(step, Touch)  # which nobody waits for
        ]
        assert all(isinstance(step, kind) for step in steps), steps
        return steps

    def answer(self, steps: list[Step], *verdicts: Verdict) -> None:
        """The same verdict for every key, or one each."""
        for step in steps:
            told = verdicts if len(verdicts) == len(step.keys) else verdicts * len(step.keys)
            self.core.apply([Outcome(step.id, told)])

    def store(self, owner: str, keys: list[bytes], start: int = 0) -> int:
        """Store what fits, cascaded at once; how far it got."""
        self.core.open(owner)
        reservation = self.core.reserve(owner, keys, start)
        self.core.filled(reservation.slots)
        while steps := self.steps(Cascade):
            self.answer(steps, Verdict.STORED)
        return reservation.end

    def on_disk_only(self, keys: list[bytes]) -> None:
        """The tier's answer to the next lookups of `keys`."""
        self.core.open("scout")
        self.core.ask("scout", keys)
        self.answer(self.steps(Contains), Verdict.HIT)
        self.core.close("scout")

    @property
    def pins(self) -> int:
        slots = self.core.index.slots
        return int(slots.load_pins.sum() + slots.write_pins.sum())


def chain(name: str, count: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(count)]


def test_stored_chunks_match_and_are_written_through() -> None:
    rig, keys = Rig(8), chain("a", 3)
    rig.core.open("r")
    reservation = rig.core.reserve("r", keys, 0)
    assert (reservation.end, reservation.indices) == (3, [0, 1, 2])
    assert rig.core.match(keys) == Match(host=0, reach=3, is_open=False), "being written"
    rig.core.filled(reservation.slots)
    assert rig.core.match(keys).host == 3
    (step,) = rig.steps(Cascade)
    assert (step.keys, step.slots) == (tuple(keys), tuple(reservation.slots))
    assert rig.pins == 3
    rig.answer([step], Verdict.STORED)
    assert rig.pins == 0
    assert rig.core.take_events() == [
        ChunksStored(HOST, tuple(keys)),
        ChunksStored(0, tuple(keys)),
    ]


def test_a_match_changes_nothing() -> None:
    rig, keys = Rig(4), chain("a", 6)
    rig.on_disk_only(keys)
    before = repr(rig.core)
    for _ in range(3):
        assert rig.core.match(keys, "nobody") == Match(host=0, reach=6, is_open=False)
    assert repr(rig.core) == before
    assert rig.core.take_steps() == []


def test_an_unknown_prefix_is_asked_for_once_in_one_batch_a_tier() -> None:
    rig, keys = Rig(4, tiers=2), chain("a", 3)
    rig.core.open("r")
    assert rig.core.match(keys, "r").is_open
    rig.core.ask("r", keys)
    rig.core.ask("r", keys)
    steps = rig.steps(Contains)
    assert [(step.tier, step.keys) for step in steps] == [(0, tuple(keys)), (1, tuple(keys))]
    assert rig.core.is_asking("r")
    rig.answer(steps[:1], Verdict.HIT, Verdict.MISS, Verdict.MISS)
    rig.answer(steps[1:], Verdict.MISS, Verdict.HIT, Verdict.MISS)
    assert not rig.core.is_asking("r")
    assert rig.core.match(keys, "r") == Match(host=0, reach=2, is_open=False)


def test_a_prefix_is_promoted_from_where_it_is() -> None:
    rig, keys = Rig(8, tiers=2), chain("a", 2)
    rig.core.open("r")
    rig.core.ask("r", keys)
    first, second = rig.steps(Contains)
    rig.answer([first], Verdict.HIT, Verdict.MISS)
    rig.answer([second], Verdict.MISS, Verdict.HIT)
    assert rig.core.hold("r", keys)
    steps = rig.steps(Promote)
    assert [(s.tier, s.keys) for s in steps] == [(0, (keys[0],)), (1, (keys[1],))]
    assert rig.core.held("r") is None
    rig.answer(steps, Verdict.HIT)
    assert rig.core.held("r") == 2
    assert rig.core.claim("r") == [s.slots[0] for s in steps]
    rig.core.close("r")
    assert rig.pins == 0


def test_a_prefix_longer_than_the_host_tier_is_cut_to_what_fits() -> None:
    rig, keys = Rig(8), chain("a", 20)
    rig.on_disk_only(keys)
    rig.core.open("r")
    assert rig.core.hold("r", keys), "alone: never deferred"
    steps = rig.steps(Promote)
    promoted = [key for step in steps for key in step.keys]
    assert promoted == keys[:7], "all but the reserve for stores"
    rig.answer(steps, Verdict.HIT)
    assert rig.core.held("r") == 7
    assert rig.store("other", chain("b", 1)) == 1, "running stores find room beside it"


def test_who_finds_the_room_taken_waits_but_not_for_ever() -> None:
    rig = Rig(8)
    first, second = chain("a", 7), chain("b", 7)
    rig.on_disk_only(first)
    rig.on_disk_only(second)
    for owner in ("one", "two"):
        rig.core.open(owner)
    assert rig.core.hold("one", first)
    assert not rig.core.hold("two", second)
    rig.clock.advance(DEADLINE)
    assert rig.core.hold("two", second), "at the deadline it is cut to what there is"
    assert rig.core.held("two") == 0
    assert rig.core.counters["loads_cut"] == 1


def test_room_comes_back_when_a_load_ends() -> None:
    rig = Rig(8)
    rig.on_disk_only(chain("a", 7))
    rig.on_disk_only(chain("b", 7))
    rig.core.open("one")
    rig.core.open("two")
    assert rig.core.hold("one", chain("a", 7))
    rig.answer(rig.steps(Promote), Verdict.HIT)
    rig.core.claim("one")
    rig.core.close("one")
    assert rig.core.hold("two", chain("b", 7))
    rig.answer(rig.steps(Promote), Verdict.HIT)
    assert rig.core.held("two") == 7


def test_two_requests_for_one_prefix_share_one_flight() -> None:
    rig, keys = Rig(8), chain("a", 4)
    rig.on_disk_only(keys)
    for owner in ("one", "two"):
        rig.core.open(owner)
        assert rig.core.hold(owner, keys)
    steps = rig.steps(Promote)
    assert len(steps) == 1
    rig.core.close("one")
    rig.answer(steps, Verdict.HIT)
    assert rig.core.held("two") == 4
    rig.core.close("two")
    assert rig.pins == 0


@pytest.mark.parametrize("verdict", [Verdict.MISS, Verdict.DAMAGED, Verdict.FAILED, Verdict.BUSY])
def test_a_key_that_fails_cuts_the_load_there_and_is_not_tried_again(verdict: Verdict) -> None:
    rig, keys = Rig(8), chain("a", 4)
    rig.on_disk_only(keys)
    rig.core.open("r")
    assert rig.core.hold("r", keys)
    steps = rig.steps(Promote)
    rig.answer(steps, Verdict.HIT, Verdict.HIT, verdict, Verdict.HIT)
    assert rig.core.held("r") == 2
    rig.core.release("r")
    assert rig.pins == 0
    assert rig.core.match(keys, "r") == Match(host=2, reach=2, is_open=False)
    assert rig.core.index.ready([keys[3]]), "what did arrive stays"
    # The next request may try again unless the tier itself said that the chunk is gone.
    known = verdict in (Verdict.FAILED, Verdict.BUSY)
    assert rig.core.match(keys) == Match(host=2, reach=4 if known else 2, is_open=not known)


def test_a_late_promotion_is_a_miss_and_its_slot_stays_with_the_reader() -> None:
    rig, keys = Rig(8), chain("a", 2)
    rig.on_disk_only(keys)
    rig.core.open("r")
    assert rig.core.hold("r", keys)
    (step,) = rig.steps(Promote)
    assert step.deadline_seconds == DEADLINE
    rig.core.apply([Outcome(step.id, (Verdict.LATE, Verdict.LATE), final=False)])
    assert rig.core.held("r") == 0
    rig.core.close("r")
    assert rig.core.index.slots.census()[SlotState.FILLING] == 2
    rig.answer([step], Verdict.HIT)
    assert rig.core.match(keys).host == 2, "late bytes are good bytes"


def test_a_shell_that_says_nothing_cannot_hold_a_request_up() -> None:
    rig, keys = Rig(8), chain("a", 2)
    rig.core.open("r")
    rig.core.ask("r", keys)
    rig.clock.advance(DEADLINE)
    assert not rig.core.is_asking("r")
    assert rig.core.match(keys, "r") == Match(host=0, reach=0, is_open=False)
    rig.core.release("r")
    rig.on_disk_only(keys)
    assert rig.core.hold("r", keys)
    assert rig.core.held("r") is None
    rig.clock.advance(DEADLINE)
    assert rig.core.held("r") == 0
    assert rig.core.counters["promotions_late"] == 2


def test_a_host_tier_smaller_than_a_request_stores_what_fits() -> None:
    rig = Rig(4, tiers=0)
    assert rig.store("r", chain("a", 10)) == 4
    assert rig.core.match(chain("a", 10)).host == 4, "the head; none of it went for a tail"
    assert rig.store("r", chain("a", 10), start=4) == 4
    assert rig.core.counters["stores_refused"] == 2


def test_with_a_disk_below_it_a_small_host_tier_passes_everything_on() -> None:
    rig, keys = Rig(4), chain("a", 10)
    at = 0
    while at < 10:
        at = rig.store("r", keys, start=at)
    assert rig.core.counters["cascades_stored"] == 10
    assert rig.core.match(keys) == Match(host=2, reach=10, is_open=False)


def test_a_refused_store_leaves_no_gap() -> None:
    rig, keys = Rig(4, tiers=0), chain("a", 6)
    rig.core.open("r")
    reservation = rig.core.reserve("r", keys, 0)
    assert reservation.end == 4
    again = rig.core.reserve("r", keys, reservation.end)
    assert (again.end, again.slots) == (4, [])
    rig.core.filled(reservation.slots)
    rig.core.close("r")
    rig.core.open("s")
    other = rig.core.reserve("s", chain("b", 2), 0)
    assert len(other.slots) == 2, "the next request evicts the first one's tail"
    assert rig.core.match(keys).host == 2


def test_chunks_that_are_there_are_not_stored_twice() -> None:
    rig, keys = Rig(8), chain("a", 4)
    rig.store("r", keys[:2])
    rig.core.open("s")
    reservation = rig.core.reserve("s", keys, 0)
    assert reservation.indices == [2, 3]
    rig.core.unfilled(reservation.slots)
    assert rig.core.match(keys).host == 2
    assert rig.core.reserve("s", keys, 0).indices == [2, 3], "a failed store may be tried again"


def test_writes_leave_the_reserve_and_the_rest_follows() -> None:
    rig, keys = Rig(8), chain("a", 8)
    rig.core.open("r")
    rig.core.filled(rig.core.reserve("r", keys, 0).slots)
    seen: list[bytes] = []
    while steps := rig.steps(Cascade):
        assert rig.pins <= 7
        seen += [key for step in steps for key in step.keys]
        rig.answer(steps, Verdict.STORED)
    assert seen == keys


@pytest.mark.parametrize("verdict", [Verdict.FULL, Verdict.REFUSED, Verdict.FAILED])
def test_a_tier_that_refuses_is_not_believed_to_hold(verdict: Verdict) -> None:
    rig, keys = Rig(8), chain("a", 1)
    rig.core.open("r")
    rig.core.filled(rig.core.reserve("r", keys, 0).slots)
    rig.answer(rig.steps(Cascade), verdict)
    assert rig.pins == 0
    rig.core.drop(keys)
    assert rig.core.match(keys).reach == 0


def test_drop_takes_a_chunk_out_of_every_tier() -> None:
    rig, keys = Rig(8), chain("a", 2)
    rig.store("r", keys)
    rig.core.take_events()
    rig.core.drop(keys[1:])
    steps = rig.steps(Drop)
    assert [step.keys for step in steps] == [(keys[1],)]
    rig.answer(steps, Verdict.DELETED)
    assert rig.core.match(keys).reach == 1
    assert rig.core.take_events() == [
        ChunksRemoved(HOST, (keys[1],)),
        ChunksRemoved(0, (keys[1],)),
    ]


def test_after_a_reset_nothing_of_before_comes_up_again() -> None:
    rig = Rig(8)
    stored, filling, promoting = chain("a", 2), chain("b", 2), chain("c", 2)
    rig.store("r", stored)
    rig.on_disk_only(promoting)
    rig.core.open("s")
    reserved = rig.core.reserve("s", filling, 0)
    assert rig.core.hold("s", promoting)
    rig.core.open("t")
    assert rig.core.hold("t", stored)
    copying = rig.core.claim("t")
    rig.core.reset()
    rig.core.filled(reserved.slots)
    rig.answer(rig.steps(Promote), Verdict.HIT)
    for keys in (stored, filling, promoting):
        assert rig.core.match(keys).reach == 0
    states = [SlotState(rig.core.index.slots.states[slot]) for slot in copying]
    assert states == [SlotState.DOOMED] * 2, "a copy under way keeps its source"
    for owner in "rst":
        rig.core.close(owner)
    assert rig.core.index.slots.free == 8
    assert rig.core.steps_out == 0


def test_storing_a_tail_keeps_its_head_as_recent() -> None:
    rig, keys = Rig(6, tiers=0), chain("a", 4)
    rig.store("r", keys[:2])
    rig.store("other", chain("b", 2))
    rig.store("s", keys)
    rig.store("t", chain("c", 2))
    assert rig.core.match(keys).host == 4, "its head was used with it"
    assert rig.core.match(chain("b", 2)).host == 0


def test_a_chain_goes_on_from_the_host_tier_to_another_and_back() -> None:
    rig, keys = Rig(8), chain("a", 4)
    rig.on_disk_only(keys)
    rig.core.open("r")
    assert rig.core.hold("r", keys)
    rig.answer(rig.steps(Promote), Verdict.HIT, Verdict.HIT, Verdict.MISS, Verdict.HIT)
    assert rig.core.match(keys) == Match(host=2, reach=2, is_open=True)
    rig.on_disk_only([keys[2]])
    rig.core._known[0].discard(keys[3:])
    assert rig.core.match(keys) == Match(host=2, reach=4, is_open=False)


def test_writes_that_fail_are_counted_and_what_is_being_filled_is_not_ready() -> None:
    rig, keys = Rig(8), chain("a", 3)
    rig.core.open("r")
    rig.core.filled(rig.core.reserve("r", keys, 0).slots)
    rig.answer(rig.steps(Cascade), Verdict.STORED, Verdict.FAILED, Verdict.REFUSED)
    told = rig.core.counters.snapshot()
    stored, failed, refused = (told[f"cascades_{what}"] for what in ("stored", "failed", "refused"))
    assert (stored, failed, refused) == (1, 1, 1)
    rig.core.reserve("r", chain("b", 1), 0)
    assert rig.core.index.ready([*keys, *chain("b", 1)]).keys() == set(keys)


def test_turns_are_needed_while_writes_wait_and_move_but_not_for_a_hung_tier() -> None:
    rig, keys = Rig(8), chain("a", 8)
    rig.core.open("r")
    assert not rig.core.needs_turns
    rig.core.filled(rig.core.reserve("r", keys, 0).slots)
    assert rig.core.needs_turns, "one of eight is over the limit"
    rig.clock.advance(DEADLINE)
    assert not rig.core.needs_turns, "nothing was heard of the tier"
    (first,) = rig.steps(Cascade)
    rig.answer([first], Verdict.STORED)
    assert not rig.core.needs_turns
    assert [step.keys for step in rig.steps(Cascade)] == [(keys[7],)]


# What tiers are told of use


def touched(rig: Rig) -> list[tuple[int, tuple[bytes, ...]]]:
    return [(s.tier, s.keys) for s in rig.core.take_steps() if isinstance(s, Touch)]


def test_a_prefix_that_is_always_in_the_host_tier_is_used_in_the_other_tiers_too() -> None:
    rig, keys = Rig(slots=8), chain("a", 4)
    rig.store("writer", keys)
    rig.core.close("writer")
    assert touched(rig) == [(0, tuple(keys))]
    rig.core.open("reader")
    assert rig.core.hold("reader", keys[:3])
    rig.core.claim("reader")
    assert touched(rig) == []
    rig.core.close("reader")
    assert touched(rig) == [(0, tuple(keys[:3]))]


def test_a_prefix_is_told_of_once_its_last_chunk_is_written() -> None:
    rig, keys = Rig(slots=16, tiers=2), chain("a", 4)
    rig.core.open("writer")
    rig.core.filled(rig.core.reserve("writer", keys, 0).slots)
    fast, slow = rig.steps(Cascade)
    rig.core.close("writer")
    rig.answer([fast], Verdict.STORED)
    assert touched(rig) == [], "its tail would become more recent than its head"
    rig.answer([slow], Verdict.STORED, Verdict.FAILED, Verdict.STORED, Verdict.STORED)
    assert touched(rig) == [(0, tuple(keys)), (1, (keys[0], keys[2], keys[3]))]


@pytest.mark.parametrize("verdict", [Verdict.REFUSED, Verdict.FULL, Verdict.FAILED])
def test_what_a_tier_did_not_take_is_offered_again_when_it_was_used(verdict: Verdict) -> None:
    rig, keys = Rig(slots=8), chain("a", 4)
    rig.core.open("writer")
    rig.core.filled(rig.core.reserve("writer", keys, 0).slots)
    rig.answer(rig.steps(Cascade), Verdict.STORED, verdict, Verdict.STORED, verdict)
    assert rig.steps(Cascade) == [], "not by itself: the tier may be full for long"
    rig.core.close("writer")
    (again,) = rig.steps(Cascade)
    assert again.keys == (keys[1], keys[3])
    rig.core.open("reader")
    rig.core.used("reader", keys)
    rig.core.close("reader")
    assert rig.steps(Cascade) == [], "it is on its way"
    rig.answer([again], Verdict.STORED)
    rig.core.open("reader")
    rig.core.used("reader", keys)
    rig.core.close("reader")
    assert rig.steps(Cascade) == []


# What tiers say unasked, and surveys


def test_what_a_tier_evicts_is_not_believed_any_more() -> None:
    rig, keys = Rig(8), chain("a", 3)
    rig.on_disk_only(keys)
    rig.core.apply([Removed(0, tuple(keys[1:]))])
    assert rig.core.match(keys).reach == 1
    assert rig.core.take_events() == [ChunksRemoved(0, tuple(keys[1:]))]


def test_a_survey_is_made_at_start_and_from_time_to_time() -> None:
    clock = ManualClock()
    core = Residency(4, 2, LruPolicy(4), clock, 10.0, surveyed=[1])
    keys = tuple(chain("a", 2))
    for _ in range(2):
        (step,) = core.take_steps()
        assert step == Survey(step.id, 1)
        assert core.take_steps() == []
        core.apply([Found(1, keys), Outcome(step.id, ())])
        assert core.take_events() == [SurveyBegan(1), ChunksStored(1, keys), SurveyEnded(1)]
        assert core.match(list(keys)).reach == 2, "known without asking"
        clock.advance(SURVEY_SECONDS - 1)
        assert core.take_steps() == []
        clock.advance(1)
    (step,) = core.take_steps()
    assert core.is_settled, "nobody waits for it"
    core.apply([failed(step)])
    assert core.take_events() == [SurveyBegan(1), SurveyEnded(1, is_whole=False)]


def test_a_promotion_says_what_the_tier_had_and_what_not() -> None:
    rig, keys = Rig(8), chain("a", 3)
    rig.on_disk_only(keys)
    rig.core.open("r")
    assert rig.core.hold("r", keys)
    (step,) = rig.steps(Promote)
    rig.core.apply([Outcome(step.id, (Verdict.HIT, Verdict.DAMAGED, Verdict.FAILED))])
    assert rig.core.take_events() == [
        ChunksStored(HOST, (keys[0],)),
        ChunksStored(0, (keys[0],)),
        ChunksRemoved(0, (keys[1],)),
    ]
