"""Where the engine's log lines go in a process of vLLM's."""

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
