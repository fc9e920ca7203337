"""Ports for servers of tests' own."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from tiering.testing import ports


@pytest.mark.parametrize("given", ["32768\t60999", "1024\t65535"])
def test_none_is_one_that_the_system_gives_away_where_it_leaves_some(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(given + "\n")
    monkeypatch.setattr(ports, "_GIVEN_AWAY", tmp_path / "range")
    found = set()
    for _ in range(5):
        random.seed(1)  # as tests do that run at the same time
        found.add(ports.free_port())
    assert len(found) > 1
    for port in found:
        assert given.startswith("1024") or not 32768 <= port <= 60999
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_one_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", ports.free_port())) as taken:
        tried = [taken.getsockname()[1], port := ports.free_port()]
        monkeypatch.setattr(random, "SystemRandom", lambda: Choosing(tried))
        assert ports.free_port() == port


class Choosing:
    def __init__(self, these: list[int]) -> None:
        self._these = iter(these)

    def choice(self, ports: list[int]) -> int:
        return next(self._these)
