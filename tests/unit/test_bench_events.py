"""The benchmark of KV events runs with small sizes; nothing is asserted about time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tiering_benchmarks import announce
from tiering_benchmarks.cli import main

SMALL = ["--blocks", "16", "--blocks-per-chunk", "4", "--repeats", "3"]


def test_it_measures_everything_without_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--ours-only", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"] == {"blocks": 16, "blocks_per_chunk": 4, "repeats": 3}
    assert list(found["us_a_block"]) == list(announce.THINGS)
    for ours, theirs, ratio in found["us_a_block"].values():
        assert 0 < ours["low"] <= ours["median"] <= ours["high"]
        assert theirs is ratio is None


@pytest.mark.vllm
@pytest.mark.slow
def test_vllms_is_measured_beside_it() -> None:
    command = [sys.executable, "-m", "tiering_benchmarks.cli", "events", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    lines = done.stdout.splitlines()
    rows = [line for line in lines if line.startswith(announce.THINGS)]
    assert len(rows) == len(announce.THINGS)
    assert not any(" - " in row for row in rows)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--blocks-per-chunk", "5"], "--blocks-per-chunk = 5"),
        (["--repeats", "0"], "--repeats = 0"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", "--ours-only", *flags]) == 2
    assert sentence in capsys.readouterr().err
