"""Chunks by key, each with a run in which it is described.

A run is kept in one piece, however it comes and goes: nothing is made for a single chunk until
somebody asks for it. Where half of a run has gone, what is left of it is copied out, so that what
is kept is at most twice what is there. Sans-IO; used by the announcer, on its thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice, repeat

from tiering.events.descriptions import Described, Run


class Runs:
    """Of each key, the run that was first put there."""

    def __init__(self) -> None:
        self._runs: dict[bytes, Run] = {}
        # How many chunks of each run are here.
        self._left: dict[Run, int] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, key: bytes) -> bool:
        return key in self._runs

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._runs)

    def put(self, run: Run) -> Sequence[bytes]:
        """All of a run, which was not put here before; those of its keys that were not here."""
        runs, before = self._runs, len(self._runs)
        found = list(map(runs.setdefault, run.keys, repeat(run)))
        count = len(runs) - before
        if count == len(run.keys):
            self._left[run] = count
            return run.keys
        news = dict.fromkeys(key for key, at in zip(run.keys, found, strict=True) if at is run)
        if news:
            self._keep(run, count)
        return list(news)

    def take(self, keys: Iterable[bytes]) -> list[Run | None]:
        """`keys` are not here any more; the run of each, None for what was not here."""
        taken = list(map(self._runs.pop, keys, repeat(None)))
        for run, count in _counted(taken):
            self._keep(run, self._left[run] - count)
        return taken

    def take_oldest(self, count: int) -> None:
        self.take(list(islice(self._runs, count)))

    def clear(self) -> None:
        self._runs.clear()
        self._left.clear()

    def run_of(self, keys: Sequence[bytes]) -> Run | None:
        """One that is made of `keys` and no others, if they are here and follow one another."""
        if not keys:
            return None
        found = list(map(self._runs.get, keys))
        run = found[0]
        if run is None or found.count(run) < len(keys):
            return None
        start = run.place(keys[0])
        stop = start + len(keys)
        return run.part(start, stop) if run.keys[start:stop] == tuple(keys) else None

    def described(self, keys: Sequence[bytes]) -> list[Described]:
        """Those of `keys` that are here."""
        return list(chain.from_iterable(self.runs_of(keys)))

    def runs_of(self, keys: Sequence[bytes]) -> Iterator[Run]:
        """Those of `keys` that are here, as few runs that are made of no others."""
        found = list(map(self._runs.get, keys))
        at, count = 0, len(keys)
        while at < count:
            run = found[at]
            at += 1
            if run is None:
                continue
            start = run.place(keys[at - 1])
            stop, most = start + 1, len(run)
            while at < count and stop < most and found[at] is run and keys[at] == run.keys[stop]:
                stop += 1
                at += 1
            yield run.part(start, stop)

    def _keep(self, run: Run, left: int) -> None:
        """So many chunks of it."""
        if left * 2 > len(run):
            self._left[run] = left
            return
        self._left.pop(run, None)
        if left:
            self._copy_out(run)

    def _copy_out(self, run: Run) -> None:
        """What is left of `run`, as runs of their own."""
        runs, at = self._runs, 0
        for is_left, some in groupby(run.keys, lambda key: runs.get(key) is run):
            count = len(list(some))
            if is_left:
                part = run.part(at, at + count)
                runs.update(dict.fromkeys(part.keys, part))
                self._left[part] = count
            at += count

    def __repr__(self) -> str:
        return f"<Runs of {len(self)} chunks, {len(self._left)} runs>"


def _counted(runs: Sequence[Run | None]) -> Iterable[tuple[Run, int]]:
    """Each of them, and how often it is there."""
    first = runs[0] if runs else None
    if first is not None and runs.count(first) == len(runs):
        return [(first, len(runs))]
    return Counter(run for run in runs if run is not None).items()
