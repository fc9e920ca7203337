"""Lookups and loads of the scheduler half, in a mini vLLM that checks every byte it uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated import SCATTER
from mini_blocks import Request
from mini_groups import BLOCK
from mini_scenes import (
    STATES,
    abort_in,
    copying,
    load_begins,
    reset_in,
    step_until,
    stored_before,
)
from mini_vllm import DEADLINE_SECONDS, MiniVllm
from tiering.residency.plan import Promote
from tiering.residency.state import SlotState


@pytest.mark.slow
@pytest.mark.parametrize("per_chunk", [1, 2, 16])
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 200),
    local=st.integers(0, 50),
    again=st.integers(1, 200),
    from_tier=st.booleans(),
    ranks=st.integers(1, 2),
    hashes=st.sampled_from([1, 2]),
    budget=st.sampled_from([7, 64]),
)
def test_any_alignment_of_length_and_local_hit(
    per_chunk: int,
    tokens: int,
    local: int,
    again: int,
    from_tier: bool,
    ranks: int,
    hashes: int,
    budget: int,
) -> None:
    vllm = MiniVllm(
        blocks_per_chunk=per_chunk,
        ranks=ranks,
        device_blocks=64,
        slots=64,
        hashes_per_block=hashes,
        token_budget=budget,
    )
    first = vllm.add("first", range(tokens))
    vllm.run()
    chunk = BLOCK * per_chunk
    assert len(vllm.core.index) == tokens // chunk
    local = min(local, tokens // BLOCK)
    vllm.forget_device(first, keep=local * BLOCK)
    if from_tier:
        vllm.core.index.clear()
    vllm.add("again", range(again))
    vllm.run()
    limit = (again - 1) // BLOCK * BLOCK
    here = min(local * BLOCK, limit)
    there = min(tokens // chunk, -(-limit // chunk), again // chunk) * chunk
    assert vllm.loaded_tokens["again"] == max(0, min(there, limit) - here)
    assert len(vllm.finished) == 2


def test_the_promise_shrinks_and_grows_with_the_local_hit() -> None:
    vllm = stored_before(40, blocks_per_chunk=2)
    request = vllm.add("again", range(40))
    half = vllm.half
    assert half.matched(request, 0) is None  # asking
    vllm.portal.finish_all()
    assert half.matched(request, 16) is None  # promoting chunks 2, 3 and 4
    (promotion,) = vllm.portal.steps
    assert isinstance(promotion, Promote)
    assert len(promotion.keys) == 3
    vllm.portal.finish_all()
    assert half.matched(request, 16) == 20
    assert half.matched(request, 28) == 8
    assert half.matched(request, 36) == 0
    # What was held is too short at its head now: the chunks before it are promoted as well.
    assert half.matched(request, 4) is None
    vllm.portal.finish_all()
    assert half.matched(request, 4) == 32
    half.finished(request)
    assert not vllm.core.index.slots.load_pins.any()


@pytest.mark.parametrize("reach_state", STATES)
def test_an_abort_in_any_state_leaks_nothing(reach_state: Callable[[MiniVllm], None]) -> None:
    vllm = stored_before(40)
    abort_in(vllm, reach_state)


@pytest.mark.parametrize("reach_state", STATES)
def test_a_reset_in_any_state_finds_nothing_old(reach_state: Callable[[MiniVllm], None]) -> None:
    vllm = stored_before(40)
    reset_in(vllm, reach_state)


def test_a_reset_while_a_request_is_loading_keeps_its_pins() -> None:
    vllm = stored_before(40)
    vllm.add("again", range(40))
    load_begins(vllm)
    assert not vllm.reset()
    assert vllm.core.index.slots.census()[SlotState.DOOMED] == 9
    vllm.run()
    assert len(vllm.finished) == 1


def test_a_preempted_request_loads_what_it_lost() -> None:
    vllm = MiniVllm(device_blocks=32, slots=16, tiers=0)
    request = vllm.add("a", range(20), outputs=12)
    vllm.step()
    vllm.release()
    vllm.step()
    vllm.running.remove(request)
    vllm._preempt(request)
    vllm.forget_device()
    vllm.run()
    assert vllm.loaded_tokens["a"] == 20
    assert request in vllm.finished


@pytest.mark.parametrize("bad", range(9))
def test_a_promotion_that_fails_at_one_chunk_loads_those_before_it(bad: int) -> None:
    vllm = stored_before(40)
    request = vllm.add("again", range(40))
    vllm.portal.finish(step_until(vllm, Promote), failing=[bad])
    vllm.step()
    # They came from the tier, though they are in the host tier when the shorter load is found.
    assert vllm.half.loaded_from_host(request) == 0
    vllm.run()
    assert vllm.loaded_tokens["again"] == bad * BLOCK
    assert len([s for s in vllm.portal.submitted if isinstance(s, Promote)]) == 1


def test_a_late_promotion_is_not_waited_for_and_its_slots_stay_with_the_tier() -> None:
    vllm = stored_before(40)
    request = vllm.add("again", range(40))
    promotion = step_until(vllm, Promote)
    vllm.portal.late(promotion)
    vllm.step()
    assert request.status == "RUNNING"
    assert vllm.core.index.slots.census()[SlotState.FILLING] >= 9
    while vllm.running:
        vllm.step()
    assert request in vllm.finished
    vllm.run()
    assert vllm.loaded_tokens["again"] == 0


def test_a_tier_that_says_nothing_delays_a_request_by_its_deadline_only() -> None:
    vllm = stored_before(40)
    request = vllm.add("again", range(40))
    for _ in range(3):
        vllm.step()
    assert request.status == "WAITING"
    vllm.clock.advance(DEADLINE_SECONDS)
    vllm.step()
    assert request.status == "RUNNING"
    vllm.run()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_copy_is_computed_and_never_tried_again(ranks: int) -> None:
    vllm = stored_before(40, ranks=ranks)
    request = vllm.add("again", range(40), outputs=8)
    load_begins(vllm)
    vllm.copiers[-1].to_fail[SCATTER] = 1
    vllm.run()
    assert request in vllm.finished
    assert vllm.loaded_tokens["again"] == 36
    assert vllm.loaded["again"] == ranks
    vllm.forget_device()
    vllm.add("another", range(40))
    vllm.run()
    assert vllm.loaded_tokens["another"] == 36


def test_pins_go_with_the_acknowledgement_of_the_copy() -> None:
    vllm = stored_before(40)
    vllm.add("again", range(40))
    copying(vllm)
    assert vllm.core.budget.held == 9
    vllm.copiers[0].run_all(SCATTER)
    vllm.pool.take(len(vllm.pool.free))
    vllm.step()
    assert vllm.waiting
    assert vllm.core.budget.held == 0


def test_of_a_failed_copy_behind_a_local_hit_the_hit_is_kept() -> None:
    vllm = stored_before(40)
    vllm.add("head", range(13))
    vllm.run()
    request = vllm.add("again", range(40))
    load_begins(vllm)
    vllm.copiers[0].to_fail[SCATTER] = 1
    vllm.copiers[0].run(SCATTER)
    vllm.step()
    assert request.num_computed_tokens == 12
    vllm.run()
    assert request in vllm.finished


def test_a_promise_that_cannot_be_kept_is_computed() -> None:
    vllm = stored_before(40)
    vllm.add("warm", range(40))
    vllm.run()
    vllm.forget_device()
    request = vllm.add("again", range(40))
    match = vllm.half.matched

    def vanishing(request: Request, local: int) -> int | None:
        tokens = match(request, local)
        vllm.core.drop([vllm.half._requests[request.request_id].keys[0][4]])
        return tokens

    vllm.half.matched = vanishing  # type: ignore[method-assign]
    orders = vllm.step()
    vllm.half.matched = match  # type: ignore[method-assign]
    assert len(orders.lost["again"]) == 9
    assert not orders.loads
    vllm.run()
    assert request in vllm.finished


def test_requests_with_one_prefix_share_one_promotion() -> None:
    vllm = stored_before(40)
    for name in "abc":
        vllm.add(name, range(40))
    vllm.portal.finish(step_until(vllm, Promote))
    vllm.step()
    promotions = [s for s in vllm.portal.submitted if isinstance(s, Promote)]
    assert len(promotions) == 1
    vllm.run()
    assert len(vllm.finished) == 3
    assert vllm.core.counters.snapshot()["promotions_succeeded"] == 9


def test_a_prefix_longer_than_the_host_tier_is_loaded_as_far_as_it_fits() -> None:
    vllm = stored_before(40, slots=4)
    stored = len(vllm.portal.stored[0])
    vllm.add("again", range(40))
    vllm.run()
    assert stored
    assert vllm.loaded_tokens["again"] == min(stored, 3) * BLOCK
