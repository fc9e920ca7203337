"""What is where, as a stream of block events tells it: an index as a router keeps one. Sans-IO.

Each residency is to be announced once and removed once: what is stored again while it is there, or
removed without being there, changes nothing and is counted. Hashes given as bytes are taken by
their last 64 bits, as vLLM itself makes numbers of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from tiering.events.blocks import (
    HASH_BYTES,
    MEDIUM_GPU,
    BlockEvent,
    BlockHash,
    BlockRemoved,
    BlockStored,
)

_MASK = (1 << 8 * HASH_BYTES) - 1


class Place(NamedTuple):
    """`medium` is never None here: that is the GPU."""

    medium: str
    locality: str | None
    group_idx: int | None


class Difference(NamedTuple):
    """`missing` is there and was not announced, `surplus` was announced and is not there."""

    missing: frozenset[int]
    surplus: frozenset[int]


@dataclass(slots=True)
class MediumCounts:
    """Blocks so far, placeholders not among them. `stored_again` and `removed_unknown` were not
    as they should be."""

    stored: int = 0
    removed: int = 0
    stored_again: int = 0
    removed_unknown: int = 0
    placeholders_stored: int = 0
    placeholders_removed: int = 0


@dataclass(slots=True)
class _Held:
    """Hashes of blocks with the hash of the block before; None for the first of a prompt."""

    blocks: dict[int, int | None] = field(default_factory=dict)
    placeholders: set[int] = field(default_factory=set)


class EventMirror:
    """`counts` by medium only grow; `cleared` times everything was gone at once. `malformed`
    events did not have a token for each place in their blocks; they are taken all the same."""

    def __init__(self) -> None:
        self._places: dict[Place, _Held] = {}
        self.counts: dict[str, MediumCounts] = {}
        self.cleared = 0
        self.malformed = 0

    @property
    def anomalies(self) -> int:
        """Blocks that were stored again or removed unknown, and malformed events."""
        of_media = (each.stored_again + each.removed_unknown for each in self.counts.values())
        return sum(of_media) + self.malformed

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """In the order in which they were published."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.cleared += 1
                self.forget()

    def forget(self) -> None:
        """Nothing is anywhere any more: all was cleared, or the publisher is another one."""
        self._places.clear()

    def residents(self, medium: str, group: int | None = None) -> set[int]:
        """Hashes of the blocks in `medium`, in all localities; of all groups or of one, in which
        blocks without a group are in group 0."""
        found: set[int] = set()
        for held in self._in(medium, group):
            found.update(held.blocks)
        return found

    def placeholders(self, medium: str, group: int | None = None) -> set[int]:
        """The same of blocks of which only that is known."""
        found: set[int] = set()
        for held in self._in(medium, group):
            found.update(held.placeholders)
        return found

    def resident_counts(self) -> dict[Place, int]:
        """How many blocks are in each place, placeholders left out."""
        return {place: len(held.blocks) for place, held in self._places.items()}

    def reach(self, hashes: Iterable[BlockHash], media: Set[str], group: int | None = None) -> int:
        """How many leading blocks of a chain of `hashes` are in one of `media` each."""
        places = [held.blocks for medium in media for held in self._in(medium, group)]
        reached = 0
        for each in hashes:
            number = hash_number(each)
            if not any(number in blocks for blocks in places):
                break
            reached += 1
        return reached

    def chain(self, medium: str, last: int, count: int, group: int | None = None) -> list[int]:
        """`last` and the blocks before it, at most `count`; ends with one that is not in `medium`
        or has none before it."""
        places = [held.blocks for held in self._in(medium, group)]
        found: list[int] = []
        at: int | None = last
        while at is not None and len(found) < count:
            found.append(at)
            blocks = next((blocks for blocks in places if at in blocks), None)
            at = None if blocks is None else blocks[at]
        return found

    def groups(self, medium: str) -> set[int]:
        """Those of which something is in `medium`."""
        return {
            place.group_idx or 0
            for place, held in self._places.items()
            if place.medium == medium and (held.blocks or held.placeholders)
        }

    def difference(
        self, truth: Mapping[str, Set[int]], group: int | None = None
    ) -> dict[str, Difference]:
        """How what was announced differs from the hashes that are in each medium, placeholders
        included; without the media that are as they should be."""
        found: dict[str, Difference] = {}
        for medium, there in truth.items():
            announced = self.residents(medium, group) | self.placeholders(medium, group)
            if announced != there:
                missing, surplus = frozenset(there - announced), frozenset(announced - there)
                found[medium] = Difference(missing, surplus)
        return found

    def __repr__(self) -> str:
        media: dict[str, int] = {}
        for place, held in self._places.items():
            media[place.medium] = media.get(place.medium, 0) + len(held.blocks)
        told = ", ".join(f"{medium} {count}" for medium, count in sorted(media.items()))
        return f"<EventMirror {told or 'empty'}; {self.anomalies} anomalies>"

    # Parts of the above

    def _store(self, event: BlockStored) -> None:
        place = _place_of(event)
        held, counts = self._places.setdefault(place, _Held()), self._counts_of(place)
        if event.block_size == 0:
            self._store_placeholders(event, held, counts)
            return
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            self.malformed += 1
        before = event.parent_block_hash
        parent = None if before is None else hash_number(before)
        for each in event.block_hashes:
            number = hash_number(each)
            if number in held.blocks or number in held.placeholders:
                counts.stored_again += 1
                held.placeholders.discard(number)
            else:
                counts.stored += 1
            held.blocks[number] = parent
            parent = number

    def _store_placeholders(self, event: BlockStored, held: _Held, counts: MediumCounts) -> None:
        for number in map(hash_number, event.block_hashes):
            if number in held.blocks or number in held.placeholders:
                counts.stored_again += 1
            else:
                counts.placeholders_stored += 1
                held.placeholders.add(number)

    def _remove(self, event: BlockRemoved) -> None:
        place = _place_of(event)
        held, counts = self._places.setdefault(place, _Held()), self._counts_of(place)
        for number in map(hash_number, event.block_hashes):
            if number in held.blocks:
                del held.blocks[number]
                counts.removed += 1
            elif number in held.placeholders:
                held.placeholders.discard(number)
                counts.placeholders_removed += 1
            else:
                counts.removed_unknown += 1

    def _counts_of(self, place: Place) -> MediumCounts:
        return self.counts.setdefault(place.medium, MediumCounts())

    def _in(self, medium: str, group: int | None) -> Iterator[_Held]:
        for place, held in self._places.items():
            if place.medium == medium and group in (None, place.group_idx or 0):
                yield held


def hash_number(given: BlockHash) -> int:
    """A block's hash as a number of 64 bits, whichever way it was given."""
    if isinstance(given, bytes):
        return int.from_bytes(given[-HASH_BYTES:], "big")
    return given & _MASK


def _place_of(event: BlockStored | BlockRemoved) -> Place:
    return Place(event.medium or MEDIUM_GPU, event.locality, event.group_idx)
