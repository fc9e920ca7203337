"""That a test which leaves a thread behind fails, and one that leaves none does not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from threads_left import threads_left

TESTS = Path(__file__).parents[1]
SLOPPY = """
import threading

import pytest

go_on = threading.Event()

@pytest.fixture(scope="module")
def shared():
    thread = threading.Thread(target=go_on.wait, name="of the module")
    thread.start()
    yield
    go_on.set()
    thread.join()

@pytest.mark.parametrize("time", [1, 2])
def test_that_is_tidy(shared, time):
    thread = threading.Thread(target=int)
    thread.start()

def test_that_is_not():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

def test_after_it():
    pass
"""


def test_threads_are_named_until_they_have_ended() -> None:
    before = set(threading.enumerate())
    go_on = threading.Event()
    threads = [threading.Thread(target=go_on.wait, name=name) for name in ("second", "first")]
    for thread in threads:
        thread.start()
    assert threads_left(before, 0.01) == ["first", "second"]
    assert threads_left({*before, threads[1]}, 0.01) == ["second"]
    threading.Timer(0.05, go_on.set).start()
    assert threads_left(before) == []


@pytest.mark.slow
def test_the_test_that_leaves_a_thread_fails_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_sloppy.py").write_text(SLOPPY)
    shutil.copy(TESTS / "conftest.py", tmp_path)
    settings = ("-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *settings, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert "4 passed, 1 error" in ran.stdout, ran.stdout + ran.stderr
    assert "at teardown of test_that_is_not" in ran.stdout
    assert "threads are left: forgotten" in ran.stdout
