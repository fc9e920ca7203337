"""What the tests of the fs tier share: small tiers, and where their files lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tiering.testing.examples import CHUNK_BYTES, example_namespace, key_number, payload_of, views
from tiering.tiers.base import Write, WriteOutcome
from tiering.tiers.files.tier import FsTier

NAMESPACE = example_namespace()
KEYS = [key_number(i) for i in range(20)]


def make_tier(root: Path, chunk_bytes: int = CHUNK_BYTES, **changes: Any) -> FsTier:
    own = {
        name: changes.pop(name)
        for name in ("rank", "io", "limits", "durability")
        if name in changes
    }
    return FsTier(
        root,
        example_namespace(**changes),
        chunk_bytes,
        n_read_threads=2,
        n_write_threads=2,
        **own,
    )


@asynccontextmanager
async def opened(root: Path, **kwargs: Any) -> AsyncIterator[FsTier]:
    tier = make_tier(root, **kwargs)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


async def write_when_counted(tier: FsTier, keys: list[bytes]) -> list[WriteOutcome]:
    """What becomes of a write that is tried again for as long as it is refused."""
    for _ in range(3000):
        outcomes = await tier.write(keys, views([payload_of(key) for key in keys]))
        if Write.REFUSED not in outcomes:
            break
        await asyncio.sleep(0.01)
    return outcomes


def file_of(root: Path, key: bytes, rank: int = 0) -> Path:
    digits, group = key[:-4].hex(), int.from_bytes(key[-4:], "big")
    rank_dir = root / f"{NAMESPACE.directory}_r{rank}"
    return rank_dir / digits[:3] / f"{digits[3:5]}_g{group}" / f"{digits}.bin"


def files(root: Path, pattern: str) -> list[Path]:
    return sorted(root.rglob(pattern))


def quarantined(root: Path) -> list[Path]:
    return files(root, "quarantine_r*/*")


def children(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())
