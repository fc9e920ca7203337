"""The serve benchmark asks what it says, is fair to its sides and reckons right. No server is
started here; vLLM's worker is compared with memory that the test fills."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tiering_benchmarks import serve
from tiering_benchmarks import serve_report as report
from tiering_benchmarks.cli import main
from tiering_benchmarks.serve_load import (
    BLOCK_TOKENS,
    REQUESTS_MIN,
    TRACE,
    TRACE_ANSWER_MAX,
    TRACE_PROMPT_MAX,
    Asked,
    Load,
    cut,
    made_trace,
    paced,
    prefix_load,
    read_trace,
    scaled,
    tax_load,
    trace_lines,
    trace_load,
)
from tiering_benchmarks.serve_run import Sample, Setup, check, cpu_seconds, measure
from tiering_benchmarks.serve_sides import BLOCKS_PER_CHUNK, NONE, SIDES, Memory, Side, rivals
from tiering_benchmarks.tiers_run import WrongAnswer

LOADS = [
    *(prefix_load(count, 1) for count in (REQUESTS_MIN, 24)),
    *(tax_load(count, 1) for count in (REQUESTS_MIN, 16)),
    *(trace_load(count, 4.0, None, 512) for count in (REQUESTS_MIN, 40)),
]


def sample(seconds: float = 1.0, **more: Any) -> Sample:
    values: dict[str, Any] = {
        "ttft_mean_seconds": seconds,
        "ttft_median_seconds": seconds,
        "tokens_per_second": 1 / seconds,
        "cpu_seconds": seconds,
        "seconds": seconds,
        "prompt_tokens": 100,
        "by_source": {},
        "answers": ("a", "b"),
    }
    return Sample(**{**values, **more})


def write_trace(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def mooncake(at: int, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {
        "timestamp": at,
        "input_length": tokens,
        "output_length": 100,
        "hash_ids": ids,
        **more,
    }


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.name} {load.requests}")
def test_memory_holds_one_request_and_the_device_not_the_load(load: Load) -> None:
    memory = Memory.of(load, kv_bytes_per_token=1)
    for size in (memory.device_bytes, memory.small_bytes):
        assert size > load.model_len >= load.longest_tokens + BLOCK_TOKENS
    assert memory.host_bytes > load.distinct_tokens + load.longest_tokens
    if load.requests > REQUESTS_MIN:
        assert memory.device_bytes < memory.small_bytes < load.distinct_tokens


def test_tax_prompts_share_no_block() -> None:
    load = tax_load(16, 1)
    asked = [block for each in load.trace for block in each.blocks]
    assert len(load.trace) == load.requests == 16
    assert len(set(asked)) == len(asked)
    assert load.distinct_tokens == sum(e.input_tokens + e.output_tokens for e in load.trace)


def test_the_made_trace_is_the_same_again_and_comes_back() -> None:
    trace = made_trace(40)
    assert trace == made_trace(40)
    assert [each.seconds for each in trace] == sorted(each.seconds for each in trace)
    seen: set[int] = set()
    returns = fresh = 0
    for each in trace:
        assert each.input_tokens == len(each.blocks) * BLOCK_TOKENS
        # An id is found only with all that was before it.
        known = [block in seen for block in each.blocks]
        assert known == sorted(known, reverse=True)
        returns += known[0]
        fresh += not known[0]
        seen.update(each.blocks)
    assert returns > 10
    assert fresh > 5
    assert max(each.input_tokens for each in made_trace(1000)) <= TRACE_PROMPT_MAX


def test_a_trace_goes_at_its_pace_in_its_own_rhythm() -> None:
    rows = [Asked(at, 32, 1, (1,)) for at in (100.0, 101.0, 104.0)]
    assert [row.seconds for row in paced(rows, 3.0)] == [0.0, 1.5, 6.0]
    assert [row.seconds for row in paced([rows[0], rows[0]], 3.0)] == [0.0, 0.0]


def test_what_vllm_reads_is_the_trace() -> None:
    lines = trace_lines([Asked(1.5, 40, 3, (7, 9)), Asked(2.0, 32, 1, (7,))]).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"timestamp": 1.5, "input_length": 40, "output_length": 3, "hash_ids": [7, 9]},
        {"timestamp": 2.0, "input_length": 32, "output_length": 1, "hash_ids": [7]},
    ]


def test_a_recorded_trace_keeps_its_blocks_and_shrinks_its_prompts(tmp_path: Path) -> None:
    rows = [
        mooncake(2000, 1000, [0, 1]),
        # Whole blocks only: the rest has no id.
        mooncake(3000, 1500, [0, 2]),
        mooncake(5000, 40_000, [0, *range(10, 88)]),
    ]
    first, second, third = scaled(read_trace(write_trace(tmp_path / "a.jsonl", rows)), 512)
    assert (first.seconds, first.blocks) == (2.0, (0, 1))
    assert (first.input_tokens, first.output_tokens) == (63, 7)
    assert second.input_tokens == 2 * BLOCK_TOKENS
    assert third.input_tokens == 2500
    long = mooncake(0, 512, [0], output_length=10**6)
    (answer,) = scaled(read_trace(write_trace(tmp_path / "b.jsonl", [long])), 512)
    assert answer.output_tokens == TRACE_ANSWER_MAX


def test_conversations_are_drawn_whole() -> None:
    """Of 200 that all begin with the same block, 3 turns each; every other one gets too long."""
    rows = []
    for turn in range(3):
        for talk in range(200):
            ids = (0, *range(1000 * talk + 1, 1000 * talk + 2 + turn))
            tokens = TRACE_PROMPT_MAX + 1 if talk % 2 == 0 and turn == 2 else 32 * len(ids)
            rows.append(Asked(turn * 1000 + talk, tokens, 1, ids))
    found = cut(rows, 30)
    assert len(found) == 30
    assert [row.seconds for row in found] == sorted(row.seconds for row in found)
    turns: dict[int, int] = {}
    for row in found:
        talk = row.blocks[1] // 1000
        turns[talk] = turns.get(talk, 0) + 1
    assert sorted(turns.values()) == [3] * 10
    assert not [talk for talk in turns if talk % 2 == 0], "one of them is too long"


def test_a_recorded_session_is_a_conversation_by_its_name() -> None:
    rows = [Asked(at, 32, 1, (at,), session=f"s{at % 50}") for at in range(100)]
    by_name: dict[str | None, int] = {}
    for row in cut(rows, 20):
        by_name[row.session] = by_name.get(row.session, 0) + 1
    assert list(by_name.values()) == [2] * 10


@pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")
def test_a_packed_trace_is_read_as_it_is(tmp_path: Path) -> None:
    plain = write_trace(tmp_path / "a.jsonl", [{**mooncake(0, 9, [1]), "timestamp_ms": 4000}])
    subprocess.run(["zstd", "-q", str(plain)], check=True)
    packed = read_trace(tmp_path / "a.jsonl.zst")
    assert packed == read_trace(plain) == [Asked(4.0, 9, 100, (1,))]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--sides", "none,tape"], "--sides = 'tape': is no side"),
        (["--repeats", "0"], "--repeats = 0"),
        (["--requests", "3"], "--requests = 3: measures nothing; use 4 or more"),
        (["--concurrency", "0"], "--concurrency = 0"),
        (["--interval", "0"], "--interval = 0.0"),
        (["--minutes", "-1"], "--minutes = -1.0"),
        (["--trace-block", "0"], "--trace-block = 0"),
        (["--trace", "a.jsonl"], "--trace = 'a.jsonl': is not asked by prefix"),
        (["--workload", "trace", "--trace", "/nowhere/at/all"], "No such file or directory"),
        (["--dir", "/nowhere/at/all"], "--dir = '/nowhere/at/all'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_started(
    flags: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(directory: Path, size: str) -> Path:
        raise AssertionError(f"it makes the model {size}")

    monkeypatch.setattr(serve, "make_model", started)
    assert main(["serve", "--dir", str(tmp_path), *flags]) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_it_reports_what_it_ran_and_ends_at_a_wrong_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(setup: Setup, side: Side) -> Sample:
        if side.name == "vllm":
            raise WrongAnswer("vllm: nothing was answered")
        return sample(1.0 if side.name == NONE else 0.5)

    monkeypatch.setattr(serve, "make_model", lambda directory, size: directory / size)
    monkeypatch.setattr(Setup, "run", run)
    there, figures = tmp_path / "there", tmp_path / "figures.json"
    there.mkdir()
    flags = ["serve", "--dir", str(there), "--repeats", "2", "--json", str(figures), "--sides"]
    assert main([*flags, "none,tiered"]) == 0
    found = json.loads(figures.read_text())
    assert (found["workload"], found["repeats"]) == ("prefix", 2)
    assert {name: len(runs) for name, runs in found["sides"].items()} == {"none": 2, "tiered": 2}
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "tiered / none" in each)
    assert line.split()[3:6] == ["0.50", "[0.50", "0.50]"]
    assert main([*flags, "none,vllm"]) == 1
    assert "vllm: nothing was answered" in capsys.readouterr().err
    assert list(there.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "is no trace"), ('{"a": 1}', "is no trace"), ("[1]", "is no trace"), ("", "0 requests")],
)
def test_what_is_no_trace_is_refused(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    flags = ["serve", "--dir", str(tmp_path), "--workload", TRACE, "--trace", str(file)]
    assert main(flags) == 2
    assert sentence in capsys.readouterr().err


def test_both_connectors_are_given_the_same(tmp_path: Path) -> None:
    memory = Memory(1, 20, 10)
    assert SIDES[NONE].config(memory, tmp_path, "e") is None
    pairs = [pair for pair in rivals(list(SIDES)) if pair[1] != NONE]
    assert [ours for ours, _ in pairs] == ["tiered", "tiered-fs", "tiered-small-fs"]
    sizes = []
    for pair in pairs:
        configs = [SIDES[name].config(memory, tmp_path, "e") for name in pair]
        ours, theirs = (config["kv_connector_extra_config"] for config in configs if config)
        names = {"spec_name", "spec_module_path"}
        assert ours == {key: value for key, value in theirs.items() if key not in names}
        assert ours["blocks_per_chunk"] == BLOCKS_PER_CHUNK
        disks = [{"type": "fs", "root_dir": str(tmp_path)}]
        assert ours.get("secondary_tiers") == (disks if pair[0].endswith("fs") else None)
        sizes.append(ours["cpu_bytes_to_use"])
    assert sizes == [20, 20, 10]


def test_only_what_was_measured_is_compared() -> None:
    assert rivals(["tiered", "vllm-fs"]) == []
    assert rivals(["tiered-fs", "vllm-fs"]) == [("tiered-fs", "vllm-fs")]
    assert rivals(["none", "vllm"]) == [("vllm", "none")]


def test_sides_take_turns_and_the_order_rotates() -> None:
    order: list[str] = []
    sides = [SIDES[name] for name in ("none", "tiered", "vllm")]

    def run(side: Any) -> Sample:
        order.append(side.name)
        return sample()

    samples = measure(sides, run, 2, 1e9, lambda what: None)
    assert order == ["none", "tiered", "vllm", "tiered", "vllm", "none"]
    assert {name: len(runs) for name, runs in samples.items()} == dict.fromkeys(samples, 2)
    order.clear()
    assert [len(runs) for runs in measure(sides, run, 9, 0.0, lambda what: None).values()] == [
        1
    ] * 3
    assert len(order) == 3, "the budget is spent after a repeat, not within one"


def test_a_run_that_measured_something_else_is_refused() -> None:
    prefix, tax = prefix_load(8, 1), tax_load(8, 1)
    none, tiered = SIDES[NONE], SIDES["tiered"]
    host = sample(by_source={"host": 3})
    check(prefix, tiered, 8, 0, host)
    check(tax, tiered, 8, 0, sample())
    with pytest.raises(WrongAnswer, match="7 of 8 requests were answered, 1 failed"):
        check(prefix, tiered, 7, 1, host)
    with pytest.raises(WrongAnswer, match="none: 3% of the tokens came from elsewhere"):
        check(prefix, none, 8, 0, host)
    with pytest.raises(WrongAnswer, match=r"never repeat were found: {'host': 3}"):
        check(tax, tiered, 8, 0, host)


def test_ratios_are_taken_repeat_by_repeat() -> None:
    samples = {
        "none": [sample(2.0), sample(4.0), sample(8.0)],
        "tiered": [sample(1.0), sample(1.0, answers=("a", "x")), sample(16.0)],
    }
    first, *_ = report.FIGURES.values()
    ratio = report.ratio(first, samples["tiered"], samples["none"])
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.25, 2.0)
    assert report.same_answers(samples["tiered"], samples["none"]) == 5 / 6
    lines = report.ratios(samples).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["tiered", "/", "none"]]
    assert "0.50 [0.25 2.00]" in lines[1]
    assert "83%" in report.figures(samples)


def test_shares_tell_device_from_elsewhere() -> None:
    found = sample(by_source={"device": 10, "host": 20, "disk": 5})
    assert (found.share(is_device=True), found.share(is_device=False)) == (0.1, 0.25)
    assert "10.0%" in report.figures({"vllm": [found]})
    raw = report.raw({"vllm": [found]})
    assert json.loads(json.dumps(raw))["vllm"][0]["by_source"] == found.by_source


def test_cpu_time_of_processes_is_added_up() -> None:
    own = os.getpid()
    before = cpu_seconds([own])
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert cpu_seconds([own]) - before >= 0.08
    assert cpu_seconds([own, own]) >= 2 * before
    assert cpu_seconds([2**22 + 1]) == 0


def test_a_model_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs torch: `make test` installs it")
    (tmp_path / "file").write_text("mine")
    assert main(["model", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith(f"tiering-bench: DIR = '{tmp_path / 'file'}': ")
    assert (tmp_path / "file").read_text() == "mine"
