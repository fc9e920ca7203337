"""Prompts for the tiny model: random tokens, so that nothing is shared unless a test shares it."""

from __future__ import annotations

import random

from tiering_benchmarks.models import VOCABULARY

BLOCK = 32
"""Tokens in a block of the servers and engines that tests start."""


def random_prompt(seed: object, tokens: int) -> list[int]:
    """Another one for each `seed`, the same for the same."""
    chance = random.Random(repr(seed))
    return [chance.randrange(16, VOCABULARY) for _ in range(tokens)]
