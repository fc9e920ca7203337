"""The core by scenario: what one request may have, what it is told of, and how it is counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from test_residency import DEADLINE, Rig, chain
from tiering.keys import chunk_key
from tiering.policy.admission import AdmissionPolicy, SeenOften
from tiering.policy.lru import LruPolicy
from tiering.residency.answers import Match, Place
from tiering.residency.core import Residency
from tiering.residency.plan import Cascade, Contains, Outcome, Promote, Touch, Verdict
from tiering.residency.state import PinKind

ABSENT, UNKNOWN, KNOWN, FILLING, READY = Place


def grouped(name: str, count: int, group: int) -> list[bytes]:
    return [chunk_key(f"{name}{i}".encode(), group) for i in range(count)]


# Places


def test_the_place_of_each_key_whatever_their_order() -> None:
    rig = Rig(8, tiers=2)
    rig.store("w", ready := chain("r", 1))
    rig.core.reserve("w", filling := chain("f", 1), 0)
    rig.on_disk_only(known := chain("k", 1))
    keys = [*chain("nowhere", 1), *known, *ready, *filling]
    rig.core.open("o")
    assert list(rig.core.places(keys, "o")) == [UNKNOWN, KNOWN, READY, FILLING]
    rig.core.ask("o", keys)
    steps = rig.steps(Contains)
    assert [step.keys for step in steps] == [(keys[0],)] * 2, "only what no place is known of"
    rig.answer(steps[:1], Verdict.MISS)
    assert rig.core.places(keys[:1], "o") == bytes([UNKNOWN]), "one tier has not said yet"
    rig.answer(steps[1:], Verdict.MISS)
    assert rig.core.places(keys[:1], "o") == bytes([ABSENT])
    assert rig.core.places(keys[:1]) == bytes([UNKNOWN]), "for another request"


def test_what_is_unknown_at_the_deadline_is_absent() -> None:
    rig, keys = Rig(8), chain("a", 2)
    rig.core.open("o")
    rig.core.ask("o", keys)
    rig.clock.advance(DEADLINE)
    assert list(rig.core.places(keys, "o")) == [ABSENT] * 2
    rig.core._known[0].add(keys[1:])
    assert list(rig.core.places(keys, "o")) == [ABSENT, KNOWN]


def test_a_failed_key_is_not_offered_from_that_tier_again() -> None:
    rig, keys = Rig(8, tiers=2), chain("a", 2)
    rig.core.open("o")
    rig.core.ask("o", keys)
    first, second = rig.steps(Contains)
    rig.answer([first], Verdict.HIT)
    rig.answer([second], Verdict.HIT, Verdict.MISS)
    assert rig.core.hold("o", keys)
    (step,) = rig.steps(Promote)
    rig.answer([step], Verdict.FAILED)
    rig.core.release("o")
    assert list(rig.core.places(keys, "o")) == [KNOWN, ABSENT], "the other tier has the first"


def test_a_request_is_restricted_to_some_tiers() -> None:
    rig, keys = Rig(8, tiers=2), chain("a", 2)
    rig.core._known[0].add(keys[:1])
    rig.core._known[1].add(keys)
    rig.core.open("o")
    rig.core.restrict("o", frozenset([0]))
    assert list(rig.core.places(keys, "o")) == [KNOWN, UNKNOWN]
    rig.core.ask("o", keys)
    (question,) = rig.steps(Contains)
    assert (question.tier, question.keys) == (0, (keys[1],))
    rig.answer([question], Verdict.MISS)
    assert rig.core.match(keys, "o") == Match(host=0, reach=1, is_open=False)
    rig.core.restrict("o", frozenset([1]))
    assert rig.core.hold("o", keys)
    assert [(step.tier, step.keys) for step in rig.steps(Promote)] == [(1, tuple(keys))]


def test_a_request_may_be_forbidden_all_tiers_but_the_host() -> None:
    rig, keys = Rig(8), chain("a", 3)
    rig.store("w", keys[:1])
    rig.on_disk_only(keys)
    rig.core.open("o")
    rig.core.restrict("o", frozenset())
    assert list(rig.core.places(keys, "o")) == [READY, ABSENT, ABSENT]
    rig.core.ask("o", keys)
    assert rig.steps(Contains) == []
    assert rig.core.hold("o", keys)
    assert rig.core.held("o") == 1


# Holds of keys that are no chain


def test_keys_of_two_groups_are_held_as_one_and_cut_where_one_is_lost() -> None:
    rig = Rig(16)
    keys = [*chain("a", 2), *chain("b", 3)]
    rig.on_disk_only(keys)
    rig.core.open("o")
    assert rig.core.hold("o", keys)
    steps = rig.steps(Promote)
    assert [step.keys for step in steps] == [tuple(keys)]
    rig.answer(steps, *[Verdict.HIT] * 3, Verdict.MISS, Verdict.HIT)
    assert rig.core.held("o") == 3
    assert len(rig.core.claim("o")) == 3


def test_room_for_is_what_a_hold_takes() -> None:
    rig = Rig(8)
    assert rig.core.room_limit == 7
    first, second = chain("a", 5), chain("b", 5)
    rig.on_disk_only(first)
    rig.on_disk_only(second)
    for owner in ("one", "two"):
        rig.core.open(owner)
    assert rig.core.room_for(first, "one") == 5
    assert rig.core.hold("one", first)
    assert rig.core.room_for(second, "two") == 2
    rig.clock.advance(DEADLINE)
    rig.core.ask("two", second)
    rig.clock.advance(DEADLINE)
    assert rig.core.room_for(second, "two") == 0, "there is no time left to promote any"
    assert rig.core.hold("two", second[:2])
    assert rig.core.budget.held == rig.core.index.slots.held(PinKind.LOAD) == 5


def test_a_resident_head_outlives_the_tail_that_was_promoted_behind_it() -> None:
    rig, keys = Rig(8), chain("a", 4)
    rig.store("w", keys[:2])
    rig.on_disk_only(keys)
    rig.core.open("o")
    assert rig.core.hold("o", keys)
    rig.answer(rig.steps(Promote), Verdict.HIT)
    rig.core.close("o")
    rig.core.close("w")
    rig.store("x", chain("x", 6))
    assert rig.core.match(keys).host == 2


# Admission


class Listed(AdmissionPolicy):
    """Admits what is on its list, and keeps what it was told."""

    def __init__(self, *wanted: bytes) -> None:
        self.wanted = wanted
        self.told: list[list[bytes]] = []

    def seen(self, keys: Sequence[bytes]) -> None:
        if keys:
            self.told.append(list(keys))

    def admits(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.wanted), len(keys))


class PickyRig(Rig):
    def __init__(self, slots: int, admission: AdmissionPolicy) -> None:
        super().__init__(slots)
        self.core = Residency(slots, 1, LruPolicy(slots), self.clock, DEADLINE, admission)


def test_a_request_reports_each_key_once() -> None:
    admission = Listed()
    rig, keys = PickyRig(8, admission), chain("a", 5)
    rig.core.match(keys)
    assert admission.told == [], "nobody asks"
    rig.core.open("r")
    rig.core.match(keys[1:3], "r")
    rig.core.places(keys[1:3], "r")
    rig.core.reserve("r", keys[:4], 0)
    rig.core.reserve("r", keys, 4)
    assert admission.told == [keys[1:3], [keys[0], keys[3]], keys[4:]]


def test_only_what_is_admitted_is_stored_and_the_rest_is_cared_for() -> None:
    keys = chain("a", 6)
    rig = PickyRig(8, Listed(*keys[:2], keys[3]))
    rig.core.open("r")
    reservation = rig.core.reserve("r", keys[:4], 0)
    assert (reservation.end, reservation.indices) == (4, [0, 1]), "no gap, and no second try"
    assert rig.core.counters["stores_skipped"] == 2
    rig.core.filled(reservation.slots)
    assert rig.core.reserve("r", keys, 4).slots == []
    assert rig.core.counters["stores_skipped"] == 4
    assert rig.core.counters["stores_refused"] == 0


def test_what_is_promised_to_a_peer_is_stored_whoever_has_asked_for_it() -> None:
    rig, keys = PickyRig(8, SeenOften(2, entries_max=100)), chain("a", 3)
    rig.core.open("r")
    rig.core.peers.promise("r")
    assert rig.core.reserve("r", keys, 0).indices == [0, 1, 2]
    assert rig.core.counters["stores_skipped"] == 0


def test_what_a_second_request_asks_for_is_stored() -> None:
    rig, keys = PickyRig(8, SeenOften(2, entries_max=100)), chain("a", 3)
    assert [rig.store(owner, keys) for owner in "rs"] == [3, 3]
    assert rig.core.match(keys).host == 3
    assert rig.core.counters["stores_skipped"] == 3


# Counting


def test_a_chunk_that_is_late_twice_is_counted_once() -> None:
    rig, keys = Rig(8), chain("a", 3)
    rig.on_disk_only(keys)
    rig.core.open("r")
    assert rig.core.hold("r", keys)
    (step,) = rig.steps(Promote)
    rig.clock.advance(DEADLINE)
    assert rig.core.held("r") == 0
    rig.core.apply([Outcome(step.id, (Verdict.LATE,) * 3, final=False)])
    assert rig.core.counters["promotions_late"] == 3
    rig.answer([step], Verdict.HIT, Verdict.MISS, Verdict.HIT)
    told = rig.core.counters
    assert (told["promotions_started"], told["promotions_late"]) == (3, 3)
    assert (told["promotions_succeeded"], told["promotions_missing"]) == (0, 0)
    assert rig.core.index.ready(keys).keys() == {keys[0], keys[2]}, "late bytes are good bytes"


def test_waiting_in_vain_for_another_requests_store_is_no_late_promotion() -> None:
    rig, keys = Rig(8), chain("a", 2)
    for owner in ("writer", "reader"):
        rig.core.open(owner)
    rig.core.reserve("writer", keys, 0)
    assert rig.core.hold("reader", keys)
    rig.clock.advance(DEADLINE)
    assert rig.core.held("reader") == 0
    assert rig.core.counters["promotions_late"] == 0


def test_what_was_offered_to_tiers_adds_up_after_a_reset() -> None:
    rig, keys = Rig(8), chain("a", 8)
    rig.core.open("r")
    rig.core.filled(rig.core.reserve("r", keys, 0).slots)
    assert (rig.core.counters["cascades_offered"], rig.core.writes_under_way) == (8, 8)
    rig.core.reset()
    assert (rig.core.counters["cascades_skipped"], rig.core.writes_under_way) == (1, 7)
    rig.answer(rig.steps(Cascade), Verdict.STORED)
    assert (rig.core.counters["cascades_stored"], rig.core.writes_under_way) == (7, 0)


def test_a_lookup_is_counted_once_for_each_request() -> None:
    rig = Rig(8)
    rig.core.open("r")
    for _ in range(2):
        rig.core.count_lookup("r", in_host=2, in_tiers=3, missed=1)
    told = rig.core.counters
    names = ("asked", "hit_host", "hit_tier", "missed")
    assert [told[f"chunks_{name}"] for name in names] == [6, 2, 3, 1]


# What tiers are told of use


def test_each_group_of_a_request_is_told_of_in_its_own_order() -> None:
    rig = Rig(16)
    first, second = grouped("a", 4, group=0), grouped("b", 2, group=1)
    rig.on_disk_only([*first, *second])
    rig.core.open("r")
    rig.core.used("r", first[:1])
    mixed = [first[0], second[0], first[1], second[1], first[2]]
    assert rig.core.hold("r", mixed)
    rig.core.used("r", first)
    rig.answer(rig.steps(Promote), Verdict.HIT)
    rig.core.close("r")
    touches = [step for step in rig.core.take_steps() if isinstance(step, Touch)]
    assert [step.keys for step in touches] == [tuple(first), tuple(second)]


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_a_long_prefix_is_told_of_when_all_of_it_is_written_in_any_order(answered: int) -> None:
    rig, keys = Rig(300), chain("a", 150)
    rig.core.open("r")
    rig.core.filled(rig.core.reserve("r", keys, 0).slots)
    steps = rig.steps(Cascade)
    assert [len(step.keys) for step in steps] == [64, 64, 22]
    rig.core.close("r")
    for step in [*steps[answered:], *steps[:answered]]:
        assert not [step for step in rig.core.take_steps() if isinstance(step, Touch)]
        rig.answer([step], Verdict.STORED)
    (touch,) = rig.core.take_steps()
    assert touch.keys == tuple(keys)


def test_a_chunk_stored_anew_while_its_old_write_is_under_way_is_on_its_way_until_both_ended() -> (
    None
):
    rig, keys = Rig(8), chain("a", 2)
    rig.core.open("r")
    rig.core.filled(rig.core.reserve("r", keys, 1).slots)
    (old,) = rig.steps(Cascade)
    rig.core.reset()
    rig.core.filled(rig.core.reserve("r", keys, 0).slots)
    (new,) = rig.steps(Cascade)
    rig.core.close("r")
    for step in (new, old):
        assert not rig.core.take_steps(), "nothing is said of a prefix on its way"
        rig.answer([step], Verdict.STORED)
    (touch,) = rig.core.take_steps()
    assert touch.keys == tuple(keys)
