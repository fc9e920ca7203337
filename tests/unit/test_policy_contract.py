"""What every eviction policy that is built in owes the core."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering import FsTierConfig, KVLayout, StoreConfig, TieredStore
from tiering.layout import RowLayout
from tiering.plugins import Given, load_class
from tiering.policy.base import EvictionPolicy
from tiering.policy.registry import Place, place_of

SLOTS = 12
NAMES = ("lru", "arc")


def policy_class(name: str) -> type[EvictionPolicy]:
    place = place_of(name)
    assert isinstance(place, Place)
    return load_class(Given("", place.module), Given("", place.name), EvictionPolicy)


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return policy_class(request.param)(SLOTS)


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def everything(keys: Sequence[bytes]) -> list[bool]:
    return [True] * len(keys)


def nothing(keys: Sequence[bytes]) -> list[bool]:
    return [False] * len(keys)


def not_among(some: Sequence[bytes]) -> Callable[[Sequence[bytes]], list[bool]]:
    return lambda keys: [key not in some for key in keys]


def all_but(text: str) -> Callable[[Sequence[bytes]], list[bool]]:
    return not_among(names(text))


def shown(policy: EvictionPolicy) -> str:
    return b"".join(policy.order()).decode()


def test_the_tail_of_a_prefix_goes_before_its_head(policy: EvictionPolicy) -> None:
    policy.add(names("abcd"), 1)
    assert shown(policy) == "dcba"


def test_a_prefix_stored_in_pieces_still_goes_from_its_end(policy: EvictionPolicy) -> None:
    policy.add(names("ab"), 1)
    policy.add(names("xy"), 2)
    policy.add(names("cd"), 1)
    assert shown(policy) == "dcbayx"


def test_a_shared_head_outlives_what_one_request_used(policy: EvictionPolicy) -> None:
    policy.add(names("abcd"), 1)
    policy.touch(names("ab"), 2)
    policy.add(names("ef"), 2)
    assert shown(policy) == "dcfeba"


def test_one_access_counts_once(policy: EvictionPolicy) -> None:
    policy.add(names("ab"), 1)
    policy.add(names("cd"), 2)
    for _ in range(3):
        policy.touch(names("ab"), 1)
    assert shown(policy) == "badc"


def test_an_old_access_that_stores_again_stays_old(policy: EvictionPolicy) -> None:
    policy.add(names("ab"), 1)
    policy.touch(names("ab"), 2)
    policy.add(names("c"), 1)
    assert shown(policy) == "cba", "a child must not outlive its parent"


def test_a_key_that_comes_back_is_there_once(policy: EvictionPolicy) -> None:
    policy.add(names("abc"), 1)
    policy.remove(names("c"))
    policy.add(names("c"), 1)
    assert policy.pick(9, everything) == names("cba")


def test_pick_passes_over_what_may_not_go(policy: EvictionPolicy) -> None:
    policy.add(names("abcd"), 1)
    assert policy.pick(2, all_but("d")) == names("cb")
    assert policy.pick(0, everything) == []
    assert policy.pick(9, all_but("bcd")) == names("a")
    assert policy.pick(9, nothing) == []


def test_nothing_at_all_is_no_matter(policy: EvictionPolicy) -> None:
    policy.add([], 1)
    policy.touch([], 2)
    policy.remove([])
    assert policy.order() == []
    assert policy.pick(3, everything) == []


# A key is its whole prefix, so its parent is the key without its last letter.
requests = st.text("ab", min_size=1, max_size=7)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(requests, st.integers(1, 4)), max_size=60))
def test_requests_never_leave_a_chunk_without_its_parent(
    name: str, steps: list[tuple[str, int]]
) -> None:
    """Each request uses what there is of its prefix and adds the rest, in pieces."""
    policy, resident = policy_class(name)(SLOTS), set[bytes]()
    for access, (text, piece) in enumerate(steps):
        chain = [text[:end].encode() for end in range(1, len(text) + 1)]
        policy.touch([key for key in chain if key in resident], access)
        fresh = [key for key in chain if key not in resident]
        for start in range(0, len(fresh), piece):
            keys = fresh[start : start + piece]
            short = len(resident) + len(keys) - SLOTS
            before = policy.order()
            unseen = copy.deepcopy(policy)
            may_go = not_among(chain)
            victims = policy.pick(short, may_go)
            assert policy.order() == unseen.order() == before
            if short > 0:
                # One by one it would choose the same.
                for victim in victims:
                    assert unseen.pick(1, may_go) == [victim]
                    unseen.remove([victim])
            policy.remove(victims)
            resident -= set(victims)
            policy.add(keys, access)
            resident |= set(keys)
            assert len(resident) <= SLOTS
            assert sorted(policy.order()) == sorted(resident)
            assert all(len(key) == 1 or key[:-1] in resident for key in resident)


@pytest.mark.parametrize("name", NAMES)
async def test_a_store_that_evicts_gives_back_what_it_was_given(name: str, tmp_path: Path) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=16, block_tokens=16)
    config = StoreConfig(
        layout=layout,
        cpu_bytes_to_use=4096 + 8 * RowLayout(layout.chunk_bytes).row_bytes,
        secondary_tiers=(FsTierConfig(root_dir=str(tmp_path / "kv")),),
        eviction_policy=name,
    )
    chains = [layout.keys(range(i * 1000, i * 1000 + 5 * 16)) for i in range(6)]
    async with TieredStore(config) as store:
        for keys in [*chains, chains[0], chains[3]]:
            pages = [(key * layout.chunk_bytes)[: layout.chunk_bytes] for key in keys]
            assert await store.save(keys, pages) == 5
        await store.flush()
        for keys in chains:
            pages = [bytearray(layout.chunk_bytes) for _ in keys]
            async with store.load(keys) as loaded:
                assert loaded.found == 5
                await loaded.copy_to(pages)
            assert pages == [(key * layout.chunk_bytes)[: layout.chunk_bytes] for key in keys]
        assert store.stats().counters["promotions_succeeded"] > 0
