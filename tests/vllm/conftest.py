"""Fixtures for tests against a real `vllm serve`: tiny models, and servers that end with a
test.

vLLM is never imported here: it is heavy, and its warnings are not ours to mend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiering_benchmarks.models import make_adapter, make_draft, make_model
from tiering_benchmarks.server import VllmServer
from warm import fork_server

ServerFactory = Callable[..., VllmServer]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are made that tests ask for."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_model(models: Path) -> Path:
    return make_model(models, "tiny")


@pytest.fixture(scope="session")
def gemma2_model(models: Path) -> Path:
    """Sliding windows and full attention."""
    return make_model(models, "gemma2")


@pytest.fixture(scope="session")
def gemma3_model(models: Path) -> Path:
    """Sliding windows and full attention, two to one."""
    return make_model(models, "gemma3")


@pytest.fixture(scope="session")
def qwen3next_model(models: Path) -> Path:
    """Recurrent states and full attention. vLLM's CPU backend runs it in bfloat16 only."""
    return make_model(models, "qwen3next")


@pytest.fixture(scope="session")
def chunked_model(models: Path) -> Path:
    """Attention within chunks, and full attention."""
    return make_model(models, "chunked")


@pytest.fixture(scope="session")
def mla_model(models: Path) -> Path:
    """Latent attention. vLLM's CPU backend runs it without a prefix cache of the device."""
    return make_model(models, "mla")


@pytest.fixture(scope="session")
def adapters(models: Path) -> tuple[Path, Path]:
    """Two LoRAs of the tiny model."""
    return make_adapter(models, "tiny", 1), make_adapter(models, "tiny", 2)


@pytest.fixture(scope="session")
def draft_model(models: Path) -> Path:
    """Guesses the tiny model's tokens, mostly wrong: for vLLM's speculative method `eagle`."""
    return make_draft(models, "tiny")


@pytest.fixture(scope="module")
def make_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerFactory]:
    """Makes servers of the tiny model, not yet started; takes VllmServer's keywords, but that they
    are forked from a warm process. Whatever of them still runs at the end of the module is
    stopped."""
    servers: list[VllmServer] = []

    def make(**options: Any) -> VllmServer:
        log = tmp_path_factory.mktemp("server") / "vllm.log"
        server = VllmServer(tiny_model, log, **{"start": fork_server, **options})
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()
