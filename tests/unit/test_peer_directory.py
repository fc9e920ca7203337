"""Which peers are dialled, and which are left alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tiering.peers.addresses import Address
from tiering.peers.directory import REFUSED_SECONDS, Directory
from tiering.peers.messages import Ending
from tiering.peers.troubles import RETRY_SECONDS_MAX, RETRY_SECONDS_MIN

HERE = Address("10.0.0.1", 5710)
SIBLINGS = [Address("10.0.0.1", 5711 + rank) for rank in range(7)]
ELSEWHERE = Address("10.0.0.2", 5710)


@dataclass(eq=False)
class Dialled:
    used_at: float = 0.0
    is_idle: bool = True
    heard_at: float = 0.0
    hurried: list[float] = field(default_factory=list)

    def hurry(self, now: float) -> None:
        self.hurried.append(now)

    def heard_since(self, then: float) -> bool:
        return self.heard_at > then


def test_a_peer_is_found_by_its_address_while_it_is_there() -> None:
    directory: Directory[Dialled] = Directory(2)
    session = Dialled()
    directory.add(HERE, session)
    assert directory.get(HERE) is session
    assert directory.get(ELSEWHERE) is None
    assert list(directory) == [(HERE, session)]
    directory.ended(HERE, session, "closing", "it stops", 1.0)
    assert directory.get(HERE) is None
    assert len(directory) == 0


def test_an_old_session_does_not_take_the_new_one_with_it() -> None:
    directory: Directory[Dialled] = Directory(2)
    old, new = Dialled(), Dialled()
    directory.add(HERE, old)
    directory.ended(HERE, old, "unknown", "started anew", 1.0)
    assert directory.why_not(HERE, 1.0) is None, "it can be dialled in the same instant"
    directory.add(HERE, new)
    directory.ended(HERE, old, "unknown", "started anew", 1.0)
    assert directory.get(HERE) is new


def test_room_is_made_by_who_is_unused_for_longest() -> None:
    directory: Directory[Dialled] = Directory(3)
    busy, old, recent = Dialled(1.0, is_idle=False), Dialled(2.0), Dialled(3.0)
    for address, session in zip(SIBLINGS, (busy, recent, old), strict=False):
        assert directory.room() is True
        directory.add(address, session)
    assert directory.room() == (SIBLINGS[2], old)
    old.is_idle = recent.is_idle = False
    assert directory.room() is False


def test_who_does_not_answer_is_left_alone_for_longer_each_time() -> None:
    directory: Directory[Dialled] = Directory(1)
    now, waits = 0.0, []
    for _ in range(9):
        session = Dialled()
        directory.add(HERE, session)
        directory.ended(HERE, session, "failed", "no word", now)
        why = directory.why_not(HERE, now)
        assert why is not None
        assert why.startswith("no word; tried again in ")
        wait = RETRY_SECONDS_MIN
        while directory.why_not(HERE, now + wait) is not None:
            wait *= 2
        waits.append(wait)
        now += wait
    assert waits[:4] == [RETRY_SECONDS_MIN * 2**n for n in range(4)]
    assert max(waits) <= 2 * RETRY_SECONDS_MAX
    session = Dialled()
    directory.add(HERE, session)
    directory.opened(HERE)
    directory.ended(HERE, session, "failed", "no word", now)
    assert directory.why_not(HERE, now + RETRY_SECONDS_MIN) is None, "what is past is forgotten"


@pytest.mark.parametrize("ending", ["refused", "malformed"])
def test_who_refuses_us_is_left_alone_for_long(ending: Ending) -> None:
    directory: Directory[Dialled] = Directory(1)
    session = Dialled()
    directory.add(HERE, session)
    assert directory.ended(HERE, session, ending, "another model", 0.0) == []
    assert (
        directory.why_not(HERE, REFUSED_SECONDS - 1) == "another model; tried again in 1.0 seconds"
    )
    assert directory.why_not(HERE, REFUSED_SECONDS) is None


def test_siblings_of_who_fell_silent_are_suspect_until_they_are_heard_of() -> None:
    directory: Directory[Dialled] = Directory(10)
    lost, other = Dialled(), Dialled()
    siblings = [Dialled() for _ in SIBLINGS]
    directory.add(HERE, lost)
    directory.add(ELSEWHERE, other)
    for address, session in zip(SIBLINGS, siblings, strict=True):
        directory.add(address, session)
    assert directory.ended(HERE, lost, "failed", "no word for 4 seconds", 10.0) == siblings
    assert [session.hurried for session in siblings] == [[10.0]] * 7
    assert other.hurried == []
    for address in SIBLINGS:
        why = directory.why_not(address, 10.5)
        assert why is not None
        assert why.startswith("another engine of its host has fallen silent")
    assert directory.why_not(ELSEWHERE, 10.5) is None
    siblings[0].heard_at = 11.0
    assert directory.why_not(SIBLINGS[0], 11.5) is None
    assert directory.why_not(SIBLINGS[1], 11.5) is not None
    directory.opened(SIBLINGS[1])
    assert directory.why_not(SIBLINGS[1], 11.5) is None


def test_who_is_suspect_already_is_not_hurried_again() -> None:
    directory: Directory[Dialled] = Directory(10)
    sessions = [Dialled() for _ in SIBLINGS]
    for address, session in zip(SIBLINGS, sessions, strict=True):
        directory.add(address, session)
    directory.ended(SIBLINGS[0], sessions[0], "failed", "no word", 1.0)
    assert directory.ended(SIBLINGS[1], sessions[1], "failed", "no word", 2.0) == []
    assert [session.hurried for session in sessions[2:]] == [[1.0]] * 5


@pytest.mark.parametrize("ending", ["closing", "unknown", "refused", "malformed"])
def test_other_ends_make_nobody_suspect(ending: Ending) -> None:
    directory: Directory[Dialled] = Directory(10)
    lost, sibling = Dialled(), Dialled()
    directory.add(HERE, lost)
    directory.add(SIBLINGS[0], sibling)
    assert directory.ended(HERE, lost, ending, "so it is", 1.0) == []
    assert directory.why_not(SIBLINGS[0], 1.0) is None
    assert sibling.hurried == []


def test_who_says_himself_that_it_is_over_makes_nobody_suspect() -> None:
    directory: Directory[Dialled] = Directory(10)
    full, sibling = Dialled(), Dialled()
    directory.add(HERE, full)
    directory.add(SIBLINGS[0], sibling)
    assert directory.ended(HERE, full, "failed", "no room", 1.0, is_told=True) == []
    assert directory.why_not(HERE, 1.0) == "no room; tried again in 0.5 seconds"
    assert directory.why_not(SIBLINGS[0], 1.0) is None
    assert sibling.hurried == []
