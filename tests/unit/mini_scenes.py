"""Where scenes in the mini vLLM begin."""

from __future__ import annotations

from mini_vllm import MiniVllm
from tiering.residency.plan import Cascade, Contains, Promote


def stored_before(tokens: int, slots: int = 16, **more: int) -> MiniVllm:
    """An engine, just started, whose tier holds the chunks of `range(tokens)`."""
    before = MiniVllm(**more | {"slots": 64, "device_blocks": 64})
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
