"""What is worth storing: counted by request, bounded, and always a prefix."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.config import EngineConfig, FsTierConfig
from tiering.policy.admission import AdmitAll, SeenOften
from tiering.testing.clocks import ManualClock
from tiering.wiring import build_core


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def test_everything_is_stored_the_first_time() -> None:
    policy = AdmitAll()
    policy.seen(names("ab"))
    assert policy.admits(names("abc")) == 3
    assert policy.admits([]) == 0


def test_a_chunk_is_stored_for_the_request_that_makes_it_often_enough() -> None:
    policy = SeenOften(3, 100)
    for times, admitted in ((1, 0), (2, 0), (3, 2), (4, 2)):
        policy.seen(names("ab"))
        assert policy.admits(names("ab")) == admitted, times
    assert policy.admits([]) == 0


def test_only_the_part_that_was_seen_before_is_stored() -> None:
    policy = SeenOften(2, 100)
    policy.seen(names("abcd"))
    policy.seen(names("abxy"))
    assert policy.admits(names("abxy")) == 2
    policy.seen(names("bxy"))
    assert policy.admits(names("abxy")) == 4
    assert policy.admits(names("cabxy")) == 0, "no gap before what is stored"


def test_asking_counts_nothing() -> None:
    policy = SeenOften(2, 100)
    policy.seen(names("a"))
    for _ in range(3):
        assert policy.admits(names("a")) == 0


def test_what_was_not_asked_for_longest_is_forgotten_and_the_tail_before_the_head() -> None:
    policy = SeenOften(2, 4)
    policy.seen(names("abc"))
    policy.seen(names("xy"))
    policy.seen(names("ab"))
    assert policy.admits(names("ab")) == 2
    policy.seen(names("c"))
    assert policy.admits(names("c")) == 0, "it was counted anew"
    assert len(policy._counts) == 4


def test_a_chain_longer_than_the_tracker_keeps_its_head() -> None:
    policy = SeenOften(2, 3)
    for _ in range(2):
        policy.seen(names("abcdef"))
    assert policy.admits(names("abcdef")) == 3


@pytest.mark.parametrize(("threshold", "entries_max"), [(0, 1), (1, 0), (-1, 5)])
def test_nothing_less_than_one_makes_sense(threshold: int, entries_max: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SeenOften(threshold, entries_max)


chains = st.lists(st.sampled_from(names("abcdefgh")), unique=True, max_size=6)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.lists(chains))
def test_against_a_plain_model(threshold: int, most: int, requests: list[list[bytes]]) -> None:
    policy = SeenOften(threshold, most)
    counts: OrderedDict[bytes, int] = OrderedDict()
    for chain in requests:
        policy.seen(chain)
        for key in reversed(chain[:most]):
            counts[key] = counts.pop(key, 0) + 1
        while len(counts) > most:
            counts.popitem(last=False)
        admitted = 0
        while admitted < len(chain) and counts.get(chain[admitted], 0) >= threshold:
            admitted += 1
        assert policy.admits(chain) == admitted


@pytest.mark.parametrize("with_tiers", [False, True])
@pytest.mark.parametrize(("threshold", "requests"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_the_settings_reach_the_core(with_tiers: bool, threshold: int, requests: int) -> None:
    """Also with secondary tiers below, where vLLM's own tiering refuses a threshold."""
    tiers = (FsTierConfig(root_dir="/mnt/kv"),) if with_tiers else ()
    config = EngineConfig(cpu_bytes_to_use=1, store_threshold=threshold, secondary_tiers=tiers)
    core, keys = build_core(config, 8, len(tiers), ManualClock()), names("abc")
    stored = []
    for owner in map(str, range(requests)):
        core.open(owner)
        stored.append(len(core.reserve(owner, keys, 0).slots))
        core.close(owner)
    assert stored == [0] * (requests - 1) + [3]
    assert core.counters["stores_skipped"] == 3 * (requests - 1)


def test_the_size_of_the_tracker_reaches_the_core() -> None:
    config = EngineConfig(cpu_bytes_to_use=1, store_threshold=2, max_tracker_size=2)
    core, stored = build_core(config, 8, 0, ManualClock()), []
    for owner in ("1", "2"):
        core.open(owner)
        stored.append(len(core.reserve(owner, names("abc"), 0).slots))
    assert stored == [0, 2]
