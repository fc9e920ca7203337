"""A real vLLM whose workers copy through the CUDA path, over an emulated device: what comes back is
what the device had, and a device that dies costs the cache and not the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from emulated_inproc import EmulatedEngine
from inproc import BLOCK_BYTES, assert_at_rest, connector_config
from offloading_inproc import offloading_config
from prompts import BLOCK, random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOMY_BYTES = 128 << 20
DEVICE_BLOCKS = 128
HIT = 48 * BLOCK
PROMPT = HIT + 8

OpenEngine = Callable[..., EmulatedEngine]


@pytest.fixture
def open_engine(tiny_model: Path, tmp_path: Path) -> Iterator[OpenEngine]:
    with ExitStack() as stack:

        def opened(connector: dict[str, Any], **options: Any) -> EmulatedEngine:
            usual: dict[str, Any] = {
                "model": str(tiny_model),
                "max_model_len": DEVICE_BLOCKS * BLOCK // 2,
                "kv_cache_memory_bytes": DEVICE_BLOCKS * BLOCK_BYTES,
            }
            engine = EmulatedEngine(
                tmp_path / "vllm.log", connector=connector, **{**usual, **options}
            )
            return stack.enter_context(engine)

        yield opened


@pytest.mark.parametrize("config", [connector_config, offloading_config])
@pytest.mark.parametrize("factor", [1, 2])
def test_restores_through_the_device_path_equal_device_hits(
    open_engine: OpenEngine, tmp_path: Path, config: Callable[..., dict[str, Any]], factor: int
) -> None:
    engine = open_engine(config(tmp_path / "kv", ROOMY_BYTES, blocks_per_chunk=factor))
    prompt = random_prompt(3, PROMPT)
    engine.ask(prompt)
    hit = engine.ask(prompt)
    engine.call("settle")
    engine.call("reset")
    engine.call("wipe")
    with engine.counting() as grown:
        restored = engine.ask(prompt)
    assert restored == hit
    assert grown["host"] == HIT
    engine.call("reset")
    engine.call("empty_host")
    engine.call("wipe")
    with engine.counting() as grown:
        restored = engine.ask(prompt)
    assert restored == hit
    assert grown["disk"] == HIT
    assert_at_rest(engine)
    device = engine.call("device")
    assert device["violations"] == []
    assert device["copies"] > 0
    assert ROOMY_BYTES // 2 < device["pinned_bytes"] <= ROOMY_BYTES


def test_a_device_that_dies_costs_the_cache_and_not_the_server(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Of the copies, that is: a real one takes vLLM's own kernels with it."""
    engine = open_engine(connector_config(None, ROOMY_BYTES))
    prompt, other = random_prompt(4, PROMPT), random_prompt(5, PROMPT)
    cold = engine.ask(prompt)
    engine.call("settle")
    engine.call("reset")
    engine.call("wipe")
    engine.call("die")
    computed = engine.ask(prompt)
    assert computed.tokens == cold.tokens
    engine.call("reset")
    engine.ask(other)
    engine.call("settle")
    failed = engine.call("device")["failed"]
    assert failed["tiering_loads_failed"] == 1
    assert failed["tiering_stores_failed"] > 0
    assert_at_rest(engine)
    log = (tmp_path / "vllm.log").read_text()
    assert log.count("nothing is copied to or from the host tier any more") == 1
