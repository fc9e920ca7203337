"""Counters with declared names: one owner counts, anyone gets a frozen copy. And which counts are
worth a line in a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

V = TypeVar("V")


class Counters:
    """Whole numbers that only grow. Used by one thread; an undeclared name is a KeyError."""

    def __init__(self, names: Iterable[str]) -> None:
        self._values = dict.fromkeys(names, 0)

    def add(self, name: str, amount: int = 1) -> None:
        if amount < 0:
            raise ValueError(f"{name}: a counter cannot go back by {-amount}")
        self._values[name] += amount

    def tally(self, values: Sequence[V], names: Mapping[V, str], other: str) -> None:
        """Count each of `values` under its name, or under `other` where it has none."""
        rest = len(values)
        for value, name in names.items():
            count = values.count(value)
            self.add(name, count)
            rest -= count
        self.add(other, rest)

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def snapshot(self) -> dict[str, int]:
        return dict(self._values)

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self._values.items() if value)
        return f"<Counters {told or 'all 0'}>"


def is_worth_a_line(count: int) -> bool:
    """Of what clients go on doing, the 1st, 2nd, 4th, 8th ... time: so that it does not fill the
    log."""
    return count & (count - 1) == 0
