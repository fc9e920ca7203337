"""The serve benchmark under a real vLLM, small: each workload is asked, each connector finds what
it stored and changes no answer, and nothing is left behind. No times asserted."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from tiering_benchmarks import serve_run
from tiering_benchmarks.cli import main
from tiering_benchmarks.models import SIZES
from tiering_benchmarks.serve_load import PREFIX_TOKENS, prefix_load
from tiering_benchmarks.serve_sides import NONE, SIDES, Memory
from tiering_benchmarks.server import VllmServer
from warm import fork_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _servers_start_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """How they are started, and where a worker runs, is nothing to the benchmark."""
    monkeypatch.setattr(serve_run, "VllmServer", partial(VllmServer, start=fork_server))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def left_in_shared_memory() -> list[Path]:
    return list(Path("/dev/shm").glob(f"*tiering-bench-{os.getpid()}-*"))


def test_both_connectors_bring_prefixes_back(tiny_model: Path, tmp_path: Path) -> None:
    load = prefix_load(8, 1)
    memory = Memory.of(load, SIZES["tiny"].kv_bytes_per_token)
    setup = serve_run.Setup(tiny_model, load, memory, tmp_path)
    none, ours, theirs = (setup.run(SIDES[name]) for name in (NONE, "tiered-fs", "vllm-fs"))
    assert none.share(is_device=False) == 0
    for run in (none, ours, theirs):
        assert run.prompt_tokens >= 8 * PREFIX_TOKENS
        assert len(run.answers) == 8
        assert min(run.ttft_mean_seconds, run.tokens_per_second, run.cpu_seconds) > 0
    for run in (ours, theirs):
        # Each prefix is computed once, and found whole, or nearly so, at its other three uses.
        assert sum(run.by_source.values()) > 0.9 * 6 * PREFIX_TOKENS
        assert run.share(is_device=False) > none.share(is_device=False)
        assert run.answers == none.answers
    assert list(tmp_path.iterdir()) == []
    assert left_in_shared_memory() == []


def test_a_trace_is_asked_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload, side = "trace", "tiered-small-fs"
    figures = tmp_path / "figures.json"
    flags = ["--workload", workload, "--sides", side, "--interval", "0.1", "--requests", "6"]
    flags += ["--model", "tiny", "--repeats", "1", "--json", str(figures), "--dir", str(tmp_path)]
    assert main(["serve", *flags]) == 0
    found = json.loads(figures.read_text())
    assert (found["workload"], found["requests"], found["repeats"]) == (workload, 6, 1)
    (run,) = found["sides"][side]
    assert run["prompt_tokens"] > 0
    assert any(line.startswith(side) for line in capsys.readouterr().out.splitlines())
    assert list(tmp_path.iterdir()) == [figures]
    assert left_in_shared_memory() == []
