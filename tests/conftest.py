"""For all tests: asserts of the shipped test helpers explain themselves like those of tests, and
what needs vLLM says so where there is none, and comes first: it takes longest, and short tests fill
the gaps. vLLM is asked for by its metadata, never imported."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest
from hypothesis import settings

from threads_left import threads_left

# The same examples each time, so that a change is judged by what it changed; `make explore` tries
# others. Hypothesis would give each 200 ms, in which a busy machine may run something else.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As for a command in a shell's background; programs started from here would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite(
    "tiering.testing.contract", "tiering.testing.examples", "tiering.testing.machine"
)


def _vllm_is_installed() -> bool:
    try:
        version("vllm")
    except PackageNotFoundError:
        return False
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
    if _vllm_is_installed():
        return
    skip = pytest.mark.skip(reason="no vLLM in this environment; `make test` sets up one with it")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _files_are_counted_when_a_tier_is_open() -> Iterator[None]:
    """However busy the machine is: what is not counted after a second is not written to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiering.tiers.files.books.COUNT_SECONDS_MAX", 60.0)
        yield


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """What a test leaves running, the next ones of its process meet. Set up before all that a
    test asks for itself, and so looked at after it; what a module or session has is older."""
    before = set(threading.enumerate())
    yield
    if left := threads_left(before):
        pytest.fail(f"threads are left: {', '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True)
def _no_log_level_is_left() -> Iterator[None]:
    """A test after it would see other lines than it does by itself."""
    before = _log_levels()
    yield
    assert _log_levels() == before, "leave levels to caplog.set_level, which sets them back"


def _log_levels() -> dict[str, int]:
    return {name: logging.getLogger(name).level for name in ("", "tiering")}
