"""What spares a slow tier owes what the tier owes, as long as there is no pressure."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_contract_memory import TestMemoryTier as _MemoryContract

from tiering.clock import MonotonicClock
from tiering.tiers.base import Tier
from tiering.tiers.wrappers.pressure import PressureLimits, PressureTier


@pytest.mark.slow
class TestPressedMemoryTier(_MemoryContract):
    def make_tier(self, where: Path) -> Tier:
        limits = PressureLimits(high_seconds=1e9, low_seconds=1e8)
        return PressureTier(super().make_tier(where), MonotonicClock(), limits)
