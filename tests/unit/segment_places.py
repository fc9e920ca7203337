"""What the tests of the segment tier share: small tiers, and where their files lie."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from tiering.testing.examples import (
    CHUNK_BYTES,
    blank,
    example_namespace,
    key_number,
    payload_of,
    views,
)
from tiering.testing.faults import FaultyIo
from tiering.tiers.base import Read
from tiering.tiers.disk.iopool import IoPool
from tiering.tiers.segments.files import SegmentFiles
from tiering.tiers.segments.table import Geometry
from tiering.tiers.segments.tier import SegmentTier
from tiering_kernels.chunkio import ENGINES, ChunkIo, EngineUnavailable
from tiering_kernels.engines import open_engine

NAMESPACE = example_namespace()
DIGEST = NAMESPACE.digest_of_rank(0)
KEYS = [key_number(i) for i in range(200)]
SLOT_BYTES = 4096 + CHUNK_BYTES


def bound(slots: int) -> int:
    """A `max_bytes` with room for exactly `slots` slots."""
    return 4 * 4096 + slots * (SLOT_BYTES + 160 + 8)


def engines() -> list[str]:
    """The engines that there are on this machine."""
    found = []
    for engine in ENGINES:
        try:
            open_engine(engine)
        except EngineUnavailable:
            continue
        found.append(engine)
    return found


class SetClock:
    """A clock that stands until it is moved."""

    def __init__(self, seconds: float = 1_700_000_000.0) -> None:
        self.seconds = seconds

    def now(self) -> float:
        return self.seconds


def make_tier(root: Path, slots: int = 8, **settings: Any) -> SegmentTier:
    settings.setdefault("io", open_engine("portable"))
    settings.setdefault("clock", SetClock())
    settings.setdefault("max_bytes", bound(slots))
    settings.setdefault("pool", IoPool("segments", 2, 2))
    namespace = settings.pop("namespace", NAMESPACE)
    return SegmentTier(root, namespace, CHUNK_BYTES, **settings)


@asynccontextmanager
async def opened(root: Path, slots: int = 8, **settings: Any) -> AsyncIterator[SegmentTier]:
    tier = make_tier(root, slots, **settings)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


def segments_of(root: Path, rank: int = 0) -> Path:
    return root / f"{NAMESPACE.directory}_r{rank}.segments"


def quarantined(root: Path) -> list[Path]:
    return sorted((root / f"{NAMESPACE.directory}_r0.quarantine").glob("*"))


def geometry(slots_per_segment: int = 2) -> Geometry:
    return Geometry(DIGEST, CHUNK_BYTES, slots_per_segment)


def make_files(directory: Path, slots: int = 8, min_free_bytes: int | None = 0) -> SegmentFiles:
    directory.mkdir(exist_ok=True)
    return SegmentFiles(directory, DIGEST, CHUNK_BYTES, bound(slots), min_free_bytes)


def an_engine(name: str) -> ChunkIo:
    return open_engine(name)  # type: ignore[arg-type]


@contextmanager
def hanging(faulty: FaultyIo, operation: str) -> Iterator[None]:
    """Calls of `operation` hang, but not for longer than the test looks at them."""
    faulty.hang(operation)
    try:
        yield
    finally:
        faulty.let_go()


async def hits(tier: SegmentTier, keys: list[bytes] = KEYS) -> list[bytes]:
    """Which of `keys` can be read, and are right."""
    buffers = blank(len(keys))
    outcomes = await tier.read(keys, buffers)
    found = [
        (key, buf) for key, buf, o in zip(keys, buffers, outcomes, strict=True) if o == Read.HIT
    ]
    assert all(buffer == payload_of(key) for key, buffer in found)
    return [key for key, _ in found]


async def put(tier: SegmentTier, keys: list[bytes]) -> list[Any]:
    return await tier.write(keys, views([payload_of(key) for key in keys]))


def balanced(tier: SegmentTier) -> dict[str, int]:
    """The slots by state, none of them lost and none in use."""
    tally = tier._index.tally()
    assert tally["writing"] == tally["doomed"] == 0
    assert sum(tally.values()) == tier._files.n_slots
    assert tally["free"] == tier._index.n_free
    assert not tier._index._pins
    assert not tier._written
    return tally


def overwrite(root: Path, slot: int, data: bytes, at: int = 0, per_segment: int = 2) -> None:
    segment, place = divmod(slot, per_segment)
    path = segments_of(root) / f"segment-{segment:05d}.kv"
    with path.open("r+b") as file:
        file.seek(place * SLOT_BYTES + at)
        file.write(data)
