"""`tiering-bench device`: on the emulated device it works from its arguments to its report, finds
wrong bytes, and gives a device that is none no speed; what it says of samples is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiering_benchmarks import device, device_sides
from tiering_benchmarks.cli import main
from tiering_benchmarks.device_report import aims, as_json, crossover, share, speed, table
from tiering_benchmarks.device_run import (
    BATCH,
    BOTH,
    KERNEL,
    KIB,
    LARGE,
    LOAD,
    LOOP,
    STORE,
    Bench,
    Plan,
    Samples,
    WrongBytes,
)
from tiering_benchmarks.device_sides import FakeSide
from tiering_benchmarks.device_wakeups import IN_LOOP, WAYS, measure

TOP = Path(__file__).parents[2]
PLAN = Plan(
    1 << 20, (4 * KIB, 64 * KIB), repeats=2, products=1, futures=10, wakeups=10, seconds_max=60
)
# What is not on a machine with torch and little else.
ABSENT = ("aiofiles", "msgspec", "orjson", "pydantic", "pytest_asyncio", "vllm", "zmq")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "EMULATED", PLAN)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_it_runs_on_the_emulated_device_and_says_nothing_of_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert main(["device", "--runtime", "fake", "--json", str(figures)]) == 0
    told = capsys.readouterr().out
    assert "emulated runtime, no speeds" in told
    assert "4 KiB: 256 fragments, stored and loaded by batch, loop" in told
    assert "GB/s" not in told
    found = json.loads(figures.read_text())
    assert found["is_emulated"]
    passes = {(each["bytes"], each["direction"], each["way"]) for each in found["fragments"]}
    sizes = [
        (size, d, w) for size in PLAN.sizes for d in (STORE, LOAD, BOTH) for w in (BATCH, LOOP)
    ]
    assert passes == set(sizes) | {(0, d, LARGE) for d in (STORE, LOAD, BOTH)}
    assert not any("seconds" in each for each in found["fragments"])
    assert "aims" not in found


@pytest.mark.usefixtures("small")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a device here")
    assert main(["device"]) == 2
    assert "tiering-bench: " in capsys.readouterr().err


def test_no_further_size_is_begun_when_the_time_is_over() -> None:
    side = FakeSide()
    bench = Bench(side, replace(PLAN, seconds_max=0))
    samples = bench.run()
    assert sorted(samples.of_size) == [0]
    assert samples.left_out[:2] == ["fragments of 4 KiB", "fragments of 64 KiB"]
    bench.close()
    side.close()


def test_a_kernel_that_cannot_be_compiled_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton needs a C compiler, which not every machine with a GPU has."""

    class Uncompiled:
        def warm_up(self) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(device_sides, "page_kernel", lambda *given: Uncompiled())
    cuda: Any = object.__new__(device_sides.CudaSide)
    side = FakeSide()
    bench = Bench(side, PLAN)
    places = bench._places(4 * KIB)
    assert bench._kernel(places) is None
    bench._side = cuda
    for _ in range(2):
        assert bench._kernel(places) is None
    assert bench.samples.left_out == [
        "the kernel for small pages: an emulated device runs none",
        "the kernel for small pages: RuntimeError: Failed to find C compiler",
    ]
    bench.close()
    side.close()


def test_wrong_bytes_are_found() -> None:
    side = FakeSide()
    copy = side.fake.copy

    def forgetful(targets: Any, sources: Any, sizes: Any, stream: int, **how: bool) -> None:
        sizes[-1] -= 1
        copy(targets, sources, sizes, stream, **how)

    side.fake.copy = forgetful  # type: ignore[method-assign, assignment]
    bench = Bench(side, PLAN)
    with pytest.raises(WrongBytes, match="store of 4096 bytes by batch"):
        bench.run()
    side.close()


def samples(**changed: float) -> Samples:
    """As of a device that copies 100 GB/s one way and 160 both ways, and just meets every aim."""
    plan = replace(PLAN, total_bytes=10**9, sizes=(4 * KIB, 16 * KIB, 32 * KIB, 512 * KIB))
    made = Samples(plan)
    at = {"large": 0.01, "both": 0.0125, "batch": 0.0104, "batch both": 0.0138} | changed
    for direction in (STORE, LOAD):
        made.add(0, direction, LARGE, at["large"])
        made.add(512 * KIB, direction, BATCH, at["batch"])
    made.add(0, BOTH, LARGE, at["both"])
    made.add(512 * KIB, BOTH, BATCH, at["batch both"])
    for size, batch in ((4 * KIB, 0.1), (16 * KIB, 0.03), (32 * KIB, 0.015)):
        made.add(size, LOAD, BATCH, batch)
        made.add(size, LOAD, KERNEL, at.get("kernel", 0.02))
    made.latencies[IN_LOOP] = [at.get("latency", 90e-6)] * 10
    made.products = {"alone": [1.0], "beside copies": [at.get("product", 1.02)]}
    return made


def test_speeds_and_shares_are_those_of_the_medians() -> None:
    made = samples()
    assert speed(made, 0, LOAD, LARGE) == pytest.approx(100)
    assert speed(made, 0, BOTH, LARGE) == pytest.approx(160)
    assert share(made, 512 * KIB, STORE, BATCH) == pytest.approx(0.0100 / 0.0104)
    assert share(made, 512 * KIB, STORE, LOOP) is None
    lines = list(table(made))
    assert "96.2 (0.96)" in next(line for line in lines if line.startswith("512 KiB"))
    assert lines[-1].startswith("the kernel is ahead of a batch below 32768 bytes")
    assert crossover(made) == 32 * KIB
    assert crossover(samples(kernel=0.001)) == 32 * KIB, "nobody compared larger ones"
    assert crossover(Samples(PLAN)) is None


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, None),
        ({"batch": 0.0106}, 0),
        ({"batch both": 0.0140}, 1),
        ({"kernel": 0.05}, 2),
        ({"latency": 110e-6}, 3),
        ({"product": 1.04}, 4),
    ],
)
def test_aims_are_judged(changed: dict[str, float], missed: int | None) -> None:
    judged = [aim.is_met for aim in aims(samples(**changed))]
    assert judged == [at != missed for at in range(5)]


def test_what_was_not_measured_is_open() -> None:
    assert [aim.is_met for aim in aims(Samples(PLAN))] == [None] * 5
    whole = as_json(samples(), {}, {"device": "one"}, is_real=True)
    assert [aim["is_met"] for aim in whole["aims"]] == [True] * 5
    assert whole["kernel_below_bytes"] == 32 * KIB


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_busy", [False, True])
def test_wake_ups_are_measured_in_every_way(way: str, is_busy: bool) -> None:
    found = measure(way, 10, is_busy)
    assert len(found.latencies) == 10
    assert min(found.latencies) > 0


def test_it_needs_none_of_what_only_this_project_installs() -> None:
    """It is for machines where nothing can be installed."""
    program = (
        "import sys\n"
        f"for name in {ABSENT}: sys.modules[name] = None\n"
        "from tiering_benchmarks.device import main\n"
        "sys.exit(main(['--help']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--runtime" in done.stdout


@pytest.mark.slow
def test_the_script_runs_from_start_to_json_on_the_emulated_device(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(TOP / "benchmarks/device_check.sh"), str(tmp_path / "out")],
        env={**os.environ, "RUNTIME": "fake", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/device.json").read_text())
    assert found["is_emulated"]
    assert "passed" in (tmp_path / "out/tests.log").read_text()
