"""Fixtures for tests against a real `vllm serve`: a tiny model, and servers that end with a test.

vLLM is never imported here: it is heavy, and its warnings are not ours to mend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiering_benchmarks.models import make_model
from tiering_benchmarks.server import VllmServer

ServerFactory = Callable[..., VllmServer]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "tiny")


@pytest.fixture(scope="module")
def make_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerFactory]:
    """Makes servers of the tiny model, not yet started; takes VllmServer's keywords. Whatever
    of them still runs at the end of the module is stopped."""
    servers: list[VllmServer] = []

    def make(**options: Any) -> VllmServer:
        server = VllmServer(tiny_model, tmp_path_factory.mktemp("server") / "vllm.log", **options)
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()
