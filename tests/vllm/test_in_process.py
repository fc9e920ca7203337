"""What comes back from host memory or disk is what the device had: vLLM's engine, in process.

The reference of every restore is a device hit with as many cached tokens: cold runs round
differently by themselves. Counts prove where the tokens came from.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from inproc import (
    BLOCK_BYTES,
    Answer,
    EngineProcess,
    assert_at_rest,
    assert_one_block_left_out_is_seen,
    connector_config,
)
from prompts import BLOCK, random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOMY_BYTES = 128 << 20
HEADER_BYTES_MAX = 8192
PROMPT_BLOCKS = 50
PROMPT = PROMPT_BLOCKS * BLOCK + 8
DEVICE_BLOCKS = 128
"""Twice what the longest request may take."""

FACTORS = (1, 2, 16)

HELD = {1: (1, 15, 17), 2: (1, 15, 17), 16: (5, 17)}
"""Blocks of a prefix that the device still has, by chunk factor."""

HITS = {1: 32, 2: 1, 15: 32, 16: 8, 17: 8, 31: 32, 33: 32, 48: 32}
"""Blocks of a request that it can have at most, and the tokens behind them. A chunk is known by
its last block: a request that ends inside of a chunk cannot have that one."""

SMALL_ROWS = 6

OpenEngine = Callable[..., EngineProcess]
EngineOf = Callable[[int], EngineProcess]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every engine here; those with one size of chunk share what is in it."""
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def open_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenEngine:
    def opened(connector: dict[str, Any], **options: Any) -> EngineProcess:
        log = tmp_path_factory.mktemp("engine") / "vllm.log"
        return EngineProcess(
            log,
            model=str(tiny_model),
            connector=connector,
            max_model_len=DEVICE_BLOCKS * BLOCK // 2,
            kv_cache_memory_bytes=DEVICE_BLOCKS * BLOCK_BYTES,
            **options,
        )

    return opened


@pytest.fixture(scope="module")
def engine_of(open_engine: OpenEngine, root: Path) -> Iterator[EngineOf]:
    """The engine of a chunk factor, with room for everything in host memory."""
    with ExitStack() as stack:

        @functools.cache
        def engine_of(factor: int) -> EngineProcess:
            config = connector_config(root, ROOMY_BYTES, blocks_per_chunk=factor)
            return stack.enter_context(open_engine(config))

        yield engine_of


@pytest.fixture(scope="module")
def small(open_engine: OpenEngine, root: Path) -> Iterator[EngineProcess]:
    """With host memory for 6 chunks, and a device that a few requests fill. Stores answers too."""
    config = connector_config(
        root, HEADER_BYTES_MAX + SMALL_ROWS * BLOCK_BYTES, offload_prompt_only=False
    )
    with open_engine(config, max_num_seqs=32) as running:
        assert running.call("state")["rows"] == SMALL_ROWS
        yield running


def test_the_connector_is_found_by_its_name(engine_of: EngineOf) -> None:
    engine = engine_of(2)
    assert "kv_connector_module_path" not in connector_config(None, 1)
    assert engine.call("state")["connector"] == "TieredConnector"


@pytest.mark.parametrize("factor", FACTORS)
def test_restores_equal_device_hits_at_any_alignment(engine_of: EngineOf, factor: int) -> None:
    """The device still holds `held` blocks of a prefix, the request has `hit` that can be had."""
    engine, held_blocks = engine_of(factor), HELD[factor]
    prompt = random_prompt(("alignment", factor), PROMPT)
    queries = {hit: prompt[: hit * BLOCK + tail] for hit, tail in HITS.items()}
    colds = {hit: engine.ask(query, salt=f"stranger {hit}") for hit, query in queries.items()}
    engine.call("reset")
    # The first blocks are computed in the steps in which they will be computed again where the
    # device is to hold them and no whole chunk can be loaded: so they are the same to the bit.
    for blocks in sorted(
        {blocks for held in held_blocks for blocks in (held // factor * factor, held)}
    ):
        engine.ask(prompt[: blocks * BLOCK + 1], 1)
    engine.ask(prompt, 1)
    warm = {hit: engine.ask(query) for hit, query in queries.items()}
    for hit, cold in colds.items():
        assert cold.cached_tokens == 0
        assert warm[hit].cached_tokens == hit * BLOCK
        assert warm[hit].tokens == cold.tokens
    engine.call("settle")

    def check(held: int, hit: int, source: str) -> None:
        case = (held, hit, source)
        engine.call("reset")
        if source == "disk":
            engine.call("empty_host")
        if held:
            engine.ask(prompt[: held * BLOCK + 1], 1)
        with engine.counting() as grown:
            answer = engine.ask(queries[hit])
        # Chunks whose tokens are all in the request, but for what must be computed of it.
        had = max(held, min(hit, len(queries[hit]) // (factor * BLOCK) * factor))
        sources = {name: grown[name] for name in ("device", "host", "disk") if name in grown}
        wanted = {"device": held, source: had - held}
        assert sources == {n: blocks * BLOCK for n, blocks in wanted.items() if blocks}, case
        assert answer.cached_tokens == had * BLOCK, case
        assert answer.tokens == warm[hit].tokens, case
        if had == hit:
            assert answer == warm[hit], case

    for source in ("host", "disk"):
        for held in (0, *held_blocks):
            for hit in HITS:
                if held < hit:
                    check(held, hit, source)
    assert_at_rest(engine)


@pytest.mark.parametrize("factor", FACTORS)
def test_the_tail_that_fills_no_chunk_is_computed(engine_of: EngineOf, factor: int) -> None:
    engine = engine_of(factor)
    prompt = random_prompt(("tail", factor), PROMPT)
    with engine.counting() as grown:
        cold = engine.ask(prompt)
        engine.call("settle")
    chunks = PROMPT_BLOCKS // factor
    assert grown["chunks_stored"] == grown["cascades_stored"] == chunks
    for empty in ("reset", "empty_host"):
        engine.call("reset")
        engine.call(empty)
        again = engine.ask(prompt)
        assert again.cached_tokens == chunks * factor * BLOCK
        assert again.tokens == cold.tokens


def test_another_process_hits_the_disk_with_its_first_request(
    engine_of: EngineOf, open_engine: OpenEngine, root: Path
) -> None:
    engine = engine_of(16)
    prompt = random_prompt("restart", 48 * BLOCK + 8)
    cold, warm = (engine.ask(prompt) for _ in range(2))
    engine.call("settle")
    with open_engine(connector_config(root, ROOMY_BYTES, blocks_per_chunk=16)) as other:
        with other.counting() as grown:
            first = other.ask(prompt)
        assert first == warm
        assert first.tokens == cold.tokens
        assert (grown["disk"], grown["promotions_succeeded"]) == (48 * BLOCK, 3)
        assert not {"device", "host"} & grown.keys()


def test_one_block_left_unwritten_is_seen(engine_of: EngineOf) -> None:
    assert_one_block_left_out_is_seen(
        engine_of(2), random_prompt("control", 48 * BLOCK + 8), 48 * BLOCK
    )


def test_a_failed_load_is_computed(engine_of: EngineOf) -> None:
    engine = engine_of(2)
    prompt = random_prompt("failed load", 48 * BLOCK + 8)
    cold = engine.ask(prompt)
    engine.call("reset")
    engine.call("break_copies", direction="scatter", fault="fail", copies=1)
    computed = engine.ask(prompt)
    assert engine.call("copies_broken") == 1
    assert computed.tokens == cold.tokens
    assert_at_rest(engine)

    engine.call("reset")
    with engine.counting() as grown:
        assert engine.ask(prompt).tokens == cold.tokens
    assert grown["host"] == 48 * BLOCK


def test_a_failed_store_is_a_later_miss(engine_of: EngineOf) -> None:
    engine = engine_of(2)
    prompt = random_prompt("failed store", 48 * BLOCK + 8)
    engine.call("break_copies", direction="gather", fault="fail", copies=1)
    cold = engine.ask(prompt)
    assert engine.call("copies_broken") == 1
    assert_at_rest(engine)
    for cached in (0, 48 * BLOCK):
        engine.call("reset")
        again = engine.ask(prompt)
        assert (again.cached_tokens, again.tokens) == (cached, cold.tokens)


def test_after_a_reset_nothing_is_found_anywhere(engine_of: EngineOf) -> None:
    engine = engine_of(2)
    prompt = random_prompt("reset", 48 * BLOCK + 8)
    cold = engine.ask(prompt)
    engine.call("settle")
    assert engine.call("reset", connector=True)
    with engine.counting() as grown:
        assert engine.ask(prompt) == cold
    assert not {"device", "host", "disk"} & grown.keys()
    engine.call("settle")

    # And what is stored from then on is found as ever, in both tiers.
    for empty, source in (("reset", "host"), ("empty_host", "disk")):
        engine.call("reset")
        engine.call(empty)
        with engine.counting() as grown:
            assert engine.ask(prompt).tokens == cold.tokens
        assert grown[source] == 48 * BLOCK


def test_answers_are_stored_only_if_asked_for(small: EngineProcess, engine_of: EngineOf) -> None:
    """The roomy engines store prompts only, the small one answers too."""
    stored = []
    for engine in (small, engine_of(1)):
        with engine.counting() as grown:
            engine.ask(random_prompt(("answer", len(stored)), 2 * BLOCK), 2 * BLOCK)
            engine.call("settle")
        stored.append(grown["chunks_stored"])
    # The last token of all is never computed with, so the fourth block is not whole.
    assert stored == [3, 2]


def test_a_prompt_larger_than_the_host_tier_is_stored_and_found(small: EngineProcess) -> None:
    prompt = random_prompt("larger", 31 * BLOCK + 8)
    with small.counting() as grown:
        cold = small.ask(prompt)
        small.call("settle")
    assert grown["chunks_stored"] > 0
    small.call("reset")
    with small.counting() as grown:
        again = small.ask(prompt)
    assert again.tokens == cold.tokens
    assert again.cached_tokens == grown.get("host", 0) + grown.get("disk", 0) > 0
    assert_at_rest(small)


def test_of_a_prefix_longer_than_the_host_tier_what_fits_is_loaded(
    engine_of: EngineOf, small: EngineProcess
) -> None:
    engine = engine_of(1)
    prompt = random_prompt("all on disk", 31 * BLOCK + 8)
    cold = engine.ask(prompt)
    engine.call("settle")
    with small.counting() as grown:
        loaded = small.ask(prompt)
    assert loaded.tokens == cold.tokens
    # Of 6 chunks one is the reserve of stores.
    assert loaded.cached_tokens == grown["disk"] == 5 * BLOCK
    assert grown["loads_cut"] == 1
    assert_at_rest(small)


def explained(answer: Answer, reference: Answer) -> bool:
    """Whether `answer` is `reference` up to rounding: batches of other shapes round otherwise,
    and where two tokens are as likely, either may come, and another text from there on."""
    for i, token in enumerate(reference.tokens):
        if abs(answer.logprobs[i] - reference.logprobs[i]) > 0.1:
            return False
        if answer.tokens[i] != token:
            return reference.logprobs[i] - reference.runner_up[i] < 0.1
    return True


def test_many_requests_with_preemption_and_a_tiny_host_tier(small: EngineProcess) -> None:
    shared = random_prompt("shared", 6 * BLOCK)
    prompts = [
        (shared if i % 2 else []) + random_prompt(("many", i), 4 * BLOCK + i) for i in range(32)
    ]
    # Strangers to one another, one by one: the connector can do nothing for them.
    references = [small.ask(prompt, 40, salt=f"alone {i}") for i, prompt in enumerate(prompts)]
    small.call("reset")
    with small.counting() as grown:
        for _ in range(2):
            answers = small.ask_all(prompts, 40)
            for i, (answer, reference) in enumerate(zip(answers, references, strict=True)):
                assert explained(answer, reference), (i, answer, reference)
    assert grown["preemptions"] > 0
    assert grown["chunks_stored"] > 0
    assert grown.get("host", 0) + grown["disk"] > 0
    assert_at_rest(small)


def test_aborts_at_any_moment_leave_nothing_behind(small: EngineProcess) -> None:
    chance = random.Random(5)
    shared = random_prompt("abort", 8 * BLOCK)
    ended = 0
    for turn in range(6):
        prompts = [
            shared[: chance.randrange(1, 9) * BLOCK] + random_prompt((turn, i), 3 * BLOCK)
            for i in range(16)
        ]
        # While a load is waited for, here for long, steps are many and short.
        small.call("break_copies", direction="scatter", fault="late", copies=16)
        abort_at = [int(2 ** chance.uniform(0, 11)) for _ in prompts]
        small.call("reset")
        ended += len(small.call("ask_and_abort", prompts=prompts, tokens=16, abort_at=abort_at))
        assert_at_rest(small)
    assert 0 < ended < 6 * 16
    cold = small.ask(shared, salt="a stranger")
    small.call("reset")
    assert small.ask(shared).tokens == cold.tokens
