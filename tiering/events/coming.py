"""What is said of chunks that may come to host memory, until they do.

Owns the descriptions of chunks that are expected, up to a bound, and their tokens as numbers, up to
another: what arrives as it was expected is known to be one run, and its tokens, which are kept
packed, need not be unpacked to be told. Sans-IO; used by the announcer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiering.events.descriptions import Run
from tiering.events.runs import Runs


class Expected(NamedTuple):
    """A run, and its tokens as numbers."""

    run: Run
    tokens: list[int]


class Coming:
    """Of at most `chunks_max` chunks, and besides of what has at most `tokens_max` tokens."""

    def __init__(self, chunks_max: int, tokens_max: int) -> None:
        self._chunks_max = chunks_max
        self._tokens_max = tokens_max
        # By the first key, the oldest first.
        self._whole: dict[bytes, Expected] = {}
        self._tokens = 0
        # Those whose tokens are not kept as numbers, the oldest first.
        self._others = Runs()

    def __len__(self) -> int:
        return len(self._others) + sum(len(each.run) for each in self._whole.values())

    def expect(self, run: Run, tokens: list[int]) -> None:
        """The list is nobody else's any more."""
        first = run.keys[0]
        if first in self._whole:
            self._let_go(first)
        self._whole[first] = Expected(run, tokens)
        self._tokens += len(tokens)
        while self._tokens > self._tokens_max:
            self._let_go(next(iter(self._whole)))

    def take_run(self, keys: Sequence[bytes]) -> Expected | None:
        """What was expected under `keys`, if that is one run and the whole of it."""
        expected = self._whole.get(keys[0]) if keys else None
        if expected is None or expected.run.keys != tuple(keys):
            return None
        del self._whole[keys[0]]
        self._tokens -= len(expected.tokens)
        return expected

    def take(self, keys: Sequence[bytes]) -> list[Run]:
        """Those of `keys` that were expected."""
        for first in list(self._whole):
            self._let_go(first)
        taken = list(self._others.runs_of(keys))
        self._others.take(keys)
        return taken

    def clear(self) -> None:
        self._whole.clear()
        self._others.clear()
        self._tokens = 0

    def _let_go(self, first: bytes) -> None:
        """Of the tokens as numbers."""
        run, tokens = self._whole.pop(first)
        self._tokens -= len(tokens)
        self._others.put(run)
        if len(self._others) > self._chunks_max:
            # Some more, so that it is not done each time.
            self._others.take_oldest(len(self._others) - self._chunks_max * 3 // 4)

    def __repr__(self) -> str:
        return f"<Coming {len(self)} chunks>"
