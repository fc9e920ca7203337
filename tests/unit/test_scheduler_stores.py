"""Stores of the scheduler half, and the fences that keep their sources from being overwritten."""

from __future__ import annotations

import pytest

from gated import GATHER
from mini_scenes import step_until, steps_of, stored_before
from mini_vllm import MiniVllm
from tiering.residency.plan import Contains, Promote
from tiering.residency.state import SlotState
from tiering_connectors.vllm.pauses import PAUSE_SECONDS, pause_of


def test_a_reset_with_a_store_under_way_gives_its_slots_back() -> None:
    vllm = MiniVllm(slots=8, tiers=0)
    vllm.add("a", range(20), outputs=4)
    vllm.step()
    assert vllm.reset()
    vllm.check()
    assert vllm.core.index.slots.census()[SlotState.ABANDONED] == 5
    vllm.run()
    assert vllm.epoch == 1
    assert len(vllm.core.index) == 5


def test_a_request_finished_before_its_store_is_acknowledged() -> None:
    vllm = MiniVllm(slots=8, tiers=0)
    vllm.add("a", range(20))
    vllm.step()
    assert [r.request_id for r in vllm.finished] == ["a"]
    assert vllm.half.needs_steps
    vllm.run()
    assert len(vllm.core.index) == 5
    assert not vllm.half.needs_steps


def test_blocks_given_to_another_are_fenced_and_no_others() -> None:
    vllm = MiniVllm(device_blocks=12, slots=16, tiers=0)
    vllm.add("a", range(20))
    store = vllm.step().stores[0]
    vllm.add("b", range(100, 120))
    quiet = vllm.step()  # Seven blocks were never used: no need to wait.
    assert quiet.fence == []
    assert vllm.copiers[0].waits == 0
    vllm.add("c", range(200, 216))
    busy = vllm.step()
    assert busy.fence == [store.job_id]
    assert vllm.copiers[0].waits == 1
    vllm.run()


def test_blocks_given_to_a_load_are_fenced() -> None:
    vllm = stored_before(24, device_blocks=8)
    vllm.add("a", range(100, 120))
    vllm.step()
    vllm.portal.finish_all()
    store = vllm.step().stores[0]
    vllm.add("again", range(24))
    vllm.portal.finish(step_until(vllm, Promote))
    orders = vllm.step()
    assert orders.loads
    assert orders.fence == [store.job_id]
    vllm.run()


def test_blocks_of_a_preempted_request_are_fenced() -> None:
    vllm = MiniVllm(device_blocks=12, slots=16, tiers=0)
    vllm.add("a", range(20), outputs=12)
    vllm.add("b", range(100, 124), outputs=12)
    fences: list[int] = []
    while not fences:  # "b" gives way, and "a" is given a block of it that is being stored.
        fences += vllm.step().fence
        assert not vllm.finished
    (victim,) = vllm.waiting
    assert (victim.request_id, victim.status) == ("b", "PREEMPTED")
    vllm.run()
    assert len(vllm.finished) == 2


def test_a_preempted_request_stores_again_what_the_host_tier_lost() -> None:
    vllm = MiniVllm(device_blocks=32, slots=16, tiers=0)
    request = vllm.add("a", range(20), outputs=4)
    vllm.step()
    vllm.release()
    vllm.step()
    assert len(vllm.core.index) == 5
    vllm.running.remove(request)
    vllm._preempt(request)
    vllm.forget_device()
    vllm.core.index.clear()
    vllm.run()
    assert len(vllm.core.index) == 5


def test_a_failed_store_is_not_found() -> None:
    vllm = MiniVllm(slots=8)
    vllm.add("a", range(20))
    vllm.step()
    vllm.copiers[0].to_fail[GATHER] = 1
    vllm.run()
    assert len(vllm.core.index) == 0
    assert not vllm.portal.stored[0]


def test_a_store_is_readable_only_when_every_rank_has_copied() -> None:
    vllm = MiniVllm(slots=8, ranks=2, tiers=0)
    vllm.add("a", range(20))
    vllm.step()
    vllm.copiers[0].run_all(GATHER)
    vllm.step()
    assert vllm.core.index.slots.census()[SlotState.FILLING] == 5
    vllm.copiers[1].to_fail[GATHER] = 1
    vllm.copiers[1].run_all(GATHER)
    vllm.step()
    assert vllm.core.index.slots.census()[SlotState.FREE] == 8
    vllm.settle()


def test_refused_stores_come_later_without_a_gap_and_without_a_storm() -> None:
    vllm = MiniVllm(slots=4, tiers=0, device_blocks=64)
    a = vllm.add("a", range(16), outputs=40)
    b = vllm.add("b", range(100, 120), outputs=40)
    reserve, calls = vllm.core.reserve, []

    def counting(owner: str, *more: object) -> object:
        calls.append(owner)
        return reserve(owner, *more)  # type: ignore[arg-type]

    vllm.core.reserve = counting  # type: ignore[assignment]
    for _ in range(12):  # All four slots are being filled: nothing changes, nothing is tried.
        vllm.step()
    assert calls == ["a", "b", "a"]  # Once more for a chunk that was not there before.
    assert vllm.core.counters.snapshot()["stores_refused"] == 2
    vllm.abort(a)
    vllm.release()
    vllm.step()
    vllm.step()
    vllm.release()
    vllm.step()
    keys = [h + bytes(4) for h in b.block_hashes]
    here = set(vllm.core.index.keys())
    found = [key in here for key in keys]
    assert found[:4] == [True] * 4
    vllm.abort(b)
    vllm.run()


def test_only_the_prompt_is_stored_if_told_so() -> None:
    for prompt_only, chunks in ((True, 2), (False, 5)):
        vllm = MiniVllm(slots=8, prompt_only=prompt_only)
        vllm.add("a", range(9), outputs=13)
        vllm.run()
        assert len(vllm.core.index) == chunks


def test_what_was_loaded_before_a_reset_is_not_stored_after_it() -> None:
    """vLLM may reset while a request loads: its blocks are of the old kind until it is done."""
    vllm = stored_before(40)
    vllm.add("again", range(44), outputs=2)
    vllm.portal.finish(step_until(vllm, Promote))
    assert vllm.step().loads
    assert not vllm.reset()
    vllm.run()
    assert vllm.loaded_tokens["again"] == 40
    assert len(vllm.core.index) == 0


def test_a_hold_without_room_is_tried_again_only_when_something_changed() -> None:
    vllm = stored_before(40, slots=16, device_blocks=64)
    other = MiniVllm(slots=64, device_blocks=64)
    other.add("other", range(200, 240))
    other.run()
    vllm.portal.stored[0].update(other.portal.stored[0])
    vllm.add("one", range(40))
    step_until(vllm, Promote)
    tried: list[str] = []
    hold = vllm.core.hold

    def counted(owner: str, keys: list[bytes]) -> bool:
        tried.append(owner)
        return hold(owner, keys)

    vllm.core.hold = counted  # type: ignore[method-assign, assignment]
    vllm.add("two", range(200, 240))
    vllm.step()
    for question in steps_of(vllm, Contains):
        vllm.portal.finish(question)
    for _ in range(5):
        vllm.step()
    assert tried == ["two"]
    vllm.run()
    assert (vllm.loaded_tokens["one"], vllm.loaded_tokens["two"]) == (36, 36)


def test_an_idle_engine_is_kept_stepping_until_every_chunk_is_given_to_the_tier() -> None:
    """Writes may pin all but the reserve of the host tier: the rest needs another step."""
    vllm = MiniVllm(slots=8, device_blocks=64, is_listened_to=False)
    vllm.add("a", range(32))
    vllm.step()
    vllm.portal.finish_all()  # The question whether the tier has it.
    for _ in range(3):
        vllm.step()
        for copier in vllm.copiers:
            copier.run_all(GATHER)
    assert [r.request_id for r in vllm.finished] == ["a"]
    assert len(vllm.half._jobs) == 0
    assert vllm.half.needs_steps
    vllm.portal.finish_all()
    vllm.step()
    assert not vllm.half.needs_steps
    vllm.portal.finish_all()
    vllm.step()
    assert len(vllm.portal.stored[0]) == 8


def test_steps_that_only_wait_for_writes_pause_and_no_others_do() -> None:
    vllm = MiniVllm(slots=16, device_blocks=64)
    vllm.add("a", range(32))
    vllm.step()
    vllm.portal.finish_all()  # The question whether the tier has it.
    while not vllm.finished:
        vllm.step()
    for copier in vllm.copiers:
        copier.run_all(GATHER)
    vllm.step()
    assert vllm.pauses == 0
    for _ in range(3):
        assert vllm.half.needs_steps
        vllm.step()
    assert vllm.pauses == 3
    vllm.add("b", range(100, 108), outputs=3)
    vllm.step()
    vllm.step()
    assert vllm.pauses == 3, "a request would wait"
    for question in steps_of(vllm, Contains):
        vllm.portal.finish(question)
    for _ in range(4):
        vllm.step()
    assert len(vllm.finished) == 2
    assert len(vllm.half._jobs) > 0
    vllm.step()
    assert vllm.pauses == 3, "copies are waited for"
    for copier in vllm.copiers:
        copier.run_all(GATHER)
    vllm.step()
    vllm.listener.device_was_reset()
    vllm.step()
    assert vllm.pauses == 3, "there was something to tell"
    vllm.step()
    assert vllm.pauses == 4
    vllm.run()
    pauses = vllm.pauses
    assert not vllm.half.needs_steps
    vllm.step()
    assert vllm.pauses == pauses, "nothing is written any more"


def test_replicas_that_step_together_do_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)
    pause_of(2)()
    assert naps == []
    pause_of(1)()
    assert naps == [PAUSE_SECONDS]


def test_a_request_that_may_not_read_the_cache_is_stored_all_the_same() -> None:
    """As one that wants the logprobs of its prompt."""
    vllm = stored_before(20)
    vllm.add("again", range(20)).skip_reading_prefix_cache = True
    vllm.run()
    assert vllm.loaded_tokens["again"] == 0
    assert len(vllm.core.index) == 5


def test_being_asked_for_nothing_is_no_reason_to_try_a_refused_store_again() -> None:
    vllm = MiniVllm(slots=8, device_blocks=64, tiers=0)
    before = vllm.core.changes
    request = vllm.add("a", range(20))
    for _ in range(3):
        assert vllm.half.matched(request, 0) == 0
    assert vllm.core.changes == before
    vllm.run()
