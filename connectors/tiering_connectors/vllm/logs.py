"""Where the engine's log lines go in a process of vLLM's, and which of many are worth one."""

from __future__ import annotations

import logging


def log_with_vllm() -> None:
    """vLLM sets up its own logger only: what the engine says goes to the same place, unless
    somebody has set up ours."""
    ours, theirs = logging.getLogger("tiering"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = not theirs.handlers


def is_worth_a_line(count: int) -> bool:
    """Of what clients go on doing, the 1st, 2nd, 4th, 8th ... time: so that it does not fill the
    log."""
    return count & (count - 1) == 0
