"""The connector as a child of vLLM's MultiConnector: beside another of its kind, and beside one of
vLLM's own. Every child stores everything; the first that has something loads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from inproc import BLOCK_BYTES, EngineProcess
from prompts import BLOCK, random_prompt
from tiering_benchmarks.demo import wait_at_rest

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODULE = "tiering_connectors.vllm.connector"
CHUNKS = 20
PROMPT = CHUNKS * BLOCK + 8
HOST_BYTES = 16 << 20
DEVICE_BLOCKS = 128


def tiered(root: Path, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "TieredConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
            **extra,
        },
    }


def example(where: Path) -> dict[str, Any]:
    """vLLM's own, which keeps whole prompts as files."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(where)},
    }


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def opened(model: Path, where: Path, connector: dict[str, Any]) -> EngineProcess:
    return EngineProcess(
        where / "vllm.log",
        model=str(model),
        connector=connector,
        max_model_len=DEVICE_BLOCKS * BLOCK // 2,
        kv_cache_memory_bytes=DEVICE_BLOCKS * BLOCK_BYTES,
    )


def roots_under(where: Path, *names: str) -> list[Path]:
    roots = [where / name for name in names]
    for root in roots:
        root.mkdir(mode=0o700)
    return roots


def test_two_of_ours_keep_their_chunks_apart(tiny_model: Path, tmp_path: Path) -> None:
    first, second, empty = roots_under(tmp_path, "first", "second", "empty")
    prompt, stranger = random_prompt("multi", PROMPT), random_prompt("stranger", 8)
    with opened(tiny_model, tmp_path, multi(tiered(first), tiered(second))) as engine:
        cold, warm = (engine.ask(prompt) for _ in range(2))
        # The steps of another request take in what the workers have ended.
        engine.ask(stranger)
        assert [wait_at_rest(root, CHUNKS) for root in (first, second)] == [CHUNKS, CHUNKS]
        engine.call("reset")
        assert engine.ask(prompt) == warm, "from host memory"

        # The policy above is MultiConnector's to tell; a child's own would have failed this.
        engine.call("reset")
        engine.call("break_copies", direction="scatter", fault="fail", copies=1)
        assert engine.ask(prompt).tokens == cold.tokens
        assert engine.call("copies_broken") == 1
        # And all of it is there and right afterwards.
        engine.call("reset")
        assert engine.ask(prompt) == warm

    assert (cold.cached_tokens, warm.cached_tokens) == (0, CHUNKS * BLOCK)
    assert cold.tokens == warm.tokens
    # What the second kept is whole by itself: now the first child has nothing.
    with opened(tiny_model, tmp_path, multi(tiered(empty), tiered(second))) as engine:
        assert engine.ask(prompt) == warm, "from the second child's disk"
        engine.ask(stranger)
        # A prefix that one child has loaded is stored by the other.
        assert wait_at_rest(empty, CHUNKS) == CHUNKS
        engine.call("reset")
        assert engine.ask(prompt) == warm, "from the first child's host memory"


def test_beside_a_connector_that_loads_within_the_step(tiny_model: Path, tmp_path: Path) -> None:
    (root, store) = roots_under(tmp_path, "ours", "examples")
    prompt, stranger = random_prompt("beside", PROMPT), random_prompt("stranger", 8)
    for connector in (multi(example(store), tiered(root)), multi(tiered(root), example(store))):
        with opened(tiny_model, tmp_path, connector) as engine:
            restored = engine.ask(prompt)
            warm = engine.ask(prompt)
            engine.ask(stranger)
            assert wait_at_rest(root, CHUNKS) >= CHUNKS
            for _ in range(2):
                engine.call("reset")
                again = engine.ask(prompt)
                assert (again.tokens, again.cached_tokens) == (warm.tokens, CHUNKS * BLOCK)
            assert restored.tokens == warm.tokens


def test_twice_the_same_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (root,) = roots_under(tmp_path, "kv")
    with EngineProcess(tmp_path / "vllm.log") as engine:
        error = engine.call(
            "start_in_vain",
            model=str(tiny_model),
            connector=multi(tiered(root), tiered(root)),
            max_model_len=DEVICE_BLOCKS * BLOCK // 2,
            kv_cache_memory_bytes=DEVICE_BLOCKS * BLOCK_BYTES,
        )
    assert "announced twice" in error


def test_served_by_module_path_alone_with_metrics(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """Without the plugin our class is in vLLM's registry only because its module was imported."""
    (first, second) = roots_under(tmp_path, "first", "second")
    children = [{**tiered(root), "kv_connector_module_path": MODULE} for root in (first, second)]
    server = make_server(
        connector=multi(*children), block_size=BLOCK, environment={"VLLM_PLUGINS": "none"}
    )
    prompt = random_prompt("served multi", PROMPT)
    with server:
        client = server.client
        cold = client.complete(prompt, 8, logprobs=True)
        device = client.complete(prompt, 8, logprobs=True)
        client.reset_prefix_cache()
        host = client.complete(prompt, 8, logprobs=True)
        metrics = client.metrics()
        log = server.log.read_text(errors="replace")
    assert (cold.cached_tokens, host.cached_tokens) == (0, CHUNKS * BLOCK)
    assert cold.token_ids == device.token_ids == host.token_ids
    assert device.logprobs == host.logprobs
    assert metrics["vllm:tiering_chunks_stored_total"] == 2 * CHUNKS, "of both children"
    assert metrics["vllm:tiering_chunks_loaded_total"] == CHUNKS, "of the first"
    assert metrics["vllm:kv_offload_load_bytes_total"] == CHUNKS * BLOCK_BYTES
    assert metrics["vllm:kv_offload_store_size_count"] >= 2
    assert not re.search(r"Traceback|is not registered", log)
