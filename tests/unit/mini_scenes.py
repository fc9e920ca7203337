"""Where scenes in the mini vLLM begin, and the states that a request waits in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gated import SCATTER
from mini_vllm import MiniVllm
from tiering.residency.plan import Cascade, Contains, Promote


def stored_before(tokens: int, slots: int = 16, **more: Any) -> MiniVllm:
    """An engine, just started, whose tier holds the chunks of `range(tokens)`."""
    before = MiniVllm(**more | {"slots": 64, "device_blocks": 128})
    before.add("before", range(tokens))
    before.run()
    vllm = MiniVllm(slots=slots, **more)
    vllm.portal.stored[0].update(before.portal.stored[0])
    return vllm


def steps_of(vllm: MiniVllm, kind: type) -> list[Contains | Promote | Cascade]:
    return [step for step in vllm.portal.steps if isinstance(step, kind)]


def step_until(vllm: MiniVllm, kind: type) -> Contains | Promote | Cascade:
    """Steps of the engine, all gates closed but for questions, until one of `kind` is out."""
    for _ in range(5):
        if found := steps_of(vllm, kind):
            return found[0]
        for question in steps_of(vllm, Contains):
            vllm.portal.finish(question)
        vllm.step()
    raise AssertionError(f"no {kind.__name__} came out")


def load_begins(vllm: MiniVllm) -> None:
    """Until a copy to the device waits at its gate."""
    vllm.portal.finish(step_until(vllm, Promote))
    vllm.step()
    assert vllm.copiers[0].queues[SCATTER]


def asking(vllm: MiniVllm) -> None:
    vllm.step()
    assert steps_of(vllm, Contains)


def promoting(vllm: MiniVllm) -> None:
    step_until(vllm, Promote)


def held(vllm: MiniVllm) -> None:
    """Promoted, but no device blocks to be had."""
    vllm.portal.finish(step_until(vllm, Promote))
    hostage = vllm.pool.take(len(vllm.pool.free))
    vllm.step()
    assert vllm.core.budget.held
    assert not vllm.half.needs_steps
    vllm.pool.give_back(hostage)


def copying(vllm: MiniVllm) -> None:
    load_begins(vllm)


def copied_but_not_told(vllm: MiniVllm) -> None:
    load_begins(vllm)
    vllm.copiers[0].run_all(SCATTER)


def arrived(vllm: MiniVllm) -> None:
    copied_but_not_told(vllm)
    hostage = vllm.pool.take(len(vllm.pool.free))
    vllm.step()
    assert not vllm.half.needs_steps
    vllm.pool.give_back(hostage)


STATES: list[Callable[[MiniVllm], None]] = [
    *(asking, promoting, held),
    *(copying, copied_but_not_told, arrived),
]
NOTHING_COPIED_YET = (asking, promoting, held)


def abort_in(vllm: MiniVllm, reach_state: Callable[[MiniVllm], None]) -> None:
    """A request is aborted in that state, and nothing leaks."""
    request = vllm.add("again", range(40))
    reach_state(vllm)
    vllm.abort(request)
    vllm.check()
    # Another request takes the blocks while the aborted one's transfers are still under way.
    vllm.add("other", range(500, 540))
    vllm.step()
    vllm.run()
    assert [r.request_id for r in vllm.finished] == ["other"]


def reset_in(vllm: MiniVllm, reach_state: Callable[[MiniVllm], None]) -> None:
    """The cache is reset in that state, and nothing old is found."""
    vllm.add("again", range(40))
    reach_state(vllm)
    before = vllm.loaded_tokens["again"]
    vllm.reset()
    vllm.run()
    assert vllm.loaded_tokens["again"] == before
    vllm.forget_device()
    vllm.add("new", range(40))
    vllm.run()
    # What "again" stored under the new names: nothing, if it held what was loaded before.
    assert vllm.loaded_tokens["new"] == (36 if reach_state in NOTHING_COPIED_YET else 0)
