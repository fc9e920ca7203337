"""A user's mistake in the connector's settings: one sentence, at start, from vLLM itself.

What each check refuses is tested where the check is; here, that every one of them is made before
the engine is up, and that its sentence comes through.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from inproc import EngineProcess, connector_config
from prompts import BLOCK
from tiering_benchmarks.server import ServerFailed

if TYPE_CHECKING:
    from .conftest import ServerFactory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOMY_BYTES = 16 << 20
KEY = "kv_connector_extra_config"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path_factory.mktemp("engine") / "vllm.log") as running:
        yield running


@pytest.fixture
def a_file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("mine")
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"blocks_per_chunck": 2}, f"{KEY}.blocks_per_chunck = 2: "),
        ({"offload_prompt_only": "no"}, f"{KEY}.offload_prompt_only = 'no': "),
        ({"cpu_bytes_to_use": None}, f"{KEY}.cpu_bytes_to_use = None: "),
        ({"block_size": 64, "blocks_per_chunk": 2}, f"{KEY}.blocks_per_chunk = 2: block_size = 64"),
        ({"block_size": 40}, f"{KEY}.block_size = 40: is not a multiple of the 32 tokens"),
        ({"cpu_bytes_to_use": 65535}, f"{KEY}.cpu_bytes_to_use = 65535: is less than one chunk"),
        ({"root_dir": "file"}, "root_dir = '{root}': "),
        ({"root_dir": "no/such/parent"}, "root_dir = '{root}': "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_engine_refuses_it_at_start(
    process: EngineProcess,
    tiny_model: Path,
    tmp_path: Path,
    a_file: Path,
    changes: dict[str, Any],
    sentence: str,
) -> None:
    changes = dict(changes)
    root = tmp_path / changes.pop("root_dir", "kv")
    connector = connector_config(root, changes.pop("cpu_bytes_to_use", ROOMY_BYTES), **changes)
    told = process.call(
        "start_in_vain",
        model=str(tiny_model),
        connector=connector,
        max_model_len=1024,
        kv_cache_memory_bytes=8 << 20,
    )
    assert told.startswith("ConfigError: ")
    assert sentence.format(root=root) in told
    assert "\n" not in told
    assert a_file.read_text() == "mine"


def test_a_server_ends_with_the_sentence_in_its_log(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    server = make_server(
        connector=connector_config(tmp_path, ROOMY_BYTES, block_size=40), block_size=BLOCK
    )
    with pytest.raises(ServerFailed, match=rf"{KEY}\.block_size = 40: is not a multiple of the 32"):
        server.start()


def test_a_server_refuses_settings_before_it_has_an_engine(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """So before weights are loaded, which takes minutes, and not deep in the log of three
    processes."""
    server = make_server(connector=connector_config(tmp_path, ROOMY_BYTES, blocks_per_chunck=2))
    with pytest.raises(ServerFailed, match=rf"ConfigError: {KEY}\.blocks_per_chunck = 2: "):
        server.start()
    assert "EngineCore" not in server.log.read_text()
