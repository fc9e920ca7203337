"""Where a simulated run takes place: directories, engines on them, and what a crash leaves.

Part of `tiering.testing.simulation`. A `Place` is what outlives a process, a `Life` the process:
one or two engines, opened on one place. A crash is a copy of the place, taken in the middle of
whatever goes on; the life that was there goes on beside it and is closed, and nobody looks at what
it still does.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tiering.config import StoreConfig
from tiering.layout import KVLayout, RowLayout
from tiering.namespace import Namespace
from tiering.residency.core import Residency
from tiering.residency.plan import (
    Found,
    News,
    OfKeys,
    Outcome,
    Promote,
    Release,
    Removed,
    Step,
    Survey,
    Touch,
    Verdict,
)
from tiering.store import TieredStore, namespace_of
from tiering.testing.faults import FaultyIo
from tiering.testing.memory import Chunks
from tiering.testing.powercut import path_of
from tiering.testing.simloop import SimClock, SimPool
from tiering.tiers.base import Tier
from tiering_kernels.portable import PortableIo

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=16, block_tokens=64)
ROW_BYTES = RowLayout(LAYOUT.chunk_bytes).row_bytes
REGION_HEADER_BYTES = 4096
POOL_THREADS = 3
LOAD_DEADLINE_SECONDS = 5.0
UNIX_SECONDS = 4e9
"""Later than any real time, so that files with real ones count as old."""


def page_of(key: bytes) -> bytes:
    """The bytes of `key`, and of no other."""
    return hashlib.shake_128(key).digest(LAYOUT.chunk_bytes)


def row_of(key: bytes) -> memoryview:
    return memoryview(bytearray(page_of(key).ljust(ROW_BYTES, b"\0")))


def name_of(keys: Sequence[bytes]) -> str:
    return f"{keys[-1].hex()[:6]}x{len(keys)}"


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for a whole run, drawn from its seed. `max_bytes` bounds the disk tier, and
    `is_synced` is whether it syncs what it stores before it says so, `is_guarded` whether a
    breaker is around it."""

    engines: int
    slots: int
    max_bytes: int
    is_synced: bool
    is_guarded: bool

    def config(self) -> StoreConfig:
        return StoreConfig(
            layout=LAYOUT,
            cpu_bytes_to_use=REGION_HEADER_BYTES + self.slots * ROW_BYTES,
            load_deadline_seconds=LOAD_DEADLINE_SECONDS,
        )


@dataclass(frozen=True, slots=True)
class Site:
    """What a tier is made of."""

    root: Path
    namespace: Namespace
    chunk_bytes: int
    max_bytes: int
    is_synced: bool
    is_guarded: bool
    io: FaultyIo
    pool: SimPool
    clock: SimClock
    chunks: Chunks


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tier. `operations` are those of a ChunkIo that it uses, and `is_shared` is whether
    two engines may have it at once. `side_files`, a regular expression, are the names of what is
    only a cache beside the chunks. `max_bytes` bounds a tier of so many chunks, `used_bytes` is
    what of that lies under a root, `unbooked` the chunks there that nobody counts, once everything
    is at rest, and `bury` makes a dead process's copy look like one."""

    make_tier: Callable[[Site], Tier]
    operations: tuple[str, ...] = ()
    is_shared: bool = True
    side_files: str = ""
    max_bytes: Callable[[int], int] = lambda chunks: 0
    used_bytes: Callable[[Path], int] = lambda root: 0
    unbooked: Callable[[Path], set[str]] = lambda root: set()
    bury: Callable[[Path], None] = lambda root: None


@dataclass(slots=True)
class Place:
    """A directory and what moves bytes there; `chunks` is for tiers in memory."""

    root: Path
    io: FaultyIo
    chunks: Chunks = field(default_factory=dict)

    def image(
        self, root: Path, kind: Kind, chance: random.Random, power_cut: bool, side_files: str
    ) -> Place:
        """What a kill, or a power cut, would leave now, as a copy at `root`. What `side_files`
        names a power cut may spoil in any way; for the rest see `FaultyIo.crash`."""
        shutil.copytree(self.root, root)
        kind.bury(root)
        paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
        if power_cut:
            self.io.crash(lambda path: str(root / Path(path).relative_to(self.root)))
            for path in paths:
                if side_files and re.search(side_files, path.name):
                    _spoil(path, chance)
        for at, path in enumerate(paths):
            with suppress(FileNotFoundError):
                # The real times are no two runs' alike.
                os.utime(path, (UNIX_SECONDS - 1e6 + at, UNIX_SECONDS - 1e6 + at))
        place = Place(root, FaultyIo(PortableIo(), chance), dict(self.chunks))
        place.io.lose_writes()
        return place


def _spoil(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    fate = chance.choice(("kept", "kept", "gone", "cut", "garbage"))
    if fate == "gone":
        path.unlink()
    elif fate == "cut":
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    elif fate == "garbage" and content:
        at = chance.randrange(len(content))
        path.write_bytes(content[:at] + chance.randbytes(min(4096, len(content) - at)))


class Ledger:
    """What one core asked for and was told: each step has one final outcome and none after it,
    and a chunk that was missing or damaged is not promoted again before a tier says it is there.
    """

    def __init__(self, core: Residency) -> None:
        self.out: dict[int, OfKeys] = {}
        self._hints: set[int] = set()
        self._gone: set[tuple[int, bytes]] = set()
        self._take_steps, self._apply = core.take_steps, core.apply
        core.take_steps = self.take_steps  # type: ignore[method-assign]
        core.apply = self.apply  # type: ignore[method-assign]

    def take_steps(self) -> list[Step]:
        steps = self._take_steps()
        for step in steps:
            if isinstance(step, Touch | Survey | Release):
                self._hints.add(step.id)
                continue
            self.out[step.id] = step
            if isinstance(step, Promote) and not self._gone.isdisjoint(_places(step)):
                raise AssertionError(f"step {step.id} promotes a chunk that is known to be gone")
        return steps

    def apply(self, news: Iterable[News]) -> None:
        news = list(news)
        for each in news:
            if isinstance(each, Outcome):
                self._settle(each)
            elif isinstance(each, Removed):
                self._gone.update(_places(each))
            else:
                self._gone.difference_update(_places(each))
        self._apply(news)

    def _settle(self, outcome: Outcome) -> None:
        if outcome.id in self._hints:
            self._hints.remove(outcome.id)
            return
        if outcome.id not in self.out:
            raise AssertionError(f"an outcome of step {outcome.id}, which is not out")
        step = self.out[outcome.id]
        if outcome.final:
            del self.out[outcome.id]
        for place, verdict in zip(_places(step), outcome.verdicts, strict=True):
            if verdict in (Verdict.HIT, Verdict.STORED, Verdict.ALREADY_THERE):
                self._gone.discard(place)
            elif isinstance(step, Promote) and verdict in (Verdict.MISS, Verdict.DAMAGED):
                self._gone.add(place)


def _places(told: OfKeys | Found | Removed) -> list[tuple[int, bytes]]:
    return [(told.tier, key) for key in told.keys]


@dataclass(slots=True)
class SimEngine:
    store: TieredStore
    tier: Tier
    pool: SimPool
    core: Residency
    ledger: Ledger


class Life:
    """Engines between `open` and `close`."""

    def __init__(self, terms: Terms, kind: Kind, place: Place) -> None:
        self.place = place
        self.engines: list[SimEngine] = []
        self._terms = terms
        self._kind = kind
        self._stack = AsyncExitStack()

    async def open(self, clock: SimClock, chance: random.Random) -> None:
        for _ in range(self._terms.engines):
            self.engines.append(await self._engine(clock, chance))

    async def close(self) -> None:
        await self._stack.aclose()

    async def _engine(self, clock: SimClock, chance: random.Random) -> SimEngine:
        config, terms, place = self._terms.config(), self._terms, self.place
        pool = SimPool("simulated", POOL_THREADS, chance)
        tier = self._kind.make_tier(
            Site(
                place.root,
                namespace_of(config),
                ROW_BYTES,
                terms.max_bytes,
                terms.is_synced,
                terms.is_guarded,
                place.io,
                pool,
                SimClock(clock.loop, UNIX_SECONDS),
                place.chunks,
            )
        )
        store = TieredStore(config, clock=clock, tiers=[tier])
        await self._stack.enter_async_context(store)
        core = store._running().core
        return SimEngine(store, tier, pool, core, Ledger(core))


@contextmanager
def syncs_seen(synced: Callable[[str], None]) -> Iterator[None]:
    """Have `synced` told the path of each file that this process syncs. The tiers sync their
    segments and tables themselves, not through a `ChunkIo`."""
    fdatasync = os.fdatasync

    def told(descriptor: int) -> None:
        fdatasync(descriptor)
        synced(path_of(descriptor))

    os.fdatasync = told  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fdatasync = fdatasync
