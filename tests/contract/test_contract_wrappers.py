"""What stands around a tier owes what the tier owes, over memory and over files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from test_contract_fs import TestUring as _FsContract
from test_contract_memory import TestMemoryTier as _MemoryContract

from tiering.clock import MonotonicClock
from tiering.testing.memory import Chunks, MemoryTier, checked
from tiering.tiers.base import Tier
from tiering.tiers.wrappers.guarded import GuardedTier
from tiering.tiers.wrappers.striped import StripedTier

ROOTS = ("a", "b")


class TestGuardedMemoryTier(_MemoryContract):
    def make_tier(self, where: Path) -> Tier:
        return GuardedTier(super().make_tier(where), MonotonicClock())


@pytest.mark.slow
class TestGuardedFsTier(_FsContract):
    def make_tier(self, where: Path) -> Tier:
        return GuardedTier(super().make_tier(where), MonotonicClock())


class TestStripedMemoryTier(_MemoryContract):
    """The raw helpers do not know which root has a key: they look in each, and put it in each."""

    def chunks_of(self, where: Path) -> Sequence[Chunks]:
        return [self.places.setdefault(where / root, {}) for root in ROOTS]

    def make_tier(self, where: Path) -> Tier:
        chunks = zip(ROOTS, self.chunks_of(where), strict=True)
        return StripedTier([MemoryTier(held, root) for root, held in chunks], MonotonicClock())

    def raw_get(self, where: Path, key: bytes) -> bytes | None:
        found = [held[key][0] for held in self.chunks_of(where) if key in held]
        assert len(found) < 2, "stored in two roots"
        return found[0] if found else None

    def raw_put(self, where: Path, key: bytes, payload: bytes) -> None:
        for held in self.chunks_of(where):
            held[key] = checked(payload)

    def raw_damage(self, where: Path, key: bytes) -> None:
        (held,) = [held for held in self.chunks_of(where) if key in held]
        payload, checksum = held[key]
        held[key] = bytes([payload[0] ^ 1]) + payload[1:], checksum


@pytest.mark.slow
class TestStripedFsTier(_FsContract):
    """Each root guarded, as it is to be used. See above for the raw helpers."""

    def make_tier(self, where: Path) -> Tier:
        where.mkdir(exist_ok=True)
        clock = MonotonicClock()
        roots = [super(TestStripedFsTier, self).make_tier(where / root) for root in ROOTS]
        return StripedTier([GuardedTier(root, clock) for root in roots], clock)

    def raw_get(self, where: Path, key: bytes) -> bytes | None:
        found = [super(TestStripedFsTier, self).raw_get(where / root, key) for root in ROOTS]
        payloads = [payload for payload in found if payload is not None]
        assert len(payloads) < 2, "stored in two roots"
        return payloads[0] if payloads else None

    def raw_put(self, where: Path, key: bytes, payload: bytes) -> None:
        for root in ROOTS:
            super().raw_put(where / root, key, payload)

    def raw_damage(self, where: Path, key: bytes) -> None:
        (root,) = [root for root in ROOTS if self.file_of(where / root, key).exists()]
        super().raw_damage(where / root, key)
