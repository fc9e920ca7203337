"""LRU by access: the order of eviction, tail before head, and no entry twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.policy.lru import LruPolicy


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def shown(policy: LruPolicy) -> str:
    return b"".join(policy.order()).decode()


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    policy = LruPolicy(1000)
    policy.add(names("abcd"), 1)
    assert shown(policy) == "dcba"


def test_a_prefix_stored_in_pieces_still_goes_from_its_end() -> None:
    policy = LruPolicy(1000)
    policy.add(names("ab"), 1)
    policy.add(names("xy"), 2)
    policy.add(names("cd"), 1)
    assert shown(policy) == "dcbayx"


def test_a_shared_head_is_as_recent_as_its_latest_user() -> None:
    policy = LruPolicy(1000)
    policy.add(names("abcd"), 1)
    policy.touch(names("ab"), 2)
    policy.add(names("ef"), 2)
    assert shown(policy) == "dcfeba"


def test_one_access_counts_once() -> None:
    policy = LruPolicy(1000)
    policy.add(names("ab"), 1)
    policy.add(names("cd"), 2)
    for _ in range(3):
        policy.touch(names("cd"), 2)
    assert shown(policy) == "badc"


def test_an_old_access_that_stores_again_stays_old() -> None:
    policy = LruPolicy(1000)
    policy.add(names("ab"), 1)
    policy.touch(names("ab"), 2)
    policy.add(names("c"), 1)
    assert shown(policy) == "cba", "a child must not outlive its parent"


def test_a_key_that_comes_back_is_there_once() -> None:
    policy = LruPolicy(1000)
    policy.add(names("abc"), 1)
    policy.remove(names("c"))
    policy.add(names("c"), 1)
    assert policy.pick(9, lambda keys: [True] * len(keys)) == names("cba")


def test_pick_passes_over_what_may_not_go_and_changes_nothing() -> None:
    policy = LruPolicy(1000)
    policy.add(names("abcd"), 1)
    assert policy.pick(2, lambda keys: [key != b"d" for key in keys]) == names("cb")
    assert policy.pick(0, lambda keys: [True] * len(keys)) == []
    assert shown(policy) == "dcba"


def test_a_hot_prefix_leaves_no_heap_of_stale_entries() -> None:
    policy = LruPolicy(1000)
    hot = [bytes([i]) for i in range(100)]
    policy.add(hot, 0)
    for access in range(1, 2000):
        policy.touch(hot, access)
        policy.add([access.to_bytes(4, "big")], access)
    entries = sum(map(len, policy._entries.values()))
    assert entries <= 2 * (100 + 1999) + 16 * 2000


KEYS = st.lists(st.integers(0, 20).map(lambda i: bytes([i])), unique=True, min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), KEYS, st.integers(1, 5))))
def test_against_a_plain_model(steps: list[tuple[str, list[bytes], int]]) -> None:
    """The model: each key has its access and its turn within it."""
    policy, model, turn = LruPolicy(1000), {}, 0
    for operation, keys, access in steps:
        if operation == "add":
            keys = [key for key in keys if key not in model]
            policy.add(keys, access)
        else:
            keys = [key for key in keys if key in model]
            (policy.touch if operation == "touch" else lambda k, _: policy.remove(k))(keys, access)
        for key in keys:
            turn += 1
            if operation == "remove":
                del model[key]
            elif model.get(key, (None, 0))[0] != access:
                model[key] = (access, turn)
        assert policy.order() == sorted(model, key=lambda k: (model[k][0], -model[k][1]))
