"""Many requests at once, some aborted, on an engine in this process: runs in the tests' child.

Owns the list of what is in flight. Prompts are few and come again, share heads with one another,
and are taken up to different lengths, so that most find part of themselves somewhere. What a
finished request said is compared by the test.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any


def run_storm(
    engine: Any,
    sampling: Any,
    prompts: Sequence[Sequence[int]],
    *,
    seconds: float,
    concurrency: int,
    abort_share: float,
    seed: int,
) -> dict[str, Any]:
    """Keep `concurrency` requests in flight for `seconds`, then let them end. An aborted one is
    stopped after a random number of steps. `answers[i]`: the different answers, each with its
    count, that prompt i was given."""
    chance = random.Random(seed)
    prompt_of: dict[str, int] = {}
    doomed: dict[str, int] = {}
    answers: list[dict[tuple[int, ...], int]] = [{} for _ in prompts]
    counts = {"finished": 0, "aborted": 0, "steps": 0}
    end = time.monotonic() + seconds
    number = 0
    while prompt_of or time.monotonic() < end:
        while len(prompt_of) < concurrency and time.monotonic() < end:
            name, number = str(number), number + 1
            prompt_of[name] = chance.randrange(len(prompts))
            engine.add_request(name, {"prompt_token_ids": list(prompts[prompt_of[name]])}, sampling)
            if chance.random() < abort_share:
                doomed[name] = counts["steps"] + chance.randrange(60)
        over = [name for name, step in doomed.items() if step <= counts["steps"]]
        for name in over:
            del doomed[name]
            if prompt_of.pop(name, None) is not None:
                engine.abort_request([name])
                counts["aborted"] += 1
        for output in engine.step():
            at = prompt_of.get(output.request_id)
            if output.finished and at is not None:
                del prompt_of[output.request_id]
                said = tuple(output.outputs[0].token_ids)
                answers[at][said] = answers[at].get(said, 0) + 1
                counts["finished"] += 1
        counts["steps"] += 1
    return {**counts, "answers": [[[list(a), n] for a, n in own.items()] for own in answers]}
