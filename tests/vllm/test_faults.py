"""Files that changed behind the back of a running engine: a miss, counted, and the right answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from inproc import EngineProcess, connector_config
from prompts import BLOCK, random_prompt
from tiering_benchmarks import demo

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNKS = 20
SERVED_CHUNK_BYTES = 128 << 10
"""Of the server, which computes in float32."""

Fault = Callable[[list[Path]], None]


def flip_one_bit(files: list[Path]) -> None:
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 0x10
    files[0].write_bytes(content)


def truncate(files: list[Path]) -> None:
    os.truncate(files[0], files[0].stat().st_size // 2)


def swap(files: list[Path]) -> None:
    first, second = (path.read_bytes() for path in files[:2])
    files[0].write_bytes(second)
    files[1].write_bytes(first)


def delete(files: list[Path]) -> None:
    files[0].unlink()


def chunk_files(root: Path) -> set[Path]:
    return set(root.rglob("???/*/*.bin"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engine(
    tiny_model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    with EngineProcess(
        tmp_path_factory.mktemp("engine") / "vllm.log",
        model=str(tiny_model),
        connector=connector_config(root, 32 << 20),
        max_model_len=4096,
        kv_cache_memory_bytes=33 << 20,
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        (flip_one_bit, {"promotions_damaged": 1}),
        pytest.param(truncate, {"promotions_damaged": 1}, marks=pytest.mark.slow),
        pytest.param(swap, {"promotions_damaged": 2}, marks=pytest.mark.slow),
        pytest.param(delete, {"promotions_missing": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_changed_file_is_a_miss_and_is_stored_again(
    engine: EngineProcess, root: Path, fault: Fault, counted: dict[str, int]
) -> None:
    prompt = random_prompt(fault.__name__, CHUNKS * BLOCK + 8)
    others = chunk_files(root)
    cold = engine.ask(prompt)
    engine.call("settle")
    files = sorted(chunk_files(root) - others)
    assert len(files) == CHUNKS
    fault(files)

    engine.call("reset")
    engine.call("empty_host")
    with engine.counting() as grown:
        answer = engine.ask(prompt)
        engine.call("settle")
    assert answer.tokens == cold.tokens
    assert answer.cached_tokens == grown.get("disk", 0) < CHUNKS * BLOCK
    problems = ("promotions_damaged", "promotions_missing", "promotions_failed")
    assert {name: grown[name] for name in problems if name in grown} == counted
    assert chunk_files(root) - others == set(files)

    engine.call("reset")
    engine.call("empty_host")
    with engine.counting() as grown:
        healed = engine.ask(prompt)
    assert healed.tokens == cold.tokens
    assert healed.cached_tokens == grown["disk"] == CHUNKS * BLOCK


@pytest.mark.slow
def test_a_server_counts_the_damage_and_goes_on(make_server: ServerFactory, tmp_path: Path) -> None:
    """The same through `vllm serve`; its host tier of 40 chunks is emptied by other prompts."""
    config = demo.connector_config(tmp_path, 41 * SERVED_CHUNK_BYTES, blocks_per_chunk=1)
    prompt = random_prompt("served", CHUNKS * BLOCK + 8)
    with make_server(connector=config, block_size=BLOCK) as server:
        client = server.client
        cold = client.complete(prompt, 8)
        assert demo.wait_at_rest(tmp_path, CHUNKS) == CHUNKS
        flip_one_bit(sorted(chunk_files(tmp_path)))
        for i in range(3):
            client.complete(random_prompt(("other", i), CHUNKS * BLOCK + 8), 1)
            demo.wait_at_rest(tmp_path, (2 + i) * CHUNKS)
        client.reset_prefix_cache()
        answer = client.complete(prompt, 8)
        assert answer.token_ids == cold.token_ids
        assert answer.cached_tokens < CHUNKS * BLOCK
        metrics = client.metrics()
        assert metrics["vllm:tiering_promotions_damaged_total"] == 1
        assert client.cached_by_source()["disk"] == answer.cached_tokens
        assert client.complete(prompt, 8).token_ids == cold.token_ids
