"""What becomes readable and what is gone, by chunk and tier, as the core learns of it.

The core makes these values; a sink passes them on. Of the host tier each comes once, in the order
in which it became true. Of the others the core knows what it is told: a chunk may be said to be
stored or removed again though nothing has changed, and what another engine removed comes late.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

HOST = -1
"""In place of a secondary tier's number."""


class ChunksStored(msgspec.Struct, frozen=True, tag="stored"):
    """`keys` can be read from `tier`, a secondary one's number or HOST."""

    tier: int
    keys: tuple[bytes, ...]


class ChunksRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """`keys` cannot be read from `tier` any more."""

    tier: int
    keys: tuple[bytes, ...]


class ChunksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing that was stored until now is found again, in any tier."""


class SurveyBegan(msgspec.Struct, frozen=True, tag="survey began"):
    """From now on every key that `tier` holds is told of as stored."""

    tier: int


class SurveyEnded(msgspec.Struct, frozen=True, tag="survey ended"):
    """What `tier` held at its beginning and was not told of since is not there any more; unless
    `is_whole` is False, when the survey was broken off."""

    tier: int
    is_whole: bool = True


Event = ChunksStored | ChunksRemoved | ChunksCleared | SurveyBegan | SurveyEnded


class EventSink(Protocol):
    """Takes events on the core's own thread; must not block and must not raise."""

    def publish(self, events: list[Event]) -> None: ...


class NoEvents:
    """Drops everything."""

    def publish(self, events: list[Event]) -> None:
        del events
