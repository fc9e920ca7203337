"""ARC: against a plain model of it, and that it does what it is chosen for."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.policy.arc import ArcPolicy
from tiering.policy.base import EvictionPolicy
from tiering.policy.lru import LruPolicy

CAPACITY = 6


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def shown(keys: list[bytes]) -> str:
    return b"".join(keys).decode()


def evict(policy: EvictionPolicy, count: int) -> list[bytes]:
    victims = policy.pick(count, lambda keys: [True] * len(keys))
    policy.remove(victims)
    return victims


class Model:
    """One key at a time, and everything looked for by going through all there is."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.once: dict[bytes, tuple[int, int]] = {}  # access, and turn within all
        self.often: dict[bytes, tuple[int, int]] = {}
        self.ghosts: list[tuple[str, bytes, int]] = []  # from which list, key, access
        self.target = 0.0
        self.turn = 0

    def place(self, where: dict[bytes, tuple[int, int]], key: bytes, access: int) -> None:
        self.turn += 1
        where[key] = (access, self.turn)

    def add(self, keys: list[bytes], access: int) -> None:
        count = {of: sum(1 for ghost in self.ghosts if ghost[0] == of) for of in ("once", "often")}
        hits = [of for of, key, by in self.ghosts if key in keys and by != access]
        for of, other, sign in (("once", "often", 1), ("often", "once", -1)):
            if of in hits:
                step = max(1.0, count[other] / count[of])
                self.target += sign * hits.count(of) * step
        self.target = min(max(self.target, 0), self.capacity)
        heads_are_often = all(by != access for by, _ in self.once.values())
        for key in keys:
            was = [(of, by) for of, ghost, by in self.ghosts if ghost == key]
            is_again = bool(was) and (was[0][0] == "often" or was[0][1] != access)
            heads_are_often = heads_are_often and is_again
            self.place(self.often if heads_are_often else self.once, key, access)
            self.ghosts = [ghost for ghost in self.ghosts if ghost[1] != key]
        self.trim()

    def touch(self, keys: list[bytes], access: int) -> None:
        if any(by == access for by, _ in self.once.values()):
            for key in keys:
                where = self.once if key in self.once else self.often
                if where[key][0] != access:
                    self.place(where, key, access)
        else:
            any_once = any(key in self.once for key in keys)
            for key in keys:
                self.once.pop(key, None)
                if any_once or self.often[key][0] != access:
                    self.place(self.often, key, access)
        self.trim()

    def remove(self, keys: list[bytes]) -> None:
        for name, where in (("once", self.once), ("often", self.often)):
            for key in keys:
                if key in where:
                    self.ghosts.append((name, key, where.pop(key)[0]))
        self.trim()

    def trim(self) -> None:
        for name, other in (("once", len(self.once)), ("often", None)):
            mine = [ghost for ghost in self.ghosts if ghost[0] == name]
            others = len(self.ghosts) - len(mine) if other is None else other
            while mine and len(mine) + others > self.capacity:
                self.ghosts.remove(mine.pop(0))

    def order(self) -> list[bytes]:
        def by_age(where: dict[bytes, tuple[int, int]]) -> list[bytes]:
            return sorted(where, key=lambda key: (where[key][0], -where[key][1]))

        once, often, victims = by_age(self.once), by_age(self.often), []
        while once or often:
            is_once = once and (
                not often
                or len(once) > self.target
                or self.once[once[0]][0] <= self.often[often[0]][0]
            )
            victims.append((once if is_once else often).pop(0))
        return victims


KEYS = st.lists(st.integers(0, 15).map(lambda i: bytes([i])), unique=True, max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "touch", "remove"]), KEYS, st.integers(1, 6)),
        st.tuples(st.just("evict"), st.just([]), st.integers(1, 4)),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(STEPS)
def test_against_a_plain_model(steps: list[tuple[str, list[bytes], int]]) -> None:
    policy, model = ArcPolicy(CAPACITY), Model(CAPACITY)
    for operation, keys, number in steps:
        resident = set(model.order())
        here = [key for key in keys if key in resident]
        if operation == "add":
            keys = [key for key in keys if key not in resident][: CAPACITY - len(resident)]
            policy.add(keys, number)
            model.add(keys, number)
        elif operation == "touch":
            policy.touch(here, number)
            model.touch(here, number)
        else:
            gone = here if operation == "remove" else model.order()[:number]
            if operation == "evict":
                assert policy.pick(number, lambda keys: [True] * len(keys)) == gone
            policy.remove(gone)
            model.remove(gone)
        assert policy.order() == model.order()
        assert policy._once_target == pytest.approx(model.target)
        for name, ghosts in (("once", policy._once_ghosts), ("often", policy._often_ghosts)):
            assert list(ghosts.items()) == [(key, by) for of, key, by in model.ghosts if of == name]
        assert len(model.ghosts) <= CAPACITY


def test_what_was_used_twice_stays_when_a_scan_comes_by() -> None:
    policy = ArcPolicy(CAPACITY)
    policy.add(names("ab"), 1)
    policy.touch(names("ab"), 2)
    for access, key in enumerate(names("qrstuvwxyz"), 3):
        evict(policy, len(policy.order()) + 1 - CAPACITY)
        policy.add([key], access)
    assert set(names("ab")) < set(policy.order())


def test_a_ghost_that_comes_back_was_worth_keeping() -> None:
    policy = ArcPolicy(4)
    policy.add(names("abcd"), 1)
    assert shown(evict(policy, 2)) == "dc"
    assert policy._once_target == 0
    policy.add(names("xc"), 2)
    assert policy._once_target == 1
    # Its head is new, so it counts as new itself: else it would outlive that.
    assert shown(policy.order()) == "bacx"
    evict(policy, 2)
    policy.add(names("ab"), 3)
    assert policy._once_target == 3
    policy.touch(names("x"), 4)
    assert shown(policy.order()) == "cbax"


def test_the_target_falls_for_what_was_used_often_and_stays_within_bounds() -> None:
    policy = ArcPolicy(4)
    policy._once_target = 4.0
    policy.add(names("ab"), 1)
    policy.touch(names("ab"), 2)
    policy.remove(names("ba"))
    policy.add(names("ab"), 3)
    assert policy._once_target == 2
    policy.remove(names("ba"))
    policy._once_target = 0.5
    policy.add(names("a"), 4)
    assert policy._once_target == 0
    policy.add(names("xy"), 5)
    policy.remove(names("yx"))
    policy._once_target = 3.5
    policy.add(names("xy"), 6)
    assert policy._once_target == 4


def test_one_access_that_stores_again_learns_nothing() -> None:
    policy = ArcPolicy(4)
    policy.add(names("abc"), 1)
    policy.remove(names("c"))
    policy.add(names("c"), 1)
    assert policy._once_target == 0
    assert len(policy._often) == 0


def test_what_is_used_again_is_never_given_up_for_something_older() -> None:
    policy = ArcPolicy(4)
    policy.add(names("ab"), 1)
    policy.touch(names("a"), 2)
    policy._once_target = 4.0
    assert shown(policy.order()) == "ba"


def test_there_are_never_more_ghosts_than_slots() -> None:
    policy = ArcPolicy(4)
    for access in range(50):
        policy.add([bytes([access])], access)
        policy.touch([bytes([access])], access + (access % 3 == 0))
        evict(policy, len(policy.order()) - 3)
    assert len(policy._once_ghosts) + len(policy._often_ghosts) == 4


def test_picking_changes_nothing_inside_either() -> None:
    policy = ArcPolicy(4)
    policy.add(names("ab"), 1)
    policy.touch(names("a"), 2)
    evict(policy, 1)
    before = copy.deepcopy(vars(policy) | {"_once": vars(policy._once)} | {"_often": 0})
    policy.pick(9, lambda keys: [True] * len(keys))
    assert vars(policy) | {"_once": vars(policy._once)} | {"_often": 0} == before


def hits(policy: EvictionPolicy, trace: list[list[bytes]], slots: int) -> int:
    """Chunks found, of a trace of prefixes, by a host tier of so many slots."""
    resident, found = set[bytes](), 0
    for access, chain in enumerate(trace):
        here = [key for key in chain if key in resident]
        found += len(here)
        policy.touch(here, access)
        fresh = [key for key in chain if key not in resident]
        short = len(resident) + len(fresh) - slots
        victims = policy.pick(short, lambda keys, used=chain: [key not in used for key in keys])
        policy.remove(victims)
        resident = resident - set(victims) | set(fresh)
        policy.add(fresh, access)
    return found


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}/{at}".encode() for at in range(length)]


def test_a_scan_costs_lru_its_hot_prefixes_and_arc_nothing() -> None:
    choose = random.Random(7)
    hot = [chain(f"hot {i}", 8) for i in range(6)]
    trace = []
    for turn in range(400):
        trace.append(chain(f"once {turn}", 24))
        if turn % 2 == 0:
            trace.append(choose.choice(hot))
    by_arc, by_lru = hits(ArcPolicy(80), trace, 80), hits(LruPolicy(80), trace, 80)
    print(f"chunks found, of {200 * 8} at most: arc {by_arc}, lru {by_lru}")
    assert by_arc > 3 * by_lru
    assert by_arc > 0.75 * 200 * 8


def test_where_recency_is_what_counts_it_is_as_good_as_lru() -> None:
    """Conversations: each is used a few times in a row, longer each time, and never again."""
    trace = [
        chain(f"talk {talk // 2 * 2 + part % 2}", 4 + part)
        for talk in range(0, 80, 2)
        for part in range(8)
    ]
    assert hits(ArcPolicy(40), trace, 40) >= 0.95 * hits(LruPolicy(40), trace, 40)
