"""TieredOffloadingSpec inside vLLM's own OffloadingConnector: a real engine, in process.

As in test_in_process, the reference of every restore is a device hit with as many cached tokens,
equal to the bit, and counts prove where the tokens came from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from inproc import BLOCK_BYTES, EngineFailed, assert_at_rest, assert_one_block_left_out_is_seen
from offloading_inproc import OffloadingEngine, offloading_config
from prompts import BLOCK, random_prompt
from tiering_benchmarks.models import make_model

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOMY_BYTES = 128 << 20
DEVICE_BLOCKS = 128
HIT = 48 * BLOCK
PROMPT = HIT + 8
SMALL_ROWS = 6

OpenEngine = Callable[..., OffloadingEngine]
EngineOf = Callable[[int], OffloadingEngine]


def sources(grown: dict[str, int]) -> dict[str, int]:
    return {name: grown[name] for name in ("device", "host", "disk") if name in grown}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def open_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenEngine:
    def opened(connector: dict[str, Any], **options: Any) -> OffloadingEngine:
        log = tmp_path_factory.mktemp("engine") / "vllm.log"
        usual: dict[str, Any] = {
            "model": str(tiny_model),
            "max_model_len": DEVICE_BLOCKS * BLOCK // 2,
            "kv_cache_memory_bytes": DEVICE_BLOCKS * BLOCK_BYTES,
        }
        return OffloadingEngine(log, connector=connector, **{**usual, **options})

    return opened


@pytest.fixture(scope="module")
def engine_of(open_engine: OpenEngine, root: Path) -> Iterator[EngineOf]:
    """The engine of a chunk factor, with room for everything in host memory."""
    with ExitStack() as stack:

        @functools.cache
        def engine_of(factor: int) -> OffloadingEngine:
            config = offloading_config(root, ROOMY_BYTES, blocks_per_chunk=factor)
            return stack.enter_context(open_engine(config))

        yield engine_of


@pytest.mark.parametrize("factor", [1, 2])
def test_restores_equal_device_hits(engine_of: EngineOf, factor: int) -> None:
    engine = engine_of(factor)
    prompt = random_prompt(("restore", factor), PROMPT)
    cold, warm = (engine.ask(prompt) for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, HIT)
    assert warm.tokens == cold.tokens
    engine.call("settle")
    for source in ("host", "disk"):
        engine.call("reset")
        if source == "disk":
            engine.call("empty_host")
        with engine.counting() as grown:
            assert engine.ask(prompt) == warm
        assert sources(grown) == {source: HIT}
    assert_at_rest(engine)


def test_what_the_device_still_has_is_not_loaded(engine_of: EngineOf) -> None:
    engine = engine_of(2)
    prompt = random_prompt("held", PROMPT)
    # In two parts, so that the second answer is computed in the same steps each time.
    for _ in range(2):
        engine.ask(prompt[: 17 * BLOCK + 1], 1)
        warm = engine.ask(prompt)
    engine.call("settle")
    engine.call("reset")
    engine.ask(prompt[: 17 * BLOCK + 1], 1, salt="a stranger")
    engine.call("reset")
    with engine.counting() as grown:
        engine.ask(prompt[: 17 * BLOCK + 1], 1)
        again = engine.ask(prompt)
    assert again == warm
    assert grown["device"] >= 16 * BLOCK
    assert_at_rest(engine)


def test_another_process_hits_the_disk_with_its_first_request(
    engine_of: EngineOf, open_engine: OpenEngine, root: Path
) -> None:
    engine = engine_of(2)
    prompt = random_prompt("restart", PROMPT)
    _, warm = (engine.ask(prompt) for _ in range(2))
    engine.call("settle")
    with open_engine(offloading_config(root, ROOMY_BYTES, blocks_per_chunk=2)) as other:
        with other.counting() as grown:
            assert other.ask(prompt) == warm
        assert sources(grown) == {"disk": HIT}
        assert grown["promotions_succeeded"] == 24


def test_one_block_left_unwritten_is_seen(engine_of: EngineOf) -> None:
    assert_one_block_left_out_is_seen(engine_of(2), random_prompt("control", PROMPT), HIT)


def test_a_failed_store_is_a_later_miss(engine_of: EngineOf) -> None:
    engine = engine_of(2)
    prompt = random_prompt("failed store", PROMPT)
    engine.call("break_copies", direction="gather", fault="fail", copies=1)
    with engine.counting() as grown:
        cold = engine.ask(prompt)
        engine.call("settle")
    assert engine.call("copies_broken") == 1
    assert grown["stores_failed"] > 0
    assert_at_rest(engine)
    for cached in (0, HIT):
        engine.call("reset")
        again = engine.ask(prompt)
        assert (again.cached_tokens, again.tokens) == (cached, cold.tokens)


def test_after_a_reset_nothing_is_found_anywhere(engine_of: EngineOf) -> None:
    engine = engine_of(2)
    prompt = random_prompt("reset", PROMPT)
    cold = engine.ask(prompt)
    # Copies are still under way: nobody tells the manager of their end.
    assert engine.call("reset", connector=True)
    with engine.counting() as grown:
        assert engine.ask(prompt) == cold
    assert not sources(grown)
    assert_at_rest(engine)
    for empty, source in (("reset", "host"), ("empty_host", "disk")):
        engine.call("reset")
        engine.call(empty)
        with engine.counting() as grown:
            assert engine.ask(prompt).tokens == cold.tokens
        assert sources(grown) == {source: HIT}


def test_vllms_metrics_have_its_names_and_ours(engine_of: EngineOf) -> None:
    engine = engine_of(2)
    prompt = random_prompt("metrics", PROMPT)
    engine.ask(prompt)
    engine.call("settle")
    engine.call("reset")
    engine.call("empty_host")
    engine.ask(prompt)
    # Tiers are looked at once a second, and told of with the step after.
    engine.ask(random_prompt("later", 8), 200)
    told = engine.call("state")["metrics"]
    for name in (
        "vllm:kv_offload_load_bytes|",
        "vllm:kv_offload_store_bytes|",
        "vllm:kv_offload_tiered_promotions_succeeded|",
        "vllm:kv_offload_tiered_cascades_stored|",
        "vllm:kv_offload_tiering_chunk_queries|0:primary",
        "vllm:kv_offload_tiering_chunk_hits|0:primary",
    ):
        assert told[name] > 0, (name, told)
    assert "vllm:kv_offload_cpu_cache_usage_perc|" in told


def test_a_host_tier_smaller_than_the_prompt_neither_hangs_nor_is_useless(
    engine_of: EngineOf, open_engine: OpenEngine, root: Path
) -> None:
    engine = engine_of(1)
    prompt = random_prompt("all on disk", 31 * BLOCK + 8)
    cold = engine.ask(prompt)
    engine.call("settle")
    # One row is for the notes between the workers and the scheduler.
    small_bytes = 8192 + (SMALL_ROWS + 1) * BLOCK_BYTES
    with open_engine(offloading_config(root, small_bytes), max_num_seqs=32) as small:
        assert small.call("state")["rows"] == SMALL_ROWS
        with small.counting() as grown:
            loaded = small.ask(prompt)
        assert loaded.tokens == cold.tokens
        # Of 6 chunks one is the reserve of stores.
        assert sources(grown) == {"disk": 5 * BLOCK}
        assert loaded.cached_tokens == 5 * BLOCK
        assert_at_rest(small)

        other = random_prompt("larger", 31 * BLOCK + 8)
        computed = small.ask(other)
        small.call("settle")
        small.call("reset")
        again = small.ask(other)
        assert again.tokens == computed.tokens
        assert again.cached_tokens > 0
        assert_at_rest(small)

        shared = random_prompt("shared", 6 * BLOCK)
        prompts = [shared + random_prompt(("many", i), 4 * BLOCK + i) for i in range(16)]
        for answers in [small.ask_all(prompts, 8) for _ in range(2)]:
            assert all(len(answer.tokens) == 8 for answer in answers)
        assert_at_rest(small)


@pytest.mark.parametrize(
    ("name", "dtype", "block_bytes"),
    [("gemma3", "float32", 512 << 10), ("qwen3next", "bfloat16", 512 << 10)],
)
def test_models_of_several_groups(
    models: Path, open_engine: OpenEngine, tmp_path: Path, name: str, dtype: str, block_bytes: int
) -> None:
    model = make_model(models, name)
    options: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "kv_cache_memory_bytes": DEVICE_BLOCKS * block_bytes,
        "enable_prefix_caching": True,
    }
    config = offloading_config(tmp_path, 256 << 20)
    prompt = random_prompt(name, PROMPT)
    with open_engine(config, **options) as engine:
        cold, warm = (engine.ask(prompt) for _ in range(2))
        assert cold.cached_tokens == 0
        assert warm.cached_tokens > 0
        engine.call("settle")
        for source in ("host", "disk"):
            engine.call("reset")
            if source == "disk":
                engine.call("empty_host")
            with engine.counting() as grown:
                restored = engine.ask(prompt)
            assert restored == warm, source
            assert grown.get("device", 0) == 0
        assert_at_rest(engine)
    with open_engine(config, **options) as other:
        assert other.ask(prompt) == warm
        assert_at_rest(other)


def test_a_failed_load_ends_the_engine_rather_than_answer_from_wrong_bytes(
    open_engine: OpenEngine,
) -> None:
    with open_engine(offloading_config(None, ROOMY_BYTES)) as engine:
        prompt = random_prompt("failed load", PROMPT)
        engine.ask(prompt)
        engine.call("settle")
        engine.call("reset")
        engine.call("break_copies", direction="scatter", fault="fail", copies=1)
        with pytest.raises(EngineFailed, match="would answer from wrong bytes"):
            engine.ask(prompt)


def test_two_ranks_restore_their_shares(make_server: ServerFactory, tmp_path: Path) -> None:
    def server() -> Any:
        return make_server(
            connector=offloading_config(tmp_path, 64 << 20, blocks_per_chunk=2),
            block_size=BLOCK,
            tensor_parallel_size=2,
        )

    prompt = random_prompt("two ranks", 40 * BLOCK + 8)
    with server() as first:
        first.client.complete(prompt, 8)
        warm = first.client.complete(prompt, 8, logprobs=True)
        assert warm.cached_tokens == 40 * BLOCK
        first.client.reset_prefix_cache()
        restored = first.client.complete(prompt, 8, logprobs=True)
        assert restored.cached_tokens == 40 * BLOCK
        assert (restored.token_ids, restored.logprobs) == (warm.token_ids, warm.logprobs)
    with server() as second:
        restored = second.client.complete(prompt, 8, logprobs=True)
        assert second.client.cached_by_source()["disk"] == 40 * BLOCK
        assert (restored.token_ids, restored.logprobs) == (warm.token_ids, warm.logprobs)
