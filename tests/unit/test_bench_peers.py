"""The benchmark of peers measures every side and believes no answer; no times asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiering_benchmarks import peers, peers_sides
from tiering_benchmarks.cli import main
from tiering_benchmarks.peers_sides import BARE, MEMCPY, SHM, TCP, Landing
from tiering_benchmarks.tiers_run import WrongAnswer


@pytest.mark.slow
def test_it_measures_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    flags = ["--sizes", "64KiB", "--bytes", "1MiB", "--repeats", "2", "--json", str(figures)]
    assert main(["tiers", "--tier", "p2p", *flags]) == 0
    found = json.loads(figures.read_text())
    assert {BARE, TCP, MEMCPY, SHM} <= set(found["speeds"]["65536"])
    assert all(len(each) == 2 for each in found["speeds"]["65536"].values())
    assert len(found["lookups_ms"]) == 2
    told = capsys.readouterr().out
    assert "shm at 64 KiB" in told
    assert "a lookup of 1000 keys" in told


@pytest.mark.slow
def test_it_measures_the_sides_that_are_named(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    flags = ["--sizes", "64KiB", "--bytes", "1MiB", "--repeats", "1", "--json", str(figures)]
    assert main(["tiers", "--tier", "p2p", "--sides", "shm,memcpy", *flags]) == 0
    assert list(json.loads(figures.read_text())["speeds"]["65536"]) == [SHM, MEMCPY]


def test_ratios_are_taken_repeat_by_repeat_and_aims_by_their_medians() -> None:
    found = {BARE: [1.0, 2.0, 4.0], TCP: [0.5, 2.0, 3.0], MEMCPY: [10.0] * 3, SHM: [6.0] * 3}
    assert peers.ratios(found) == {TCP: [0.5, 1.0, 0.75], SHM: [0.6] * 3}
    assert peers.verdicts({64 << 10: found, 256 << 10: found}, [1.0, 3.0]) == [
        "missed: tcp at 256 KiB 0.75, aim 0.8",
        "missed: shm at 64 KiB 0.60, aim 0.7",
        "missed: shm at 256 KiB 0.60, aim 0.7",
        "missed: a lookup of 1000 keys 2.00 ms, aim under 2 ms",
    ]
    assert "tcp       2.00 [0.50 3.00]   bare tcp  0.75 [0.50 1.00]" in peers.table({4096: found})


def test_a_row_that_is_not_there_is_an_error_and_not_a_fast_one() -> None:
    landing = Landing(2, 4096)
    with pytest.raises(WrongAnswer, match="tcp: row 0 is not what was served"):
        landing.require(TCP)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--sizes", "1000"], "--sizes = '1000': is no size of whole pages"),
        (["--bytes", "much"], "--bytes = 'much': is no size"),
        (["--repeats", "0"], "--repeats = 0: measures nothing"),
        (["--sides", "tcp,udp"], "--sides = 'udp': is no side; write some of bare tcp, tcp, nixl"),
    ],
)
def test_what_measures_nothing_is_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiers", "--tier", "p2p", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_what_is_not_installed_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_sides, "find_spec", lambda name: None)
    assert peers_sides.why_not("nixl") == "NIXL is not installed (pip install nixl)"
    assert peers_sides.why_not(TCP) is None
