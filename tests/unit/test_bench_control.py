"""The control benchmark runs with small sizes and says what it is asked to; no times asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from tiering_benchmarks import control
from tiering_benchmarks.cli import main

ALONE = [
    *(control.STORE, control.STORED, control.IDLE, control.MATCH_HIT),
    *(control.LOAD, control.LOADED, control.MATCH_MISS),
]
TIERED = [*ALONE[:2], control.WRITTEN, *ALONE[2:], control.PROMOTE, control.PROMOTED]


@pytest.mark.slow
def test_it_measures_everything_without_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["control", "--quick", "--ours-only", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"] == {"slots": 256, "batch": 32, "repeats": 3}
    assert found["vllm"] is None
    assert [[row["name"] for row in rows] for rows in found["setups"].values()] == [ALONE, TIERED]
    for row in [row for rows in found["setups"].values() for row in rows]:
        assert 0 < row["ours"]["low"] <= row["ours"]["median"] <= row["ours"]["high"]
        assert 0 < row["ours_calls"]["p99"] <= row["ours_calls"]["worst"]
        assert row["theirs"] is None


@pytest.mark.slow
def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["control", "--quick", "--ours-only"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(tuple(TIERED)) for line in lines) == len(ALONE) + len(TIERED)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--slots", "64", "--batch", "17"], "--batch = 17"),
        (["--batch", "0"], "--batch = 0"),
        (["--repeats", "0"], "--repeats = 0"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["control", "--ours-only", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_each_thing_is_done_to_as_many_chunks_as_it_says() -> None:
    """What is timed are the cache's answers, so they must be the right ones."""
    side, keys = control.Ours(64, 1), control.chain("a", 16)
    core = side._core
    list(side.store("s", keys))
    list(side.stored("s", keys))
    list(side.written())
    assert (core.match(keys).host, core.counters["cascades_stored"]) == (16, 16)
    list(side.load("p", keys))
    assert (core.counters["chunks_loaded"], core.budget.held) == (16, 16)
    list(side.loaded("p", keys))
    list(side.idle())
    list(side.match("m", control.chain("nowhere", 16)))
    on_disk = control.chain("b", 16)
    side.learn(on_disk)
    list(side.promote("l", on_disk))
    assert core.counters["promotions_started"] == 16
    list(side.promoted("l", on_disk))
    assert core.match(on_disk).host == 16
    assert not core.index.slots.load_pins.any()
    side.close()


def test_one_call_in_a_hundred_is_slower_than_the_99th_percentile() -> None:
    slowest = control.Slowest.of([*range(0, 199_000, 1000), 5_000_000])
    assert (slowest.p99, slowest.worst) == (198.0, 5000.0)


@pytest.mark.vllm
@pytest.mark.slow
def test_against_vllm_both_do_the_same_things() -> None:
    """In its own process: vLLM's imports warn, and take long."""
    command = [sys.executable, "-m", "tiering_benchmarks.cli", "control", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["vllm"] == version("vllm")
    assert [[row["name"] for row in rows] for rows in found["setups"].values()] == [ALONE, TIERED]
    for row in [row for rows in found["setups"].values() for row in rows]:
        assert row["theirs"]["median"] > 0
        assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
