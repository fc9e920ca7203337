"""What every kind of secondary tier has in common: keys, and what the engine does about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from tiering.config.fields import EventMedium, Locality, Settings
from tiering.config.pressure import PressureConfig


class TierSettings(Settings):
    """The keys that every kind of tier has, and what the engine does about them."""

    type: str
    locality: Locality | None = Field(
        default=None,
        description="Whether the storage is LOCAL to this server or REMOTE: what the request "
        "parameter kv_load_tiers is compared with, and what events say. Dynamo 1.6 drops events "
        "that say REMOTE.",
        examples=["LOCAL"],
    )

    @property
    def roots(self) -> tuple[str, ...]:
        """The directories that it keeps chunks in and shares with no other tier."""
        return ()


class StoringTierSettings(TierSettings):
    """The keys of every kind that chunks are stored in."""

    enable_kv_events: bool = Field(
        default=False,
        description="Publish KV events of what is stored here and what is gone, if vLLM publishes "
        "any (--kv-events-config).",
        examples=[True],
    )
    event_medium: EventMedium | None = Field(
        default=None,
        description="What KV events call the medium. Left out, STORAGE, the only name of these "
        "that Dynamo 1.6 takes.",
        examples=["FS"],
    )
    backpressure: PressureConfig | None = Field(
        default=None,
        description="Give this tier less to write while it is slow. Keys that are left out are "
        "taken from backpressure of the engine, if it has one; {} is the defaults.",
        examples=[{"high_water_s": 0.05}],
    )

    @classmethod
    def owner_of(cls, data: Mapping[str, Any], path: Sequence[int | str]) -> type[Settings]:
        is_nested = len(path) > 1 and path[0] == "backpressure"
        return PressureConfig if is_nested else super().owner_of(data, path)
