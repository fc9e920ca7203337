"""What a real vLLM has stored in a bucket another one restores; without it, both compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from inproc import BLOCK_BYTES, EngineProcess, assert_at_rest, connector_config
from prompts import BLOCK, random_prompt
from s3_servers import Served, rclone

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOMY_BYTES = 128 << 20
DEVICE_BLOCKS = 128
CHUNK_BLOCKS = 16
PROMPT = 48 * BLOCK + 8
CHUNKS = 3

OpenEngine = Callable[[Served], EngineProcess]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with rclone(tmp_path) as server:
        yield server


@pytest.fixture
def open_engine(tiny_model: Path, tmp_path: Path) -> OpenEngine:
    """One that has nothing but the bucket below its host tier."""

    def opened(served: Served) -> EngineProcess:
        tier: dict[str, Any] = {
            "type": "obj",
            "store_config": served.store_config(),
            "prefix": "team/kv",
            "io_threads": 8,
        }
        return EngineProcess(
            tmp_path / "vllm.log",
            model=str(tiny_model),
            connector=connector_config(
                None, ROOMY_BYTES, secondary_tiers=[tier], blocks_per_chunk=CHUNK_BLOCKS
            ),
            max_model_len=DEVICE_BLOCKS * BLOCK // 2,
            kv_cache_memory_bytes=DEVICE_BLOCKS * BLOCK_BYTES,
        )

    return opened


def chunks_in(served: Served) -> list[Path]:
    assert served.root is not None
    return sorted(served.root.glob("team/kv/*_r0/???/*/*.bin"))


def test_another_engine_restores_what_the_first_has_stored(
    open_engine: OpenEngine, served: Served
) -> None:
    prompt = random_prompt("bucket", PROMPT)
    with open_engine(served) as engine:
        with engine.counting() as grown:
            cold, warm = (engine.ask(prompt) for _ in range(2))
            engine.call("settle")
        assert grown["cascades_stored"] == CHUNKS
    assert len(chunks_in(served)) == CHUNKS
    with open_engine(served) as other:
        with other.counting() as grown:
            first = other.ask(prompt)
            other.call("settle")
        assert first == warm
        assert first.tokens == cold.tokens
        assert (grown["disk"], grown["promotions_succeeded"]) == (48 * BLOCK, CHUNKS)
        assert not {"device", "host", "cascades_stored"} & grown.keys()
        assert_at_rest(other)


def test_a_damaged_object_is_computed_and_stored_again(
    open_engine: OpenEngine, served: Served
) -> None:
    prompt = random_prompt("damage", PROMPT)
    with open_engine(served) as engine:
        cold = engine.ask(prompt)
        engine.call("settle")
    for path in chunks_in(served):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with open_engine(served) as other:
        with other.counting() as grown:
            assert other.ask(prompt).tokens == cold.tokens
            other.call("settle")
        assert grown["promotions_damaged"] == CHUNKS
        assert grown["cascades_stored"] == CHUNKS
        assert "disk" not in grown
        other.call("reset")
        other.call("empty_host")
        with other.counting() as grown:
            assert other.ask(prompt).tokens == cold.tokens
        assert grown["disk"] == 48 * BLOCK


def test_a_bucket_that_is_gone_costs_nothing_but_time(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    prompt = random_prompt("gone", PROMPT)
    where = tmp_path / "gone"
    where.mkdir()
    with ExitStack() as stack:
        with rclone(where) as served:
            engine = stack.enter_context(open_engine(served))
            cold = engine.ask(prompt)
            engine.call("settle")
        engine.call("reset")
        engine.call("empty_host")
        with engine.counting() as grown:
            assert engine.ask(prompt).tokens == cold.tokens
            engine.call("settle")
        assert grown["promotions_failed"] == CHUNKS
        assert not {"device", "host", "disk"} & grown.keys()
        assert_at_rest(engine)
