"""The benchmark of the tiers' loop runs with small sizes and says what it is asked to; no times
asserted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tiering.portal import ThreadPortal
from tiering.residency.plan import Cascade, Promote, Step
from tiering.testing.memory import MemoryTier
from tiering_benchmarks import loop
from tiering_benchmarks.cli import main
from tiering_benchmarks.tiers_run import WrongAnswer

QUICK = loop.QUICK


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["files", "segments"])
def test_it_measures_every_side_and_leaves_nothing(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loop", "--quick", "--json", "--layout", layout, "--dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == [*loop.THINGS]
    (samples,) = found["samples"]
    assert [*samples] == [*loop.LOOPS]
    for name, sample in samples.items():
        assert 0 < sample["p50"] <= sample["p99"] <= sample["worst"]
        assert (sample["moved_bytes"] > 0) == (name != loop.NONE)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_bucket_is_measured_over_a_server_that_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--quick", "--json", "--sides", "thread", "--dir", str(tmp_path), "--tier", "obj"]
    assert main(["loop", *given]) == 0
    (samples,) = json.loads(capsys.readouterr().out)["samples"]
    assert samples["thread"]["moved_bytes"] > 0
    assert not list(tmp_path.iterdir())


def samples_of(p50: float, thread: float, process: float) -> dict[str, loop.Sample]:
    values = {loop.NONE: p50, loop.THREAD: thread, loop.PROCESS: process}
    return {name: loop.Sample(v, 2 * v, 3 * v, 10**6, 1.0, 2.0) for name, v in values.items()}


def test_ratios_are_taken_within_each_repeat() -> None:
    found = loop.rows([samples_of(1, 100, 50), samples_of(1, 10, 30), samples_of(1, 1, 1)])
    row = found[0]
    assert (row.sides["thread"].median, row.sides["process"].median) == (10, 30)
    assert row.ratio is not None
    assert (row.ratio.low, row.ratio.median, row.ratio.high) == (0.5, 1.0, 3.0)
    moved = next(row for row in found if row.name == "moved, MB/s")
    assert moved.sides["thread"].median == 0.5
    lines = loop.table(found).splitlines()
    assert len(lines) == len(loop.THINGS) + 1
    assert "1.00 [0.50 3.00]" in lines[1]


def test_half_of_what_is_under_way_reads_and_half_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = MemoryTier()
    memory = bytearray(QUICK.chunk_bytes)
    portal = ThreadPortal([tier], lambda slot: memoryview(memory))
    portal.start()
    try:
        traffic = loop.Traffic(portal, QUICK.plan)
        kept = set(tier.chunks)
        assert len(kept) == QUICK.plan.chunks
        submitted: list[Step] = []
        submit = portal.submit
        monkeypatch.setattr(portal, "submit", lambda s: (submitted.extend(s), submit(s)))
        for _ in range(5):
            traffic.turn()
        traffic.finish()
    finally:
        portal.close(1.0)
    assert len(submitted) >= QUICK.out
    kinds = [type(step) for step in submitted]
    assert all(one is not other for one, other in itertools.pairwise(kinds))
    for step in submitted:
        assert isinstance(step, Promote if set(step.keys) <= kept else Cascade)
    assert traffic.moved == sum(len(step.keys) for step in submitted)


def test_a_tier_that_misses_is_not_measured() -> None:
    tier = MemoryTier()
    portal = ThreadPortal([tier], lambda slot: memoryview(bytearray(QUICK.chunk_bytes)))
    portal.start()
    try:
        traffic = loop.Traffic(portal, QUICK.plan)
        tier.chunks.clear()
        traffic.turn()
        with pytest.raises(WrongAnswer, match="were missed or refused"):
            traffic.finish()
    finally:
        portal.close(1.0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--steps", "1"], "--steps = 1"),
        (["--out", "1"], "--out = 1"),
        (["--sides", "fork"], "--sides = 'fork'"),
        (["--chunk", "1000"], "--chunk = '1000'"),
        (["--tier", "[]"], "--tier = '[]'"),
        (["--tier", "{"], "--tier"),
    ],
)
def test_what_measures_nothing_is_refused(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loop", "--dir", str(tmp_path), *flags]) == 2
    assert sentence in capsys.readouterr().err
