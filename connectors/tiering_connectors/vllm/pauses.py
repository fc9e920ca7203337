"""What an engine does in a step that is made only to hear of writes that end: it pauses.

vLLM asks for events, and lets chunks that wait for their turn go on, in steps alone, and makes them
one after the other, in every process, for as long as it is told that there is something to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSE_SECONDS = 0.004
"""What a request that comes meanwhile may wait for: little beside the first step of a prompt."""

Pause = Callable[[], None]


def pause_of(data_parallel_size: int) -> Pause:
    """For replicas that step together (of a model with experts; others count as one each) none: it
    would hold up those that have requests."""
    return _go_on if data_parallel_size > 1 else take_pause


def take_pause() -> None:
    time.sleep(PAUSE_SECONDS)


def _go_on() -> None:
    pass
