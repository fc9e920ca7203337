"""The tiers benchmark runs with small sizes, compares like with like and leaves nothing behind; no
times asserted."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tiering.testing.memory import MemoryTier
from tiering.tiers.base import Read
from tiering_benchmarks import tiers_report as report
from tiering_benchmarks.cli import main
from tiering_benchmarks.tiers_run import (
    CHUNKS_MAX,
    COLD,
    EXISTS,
    OPERATIONS,
    WARM,
    WRITE,
    Batch,
    Cost,
    Plan,
    Region,
    WrongAnswer,
    drop_cache,
    measure,
)
from tiering_benchmarks.tiers_sides import Ours

PLAN = Plan.within(64 << 10, 4 << 10, batch=4, jobs=2, repeats=3)
SMALL = ("--bytes", "128KiB", "--batch", "4", "--jobs", "2", "--repeats", "2")


def run_small(directory: Path, sides: str, *more: str, sizes: str = "8KiB") -> int:
    command = ["tiers", "--dir", str(directory), "--sizes", sizes, "--sides", sides]
    return main([*command, *SMALL, *more])


def check_costs(found: dict[str, Any], sides: Sequence[str], of: Sequence[str]) -> None:
    """Every one of `sides` has two costs for each operation in `of`, at each size."""
    for size in found["sizes"].values():
        assert size["payload_bytes"] == 128 << 10
        assert list(size["costs"]) == list(OPERATIONS)
        for operation in of:
            costs = size["costs"][operation]
            assert sorted(costs) == sorted(sides)
            assert all(len(repeats) == 2 for repeats in costs.values())
            assert all(cost["seconds"] > 0 for repeats in costs.values() for cost in repeats)


@pytest.mark.slow
def test_it_measures_our_tiers_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, figures = tmp_path / "there", tmp_path / "figures.json"
    there.mkdir()
    options = ("--json", str(figures))
    assert run_small(there, "files,segments", *options, sizes="8KiB,16KiB") == 0
    assert list(there.iterdir()) == []
    found = json.loads(figures.read_text())
    check_costs(found, ["files", "segments"], OPERATIONS)
    sizes = {name: size["chunk_bytes"] for name, size in found["sizes"].items()}
    assert sizes == {"8 KiB": 8192, "16 KiB": 16384}
    assert found["missing"] == {}
    assert {"cores", "kernel", "file system", "I/O engine"} <= found["machine"].keys()
    lines = capsys.readouterr().out.splitlines()
    for operation in OPERATIONS:
        assert sum(line.startswith(operation) for line in lines) == len(sizes)
    assert sum(line.startswith("not measured") for line in lines) == len(report.AIMS)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.slow
def test_fio_moves_as_many_bytes(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert run_small(tmp_path, "fio", "--json", str(figures)) == 0
    found: dict[str, Any] = json.loads(figures.read_text())
    if found["missing"]:
        pytest.skip(found["missing"]["fio"])
    check_costs(found, ["fio"], (WRITE, COLD, WARM))
    assert all(size["costs"][EXISTS] == {} for size in found["sizes"].values())


@pytest.mark.slow
def test_without_fio_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_small(tmp_path, "files,fio") == 0
    assert "apt-get install fio" in capsys.readouterr().out
    assert run_small(tmp_path, "fio") == 2
    assert "--sides = 'fio': fio is not installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--bytes", "8KiB"], "--bytes = 8192: 4 batches of 64 chunks"),
        (["--bytes", "much"], "--bytes = 'much': is no size"),
        (["--bytes", "1000000GiB"], "MiB are free, and 3 times"),
        (["--sizes", "64KiB,5000"], "--sizes = '5000'"),
        (["--sizes", "0KiB"], "--sizes = '0KiB'"),
        (["--batch", "0"], "--batch = 0"),
        (["--jobs", "0"], "--jobs = 0"),
        (["--repeats", "0"], "--repeats = 0"),
        (["--sides", "files,tape"], "--sides = 'tape': is no side"),
        (["--dir", "/nowhere/at/all"], "--dir = '/nowhere/at/all'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiers", "--dir", str(tmp_path), *flags]) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_it_removes_what_it_wrote(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tiering_benchmarks.cli", "tiers", "--dir", str(tmp_path)]
    command += ["--sizes", "4KiB", "--bytes", "256KiB", "--batch", "4", "--sides", "files"]
    command += ["--repeats", "10000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("repeat" in line for line in process.stderr), "it never came to measuring"
        assert list(tmp_path.iterdir()) != []
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number, told
    assert list(tmp_path.iterdir()) == []


class Shelf:
    """A side in memory that writes down what it is asked to do."""

    passes_to_fill = 1
    keeps_bytes = True

    def __init__(self, name: str, region: Region, directory: Path, calls: list[str]) -> None:
        self.name = name
        self.directory = directory
        self.chunks: dict[bytes, bytes] = {}
        self._rows = region.rows
        self._calls = calls

    def about(self) -> str:
        return "a dict"

    def write(self, batches: Sequence[Batch]) -> Cost:
        self._calls.append(f"{self.name} write")
        for batch in batches:
            for key, row in zip(batch.keys, batch.rows, strict=True):
                assert key not in self.chunks
                self.chunks[key] = bytes(self._rows[row])
        return Cost(1, 1)

    def read(self, batches: Sequence[Batch]) -> Cost:
        self._calls.append(f"{self.name} read")
        for batch in batches:
            for key, row in zip(batch.keys, batch.rows, strict=True):
                self._rows[row][:] = self.chunks[key]
        return Cost(1, 1)

    def exists(self, batches: Sequence[Sequence[bytes]], expected: Sequence[bool]) -> Cost:
        self._calls.append(f"{self.name} exists")
        for batch in batches:
            assert [key in self.chunks for key in batch] == list(expected[: len(batch)])
        return Cost(1, 1)

    def make_room(self) -> None:
        self.chunks.clear()

    def close(self) -> None:
        pass


def shelves(directory: Path, names: str) -> tuple[list[Shelf], Region, list[str]]:
    region, calls = Region(PLAN), []
    return [Shelf(name, region, directory, calls) for name in names], region, calls


@pytest.mark.slow
def test_sides_take_turns_and_the_order_rotates(tmp_path: Path) -> None:
    sides, region, calls = shelves(tmp_path, "ab")
    told: list[str] = []
    samples = measure(PLAN, sides, region, told.append)
    assert calls[:2] == ["a write", "b write"]
    assert calls[2:10] == [
        *("a write", "b write", "a read", "a read", "b read", "b read", "a exists", "b exists")
    ]
    assert calls[10] == "b write"
    assert told[-1] == "repeat 3 of 3"
    assert samples == {name: {"a": [Cost(1, 1)] * 3, "b": [Cost(1, 1)] * 3} for name in OPERATIONS}


@pytest.mark.slow
def test_wrong_bytes_are_an_error_and_not_a_figure(tmp_path: Path) -> None:
    (side,), region, _ = shelves(tmp_path, "a")
    read = side.read

    def read_badly(batches: Sequence[Batch]) -> Cost:
        cost = read(batches)
        region.rows[batches[0].rows[0]][7] ^= 1
        return cost

    side.read = read_badly  # type: ignore[method-assign]
    with pytest.raises(WrongAnswer, match="a read other bytes"):
        measure(PLAN, [side], region, str)


@pytest.mark.slow
def test_nothing_of_the_last_reading_is_taken_for_this_one(tmp_path: Path) -> None:
    (side,), region, _ = shelves(tmp_path, "a")
    measure(PLAN, [side], region, str)
    side.read = lambda batches: Cost(1, 1)  # type: ignore[method-assign]
    with pytest.raises(WrongAnswer, match="a read other bytes"):
        measure(PLAN, [side], region, str)


def test_passes_share_directories_and_no_names() -> None:
    first, second = PLAN.keys(1), PLAN.keys(2)
    assert len({*first, *second}) == 2 * PLAN.chunks
    assert [key[:3] for key in first] == [key[:3] for key in second]


def cached_pages(path: Path) -> int:
    """How many pages of the file the page cache holds; looking brings none in."""
    size, mincore = path.stat().st_size, ctypes.CDLL(None, use_errno=True).mincore
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as pages:
        first = ctypes.c_char.from_buffer(pages)
        found = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        assert mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found) == 0
        del first
    return sum(page & 1 for page in found)


def test_a_cold_read_finds_nothing_in_the_page_cache(tmp_path: Path) -> None:
    if report.machine(tmp_path)["file system"].startswith("tmpfs"):
        pytest.skip("a tmpfs is the page cache")
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(bytes(1 << 20))
    assert cached_pages(path) == (1 << 20) // mmap.PAGESIZE
    os.sync()
    drop_cache(tmp_path)
    assert cached_pages(path) == 0


def test_a_pass_moves_whole_rounds_of_batches_and_no_more_than_allowed() -> None:
    plan = Plan.within(100_000, 4096, batch=3, jobs=2, repeats=1)
    assert (plan.chunks, plan.payload_bytes) == (24, 98_304)
    assert plan.held_max > plan.chunks + plan.batch * plan.jobs
    assert plan.passes_to_fill * plan.chunks >= plan.held_max
    assert Plan.within(1 << 30, 4096, batch=16, jobs=4, repeats=1).chunks == CHUNKS_MAX


def ours(directory: Path, tier: MemoryTier) -> tuple[Ours, Region]:
    region = Region(PLAN)
    return Ours("memory", tier, directory, PLAN, region), region


@pytest.mark.slow
def test_a_tier_that_replaces_nothing_is_not_measured(tmp_path: Path) -> None:
    side, region = ours(tmp_path, MemoryTier())
    try:
        with pytest.raises(WrongAnswer, match="memory replaced too little: it holds"):
            measure(PLAN, [side], region, str)
    finally:
        side.close()


@pytest.mark.slow
def test_a_miss_is_an_error_and_not_a_fast_read(tmp_path: Path) -> None:
    tier = MemoryTier()
    side, _ = ours(tmp_path, tier)
    keys = PLAN.keys(0)
    (batch,) = PLAN.batches(keys, range(len(keys)))[:1]
    try:
        side.write([batch])
        tier.reads[keys[1]] = Read.MISS
        with pytest.raises(WrongAnswer, match=r"memory: Read\.MISS, not Read\.HIT"):
            side.read([batch])
        with pytest.raises(WrongAnswer, match="wrong about what it holds"):
            side.exists([batch.keys], [True, False] * 2)
    finally:
        side.close()


def sized(chunk_bytes: int, **seconds: Sequence[float]) -> report.Sized:
    """Every operation took each side so long; CPU time is a tenth of it."""
    costs = {side: [Cost(time, time / 10) for time in times] for side, times in seconds.items()}
    samples = {operation: dict(costs) for operation in OPERATIONS}
    return report.Sized(chunk_bytes, 10**9, 1000, samples)


def test_ratios_are_taken_repeat_by_repeat() -> None:
    found = sized(1 << 20, files=[1, 2, 4], vllm=[2, 2, 12])
    ratio = found.ratio(WRITE, "files", "vllm", "speed")
    assert ratio is not None
    assert (ratio.low, ratio.median, ratio.high) == (1, 2, 3)
    cpu = found.ratio(COLD, "files", "vllm", "CPU")
    assert cpu is not None
    assert (cpu.low, cpu.median, cpu.high) == (pytest.approx(1 / 3), 0.5, 1)
    assert found.ratio(WRITE, "files", "fio", "speed") is None


def test_the_aims_say_where_they_are_missed() -> None:
    small = sized(64 << 10, segments=[1], vllm=[1.2], fio=[1])
    large = sized(1 << 20, segments=[1], vllm=[4], fio=[0.8])
    verdicts = report.verdicts([small, large])
    assert [line.split("  ")[0].strip() for line in verdicts] == [
        *("not met", "not met", "not met", "not met", "not measured")
    ]
    assert verdicts[0].endswith("speed: 0.80 at 1 MiB write, 0.80 at 1 MiB cold read")
    assert verdicts[1].endswith("1.20 at 64 KiB write")
    assert verdicts[2].endswith("1.20 at 64 KiB cold read")
    assert verdicts[3].endswith("0.83 at 64 KiB write, 0.83 at 64 KiB cold read")
    assert report.verdicts([sized(1 << 20, files=[1], vllm=[1])])[4].startswith("met")


def test_a_table_has_every_side_and_no_ratio_to_itself() -> None:
    lines = report.table(sized(1 << 20, files=[0.5], vllm=[1])).splitlines()
    assert len(lines) == 1 + 2 * len(OPERATIONS)
    assert lines[1].split() == [
        *("write", "files", "2.00", "[2.00", "2.00]", "0.05", "[0.05", "0.05]", "-"),
        *("2.00", "[2.00", "2.00]", "0.50", "[0.50", "0.50]"),
    ]
    assert lines[2].split()[-3:] == ["-", "-", "-"]
    assert lines[-2].startswith("exists, us a key   files     500.00")


@pytest.mark.vllm
@pytest.mark.slow
def test_against_vllm_both_do_the_same_things(tmp_path: Path) -> None:
    """In its own process: vLLM's imports warn, and take long."""
    there, figures = tmp_path / "there", tmp_path / "figures.json"
    there.mkdir()
    command = [sys.executable, "-m", "tiering_benchmarks.cli", "tiers", "--dir", str(there), *SMALL]
    command += ["--sizes", "8KiB", "--sides", "files,vllm", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    check_costs(found, ["files", "vllm"], OPERATIONS)
    assert version("vllm") in found["machine"]["versions"]
    assert list(there.iterdir()) == []
