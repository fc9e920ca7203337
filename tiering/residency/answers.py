"""What the core answers with: plain values, no promises beyond the moment they were given."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Place(enum.IntEnum):
    """Where a chunk is for one request, in one byte: the higher, the nearer. `UNKNOWN`: some tier
    has not said yet. `KNOWN`: a secondary tier holds it. `FILLING`: in the host tier, still being
    written. `READY`: readable there. From KNOWN on, a hold can have it."""

    ABSENT = 0
    UNKNOWN = 1
    KNOWN = 2
    FILLING = 3
    READY = 4


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
    this reservation or an earlier one, or because they are not worth storing."""

    end: int
    indices: list[int]
    slots: list[int]
