"""`tiering verify`: its summary, its exit codes, its progress, and how it is interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import fs_places
import segment_places
from fs_places import KEYS, file_of
from tiering.cli import main
from tiering.cli.progress import Progress
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import stored

Output = pytest.CaptureFixture[str]


def fill(root: Path, keys: Sequence[bytes] = KEYS) -> None:
    async def store() -> None:
        async with fs_places.opened(root) as tier:
            await stored(tier, keys)

    asyncio.run(store())


def fill_segments(root: Path) -> Path:
    async def store() -> None:
        async with segment_places.opened(root, slots=8) as tier:
            await stored(tier, KEYS[:6])

    asyncio.run(store())
    return segment_places.segments_of(root) / "segment-00000.kv"


def flip(path: Path, offset: int = 5000) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_directory_without_a_namespace_is_not_all_good(tmp_path: Path, capsys: Output) -> None:
    """As where the file system is not mounted: nothing was checked."""
    assert main(["verify", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "has no namespace in it; name the root_dir of an fs tier" in err


@pytest.mark.parametrize("text", ["fast", "-1", "nan", "inf"])
def test_a_rate_that_is_none_is_named(text: str, tmp_path: Path, capsys: Output) -> None:
    with pytest.raises(SystemExit) as left:
        main(["verify", str(tmp_path), f"--max-mb-per-second={text}"])
    assert left.value.code == 2
    assert f"--max-mb-per-second: {text} is not a number from 0 on" in capsys.readouterr().err


def test_all_good_is_exit_code_0(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    assert main(["verify", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path}: 20 chunks checked, 240 KiB; ")
    assert out.splitlines()[1:] == ["  good  20"]
    assert err == "verifying: 0 of 20 chunks\n"


def test_damage_is_exit_code_3_and_told_by_cause(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    flipped, cut = file_of(tmp_path, KEYS[0]), file_of(tmp_path, KEYS[1])
    flip(flipped)
    os.truncate(cut, 7)
    assert main(["verify", str(tmp_path)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "  good               18",
        "  damaged: checksum  1",
        "  damaged: size      1",
    ]
    assert lines[4] == "damaged:"
    assert f"  {flipped}: bad checksum" in lines
    assert f"  {cut}: a file of 7 bytes is no chunk" in lines
    assert flipped.exists()


def test_what_was_found_as_json(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    flip(file_of(tmp_path, KEYS[0]))
    assert main(["verify", "--json", "--max-mb-per-second", "0", str(tmp_path)]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["damaged"] == {"checksum": 1}
    assert (told["total"], told["checked"], told["good"]) == (20, 20, 19)
    assert told["interrupted"] is False
    assert told["findings"] == [
        {
            "where": str(file_of(tmp_path, KEYS[0])),
            "cause": "checksum",
            "reason": "bad checksum",
        }
    ]


def test_quarantine_moves_files_and_says_that_segments_stay(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    flip(file_of(tmp_path, KEYS[0]))
    flip(fill_segments(tmp_path))
    assert main(["verify", "--quarantine", str(tmp_path)]) == 3
    out = capsys.readouterr().out
    assert "1 file moved to quarantine\n" in out
    assert "damage in segments is only reported" in out
    assert len(fs_places.quarantined(tmp_path)) == 1
    assert main(["verify", "--quarantine", str(tmp_path)]) == 3
    assert "0 files moved to quarantine\n" in capsys.readouterr().out


def test_what_could_not_be_checked_is_exit_code_1(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    config = tmp_path / fs_places.NAMESPACE.directory / "config.json"
    config.unlink()
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "  directories left out  1\n" in out
    assert f"not checked:\n  {config}: missing" in out


def test_a_namespace_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: Output) -> None:
    fill(tmp_path)
    assert main(["verify", "--namespace", "nothing", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert f"one of those there, without _r<rank>: {fs_places.NAMESPACE.directory}" in err
    assert main(["verify", "--namespace", fs_places.NAMESPACE.directory, str(tmp_path)]) == 0


def arguments(root: Path, rate: str) -> list[str]:
    return [sys.executable, "-m", "tiering", "verify", "--max-mb-per-second", rate, str(root)]


@pytest.mark.slow
def test_an_interrupted_process_tells_what_it_has_found(tmp_path: Path) -> None:
    fill(tmp_path)
    flip(file_of(tmp_path, KEYS[0]))
    # One chunk and a little more a second: it would take 20 s.
    process = subprocess.Popen(
        arguments(tmp_path, "0.012"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "verifying: 0 of 20 chunks\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "checked, " in out
    assert out.splitlines()[0].endswith("; interrupted")
    assert "Traceback" not in err


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    fill(tmp_path)
    terminal, side = pty.openpty()
    process = subprocess.Popen(arguments(tmp_path, "0"), stdout=subprocess.PIPE, stderr=side)
    os.close(side)
    shown = b""
    try:
        while select.select([terminal], [], [], 30)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # the other side has closed
                break
        out, _ = process.communicate(timeout=30)
    finally:
        os.close(terminal)
    assert process.returncode == 0
    assert b"verifying: 100%" in shown
    assert b"20/20" in shown
    assert b"0 damaged" in shown
    assert b"good  20" in out


def test_without_a_terminal_there_is_a_line_every_ten_seconds(capsys: Output) -> None:
    clock = ManualClock()
    with Progress("verifying", "chunks", 100, clock) as progress:
        for done in range(25):
            progress.show(done, "1 KiB")
            clock.advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "verifying: 0 of 100 chunks",
        "verifying: 10 of 100 chunks, 1 KiB",
        "verifying: 20 of 100 chunks, 1 KiB",
    ]
