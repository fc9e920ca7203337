"""The books of the files layout: what is counted, who goes first, and what a broken table costs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiering.testing.examples import key_number
from tiering.tiers.files.bookings import Booked, Flight, ManifestBroken, ManifestBusy, disk_bytes
from tiering.tiers.files.manifest import Manifest

KEYS = [key_number(i) for i in range(100)]
SIZE = 12288
HUGE = 1 << 62
# What n chunks of SIZE take.
ROOM = [disk_bytes(n, n * SIZE) for n in range(101)]


@pytest.fixture
def manifest(tmp_path: Path) -> Iterator[Manifest]:
    opened = Manifest(tmp_path / "manifest", "me", 0.0)
    yield opened
    opened.close()


def store(manifest: Manifest, keys: list[bytes], limit: int = HUGE, directory: str = "d") -> Flight:
    """As a tier does it: the first key is the most recent."""
    flight = manifest.admit(directory, keys, SIZE, limit, limit)
    top = 1 + max([each.tick for each in manifest.oldest(1000)], default=0) + len(keys)
    manifest.settle(flight, {each.key: top - at for at, each in enumerate(flight.arriving)})
    return flight


def keys_of(chunks: list[Booked]) -> list[bytes]:
    return [each.key for each in chunks]


def test_the_least_recently_used_go_and_the_tail_before_the_head(manifest: Manifest) -> None:
    store(manifest, KEYS[:4])
    store(manifest, KEYS[4:8])
    manifest.touch("d", {KEYS[1]: 1 << 40})
    flight = manifest.admit("d", KEYS[8:13], SIZE, ROOM[8], ROOM[8])
    assert keys_of(flight.arriving) == KEYS[8:13]
    assert keys_of(flight.victims) == [KEYS[3], KEYS[2], KEYS[0], KEYS[7], KEYS[6]]


def test_eviction_goes_down_to_the_target(manifest: Manifest) -> None:
    store(manifest, KEYS[:10])
    assert manifest.admit("d", KEYS[10:12], SIZE, ROOM[12], ROOM[6]).victims == []
    flight = manifest.admit("d", KEYS[12:13], SIZE, ROOM[12], ROOM[6])
    assert len(flight.victims) == 7


def test_what_is_on_its_way_counts_until_it_is_settled(manifest: Manifest) -> None:
    store(manifest, KEYS[:8])
    first = manifest.admit("d", KEYS[8:12], SIZE, ROOM[8], ROOM[8])
    assert manifest.totals().chunks == 12, "four come, four go, neither has happened yet"
    second = manifest.admit("d", KEYS[12:18], SIZE, ROOM[8], ROOM[8])
    assert (len(second.arriving), len(second.victims)) == (4, 4), "flights are protected"
    manifest.settle(first, dict.fromkeys(KEYS[8:11], 99), kept=first.victims[:1])
    manifest.settle(second, {}, kept=second.victims)
    assert manifest.totals().chunks == 8
    assert set(keys_of(manifest.oldest(100))) == {*KEYS[8:11], KEYS[7], *KEYS[:4]}


def test_a_chunk_that_is_written_again_is_counted_once(manifest: Manifest) -> None:
    store(manifest, KEYS[:4])
    store(manifest, KEYS[2:6])
    assert manifest.totals().chunks == 6
    one = manifest.admit("d", KEYS[:1], SIZE, HUGE, HUGE)
    other = manifest.admit("d", KEYS[:1], SIZE, HUGE, HUGE)
    manifest.settle(one, {KEYS[0]: 1})
    manifest.settle(other, {KEYS[0]: 2})
    assert manifest.totals().chunks == 6


def test_what_is_asked_for_and_what_is_read_does_not_go(manifest: Manifest) -> None:
    store(manifest, KEYS[:4])
    flight = manifest.admit("d", [KEYS[3], *KEYS[4:6]], SIZE, ROOM[4], ROOM[4], spared=[KEYS[2]])
    assert keys_of(flight.victims) == [KEYS[1], KEYS[0]]
    assert manifest.admit("d", KEYS[6:7], SIZE, ROOM[0], 0).arriving == []


def test_namespaces_share_the_bound(manifest: Manifest) -> None:
    store(manifest, KEYS[:5], directory="orphan")
    store(manifest, KEYS[:5], directory="mine")
    flight = manifest.admit("mine", KEYS[5:8], SIZE, ROOM[10], ROOM[10])
    assert [each.directory for each in flight.victims] == ["orphan"] * 3


def test_a_process_that_is_gone_leaves_its_flights(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    dead = Manifest(path, "dead", 5.0)
    store(dead, KEYS[:4])
    flight = dead.admit("d", KEYS[4:6], SIZE, ROOM[4], ROOM[4])
    dead.close()
    heir = Manifest(path, "heir", 6.0)
    assert heir.others() == [("dead", 5)]
    assert heir.inherit("dead") == [flight]
    heir.settle(flight, {KEYS[4]: 9}, kept=[])
    assert heir.others() == []
    assert sorted(keys_of(heir.oldest(9))) == sorted([*KEYS[:2], KEYS[4]])
    assert heir.totals().chunks == 3
    heir.leave()
    heir.close()
    with contextlib.closing(Manifest(path, "next", 7.0)) as following:
        assert following.others() == []


def test_a_process_that_was_thought_gone_comes_back(tmp_path: Path) -> None:
    """As one in another container may be, when it has not been heard of for long."""
    path = tmp_path / "manifest"
    silent, heir = Manifest(path, "silent", 0.0), Manifest(path, "heir", 9.0)
    assert heir.inherit("silent") == []
    silent.beat(10.0)
    flight = silent.admit("d", KEYS[:2], SIZE, HUGE, HUGE)
    assert heir.others() == [("silent", 10)]
    assert heir.inherit("silent") == [flight]
    silent.close()
    heir.close()


def test_who_was_thought_gone_has_its_next_flight_settled_too(tmp_path: Path) -> None:
    """Also where it ends before it could say that it is alive."""
    path = tmp_path / "manifest"
    silent, heir = Manifest(path, "silent", 0.0), Manifest(path, "heir", 9.0)
    assert heir.inherit("silent") == []
    flight = silent.admit("d", KEYS[:2], SIZE, HUGE, HUGE)
    silent.close()
    newcomer = Manifest(path, "newcomer", 9.0)  # who has nothing to do with it
    assert {name for name, _ in heir.others()} == {"silent", "newcomer"}
    assert heir.inherit("newcomer") == []
    assert heir.inherit("silent") == [flight]
    newcomer.close()
    heir.close()


def test_what_was_under_way_when_the_table_was_made_anew_is_booked_in_the_new_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "manifest"
    one, other = Manifest(path, "one", 0.0), Manifest(path, "other", 0.0)
    store(one, KEYS[:2])
    flight = one.admit("d", KEYS[2:4], SIZE, ROOM[2], ROOM[2])
    other.discard()
    assert not one.is_current
    other.close()
    anew = Manifest(path, "other", 1.0)
    elsewhere = anew.admit("d", KEYS[6:8], SIZE, HUGE, HUGE)
    one.close()
    assert anew.settle(flight, {KEYS[2]: 5}, kept=flight.victims[:1])
    assert set(keys_of(anew.oldest(9))) == {KEYS[2], flight.victims[0].key}
    assert anew.totals().chunks == 4, "and what others have under way there goes on"
    assert anew.settle(elsewhere, {KEYS[6]: 6})
    assert anew.totals().chunks == 3
    anew.close()


class BusyDatabase:
    """Whatever it is asked, another process has the file."""

    def execute(self, statement: str, *parameters: object) -> object:
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
        raise error


def test_a_table_that_another_process_holds_is_not_unsound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest"
    manifest = Manifest(path, "me", 0.0)
    store(manifest, KEYS[:2])
    manifest.counted()
    with monkeypatch.context() as busy:
        busy.setattr(manifest, "_db", BusyDatabase())
        with pytest.raises(ManifestBusy):
            manifest.is_sound()
    identity = path.stat().st_ino

    def busy_sound(manifest: Manifest) -> bool:
        raise ManifestBusy("database is locked")

    with monkeypatch.context() as busy:
        busy.setattr(Manifest, "is_sound", busy_sound)
        with pytest.raises(ManifestBusy):
            Manifest(path, "next", 0.0, discards=True)
    assert path.stat().st_ino == identity
    assert manifest.is_current
    manifest.close()


def test_a_directory_that_was_begun_anew_is_not_forgotten(
    manifest: Manifest, tmp_path: Path
) -> None:
    store(manifest, KEYS[:4])
    (tmp_path / "d").mkdir()
    manifest.forget_directory(tmp_path / "d")
    assert manifest.totals().chunks == 4
    (tmp_path / "d").rmdir()
    manifest.forget_directory(tmp_path / "d")
    assert manifest.totals().chunks == 0


def test_counting_makes_the_books_agree(manifest: Manifest) -> None:
    store(manifest, KEYS[:3])
    found = [Booked("d", key, SIZE, 7) for key in KEYS[2:6]]
    assert manifest.adopt(found) == 3
    assert manifest.adopt(found) == 0
    manifest.forget("d", [KEYS[0], KEYS[50]])
    assert manifest.totals().chunks == 5
    assert manifest.totals().file_bytes == 5 * SIZE
    first = min(KEYS[1:6])
    assert manifest.booked("d", first, first + b"\0") == [first]


def test_a_table_counts_for_nobody_until_somebody_has_counted(tmp_path: Path) -> None:
    """Or a second engine would take what the first has found so far for all there is."""
    first = Manifest(tmp_path / "manifest", "first", 0.0)
    second = Manifest(tmp_path / "manifest", "second", 0.0)
    assert not first.is_counted
    assert not second.is_counted
    second.close()
    first.counted()
    first.close()
    third = Manifest(tmp_path / "manifest", "third", 0.0)
    assert third.is_counted
    third.close()


@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated", "another program's", "newer"])
def test_a_table_that_cannot_be_used_says_so_and_nothing_else(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "manifest"
    good = Manifest(path, "me", 0.0)
    store(good, KEYS)
    good.close()
    content = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "garbage":
        path.write_bytes(os.urandom(len(content)))
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        db = sqlite3.connect(path)
        db.execute(f"PRAGMA user_version = {0 if damage == 'newer' else 7}")
        db.execute("DROP TABLE chunk") if damage != "newer" else db.execute("PRAGMA user_version=9")
        db.commit()
        db.close()
    try:
        opened = Manifest(path, "me", 0.0)
    except ManifestBroken:
        return
    try:
        assert not opened.is_counted or not opened.is_sound()
    finally:
        opened.close()


@pytest.mark.parametrize("seed", range(30))
def test_flipped_bytes_never_do_more_than_break_it(tmp_path: Path, seed: int) -> None:
    """Whatever is asked of it afterwards, it answers or says that it is broken."""
    path, chance = tmp_path / "manifest", random.Random(seed)
    good = Manifest(path, "me", 0.0)
    store(good, KEYS)
    good.close()
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 10, 1000))):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content)
    try:
        broken = Manifest(path, "me", 0.0)
    except ManifestBroken:
        return
    for question in (
        lambda: store(broken, KEYS[50:60], ROOM[20]),
        lambda: broken.touch("d", dict.fromkeys(KEYS, 3)),
        lambda: broken.forget("d", KEYS[:5]),
        lambda: broken.booked("d", b"", b"\xff"),
        lambda: broken.evict(ROOM[3]),
    ):
        with contextlib.suppress(ManifestBroken):
            question()
    broken.close()


def hold(path: Path, ready: object, done: object) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    ready.set()  # type: ignore[attr-defined]
    done.wait(60)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_process_that_holds_the_table_is_waited_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.tiers.disk.database.BUSY_SECONDS_MAX", 0.05)
    path = tmp_path / "manifest"
    manifest = Manifest(path, "me", 0.0)
    store(manifest, KEYS[:2])
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(path, ready, done))
    holder.start()
    try:
        assert ready.wait(60)
        with pytest.raises(ManifestBusy):
            store(manifest, KEYS[2:4])
        assert manifest.totals().chunks == 2, "it can be read"
    finally:
        done.set()
        holder.join()
    store(manifest, KEYS[2:4])
    assert manifest.totals().chunks == 4
    manifest.close()


class Books(RuleBasedStateMachine):
    """The table against plain dicts."""

    numbers = st.lists(st.integers(0, 15), unique=True, min_size=1, max_size=6)

    def __init__(self) -> None:
        super().__init__()
        self.manifest = Manifest(None, "me", 0.0)
        self.here: dict[bytes, int] = {}
        self.flights: list[Flight] = []
        self.tick = 0

    @rule(numbers=numbers, limit=st.integers(0, 12))
    def admit(self, numbers: list[int], limit: int) -> None:
        keys = [KEYS[number] for number in numbers]
        for key in keys:
            self.here.pop(key, None)
        before = dict(self.here)
        flight = self.manifest.admit("d", keys, SIZE, ROOM[limit], ROOM[limit])
        for victim in flight.victims:
            assert victim.tick == self.here.pop(victim.key)
        assert all(v.tick <= tick for v in flight.victims for tick in self.here.values())
        assert keys_of(flight.arriving) == keys[: len(flight.arriving)]
        others = sum(len(f.arriving) for f in self.flights)
        if flight.arriving:
            assert len(self.here) + others + len(flight.arriving) <= limit
        fits = len(before) + others + len(keys) <= limit
        assert not (fits and flight.victims)
        self.flights.append(flight)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        arrived = {}
        for each in flight.arriving:
            if data.draw(st.booleans()):
                self.tick += 1
                arrived[each.key] = self.tick
        kept = [each for each in flight.victims if data.draw(st.booleans())]
        self.manifest.settle(flight, arrived, kept)
        for each in kept:
            self.here.setdefault(each.key, each.tick)
        for key, tick in arrived.items():
            # Two who wrote one chunk: whoever comes first has booked it.
            self.here[key] = self.here.get(key, tick)

    @rule(numbers=numbers)
    def touch(self, numbers: list[int]) -> None:
        self.tick += 1
        self.manifest.touch("d", {KEYS[number]: self.tick for number in numbers})
        self.here.update({KEYS[n]: self.tick for n in numbers if KEYS[n] in self.here})

    @rule(numbers=numbers)
    def forget(self, numbers: list[int]) -> None:
        self.manifest.forget("d", [KEYS[number] for number in numbers])
        for number in numbers:
            self.here.pop(KEYS[number], None)

    @invariant()
    def everything_is_counted_once(self) -> None:
        flying = sum(len(f.arriving) + len(f.victims) for f in self.flights)
        totals = self.manifest.totals()
        assert totals.chunks == len(self.here) + flying
        assert totals.file_bytes == totals.chunks * SIZE
        assert {each.key for each in self.manifest.oldest(100)} == self.here.keys()

    def teardown(self) -> None:
        self.manifest.close()


TestBooks = pytest.mark.slow(Books.TestCase)
TestBooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, database=None)
