"""What else vLLM can be asked to do, with the connector: adapters, salts, drafts, no prefix cache
of the device, prompts computed in pieces; and models for which it cannot be done.

As in test_families.py, a restore equals a device hit with as many cached tokens, to the bit, out
of memory that was zeroed; where there is no such hit, another restore. Each test has an engine of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from families import ROOMY_BYTES, ask_with_sources, empty
from inproc import EngineProcess, assert_at_rest, connector_config
from prompts import BLOCK, random_prompt
from test_in_process import explained

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCKS = 20
WHOLE = BLOCKS * BLOCK
SOURCES = ("host", "disk")
ANSWER = 40
"""Tokens that fill a block, behind the 8 of a prompt's last."""

OpenEngine = Callable[..., EngineProcess]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[OpenEngine]:
    """Starts an engine with chunks of two blocks, or of what `connector` says."""
    with ExitStack() as stack:

        def opened(model: Path, connector: dict[str, Any] | None = None, **options: Any) -> Any:
            extra = {"blocks_per_chunk": 2, **(connector or {})}
            engine = EngineProcess(
                tmp_path / "vllm.log",
                model=str(model),
                connector=connector_config(tmp_path / "kv", ROOMY_BYTES, **extra),
                **{"max_model_len": 4096, "kv_cache_memory_bytes": 64 << 20, **options},
            )
            return stack.enter_context(engine)

        yield opened


def assert_restored(engine: EngineProcess, prompt: list[int], tokens: int = 4) -> None:
    """A restore of `prompt` from each tier equals a device hit, which must have all but a bit."""
    cold = engine.ask(prompt, tokens)
    warm, sources = ask_with_sources(engine, prompt, tokens)
    assert cold.cached_tokens == 0
    assert explained(warm, cold)
    assert sources == {"device": len(prompt) // BLOCK * BLOCK}
    for source in SOURCES:
        empty(engine, host=source == "disk")
        restored, sources = ask_with_sources(engine, prompt, tokens)
        assert sources == {source: warm.cached_tokens}
        assert restored == warm
    assert_at_rest(engine)


def test_adapters_and_salts_keep_their_caches_apart(
    tiny_model: Path, adapters: tuple[Path, Path], open_engine: OpenEngine
) -> None:
    engine = open_engine(tiny_model, enable_lora=True, max_loras=2, max_lora_rank=8)
    prompt = random_prompt("apart", WHOLE + 8)
    ways: list[dict[str, Any]] = [{}, *({"adapter": str(folder)} for folder in adapters)]
    ways += [{"salt": "one"}, {"salt": "other"}]
    warm = []
    for how in ways:
        # All that the others have stored is in both tiers.
        empty(engine)
        cold, sources = ask_with_sources(engine, prompt, **how)
        assert sources == {}
        warm.append(engine.ask(prompt, **how))
        assert explained(warm[-1], cold)
    plain, first, second, *salted = warm
    assert not any(map(explained, (plain, plain, first), (first, second, second)))
    assert all(explained(answer, plain) for answer in salted)
    for source in SOURCES:
        for how, answer in zip(ways, warm, strict=True):
            empty(engine, host=source == "disk")
            assert ask_with_sources(engine, prompt, **how) == (answer, {source: WHOLE})
    assert_at_rest(engine)


@pytest.mark.parametrize(
    ("method", "prompt_only"), [("eagle", True), ("eagle", False), ("ngram", False)]
)
def test_speculation_finds_what_was_stored(
    tiny_model: Path,
    draft_model: Path,
    open_engine: OpenEngine,
    method: str,
    prompt_only: bool,
) -> None:
    """Of a draft's cache vLLM trusts all blocks of a prefix but the last, and so do we. How many
    guesses are right decides with which others a token is computed, so that logprobs are compared
    up to rounding."""
    settings: dict[str, dict[str, Any]] = {
        "eagle": {"model": str(draft_model)},
        "ngram": {"prompt_lookup_min": 1},
    }
    engine = open_engine(
        tiny_model,
        {"offload_prompt_only": prompt_only, "blocks_per_chunk": 1},
        speculative_config={"method": method, "num_speculative_tokens": 2, **settings[method]},
    )
    distrusted = BLOCK if method == "eagle" else 0
    # It says everything several times, so that there is something to look up.
    prompt = random_prompt(method, 4 * BLOCK) * (BLOCKS // 4) + random_prompt("end", 8)
    cold = engine.ask(prompt, ANSWER, salt="a stranger")
    first = engine.ask(prompt, ANSWER)
    assert explained(first, cold)
    warm, sources = ask_with_sources(engine, prompt, ANSWER)
    assert explained(warm, cold)
    assert sources == {"device": WHOLE - distrusted}
    for source in SOURCES:
        empty(engine, host=source == "disk")
        restored, sources = ask_with_sources(engine, prompt, ANSWER)
        assert sources == {source: WHOLE - distrusted}
        assert explained(restored, warm)

    continued = [*prompt, *first.tokens, *random_prompt("more", BLOCK)]
    reference = engine.ask(continued, salt="a stranger")
    empty(engine)
    answer, sources = ask_with_sources(engine, continued)
    kept = WHOLE if prompt_only else WHOLE + BLOCK
    assert sources == {"host": kept - distrusted}
    assert explained(answer, reference)
    assert_at_rest(engine)


def test_without_a_prefix_cache_of_the_device(tiny_model: Path, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny_model, enable_prefix_caching=False)
    prompt = random_prompt("uncached", WHOLE + 8)
    cold, sources = ask_with_sources(engine, prompt)
    assert sources == {}
    restored = []
    for source in ("host", *SOURCES):
        empty(engine, host=source == "disk")
        answer, sources = ask_with_sources(engine, prompt)
        assert sources == {source: WHOLE}
        assert explained(answer, cold)
        restored.append(answer)
    assert restored[0] == restored[1] == restored[2]
    assert_at_rest(engine)


def test_models_that_cannot_go_on_within_a_prompt_are_refused(
    qwen3next_model: Path, mla_model: Path, tmp_path: Path
) -> None:
    """States where vLLM keeps none for later. Latent attention where vLLM's CPU backend reads
    nothing of what is cached while it computes a prompt: after a load its answer would be wrong."""
    options: dict[str, Any] = {
        "connector": connector_config(None, ROOMY_BYTES),
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 64 << 20,
    }
    with EngineProcess(tmp_path / "vllm.log") as engine:
        states = {"dtype": "bfloat16", "enable_prefix_caching": False}
        told = engine.call("start_in_vain", model=str(qwen3next_model), **states, **options)
        assert "MambaSpec with mamba_cache_mode 'none'" in told
        assert "start vLLM with --enable-prefix-caching --mamba-cache-mode align" in told

        told = engine.call("start_in_vain", model=str(mla_model), **options)
        assert "--enable-chunked-prefill = False: vLLM cannot go on within a prompt" in told


@pytest.mark.parametrize(
    ("model", "options"),
    [("tiny_model", {"async_scheduling": True}), ("gemma3_model", {})],
    ids=["one group, asynchronous", "windows"],
)
def test_prompts_computed_in_pieces_are_restored(
    request: pytest.FixtureRequest, open_engine: OpenEngine, model: str, options: dict[str, Any]
) -> None:
    folder: Path = request.getfixturevalue(model)
    engine = open_engine(folder, max_num_batched_tokens=128, max_num_seqs=8, **options)
    assert_restored(engine, random_prompt("pieces", WHOLE + 8))

    # Pieces of several prompts in one step, with the tails of what is loaded meanwhile.
    prompts = [random_prompt(("several", i), (6 + 2 * i) * BLOCK + 8) for i in range(6)]
    references = [engine.ask(prompt, 8, salt="a stranger") for prompt in prompts]
    engine.ask_all(prompts, 8)
    for source in SOURCES:
        empty(engine, host=source == "disk")
        with engine.counting() as grown:
            answers = engine.ask_all(prompts, 8)
        for answer, reference in zip(answers, references, strict=True):
            assert explained(answer, reference)
        assert grown[source] == sum(len(prompt) // BLOCK * BLOCK for prompt in prompts)
    assert_at_rest(engine)
