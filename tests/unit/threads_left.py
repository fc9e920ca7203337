"""Which threads a test has left behind: what `tests/conftest.py` asks after each test."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

PATIENCE_SECONDS = 5.0
"""For threads that were told to end, and that nobody waits for."""
POLL_SECONDS = 0.002


def threads_left(
    before: Collection[threading.Thread], patience_seconds: float = PATIENCE_SECONDS
) -> list[str]:
    """The sorted names of threads that are alive, and not among those `before`, though they were
    given `patience_seconds` to end; none is the usual case, and takes no time.

    Without those that began outside of Python, as a driver's or a router's: they are not the
    test's to end.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        left = [
            thread.name
            for thread in threading.enumerate()
            if thread not in before and not isinstance(thread, threading._DummyThread)
        ]
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(POLL_SECONDS)
