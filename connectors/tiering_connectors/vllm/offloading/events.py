"""What comes and goes in the tiers, as vLLM's OffloadingConnector takes it.

Each chunk is told of once for each medium that has it, and once when the last tier of that medium
has lost it. vLLM describes the chunks, from the requests that store and look them up: so what it
has not seen is not told of, such as what a disk holds from before a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from tiering.events import ChunksCleared, ChunksRemoved, ChunksStored, Event
from tiering.events.holdings import HeldSomewhere


@dataclass(frozen=True, slots=True)
class Place:
    """What an event says of where a chunk is."""

    medium: Medium
    locality: Locality | None = None


class OffloadedEvents:
    """An EventSink. `places`: how each tier is told of that is.
    `keeps_descriptions`: have vLLM keep what it knows of a chunk until it has gone from every
    medium, without which it cannot name all blocks of a chunk that goes."""

    def __init__(self, places: Mapping[int, Place], *, keeps_descriptions: bool) -> None:
        self._places = places
        self._name: Callable[[bytes], bytes | None] = bytes
        self._keeps_descriptions = keeps_descriptions
        self._held = HeldSomewhere(places)
        self._holdings = self._held.holdings
        self._told: list[OffloadingEvent] = []

    def bind(self, name: Callable[[bytes], bytes | None]) -> None:
        """Before the first event: what says how vLLM calls a key, None if it does not any more."""
        self._name = name

    def publish(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ChunksCleared):
                for tier, holdings in self._holdings.items():
                    self._removed(tier, holdings.keys())
            elif event.tier not in self._places:
                continue
            elif isinstance(event, ChunksStored):
                # What was written before a reset may come late.
                keys = [key for key in event.keys if self._name(key) is not None]
                self._tell(event.tier, self._holdings[event.tier].add(keys), False)
            elif isinstance(event, ChunksRemoved):
                self._removed(event.tier, event.keys)

    @property
    def has_news(self) -> bool:
        return bool(self._told)

    def take(self) -> list[OffloadingEvent]:
        """What was told since the last call, in order."""
        told, self._told = self._told, []
        return told

    def _removed(self, tier: int, keys: Sequence[bytes]) -> None:
        holdings = self._holdings[tier]
        self._tell(tier, holdings.discard(keys), True)

    def _tell(self, tier: int, keys: Sequence[bytes], is_removed: bool) -> None:
        keys = self._held.nowhere_else(tier, keys)
        names = [OffloadKey(name) for name in map(self._name, keys) if name is not None]
        if names:
            place = self._places[tier]
            event = OffloadingEvent(names, place.medium, is_removed, place.locality)
            event.removal_expected = self._keeps_descriptions
            self._told.append(event)
