"""The index made of a stream: what is where, and what was not announced exactly once."""

from __future__ import annotations

import random

from event_streams import cleared, placeholder, removed, stored
from tiering.events.blocks import BlockEvent, BlockRemoved, BlockStored
from tiering.events.mirror import Difference, EventMirror, MediumCounts, Place, hash_number


def mirror_of(*events: BlockEvent) -> EventMirror:
    mirror = EventMirror()
    mirror.apply(events)
    return mirror


def test_what_was_stored_and_not_removed_is_there() -> None:
    mirror = mirror_of(stored(1, 2, 3), stored(4, medium="STORAGE"), removed(2))
    assert mirror.residents("CPU") == {1, 3}
    assert mirror.residents("STORAGE") == {4}
    assert mirror.residents("GPU") == set()
    assert mirror.counts["CPU"] == MediumCounts(stored=3, removed=1)
    assert mirror.anomalies == 0


def test_media_localities_and_groups_are_places_of_their_own() -> None:
    other = stored(1, group=1)
    remote = stored(1)
    remote.locality = "REMOTE"
    mirror = mirror_of(stored(1), other, remote, stored(1, medium=None), removed(1))
    assert mirror.resident_counts() == {
        Place("CPU", None, 0): 0,
        Place("CPU", None, 1): 1,
        Place("CPU", "REMOTE", 0): 1,
        Place("GPU", None, 0): 1,
    }
    assert mirror.groups("CPU") == {0, 1}
    assert mirror.residents("CPU", group=1) == {1}
    assert mirror.anomalies == 0


def test_an_absent_group_is_group_0() -> None:
    mirror = mirror_of(stored(1, group=None))
    assert mirror.residents("CPU", group=0) == {1}
    assert mirror.residents("CPU", group=1) == set()


def test_stored_again_and_removed_unknown_change_nothing_and_are_counted() -> None:
    mirror = mirror_of(stored(1), stored(1, 2), removed(2), removed(2, 7))
    assert mirror.residents("CPU") == {1}
    counts = mirror.counts["CPU"]
    assert (counts.stored, counts.removed) == (2, 1)
    assert (counts.stored_again, counts.removed_unknown) == (1, 2)
    assert mirror.anomalies == 3
    assert "3 anomalies" in repr(mirror)


def test_placeholders_are_counted_apart() -> None:
    mirror = mirror_of(placeholder(5), placeholder(6), placeholder(5), stored(1))
    mirror.apply([BlockRemoved([6], "CPU")])
    assert mirror.residents("CPU") == {1}
    assert mirror.placeholders("CPU") == {5}
    counts = mirror.counts["CPU"]
    assert (counts.placeholders_stored, counts.placeholders_removed) == (2, 1)
    assert counts.stored_again == 1
    assert mirror.reach([5], {"CPU"}) == 0
    assert mirror.difference({"CPU": {1, 5}}) == {}


def test_a_block_after_its_placeholder_is_stored_again() -> None:
    mirror = mirror_of(placeholder(5), stored(5, group=None))
    assert mirror.counts["CPU"].stored_again == 1
    assert mirror.placeholders("CPU") == set()
    mirror.apply([removed(5, group=None)])
    assert mirror.residents("CPU") == set()
    assert mirror.anomalies == 1


def test_all_cleared_is_all_media() -> None:
    mirror = mirror_of(stored(1), stored(2, medium="STORAGE"), cleared(), stored(2))
    assert mirror.residents("STORAGE") == set()
    assert mirror.residents("CPU") == {2}
    assert (mirror.cleared, mirror.anomalies) == (1, 0)


def test_tokens_that_do_not_fit_their_blocks_are_counted() -> None:
    mirror = mirror_of(BlockStored([1, 2], None, [5], 1, None, "CPU", None))
    assert mirror.malformed == 1
    assert mirror.residents("CPU") == {1, 2}


def test_reach_goes_to_the_first_hole_in_all_of_the_media() -> None:
    mirror = mirror_of(stored(1, 2), stored(3, 5, medium="STORAGE"))
    assert mirror.reach([1, 2, 3, 4, 5], {"CPU", "STORAGE"}) == 3
    assert mirror.reach([1, 2, 3], {"CPU"}) == 2
    assert mirror.reach([1, 2, 3], {"GPU"}) == 0
    assert mirror.reach([], {"CPU"}) == 0


def test_chains_go_back_through_parents_that_were_announced() -> None:
    mirror = mirror_of(stored(1, 2), stored(3, 4, parent=2), removed(2))
    assert mirror.chain("CPU", 4, 2) == [4, 3]
    assert mirror.chain("CPU", 4, 9) == [4, 3, 2], "ends with the one that is not there"
    assert mirror.chain("CPU", 1, 9) == [1]
    assert mirror.chain("CPU", 99, 9) == [99]


def test_hashes_are_the_same_as_bytes_and_as_numbers() -> None:
    whole = bytes(range(32))
    number = int.from_bytes(whole[-8:], "big")
    assert hash_number(whole) == hash_number(number) == number
    assert hash_number(-1) == 2**64 - 1
    mirror = mirror_of(BlockStored([whole], None, [0], 1, None, "CPU", None))
    mirror.apply([BlockRemoved([number], "CPU")])
    assert mirror.residents("CPU") == set()
    assert mirror.anomalies == 0


def test_differences_from_what_is_there() -> None:
    mirror = mirror_of(stored(1, 2), stored(3, medium="STORAGE"))
    assert mirror.difference({"CPU": {1, 2}, "STORAGE": {3}, "GPU": set()}) == {}
    assert mirror.difference({"CPU": {2, 4}, "STORAGE": {3}}) == {
        "CPU": Difference(missing=frozenset({4}), surplus=frozenset({1}))
    }


def test_random_operations_leave_what_they_say() -> None:
    random_ = random.Random(5)
    mirror, truth = EventMirror(), {medium: set[int]() for medium in ("GPU", "CPU", "STORAGE")}
    for _ in range(5000):
        medium = random_.choice(list(truth))
        some = {random_.randrange(300) for _ in range(4)}
        if random_.random() < 0.002:
            mirror.apply([cleared()])
            truth = {medium: set() for medium in truth}
        elif random_.random() < 0.5:
            mirror.apply([stored(*some - truth[medium], medium=medium)])
            truth[medium] |= some
        else:
            mirror.apply([removed(*some & truth[medium], medium=medium)])
            truth[medium] -= some
        assert mirror.difference(truth) == {}
    assert mirror.anomalies == 0
