"""The scheduler half over several KV cache groups, in a mini vLLM that checks what it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated import SCATTER
from mini_blocks import Request
from mini_groups import SETS, wanted_blocks
from mini_scenes import (
    STATES,
    abort_in,
    load_begins,
    reset_in,
    step_until,
    stored_before,
)
from mini_vllm import DEADLINE_SECONDS, MiniVllm
from tiering.keys import chunk_key
from tiering.residency.plan import Promote
from tiering_connectors.vllm.params import TierKind

SEVERAL = [name for name, groups in SETS.items() if len(groups) > 1]
OTHERS = range(1000, 1200)
QUICK = {"window", "all kinds", "draft of windows", "window alone", "state alone", "full"}


def sets(*names: str) -> list[Any]:
    """As parameters; but for QUICK ones they show the same again."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


def key_of(vllm: MiniVllm, request: Request, at: int, chunk: int) -> bytes:
    group = vllm.geometry.groups[at]
    return chunk_key(request.hash_at((chunk + 1) * group.tokens_per_chunk), group.index)


def furthest(vllm: MiniVllm, request: Request, keys: Collection[bytes], local: int = 0) -> int:
    """Where `request` can go on with `keys`, by trying every boundary from the end."""
    align = vllm.geometry.align
    for boundary in range((request.num_tokens - 1) // align * align, local, -align):
        for at, group in enumerate(vllm.geometry.groups):
            size = group.tokens_per_block
            blocks = [b for b in wanted_blocks(group, boundary) if (b + 1) * size > local]
            chunks = {block // group.blocks_per_chunk for block in blocks}
            ends = [(chunk + 1) * group.tokens_per_chunk for chunk in chunks]
            if any(end > request.hashed_tokens for end in ends):
                break
            if any(key_of(vllm, request, at, chunk) not in keys for chunk in chunks):
                break
        else:
            return boundary
    return local


def after(name: str, tokens: Sequence[int], **more: Any) -> MiniVllm:
    """`tokens` were computed and stored; the device has forgotten them."""
    vllm = MiniVllm(groups=SETS[name], **{"slots": 128, "device_blocks": 128, **more})
    vllm.add("first", tokens)
    vllm.run()
    vllm.forget_device()
    return vllm


def loaded_by(vllm: MiniVllm, name: str, tokens: Sequence[int], outputs: int = 1) -> int:
    vllm.add(name, tokens, outputs)
    vllm.run()
    vllm.forget_device()
    return vllm.loaded_tokens[name]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SETS)),
    tokens=st.integers(1, 70),
    local=st.integers(0, 10),
    again=st.integers(1, 70),
    shared=st.integers(0, 70),
    from_tier=st.booleans(),
    budget=st.sampled_from([7, 16, 64]),
    lost=st.integers(0, 3),
)
def test_it_goes_on_where_no_other_boundary_is_further(
    name: str,
    tokens: int,
    local: int,
    again: int,
    shared: int,
    from_tier: bool,
    budget: int,
    lost: int,
) -> None:
    """Whatever the lengths, what is left on the device, and what was lost."""
    vllm = MiniVllm(groups=SETS[name], device_blocks=128, slots=128, token_budget=budget)
    first = vllm.add("first", range(tokens))
    vllm.run()
    vllm.forget_device(first, keep=min(local * 8, tokens))
    for key in list(vllm.portal.stored[0])[5 :: 11 - lost] if lost else ():
        vllm.core.drop([key])
    vllm.settle()
    if from_tier:
        vllm.core.index.clear()
    stored = set(vllm.portal.stored[0])
    request = vllm.add("again", [*range(shared), *OTHERS][:again])
    here, _ = vllm.tables.local_hit(request)
    there = furthest(vllm, request, stored, here)
    vllm.run()
    assert vllm.loaded_tokens["again"] == there - here
    assert len(vllm.finished) == 2


@pytest.mark.parametrize("name", sets(*SEVERAL))
def test_the_same_prompt_a_longer_one_and_the_whole_conversation(name: str) -> None:
    vllm = after(name, range(40))
    align = vllm.geometry.align
    assert loaded_by(vllm, "same", range(40)) == 39 // align * align
    longer = loaded_by(vllm, "longer", range(70), outputs=10)
    assert longer >= 40 - max(group.tokens_per_chunk for group in vllm.geometry.groups)
    talk = vllm.finished[-1].tokens
    turn = loaded_by(vllm, "turn", [*talk, *OTHERS][:90])
    assert turn >= 79 - 2 * max(group.tokens_per_chunk for group in vllm.geometry.groups)


def test_a_shorter_prompt_finds_no_window_and_keeps_that_of_the_branch() -> None:
    """The next one that parts there goes on from there."""
    vllm = after("window", range(60), token_budget=128)
    assert loaded_by(vllm, "second", [*range(28), *OTHERS[:40]]) == 0
    assert loaded_by(vllm, "third", [*range(28), *OTHERS[50:90]]) == 28
    assert loaded_by(vllm, "shorter", range(30)) == 28


def test_a_window_is_stored_at_ends_of_steps_and_at_the_branch_only() -> None:
    vllm = after("window", range(60), token_budget=128)
    first = vllm.finished[0]

    def windows() -> list[int]:
        keys = [key_of(vllm, first, 1, chunk) for chunk in range(15)]
        return [i for i, slot in enumerate(vllm.core.index.lookup(keys)) if slot >= 0]

    assert windows() == [11, 12, 13, 14]
    loaded_by(vllm, "second", [*range(28), *OTHERS[:40]])
    assert windows() == [4, 5, 6, 11, 12, 13, 14]


def test_a_state_is_stored_where_a_step_ends_and_nowhere_else() -> None:
    vllm = after("state", range(38), token_budget=16)
    first = vllm.finished[0]
    keys = [key_of(vllm, first, 1, chunk) for chunk in range(9)]
    found = [(i + 1) * 4 for i, s in enumerate(vllm.core.index.lookup(keys)) if s >= 0]
    assert found == [16, 32, 36]
    assert loaded_by(vllm, "second", [*range(30), *OTHERS]) == 16


def test_a_state_in_the_middle_of_a_step_with_drafts_is_not_stored() -> None:
    """Its block may hold that of another token until the step is over."""
    vllm = MiniVllm(groups=SETS["state"], tiers=0)
    request = vllm.add("a", range(8))
    assert vllm.half.matched(request, 0) == 0
    request.num_computed_tokens = 7
    tables = [1, 2, 3], [0, 4, 5]
    output: Any = SimpleNamespace(
        num_scheduled_tokens={"a": 3},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: tables),
    )
    (store,) = vllm.half.plan_step(output).stores
    assert [(part.group, part.blocks.tolist()) for part in store.parts] == [(0, [1, 2])]


@pytest.mark.parametrize("name", sets(*SEVERAL))
def test_no_room_is_made_for_what_the_device_has_forgotten(name: str) -> None:
    vllm = after(name, range(60), token_budget=64)
    # So that all that was not loaded would be stored again.
    vllm.core.index.clear()
    given_back: list[int] = []
    vllm.core.unfilled = given_back.extend  # type: ignore[method-assign]
    assert loaded_by(vllm, "again", range(63), outputs=12) >= 48
    assert given_back == []


def test_a_window_of_which_a_part_is_on_the_device_is_completed() -> None:
    vllm = MiniVllm(groups=SETS["window"], slots=64, device_blocks=64, token_budget=8)
    first = vllm.add("first", range(60))
    vllm.run()
    vllm.forget_device(first, keep=24)
    vllm.add("again", range(60))
    vllm.run()
    assert vllm.loaded_tokens["again"] == 56 - 24


@pytest.mark.parametrize("name", ["window", "all kinds", "large state", "draft of windows"])
@pytest.mark.parametrize("bad", range(0, 30, 3))
def test_a_lost_chunk_of_one_group_gives_the_next_smaller_boundary(name: str, bad: int) -> None:
    """Without asking or promoting for ever."""
    vllm = stored_before(44, groups=SETS[name], slots=64, device_blocks=64, token_budget=16)
    request = vllm.add("again", range(44))
    promotion = step_until(vllm, Promote)
    assert isinstance(promotion, Promote)
    bad %= len(promotion.keys)
    stored = set(vllm.portal.stored[0]) - {promotion.keys[bad]}
    there = furthest(vllm, request, stored)
    vllm.portal.finish(promotion, failing=[bad])
    vllm.run()
    assert vllm.loaded_tokens["again"] == there
    promotions = [s for s in vllm.portal.submitted if isinstance(s, Promote)]
    assert len(promotions) <= 2


@pytest.mark.parametrize("name", sets(*SEVERAL))
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_a_host_tier_too_small_for_a_prefix_delays_nobody(name: str, slots: int) -> None:
    vllm = stored_before(44, groups=SETS[name], slots=slots, device_blocks=128, token_budget=16)
    for number in range(3):
        vllm.add(f"again {number}", range(44), outputs=4)
    vllm.run()
    assert len(vllm.finished) == 3
    assert vllm.loaded_tokens["again 0"] <= 40


def test_a_tier_that_hangs_delays_a_request_by_one_deadline() -> None:
    """Though for every boundary another window is to be had from it."""
    vllm = after("window", range(60), token_budget=8)
    first = vllm.finished[0]
    vllm.core.index.drop([key_of(vllm, first, 1, chunk) for chunk in range(15)])
    request = vllm.add("again", range(60))
    step_until(vllm, Promote)
    for _ in range(3):
        vllm.step()
    assert request.status == "WAITING"
    vllm.clock.advance(DEADLINE_SECONDS)
    vllm.step()
    assert request.status == "RUNNING"
    vllm.run()


def test_of_a_prefix_too_long_for_the_host_tier_as_much_as_fits_is_loaded() -> None:
    vllm = stored_before(44, groups=SETS["window"], slots=8, device_blocks=64, token_budget=4)
    vllm.add("again", range(44))
    vllm.run()
    # Seven slots may be held: four of all history and the window before, of three.
    assert vllm.loaded_tokens["again"] == 16
    assert vllm.core.counters.snapshot()["loads_cut"]


@pytest.mark.parametrize("reach_state", STATES)
@pytest.mark.parametrize("name", ["window", "all kinds", "state alone"])
def test_an_abort_in_any_state_leaks_nothing(
    reach_state: Callable[[MiniVllm], None], name: str
) -> None:
    vllm = stored_before(40, groups=SETS[name], slots=64, device_blocks=64)
    abort_in(vllm, reach_state)


@pytest.mark.parametrize("reach_state", STATES)
@pytest.mark.parametrize("name", ["window", "all kinds", "state alone"])
def test_a_reset_in_any_state_finds_nothing_old(
    reach_state: Callable[[MiniVllm], None], name: str
) -> None:
    vllm = stored_before(40, groups=SETS[name], slots=64, device_blocks=64)
    reset_in(vllm, reach_state)


@pytest.mark.parametrize("name", sets(*SETS))
def test_a_preempted_request_loads_what_it_lost(name: str) -> None:
    vllm = MiniVllm(groups=SETS[name], device_blocks=64, slots=64, tiers=0)
    request = vllm.add("a", range(20), outputs=14)
    for _ in range(9):
        vllm.step()
        vllm.release()
    vllm.step()
    vllm.running.remove(request)
    vllm._preempt(request)
    vllm.forget_device()
    there = furthest(vllm, request, set(vllm.core.index.keys()))
    assert there >= 16
    vllm.run()
    assert vllm.loaded_tokens["a"] == there
    assert request in vllm.finished


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", sets(*SEVERAL, "window alone", "state alone"))
def test_a_failed_copy_is_computed_once_and_a_miss_from_then_on(name: str, ranks: int) -> None:
    vllm = stored_before(40, groups=SETS[name], slots=64, device_blocks=64, ranks=ranks)
    request = vllm.add("again", range(40), outputs=8)
    load_begins(vllm)
    loaded = vllm.loaded_tokens["again"]
    vllm.copiers[-1].to_fail[SCATTER] = 1
    vllm.release()
    vllm.step()
    assert request.num_computed_tokens == 0
    vllm.run()
    assert request in vllm.finished
    assert vllm.loaded_tokens["again"] == loaded
    assert vllm.loaded["again"] == ranks
    assert vllm.seen["failed loads"] == 1
    # Only the one request has seen it fail.
    vllm.forget_device()
    assert loaded_by(vllm, "another", range(40)) == loaded


def test_a_promise_that_cannot_be_kept_is_computed() -> None:
    vllm = after("window", range(40))
    match = vllm.half.matched

    def vanishing(request: Request, local: int) -> int | None:
        tokens = match(request, local)
        vllm.core.drop([key_of(vllm, request, 1, 8)])
        return tokens

    vllm.half.matched = vanishing  # type: ignore[method-assign]
    request = vllm.add("again", range(40))
    orders = vllm.step()
    vllm.half.matched = match  # type: ignore[method-assign]
    # Nine blocks of all history and the last three of the window.
    assert len(orders.lost["again"]) == 12
    assert not orders.loads
    vllm.run()
    assert request in vllm.finished


@pytest.mark.slow
@pytest.mark.parametrize("name", sets("full", *SEVERAL))
def test_a_request_loads_no_more_than_it_says(name: str) -> None:
    for most in (0, 3, 17, 30, 1000):
        vllm = after(name, range(60), token_budget=8)
        vllm.add("again", range(60), max_load_tokens=most)
        vllm.run()
        align = vllm.geometry.align
        assert vllm.loaded_tokens["again"] <= most
        if most >= 17:
            assert vllm.loaded_tokens["again"] >= min(most, 52) - 2 * max(8, align)


@pytest.mark.parametrize("name", sets("full", *SEVERAL))
def test_a_request_stores_no_more_than_it_says(name: str) -> None:
    for most in (0, 17, 30):
        vllm = MiniVllm(groups=SETS[name], slots=128, device_blocks=128, token_budget=8)
        request = vllm.add("first", range(60), max_offload_tokens=most)
        vllm.run()
        allowed = {
            key_of(vllm, request, at, chunk)
            for at, group in enumerate(vllm.geometry.groups)
            for chunk in range(most // group.tokens_per_chunk)
        }
        stored = set(vllm.core.index.keys())
        assert stored <= allowed
        assert bool(stored) == (most > 0)


@pytest.mark.parametrize(
    ("wanted", "loaded"),
    [
        ([{"locality": "LOCAL"}], 0),
        ([{"medium": "STORAGE", "locality": "REMOTE"}], 36),
        ([], 0),
        (None, 36),
    ],
)
def test_a_request_loads_from_the_tiers_that_it_names(wanted: object, loaded: int) -> None:
    kinds = [TierKind("STORAGE", "LOCAL"), TierKind("STORAGE", "REMOTE")]
    vllm = stored_before(40, groups=SETS["window"], slots=64, tiers=2, tier_kinds=kinds)
    first, second = vllm.portal.stored
    second.update(first)
    first.clear()
    vllm.add("again", range(40), kv_load_tiers=wanted)
    vllm.run()
    assert vllm.loaded_tokens["again"] == loaded


def test_the_host_tier_serves_also_who_names_no_tier() -> None:
    vllm = after("window", range(40))
    vllm.add("again", range(40), kv_load_tiers=[])
    vllm.run()
    assert vllm.loaded_tokens["again"] == 36


@pytest.mark.parametrize("name", ["full", "window", "all kinds"])
def test_ranks_with_the_same_bytes_have_one_share(name: str) -> None:
    vllm = stored_before(40, groups=SETS[name], slots=64, ranks=2, replicas=2, device_blocks=64)
    assert vllm.rows.shape[1] == vllm.geometry.share_bytes
    vllm.add("again", range(60))
    vllm.run()
    assert vllm.loaded_tokens["again"] >= 36
    assert vllm.loaded["again"] == 2
    # What either of them stored is right for both.
    vllm.forget_device()
    assert loaded_by(vllm, "third", range(60)) >= 52


def test_a_failed_store_of_one_group_is_not_found() -> None:
    vllm = MiniVllm(groups=SETS["window"], slots=64, device_blocks=64)
    vllm.add("a", range(20))
    vllm.step()
    vllm.copiers[0].to_fail["gather"] = 1
    vllm.run()
    assert len(vllm.core.index) == 0
    assert not vllm.portal.stored[0]
