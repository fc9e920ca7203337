"""The benchmark of S3 clients runs with small sizes and compares like with like, without times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from s3_servers import rclone
from scripted_s3 import ScriptedS3
from tiering_benchmarks import objects, objects_sides
from tiering_benchmarks.cli import main
from tiering_benchmarks.objects import Case, cases, measure
from tiering_benchmarks.objects_sides import SIDES, Bucket, Item, open_side
from tiering_benchmarks.tiers_report import Sized
from tiering_benchmarks.tiers_run import Cost, WrongAnswer

KIB = 1 << 10


@pytest.mark.slow
def test_it_measures_every_side_against_the_same_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    figures = tmp_path / "figures.json"
    small = ["--sizes", "64KiB", "--bytes", "256KiB", "--repeats", "2", "--concurrent", "1,3"]
    where = ["--dir", str(tmp_path / "there"), "--json", str(figures)]
    assert main(["tiers", "--tier", "obj", *small, *where]) == 0
    assert list((tmp_path / "there").iterdir()) == []
    found = json.loads(figures.read_text())
    measured = [side for side in SIDES if side not in found["missing"]]
    assert "ours" in measured
    assert list(found["cases"]) == ["64 KiB x 1", "64 KiB x 3"]
    for case in found["cases"].values():
        costs = case["64 KiB"]["costs"]
        assert list(costs) == ["put", "get"]
        for by_side in costs.values():
            assert sorted(by_side) == sorted(measured)
            assert all(len(repeats) == 2 for repeats in by_side.values())
    out = capsys.readouterr().out
    assert "64 KiB x 3" in out
    assert "aims, by the medians" in out


@pytest.mark.slow
def test_a_server_of_ones_own_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedS3() as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "one")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "two")
        small = ["--sizes", "4KiB", "--bytes", "16KiB", "--repeats", "1", "--sides", "ours"]
        where = ["--endpoint", server.endpoint, "--bucket", "bucket", "--dir", str(tmp_path)]
        assert main(["tiers", "--tier", "obj", *small, *where]) == 0
        assert server.objects == {}
        assert server.under_way_max <= 16
        assert {asked.access_key for asked in server.asked} == {"one"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIDES)
def test_a_side_moves_the_bytes_it_is_given(name: str, tmp_path: Path) -> None:
    with rclone(tmp_path) as served:
        bucket = Bucket(served.endpoint, "bucket", "us-east-1", "testaccess", "testsecret-2f1c")
        try:
            side = open_side(name, bucket)
        except objects_sides.SideMissing as missing:
            pytest.skip(str(missing))
        sent = [(f"k{at}", bytearray([at]) * (64 * KIB + at)) for at in range(5)]
        found = [(key, bytearray(len(body))) for key, body in sent]
        side.put(sent, 3)
        side.get(found, 3)
        assert found == sent
        assert served.root is not None
        assert (served.root / "k3").read_bytes() == sent[3][1]
        side.delete([key for key, _ in sent])
        assert not (served.root / "k3").exists()
        side.close()


class Forgetful:
    """Fills half of a buffer."""

    def put(self, items: Sequence[Item], jobs: int) -> None:
        self.kept = dict(items)

    def get(self, items: Sequence[Item], jobs: int) -> None:
        for key, buffer in items:
            half = len(buffer) // 2
            buffer[:half] = self.kept[key][:half]

    def delete(self, names: Sequence[str]) -> None: ...

    def close(self) -> None: ...

    def about(self) -> str:
        return ""


@pytest.mark.slow
def test_a_side_that_gets_other_bytes_is_found_out() -> None:
    with pytest.raises(WrongAnswer, match="forgetful got other bytes"):
        measure(Case(4 * KIB, 2, 1), {"forgetful": Forgetful()}, 1)


def test_each_job_has_an_object_at_least() -> None:
    assert [str(case) for case in cases([KIB, 4 * KIB], [1, 16], 8 * KIB)] == [
        "1 KiB x 1", "1 KiB x 16", "4 KiB x 1", "4 KiB x 16",
    ]  # fmt: skip
    assert [case.objects for case in cases([KIB, 4 * KIB], [1, 16], 8 * KIB)] == [8, 16, 2, 16]


def test_aims_are_judged_case_by_case() -> None:
    def sized(seconds: float) -> Sized:
        costs: dict[str, list[Cost]] = {
            "ours": [Cost(seconds, 1.0)],
            "obstore": [Cost(1.0, 1.0)],
            "boto3": [Cost(1.0, 1.0)],
        }
        return Sized(4 << 20, 1, 0, {"put": costs, "get": costs})

    told = objects.verdicts([(Case(4 << 20, 1, 1), sized(4.0)), (Case(4 << 20, 1, 16), sized(1.0))])
    assert told[0].startswith("not met")
    assert told[0].endswith("0.25 at 4 MiB x 1 put, 0.25 at 4 MiB x 1 get")
    assert [line.split()[0] for line in told[1:3]] == ["met", "met"]
    assert told[3].startswith("met")
    assert objects.verdicts([])[0].startswith("not measured")


@pytest.mark.parametrize(
    "options",
    [["--sizes", "x"], ["--concurrent", "0"], ["--concurrent", "a"], ["--sides", "curl"]],
)
def test_what_measures_nothing_is_refused(
    options: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiers", "--tier", "obj", "--dir", str(tmp_path), *options]) == 2
    assert f"tiering-bench: {options[0]}" in capsys.readouterr().err
