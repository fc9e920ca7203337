"""Two hundred requests at once over a host tier of 16 slots, aborts at random: what each one says
is what it says alone, and in the end nothing is held.

A minute by default; KV_TIERING_STORM_SECONDS sets another time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inproc import BLOCK_BYTES, EngineProcess, assert_at_rest, connector_config
from prompts import BLOCK, random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SECONDS = float(os.environ.get("KV_TIERING_STORM_SECONDS", "60"))
CONCURRENCY = 200
SLOTS = 16
HEADS = 4
TAILS = 6
TOKENS = 4
CLOSE = 1e-3
"""Two tokens whose logprobs differ by less may change places with the company in a batch."""


def storm_prompts() -> list[list[int]]:
    """Heads of 4 to 7 blocks, each with tails of its own of 0 to 5 blocks and a bit."""
    prompts = []
    for head in range(HEADS):
        shared = random_prompt(f"head {head}", (4 + head) * BLOCK)
        for tail in range(TAILS):
            prompts.append(shared + random_prompt(f"tail {head} {tail}", tail * BLOCK + 5 + tail))
    return prompts


def test_in_a_storm_everybody_gets_the_right_answer(tiny_model: Path, tmp_path: Path) -> None:
    prompts = storm_prompts()
    options = {
        "model": str(tiny_model),
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 * BLOCK_BYTES,
        "connector": connector_config(tmp_path, SLOTS * BLOCK_BYTES + 8192),
    }
    with EngineProcess(tmp_path / "vllm.log", **options) as engine:
        alone = [engine.ask(prompt, TOKENS, salt=f"alone {i}") for i, prompt in enumerate(prompts)]
        assert engine.call("state")["rows"] == SLOTS
        with engine.counting() as grown:
            told = engine.call(
                "storm",
                prompts=prompts,
                tokens=TOKENS,
                seconds=SECONDS,
                concurrency=CONCURRENCY,
                abort_share=0.2,
                seed=7,
            )
        wrong = []
        for i, (answers, first) in enumerate(zip(told["answers"], alone, strict=True)):
            for said, count in answers:
                at = next((n for n, t in enumerate(first.tokens) if said[n : n + 1] != [t]), None)
                if at is not None and first.logprobs[at] - first.runner_up[at] >= CLOSE:
                    wrong.append((i, count, said, first.tokens))
        assert not wrong
        print({name: told[name] for name in ("finished", "aborted", "steps")}, grown)
        assert told["finished"] > CONCURRENCY
        assert told["aborted"] > CONCURRENCY // 10
        # All that can happen did: hits from both tiers, evictions, and stores without room.
        assert grown["host"] > 0
        assert grown["disk"] > 0
        assert grown["promotions_succeeded"] > 0
        assert_at_rest(engine)
