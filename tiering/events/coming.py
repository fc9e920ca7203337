"""What is said of chunks that may come to host memory, until they do.

Owns the descriptions of chunks that are expected, up to a bound, and their tokens as numbers, up to
another: what arrives as it was expected need not be looked through for what follows on from what,
nor its tokens, which are kept packed, be unpacked to be told. Sans-IO; used by the announcer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from tiering.events.descriptions import Described, Description


class Run(NamedTuple):
    """Chunks that follow one another; `tokens` are those of all of them."""

    keys: tuple[bytes, ...]
    described: list[Description]
    tokens: list[int]


class Coming:
    """Of at most `chunks_max` chunks, and besides of what has at most `tokens_max` tokens."""

    def __init__(self, chunks_max: int, tokens_max: int) -> None:
        self._chunks_max = chunks_max
        self._tokens_max = tokens_max
        # By the first key, the oldest first.
        self._runs: dict[bytes, Run] = {}
        self._tokens = 0
        # Those whose run is not kept, the oldest first.
        self._single: dict[bytes, Description] = {}

    def __len__(self) -> int:
        return len(self._single) + sum(len(run.keys) for run in self._runs.values())

    def expect(self, run: Run) -> None:
        """Its lists are nobody else's any more."""
        if not run.keys:
            return
        first = run.keys[0]
        if first in self._runs:
            self._split(first)
        self._runs[first] = run
        self._tokens += len(run.tokens)
        while self._tokens > self._tokens_max:
            self._split(next(iter(self._runs)))

    def take_run(self, keys: Sequence[bytes]) -> Run | None:
        """What was expected under `keys`, if that is one run and the whole of it."""
        run = self._runs.get(keys[0]) if keys else None
        if run is None or run.keys != tuple(keys):
            return None
        del self._runs[keys[0]]
        self._tokens -= len(run.tokens)
        return run

    def take(self, keys: Sequence[bytes]) -> list[Described]:
        """Those of `keys` that were expected."""
        for first in list(self._runs):
            self._split(first)
        single = self._single
        return [(key, told) for key in keys if (told := single.pop(key, None)) is not None]

    def clear(self) -> None:
        self._runs.clear()
        self._single.clear()
        self._tokens = 0

    def _split(self, first: bytes) -> None:
        run = self._runs.pop(first)
        self._tokens -= len(run.tokens)
        self._single.update(zip(run.keys, run.described, strict=True))
        if len(self._single) > self._chunks_max:
            # Some more, so that it is not done each time.
            spare = len(self._single) - self._chunks_max * 3 // 4
            for key in list(islice(self._single, spare)):
                del self._single[key]

    def __repr__(self) -> str:
        return f"<Coming {len(self)} chunks>"
