"""What becomes readable and what is gone, tier by tier, for whoever keeps an index of it.

The core makes these values; a sink passes them on. Once per (medium, key) and in the order in
which they became true.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class ChunksStored(msgspec.Struct, frozen=True, tag="stored"):
    """`keys` can be read from `medium` ("CPU" or "STORAGE") from now on."""

    medium: str
    keys: tuple[bytes, ...]


class ChunksRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """`keys` can no longer be read from `medium`."""

    medium: str
    keys: tuple[bytes, ...]


Event = ChunksStored | ChunksRemoved


class EventSink(Protocol):
    """Takes events on the core's own thread; must not block and must not raise."""

    def publish(self, events: list[Event]) -> None: ...


class NoEvents:
    """Drops everything."""

    def publish(self, events: list[Event]) -> None:
        del events
