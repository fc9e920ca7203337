"""Engines on one directory, and what another process does between two steps of one of them: each
race is held open at its worst moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiering.tiers.disk import temps

# Processes that end


def ends_in_parts(seconds: float) -> subprocess.Popen[bytes]:
    """A process whose first thread has ended, and another one has not."""
    script = (
        "import ctypes, threading, time\n"
        f"threading.Thread(target=time.sleep, args=({seconds},)).start()\n"
        "print(flush=True)\n"
        f"ctypes.CDLL(None).syscall({EXIT_THREAD}, 0)\n"
    )
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)


EXIT_THREAD = {"x86_64": 60, "aarch64": 93}.get(os.uname().machine, 0)


@pytest.mark.skipif(not EXIT_THREAD, reason="the call that ends one thread has another number")
def test_a_process_is_gone_when_its_last_thread_is() -> None:
    """The first one to end after a kill may be the first thread, and others still be writing."""
    with ends_in_parts(600.0) as dying:
        try:
            assert dying.stdout is not None
            dying.stdout.readline()
            stat = Path(f"/proc/{dying.pid}/stat")
            give_up = time.monotonic() + 60
            while b") Z " not in stat.read_bytes() and time.monotonic() < give_up:
                time.sleep(0.01)
            start = stat.read_bytes().rpartition(b")")[2].split()[19]
            space = temps.owner_name().split("-")[0]
            owner = f"{space}-{dying.pid}-{int(start)}-0"
            assert not temps.is_gone(owner, 0.0)
        finally:
            dying.kill()
    assert temps.is_gone(owner, 0.0)


def test_a_sweep_of_a_directory_that_vanishes_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanished(*args: Any) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", str(tmp_path))

    monkeypatch.setattr(os, "listdir", vanished)
    monkeypatch.setattr(os, "scandir", vanished)
    assert temps.sweep([tmp_path], 0.0) == 0
