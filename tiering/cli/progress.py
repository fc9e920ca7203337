"""How far a long command is: a bar on a terminal, else a line now and then. Writes to stderr."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Protocol, Self

from tiering.clock import Clock

LINE_SECONDS = 10.0


class _Bar(Protocol):
    """What is used of tqdm, which has no types."""

    n: int
    total: int | None

    def set_postfix_str(self, text: str, refresh: bool) -> None: ...
    def refresh(self) -> None: ...
    def close(self) -> None: ...


class Progress:
    """Within a `with` block; `total` of things called `noun`, None where nobody knows how many."""

    def __init__(self, what: str, noun: str, total: int | None, clock: Clock) -> None:
        self._what = what
        self._noun = noun
        self._total = total
        self._clock = clock
        self._told_at = clock.now()
        self._bar: _Bar | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bar = self._new_bar()
        elif self._total:
            self._tell(0, "")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, note: str = "") -> None:
        """`done` of the total, or more: what is counted grows meanwhile."""
        if self._total is not None:
            self._total = max(self._total, done)
        if self._bar is not None:
            self._bar.n, self._bar.total = done, self._total
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.refresh()
        elif self._clock.now() - self._told_at >= LINE_SECONDS:
            self._told_at = self._clock.now()
            self._tell(done, note)

    def show_of(self, done: int, total: int) -> None:
        """As `show`, where the total is known only now."""
        is_news, self._total = not self._total, total
        if self._bar is None and is_news and total:
            self._tell(done, "")
        self.show(done)

    def _tell(self, done: int, note: str) -> None:
        after = f", {note}" if note else ""
        of_all = "" if self._total is None else f"of {self._total} "
        told = f"{self._what}: {done} {of_all}{self._noun}{after}"
        print(told, file=sys.stderr, flush=True)

    def _new_bar(self) -> _Bar:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread of its own
        bar: _Bar = tqdm(
            total=self._total,
            desc=self._what,
            unit=f" {self._noun}",
            file=sys.stderr,
            # Where the terminal does not tell its size, nothing at all would be shown.
            ncols=os.get_terminal_size(sys.stderr.fileno()).columns or 80,
            nrows=20,
        )
        return bar
