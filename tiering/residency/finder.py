"""Where each chunk can be had, for one request: in the host tier, or in which secondary tier.

Joins the host tier's index with what the tiers are known to hold and with what a request may have:
its own failures, its deadline, and the tiers that it is restricted to. Changes nothing. Part of
the core; same owner, same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from tiering.residency.answers import Match, Place
from tiering.residency.holds import Holds, Request
from tiering.residency.index import HostIndex
from tiering.residency.known import Holdings, KnownKeys
from tiering.residency.state import SlotArray
from tiering_kernels.keytable import KeyBatch, select

_READY, _WITHIN_REACH = bytes([Place.READY]), bytes([Place.KNOWN, Place.FILLING, Place.READY])
_ABSENT, _UNKNOWN, _KNOWN = int(Place.ABSENT), int(Place.UNKNOWN), int(Place.KNOWN)


@dataclass(frozen=True, slots=True)
class Found:
    """Of each key the host tier's slot, or NOWHERE, and the Place."""

    slots: SlotArray
    places: bytearray

    @property
    def host(self) -> int:
        """How many leading chunks are READY."""
        return len(self.places) - len(self.places.lstrip(_READY))

    @property
    def reach(self) -> int:
        """How many leading chunks a hold can have."""
        return len(self.places) - len(self.places.lstrip(_WITHIN_REACH))


class Finder:
    """One for each core over `tiers` secondary tiers; those that are not in `known` are peers'."""

    def __init__(
        self, index: HostIndex, tiers: int, known: Mapping[int, KnownKeys], holds: Holds
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._known = known
        self._holds = holds

    def in_host(self, keys: Sequence[bytes]) -> Found:
        """Every key, as if there were no other tiers."""
        slots = self._index.lookup(keys)
        return Found(slots, self._index.places(slots))

    def find(self, keys: Sequence[bytes], request: Request | None) -> Found:
        """Every key, wherever it is."""
        found = self.in_host(keys)
        if _ABSENT in found.places:
            self._look_beyond(keys, found.places, request)
        return found

    def match(self, keys: Sequence[bytes], request: Request | None) -> Match:
        """How much of the chain `keys` can be had, as far as is known."""
        found = None
        if keys and self._index.place(keys[0]) == _ABSENT:
            # Most that cannot be had cannot be had from its first chunk on.
            found = self.find(keys[:1], request)
        if found is None or found.reach:
            found = self.find(keys, request)
        reach = found.reach
        is_open = reach < len(keys) and found.places[reach] == _UNKNOWN
        return Match(found.host, reach, is_open)

    def questions(
        self, keys: Sequence[bytes], request: Request
    ) -> Iterator[tuple[int, Sequence[bytes]]]:
        """By tier, those of `keys` whose place is UNKNOWN and that it has not answered for."""
        places = self.find(keys, request).places
        wanted = keys
        if places.count(_UNKNOWN) < len(keys):
            wanted = KeyBatch(compress(keys, [place == _UNKNOWN for place in places]))
        for tier, _ in self._offering(request):
            absent = request.absent[tier]
            asked = [key for key in wanted if key not in absent] if absent else wanted
            if asked:
                yield tier, asked

    def sources(
        self, keys: Sequence[bytes], slots: SlotArray, request: Request
    ) -> Iterator[tuple[int, Sequence[bytes], SlotArray]]:
        """By tier, those of `keys` that it is known to hold, each from the first that does, with
        their slots."""
        for tier, known in self._offering(request):
            if not keys:
                return
            held = known.holds(keys)
            if absent := request.absent[tier]:
                held &= ~np.fromiter(map(absent.__contains__, keys), np.bool_, len(keys))
            if held.any():
                yield tier, select(keys, held), slots[held]
                keys, slots = KeyBatch(compress(keys, (~held).tolist())), slots[~held]
        if keys:
            raise AssertionError(f"nothing to promote {keys[0].hex()} from")

    def known(self, tier: int, request: Request | None) -> Holdings | None:
        """What `tier` is known to hold for `request`; None where it names no peer there."""
        if (known := self._known.get(tier)) is not None:
            return known
        peer = request.peers.get(tier) if request is not None else None
        return peer.known if peer is not None else None

    def _offering(self, request: Request | None) -> Iterator[tuple[int, Holdings]]:
        """The tiers that `request` may have chunks from, in order of preference."""
        for tier in range(self._tiers):
            if request is None or request.tiers is None or tier in request.tiers:
                known = self.known(tier, request)
                if known is not None:
                    yield tier, known

    def _look_beyond(
        self, keys: Sequence[bytes], places: bytearray, request: Request | None
    ) -> None:
        """Say of what is not in the host tier what the secondary tiers are known to hold."""
        is_late = request is not None and self._holds.is_late(request)
        not_said = _ABSENT if is_late else _UNKNOWN
        for tier, known in self._offering(request):
            absent = request.absent.get(tier, ()) if request is not None else ()
            failed = [i for i, key in enumerate(keys) if key in absent] if absent else ()
            before = [places[i] for i in failed]
            known.mark(keys, places, _KNOWN, not_said)
            for i, place in zip(failed, before, strict=True):
                places[i] = place
