"""`MeteredTier`: a tier around a tier that counts what became of every key it was asked for.

Owns the counts and nothing else: calls, outcomes and errors pass through unchanged. Stands outside
of all other wrappers, so what they refuse is counted too. For each operation the outcomes add up
to its attempts once no call of it is under way: `reads` = `reads_hit` + `reads_miss` + ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tiering.clock import Clock
from tiering.errors import DamagedChunk
from tiering.metrics import Counters
from tiering.tiers.base import (
    GAUGE_PREFIX,
    DeleteOutcome,
    Failed,
    Listener,
    PeerTier,
    Read,
    Reading,
    ReadOutcome,
    Tier,
    Write,
    WriteOutcome,
)

Outcomes = TypeVar("Outcomes", list[ReadOutcome], list[WriteOutcome])

OUTCOMES: dict[str, tuple[str, ...]] = {
    "lookups": ("hit", "miss", "busy", "failed"),
    "reads": ("hit", "miss", "busy", "damaged", "failed"),
    "writes": ("stored", "already_there", "full", "refused", "failed"),
}
"""What can become of a key, by operation; `failed` also where the call raised or was cancelled."""

MICROSECONDS = 1_000_000


class MeteredTier(Tier):
    """`inner`, counted. `chunk_bytes`: what one key moves."""

    def __init__(self, inner: Tier, chunk_bytes: int, clock: Clock) -> None:
        self._inner = inner
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._counters = _counters()
        self._calls = dict.fromkeys(OUTCOMES, 0)
        self._keys = dict.fromkeys(OUTCOMES, 0)

    def __repr__(self) -> str:
        return f"<MeteredTier {self._inner!r}>"

    @property
    def name(self) -> str:
        return self._inner.name

    def watch(self, removed: Listener) -> None:
        self._inner.watch(removed)

    async def open(self) -> None:
        await self._inner.open()
        self._counters = _counters()

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        return await self._asked(self._inner, keys)

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        return await self._read_from(self._inner, keys, buffers)

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        outcomes = await self._metered("writes", keys, lambda: self._inner.write(keys, buffers))
        self._counters.add("written_bytes", self._chunk_bytes * outcomes.count(Write.STORED))
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        return await self._inner.delete(keys)

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self._inner.touch(keys)

    def stats(self) -> dict[str, int]:
        """The inner tier's, and: keys by operation and outcome, bytes of whole chunks moved, the
        time that calls took, added up, and calls and keys that are under way."""
        now = {f"{GAUGE_PREFIX}{name}_calls": calls for name, calls in self._calls.items()}
        now |= {f"{GAUGE_PREFIX}{name}": keys for name, keys in self._keys.items()}
        return self._inner.stats() | self._counters.snapshot() | now

    def scan(self) -> AsyncIterator[list[bytes]]:
        return self._inner.scan()

    async def close(self) -> None:
        await self._inner.close()

    async def _asked(self, source: Reading, keys: Sequence[bytes]) -> list[ReadOutcome]:
        return await self._metered("lookups", keys, lambda: source.contains(keys))

    async def _read_from(
        self, source: Reading, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[ReadOutcome]:
        outcomes = await self._metered("reads", keys, lambda: source.read(keys, buffers))
        self._counters.add("read_bytes", self._chunk_bytes * outcomes.count(Read.HIT))
        return outcomes

    async def _metered(
        self,
        operation: str,
        keys: Sequence[bytes],
        call: Callable[[], Coroutine[Any, Any, Outcomes]],
    ) -> Outcomes:
        self._counters.add(operation, len(keys))
        with self._under_way(operation, len(keys)):
            try:
                outcomes = await call()
            except BaseException:
                self._counters.add(f"{operation}_failed", len(keys))
                raise
        for outcome in outcomes:
            self._counters.add(f"{operation}_{_named(operation, outcome)}")
        return outcomes

    @contextmanager
    def _under_way(self, operation: str, keys: int) -> Iterator[None]:
        began = self._clock.now()
        self._calls[operation] += 1
        self._keys[operation] += keys
        try:
            yield
        finally:
            self._calls[operation] -= 1
            self._keys[operation] -= keys
            took = max(0.0, self._clock.now() - began)
            self._counters.add(f"{operation}_microseconds", round(took * MICROSECONDS))


class MeteredPeerTier(MeteredTier, PeerTier):
    """The same around a tier of peers: what is read of peers counts, not what they read here."""

    def __init__(self, inner: PeerTier, chunk_bytes: int, clock: Clock) -> None:
        super().__init__(inner, chunk_bytes, clock)
        self._peers = inner

    def at(self, peer: bytes) -> Reading:
        return _MeteredReading(self, self._peers.at(peer))

    def release(self, peer: bytes) -> None:
        self._peers.release(peer)

    def show(self, keys: Sequence[bytes], slots: Sequence[int], generations: Sequence[int]) -> None:
        self._peers.show(keys, slots, generations)

    def hide(self, keys: Sequence[bytes]) -> None:
        self._peers.hide(keys)

    async def keep(self, kv_request_id: str, keys: Sequence[bytes]) -> list[ReadOutcome]:
        return await self._peers.keep(kv_request_id, keys)


class _MeteredReading:
    def __init__(self, tier: MeteredPeerTier, source: Reading) -> None:
        self._tier = tier
        self._source = source

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        return await self._tier._asked(self._source, keys)

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        return await self._tier._read_from(self._source, keys, buffers)


def _counters() -> Counters:
    names = ["read_bytes", "written_bytes"]
    for operation, outcomes in OUTCOMES.items():
        names += [operation, f"{operation}_microseconds"]
        names += [f"{operation}_{outcome}" for outcome in outcomes]
    return Counters(names)


def _named(operation: str, outcome: ReadOutcome | WriteOutcome) -> str:
    if not isinstance(outcome, Failed):
        return outcome.name.lower()
    is_damaged = operation == "reads" and isinstance(outcome.error, DamagedChunk)
    return "damaged" if is_damaged else "failed"
