"""The tier that tests of the engine use owes what every tier owes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiering.testing.contract import TierContract
from tiering.testing.memory import Chunks, MemoryTier, checked
from tiering.tiers.base import Tier


class TestMemoryTier(TierContract):
    @pytest.fixture(autouse=True)
    def _places(self) -> None:
        self.places: dict[Path, Chunks] = {}

    def make_tier(self, where: Path) -> Tier:
        return MemoryTier(self.places.setdefault(where, {}))

    def raw_get(self, where: Path, key: bytes) -> bytes | None:
        kept = self.places[where].get(key)
        return None if kept is None else kept[0]

    def raw_put(self, where: Path, key: bytes, payload: bytes) -> None:
        self.places[where][key] = checked(payload)

    def raw_damage(self, where: Path, key: bytes) -> None:
        payload, checksum = self.places[where][key]
        self.places[where][key] = bytes([payload[0] ^ 1]) + payload[1:], checksum
