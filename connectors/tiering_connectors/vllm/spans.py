"""How far a request can go on: the boundary that every KV cache group can stand at.

Pure functions over what the core said of each chunk, one byte for each (`Place`), and so C calls
over bytes: nothing here takes time per chunk in Python. A boundary counts tokens, and is always a
multiple of `align`, the tokens at which blocks of all groups end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiering.residency.answers import Place
from tiering_connectors.vllm.groups import Group, Kind

_NO, _YES = b"\0", b"\1"


def _counting(*places: Place) -> bytes:
    return bytes(int(place in places) for place in range(256))


AT_HAND = _counting(Place.READY)
OBTAINABLE = _counting(Place.READY, Place.FILLING, Place.KNOWN)


@dataclass(frozen=True, slots=True)
class Counting:
    """Which places count: where a chunk can be had, as far as is known, and where it might be."""

    known: bytes
    hoped: bytes


WAITING = Counting(OBTAINABLE, _counting(Place.READY, Place.FILLING, Place.KNOWN, Place.UNKNOWN))
# What was waited for in vain is still being filled, by a reader that is late.
AFTER_A_LOSS = Counting(
    _counting(Place.READY, Place.KNOWN), _counting(Place.READY, Place.KNOWN, Place.UNKNOWN)
)
TOO_LATE = Counting(AT_HAND, AT_HAND)


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known of one group's chunks: `places[i]` of chunk `first + i`."""

    group: Group
    first: int
    places: bytes

    def of(self, chunks: range) -> bytes:
        """The places of `chunks`, which must be in sight."""
        return self.places[chunks.start - self.first : chunks.stop - self.first]


def boundary(sights: Sequence[Sight], local: int, limit: int, align: int, counting: bytes) -> int:
    """The furthest boundary up to `limit` for which every group has its chunks among what counts,
    or `local`, where the device stands by itself."""
    parts = [(sight, sight.places.translate(counting)) for sight in sights]
    best = limit // align * align
    while best > local:
        before = best
        for sight, has in parts:
            best = _furthest(sight, has, local, best, align)
        if best == before:
            return best
    return local


def _furthest(sight: Sight, has: bytes, local: int, limit: int, align: int) -> int:
    """As `boundary`, for one group; `has[i]` says whether its chunk `first + i` counts."""
    group, first = sight.group, sight.first
    size = group.tokens_per_chunk
    in_sight = (first + len(has)) * size
    best = min(limit, (in_sight - group.spare) // align * align)
    while best > local:
        chunks = group.evidence(local, best)
        gap = has.find(_NO, chunks.start - first, chunks.stop - first)
        if gap < 0:
            return best
        if group.kind is Kind.STATE:
            best = (first + has.rfind(_YES, 0, gap) + 1) * size
        else:
            # Whoever stands behind the gap and before here would need what is missing, too.
            best = (first + gap) * size - group.spare
        best = best // align * align
    return local
