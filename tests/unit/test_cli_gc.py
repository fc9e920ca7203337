"""`tiering gc`: what it says and does without and with --delete, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fs_places
import segment_places
from fs_places import KEYS, NAMESPACE
from tiering.cli import main
from tiering.testing.examples import stored

Output = pytest.CaptureFixture[str]
NOW = ["--orphaned-days", "0"]


def fill(root: Path) -> None:
    async def store() -> None:
        async with fs_places.opened(root) as tier:
            await stored(tier, KEYS)
        async with segment_places.opened(root, slots=8) as tier:
            await stored(tier, KEYS[:6])

    asyncio.run(store())


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_it_lists_and_removes_nothing_without_delete(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    before = names(tmp_path)
    assert main(["gc", *NOW, str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path}: 1 namespace; would remove 1 of them, ")
    assert out.splitlines()[0].endswith("; --delete does it")
    assert f"  {NAMESPACE.directory}  files+segments  26      " in out
    assert out.splitlines()[2].endswith("would be removed (orphaned)")
    assert err == ""
    assert names(tmp_path) == before


def test_with_delete_it_removes_and_says_so(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    assert main(["gc", "--delete", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("  kept")
    assert main(["gc", *NOW, "--delete", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("removed (orphaned)")
    assert names(tmp_path) == [".manifest"]


def test_what_it_did_as_json(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    named = ["--namespace", NAMESPACE.directory]
    for more, outcome in (([], "would be removed"), (["--delete"], "removed")):
        assert main(["gc", "--json", *named, *more, str(tmp_path)]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["deleted"] is bool(more)
        (found,) = told["namespaces"]
        assert (found["outcome"], found["why"]) == (outcome, "named")
        assert (found["layouts"], found["chunks"]) == (["files", "segments"], 26)
        assert (told["temp_files"], told["empty_directories"], told["problems"]) == (0, 0, [])


def test_it_tells_what_else_it_removes(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    for name in ("000", "fff"):
        (tmp_path / f"{NAMESPACE.directory}_r0" / name).mkdir(exist_ok=True)
    assert main(["gc", str(tmp_path)]) == 0
    assert "would remove: 2 empty directories\n" in capsys.readouterr().out
    assert main(["gc", "--delete", str(tmp_path)]) == 0
    assert "\nremoved: 2 empty directories\n" in capsys.readouterr().out
    assert main(["gc", "--delete", str(tmp_path)]) == 0
    assert "empty" not in capsys.readouterr().out


def test_what_could_not_be_removed_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output
) -> None:
    fill(tmp_path)

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("tiering.tiers.upkeep.collect.shutil.rmtree", refuse)
    assert main(["gc", *NOW, "--delete", str(tmp_path)]) == 1
    assert "not removed: " in capsys.readouterr().out


def test_a_root_without_namespaces_is_one_sentence_and_exit_code_1(
    tmp_path: Path, capsys: Output
) -> None:
    (tmp_path / "home").mkdir()
    assert main(["gc", "--delete", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"tiering: root_dir = '{tmp_path}': has no namespace in it; "
        "name the root_dir of an fs tier, with its file system mounted\n"
    )
    assert names(tmp_path) == ["home"]


@pytest.mark.slow
def test_a_real_process_removes_what_another_has_left(tmp_path: Path) -> None:
    fill(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tiering", "gc", *NOW, "--delete", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "removed (orphaned)" in done.stdout
    assert done.stderr.startswith("removing: 0 of ")
    assert names(tmp_path) == [".manifest"]
