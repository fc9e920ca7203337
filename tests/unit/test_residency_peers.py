"""The core by scenario: chunks that a request may have from a peer that it names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from test_residency import DEADLINE, chain
from tiering.engine import Engine
from tiering.events import HOST, NoEvents
from tiering.policy.lru import LruPolicy
from tiering.residency.answers import Match, Place
from tiering.residency.core import Residency
from tiering.residency.plan import (
    Cascade,
    Contains,
    Drop,
    Hide,
    Keep,
    News,
    Outcome,
    Promote,
    Show,
    Step,
    Touch,
    Verdict,
)
from tiering.testing.clocks import ManualClock

DISK, PEERS = 0, 1
ABSENT, UNKNOWN, KNOWN, FILLING, READY = Place


class Rig:
    """A core over a disk and a tier of peers, and what it hands out."""

    def __init__(self, slots: int = 8) -> None:
        self.clock = ManualClock()
        policy = LruPolicy(slots)
        self.core = Residency(slots, 2, policy, self.clock, DEADLINE, peers=[PEERS])

    def steps(self) -> list[Step]:
        return self.core.take_steps()

    def answer(self, step: Contains | Promote | Cascade, *verdicts: Verdict) -> None:
        told = verdicts if len(verdicts) == len(step.keys) else verdicts * len(step.keys)
        self.core.apply([Outcome(step.id, told)])


def test_only_who_names_a_peer_asks_him_and_knows_what_he_said() -> None:
    rig, keys = Rig(), chain("a", 3)
    rig.core.open("r")
    rig.core.open("other")
    rig.core.peers.name("r", PEERS, b"p")
    rig.core.ask("r", keys)
    disk, peer = rig.steps()
    assert isinstance(disk, Contains)
    assert (disk.tier, disk.peer) == (DISK, b"")
    assert isinstance(peer, Contains)
    assert (peer.tier, peer.peer, peer.keys) == (PEERS, b"p", tuple(keys))
    rig.answer(disk, Verdict.MISS)
    rig.answer(peer, Verdict.HIT, Verdict.HIT, Verdict.MISS)
    assert rig.core.places(keys, "r") == bytes([KNOWN, KNOWN, ABSENT])
    assert rig.core.match(keys, "r") == Match(0, 2, False)
    assert rig.core.places(keys, "other") == bytes([UNKNOWN] * 3), "the disk may have got them"
    rig.core.ask("other", keys)
    (question,) = rig.steps()
    assert question.tier == DISK


def test_what_a_peer_holds_comes_from_him_and_what_the_disk_holds_from_there() -> None:
    rig, keys = Rig(), chain("a", 3)
    rig.core._known[DISK].add(keys[:1])
    rig.core.open("r")
    rig.core.peers.name("r", PEERS, b"p")
    rig.core.ask("r", keys)
    disk, peer = rig.steps()
    rig.answer(disk, Verdict.MISS)
    rig.answer(peer, Verdict.HIT)
    assert rig.core.hold("r", keys)
    disk_reads, peer_reads = rig.steps()
    assert isinstance(disk_reads, Promote)
    assert (disk_reads.tier, disk_reads.keys, disk_reads.peer) == (DISK, tuple(keys[:1]), b"")
    assert isinstance(peer_reads, Promote)
    assert (peer_reads.tier, peer_reads.keys, peer_reads.peer) == (PEERS, tuple(keys[1:]), b"p")
    rig.answer(disk_reads, Verdict.HIT)
    rig.answer(peer_reads, Verdict.HIT)
    assert rig.core.held("r") == 3
    told = {event.tier for event in rig.core.take_events() if hasattr(event, "tier")}
    assert told == {HOST, DISK}, "what a peer holds is for him to announce"


def test_a_peer_taken_at_his_word_is_not_asked_and_what_he_lacks_is_not_tried_again() -> None:
    rig, keys = Rig(), chain("a", 3)
    rig.core.open("r")
    rig.core.peers.name("r", PEERS, b"p", has_all=True)
    assert rig.core.match(keys, "r") == Match(0, 3, False)
    assert rig.core.hold("r", keys)
    (reads,) = rig.steps()
    assert isinstance(reads, Promote)
    rig.answer(reads, Verdict.HIT, Verdict.MISS, Verdict.HIT)
    assert rig.core.held("r") == 1
    rig.core.release("r")
    assert rig.core.places(keys, "r") == bytes([READY, UNKNOWN, READY]), "the disk was not asked"
    rig.core.ask("r", keys)
    (question,) = rig.steps()
    assert (question.tier, question.keys) == (DISK, (keys[1],))


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.DAMAGED, Verdict.BUSY])
def test_a_peer_that_fails_costs_the_rest_of_the_prefix_only(verdict: Verdict) -> None:
    rig, keys = Rig(), chain("a", 2)
    rig.core.open("r")
    rig.core.peers.name("r", PEERS, b"p", has_all=True)
    assert rig.core.hold("r", keys)
    (reads,) = rig.steps()
    assert isinstance(reads, Promote)
    rig.answer(reads, Verdict.HIT, verdict)
    assert rig.core.held("r") == 1
    rig.core.close("r")
    assert rig.core.is_settled


def test_nothing_is_written_to_peers_nor_told_to_them_nor_removed_there() -> None:
    rig, keys = Rig(), chain("a", 2)
    rig.core.open("r")
    rig.core.peers.name("r", PEERS, b"p", has_all=True)
    rig.core.filled(rig.core.reserve("r", keys, 0).slots)
    (write,) = rig.steps()
    assert isinstance(write, Cascade)
    rig.answer(write, Verdict.STORED)
    rig.core.close("r")
    (touch,) = rig.steps()
    assert isinstance(touch, Touch)
    rig.core.drop(keys)
    (drop,) = rig.steps()
    assert isinstance(drop, Drop)
    assert {write.tier, touch.tier, drop.tier} == {DISK}


def test_a_reset_forgets_what_peers_hold() -> None:
    rig, keys = Rig(), chain("a", 2)
    rig.core.open("r")
    rig.core.peers.name("r", PEERS, b"p", has_all=True)
    rig.core.reset()
    assert rig.core.match(keys, "r") == Match(0, 0, True)


def test_only_a_tier_of_peers_has_any() -> None:
    rig = Rig()
    rig.core.open("r")
    with pytest.raises(AssertionError, match="tier 0 is not one of peers"):
        rig.core.peers.name("r", DISK, b"p")


class Recording:
    """A portal that carries nothing out."""

    restarts = 0

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def submit(self, steps: Sequence[Step]) -> None:
        self.steps += steps

    def drain(self) -> list[News]:
        return []

    def take(self, *kinds: type[Step]) -> list[Step]:
        """Those of these kinds that have come since the last call."""
        taken, self.steps = self.steps, []
        return [step for step in taken if isinstance(step, kinds)]


class Shown:
    """An engine whose steps for peers are looked at. Chunks `a` are in slots of its own."""

    def __init__(self, slots: int = 8) -> None:
        self.rig, self.portal = Rig(slots), Recording()
        self.core = self.rig.core
        self.engine = Engine(self.core, self.portal, NoEvents())
        self.core.open("r")

    def store(self, keys: Sequence[bytes]) -> list[int]:
        slots = self.core.reserve("r", keys, 0).slots
        self.core.filled(slots)
        return slots


def test_what_is_kept_was_shown_before() -> None:
    shown, keys = Shown(), chain("a", 2)
    shown.store(keys)
    shown.core.peers.keep("request", [*keys, b"never stored"])
    shown.engine.pump()
    show, keep = shown.portal.take(Show, Keep)
    assert isinstance(show, Show)
    assert isinstance(keep, Keep)
    assert (keep.keys, keep.kv_request_id) == (tuple(keys), "request")
    assert set(show.keys) == set(keys)


def test_what_is_kept_stays_until_a_peer_has_come() -> None:
    shown, keys = Shown(4), chain("a", 2)
    shown.store(keys)
    shown.core.peers.keep("request", keys)
    shown.engine.pump()
    (keep,) = shown.portal.take(Keep)
    assert isinstance(keep, Keep)
    assert shown.core.budget.held == 2
    shown.store(chain("b", 4))
    assert shown.core.places(keys, "r") == bytes([READY, READY])
    shown.core.apply([Outcome(keep.id, (Verdict.HIT, Verdict.MISS))])
    assert shown.core.budget.held == 0


def test_what_nobody_comes_for_leaves_room_for_loads() -> None:
    """Of 16 slots loads may hold 14, and of those what is kept may hold 7: the oldest gives way."""
    shown, chains = Shown(16), [chain(name, 3) for name in "abcd"]
    for keys in chains:
        shown.store(keys)
        shown.core.peers.keep(f"request {keys[0]!r}", keys)
    shown.engine.pump()
    first, second, for_first, third, for_second, fourth = shown.portal.take(Keep)
    assert isinstance(first, Keep)
    assert isinstance(for_first, Keep)
    assert (first.keys, for_first.keys) == (tuple(chains[0]), ())
    assert for_first.kv_request_id == first.kv_request_id
    assert isinstance(for_second, Keep)
    assert for_second.keys == ()
    assert shown.core.budget.held == 6
    shown.core.open("load")
    assert shown.core.hold("load", chains[0])
    assert shown.core.held("load") == 3, "what gave way is still there while there is room for it"
    for step in (first, second, for_first, third, for_second, fourth):
        assert isinstance(step, Keep)
        shown.core.apply([Outcome(step.id, (Verdict.MISS,) * len(step.keys))])
    assert shown.core.budget.held == 3


def test_what_requests_share_is_kept_once() -> None:
    shown, common = Shown(16), chain("a", 5)
    shown.store(common)
    for number in range(8):
        shown.core.peers.keep(f"request {number}", common)
    shown.engine.pump()
    assert [len(step.keys) for step in shown.portal.take(Keep) if isinstance(step, Keep)] == [5] * 8
    shown.core.peers.keep("another", common[:2])
    shown.store(more := chain("b", 3))
    shown.core.peers.keep("more", more)
    shown.engine.pump()
    told = [len(step.keys) for step in shown.portal.take(Keep) if isinstance(step, Keep)]
    assert told == [2, *[0] * 8, 3], "one of two chunks of it is within the limit, all others go"


def test_one_request_is_kept_as_far_as_it_may() -> None:
    shown, keys = Shown(16), chain("a", 12)
    shown.store(keys)
    shown.core.peers.keep("request", keys)
    shown.engine.pump()
    (keep,) = shown.portal.take(Keep)
    assert isinstance(keep, Keep)
    assert keep.keys == tuple(keys[:7])


def test_of_a_chain_with_gaps_all_that_is_there_is_kept() -> None:
    shown, keys = Shown(), chain("a", 4)
    shown.store(keys)
    shown.core.drop(keys[1:2])
    shown.core.peers.keep("request", keys)
    shown.engine.pump()
    (keep,) = shown.portal.take(Keep)
    assert isinstance(keep, Keep)
    assert keep.keys == (keys[0], keys[2], keys[3])


def test_a_reset_hides_everything_and_lets_go_of_what_is_kept() -> None:
    shown, keys = Shown(), chain("a", 2)
    shown.store(keys)
    shown.core.peers.keep("request", keys)
    shown.engine.pump()
    (keep,) = shown.portal.take(Keep)
    shown.core.reset()
    shown.engine.pump()
    assert () in [step.keys for step in shown.portal.take(Hide) if isinstance(step, Hide)]
    assert shown.core.budget.held == 0
    shown.core.apply([Outcome(keep.id, (Verdict.FAILED,) * 2)])
    shown.store(chain("b", 1))
    shown.engine.pump()
    (show,) = shown.portal.take(Show)
    assert isinstance(show, Show)
    assert show.keys == tuple(chain("b", 1))


def test_tiers_made_anew_are_told_of_all_that_is_there() -> None:
    shown, keys = Shown(), chain("a", 3)
    slots = shown.store(keys)
    shown.core.drop(keys[:1])
    shown.engine.pump()
    shown.portal.take()
    shown.portal.restarts = 1
    shown.engine.pump()
    (show,) = shown.portal.take(Show)
    assert isinstance(show, Show)
    assert dict(zip(show.keys, show.slots, strict=True)) == dict(
        zip(keys[1:], slots[1:], strict=True)
    )
    shown.engine.pump()
    assert not shown.portal.take(Show)
