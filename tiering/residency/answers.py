"""What the core answers with: plain values, no promises beyond the moment they were given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """How long a prefix can be had: `host` leading chunks at once, `reach` with promotions (or
    with writers under way). `is_open`: some tier has not yet said whether it holds more."""

    host: int
    reach: int
    is_open: bool


@dataclass(frozen=True, slots=True)
class Reservation:
    """`slots[i]` is to be filled with chunk `indices[i]`; chunks before `end` are cared for, by
    this reservation or an earlier one."""

    end: int
    indices: list[int]
    slots: list[int]
