"""The index benchmark restarts over as many chunks as it says and leaves nothing; no times or
sizes asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiering_benchmarks import index
from tiering_benchmarks.cli import main
from tiering_benchmarks.tiers_run import WrongAnswer


@pytest.mark.parametrize(
    "command",
    [["index"], ["tiers", "--sizes", "64KiB"], ["serve"], ["device", "--runtime", "fake"]],
)
@pytest.mark.parametrize("file", ["there", "missing/figures.json"])
def test_figures_that_could_not_be_kept_are_not_made(
    command: list[str], file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be known only when minutes are over."""
    (tmp_path / "there").mkdir()
    assert main([*command, "--json", str(tmp_path / file)]) == 2
    assert f"--json = '{tmp_path / file}': cannot be written; name" in capsys.readouterr().err


@pytest.mark.slow
def test_it_restarts_over_both_layouts_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, figures = tmp_path / "there", tmp_path / "figures.json"
    there.mkdir()
    flags = ["--dir", str(there), "--chunks", "300", "--repeats", "2", "--json", str(figures)]
    assert main(["index", *flags]) == 0
    assert list(there.iterdir()) == []
    found = json.loads(figures.read_text())
    assert found["chunks"] == 300
    assert list(found["restarts"]) == ["files", "segments"]
    for restarts in found["restarts"].values():
        assert [each["seconds"] > 0 for each in restarts] == [True, True]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["files", "segments"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", index.LAYOUTS)
def test_an_index_that_is_not_found_is_an_error_and_not_a_fast_start(
    layout: str, tmp_path: Path
) -> None:
    for name in ("root", "empty"):
        (tmp_path / name).mkdir()
    with pytest.raises(WrongAnswer, match=f"{layout}: [01] of 300 chunks after a restart"):
        index.restart(layout, 300, tmp_path / "root", tmp_path / "empty")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--chunks", "0"], "--chunks = 0"),
        (["--chunks", "1000001"], "--chunks = 1000001: is no number of chunks"),
        (["--repeats", "0"], "--repeats = 0"),
        (["--dir", "/nowhere/at/all"], "--dir = '/nowhere/at/all'"),
    ],
)
def test_what_measures_nothing_is_refused(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index", "--dir", str(tmp_path), *flags]) == 2
    assert sentence in capsys.readouterr().err
