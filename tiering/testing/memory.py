"""A tier in a dict whose calls wait and fail when a test says so.

For tests of what stands above a tier. It keeps the whole contract of `Tier`, also while a gate is
closed: a call that was cancelled touches no buffer any more, `close` waits for what is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import xxhash

from tiering.errors import ClosedError, DamagedChunk
from tiering.tiers.base import (
    Delete,
    DeleteOutcome,
    Failed,
    Listener,
    Read,
    ReadOutcome,
    Tier,
    Write,
    WriteOutcome,
    nobody,
)
from tiering.underway import UnderWay

Chunks = dict[bytes, tuple[bytes, int]]


def checked(payload: bytes) -> tuple[bytes, int]:
    """What lies in the dict for a chunk: its payload and a checksum over it."""
    return payload, xxhash.xxh3_64_intdigest(payload)


class MemoryTier(Tier):
    """`chunks` may be shared by several tiers. For tests:

    `calls` lists `(operation, keys)` as they begin; `errors[operation]` is what each call of it
    raises; `reads` and `writes` are outcomes of single keys instead of the true ones, and then
    nothing is read or written. Operations are "open", "contains", "read", "write" and "delete".
    """

    def __init__(self, chunks: Chunks | None = None, name: str = "memory") -> None:
        self.chunks: Chunks = {} if chunks is None else chunks
        self.calls: list[tuple[str, tuple[bytes, ...]]] = []
        self.errors: dict[str, Exception] = {}
        self.reads: dict[bytes, ReadOutcome] = {}
        self.writes: dict[bytes, WriteOutcome] = {}
        self._name = name
        self._removed: Listener = nobody
        self._gates: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way = UnderWay()

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_open(self) -> bool:
        return self._loop is not None

    def hold(self, operation: str) -> None:
        """From now on calls of `operation` wait before they do anything."""
        self._gates.setdefault(operation, asyncio.Event())

    def let_go(self, operation: str) -> None:
        """Calls of `operation` go on, also later ones. From any thread, while open."""
        if self._loop is None:
            raise ClosedError(f"{self.name} is not open")
        self._loop.call_soon_threadsafe(self._gates.pop(operation).set)

    def let_all_go(self) -> None:
        """Calls of every operation go on, also of a closed tier. From the loop's thread."""
        while self._gates:
            self._gates.popitem()[1].set()

    def watch(self, removed: Listener) -> None:
        self._removed = removed

    def evict(self, keys: Sequence[bytes]) -> None:
        """For tests: those of `keys` that are here go, as if there were no room. On the loop."""
        gone = [key for key in keys if self.chunks.pop(key, None) is not None]
        self._removed(gone)

    async def open(self) -> None:
        self.calls.append(("open", ()))
        if "open" in self.errors:
            raise self.errors["open"]
        self._loop = asyncio.get_running_loop()

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        async with self._call("contains", keys):
            return [Read.HIT if key in self.chunks else Read.MISS for key in keys]

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        async with self._call("read", keys):
            pairs = zip(keys, buffers, strict=True)
            return [self.reads.get(key) or self._fill(key, buffer) for key, buffer in pairs]

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        async with self._call("write", keys):
            pairs = zip(keys, buffers, strict=True)
            return [self.writes.get(key) or self._keep(key, buffer) for key, buffer in pairs]

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        async with self._call("delete", keys):
            return [
                Delete.MISSING if self.chunks.pop(key, None) is None else Delete.DELETED
                for key in keys
            ]

    async def touch(self, keys: Sequence[bytes]) -> None:
        async with self._call("touch", keys):
            pass

    def stats(self) -> dict[str, int]:
        return {"now_chunks": len(self.chunks)}

    async def scan(self) -> AsyncIterator[list[bytes]]:
        if not self.is_open:
            raise ClosedError(f"{self.name} is not open")
        yield list(self.chunks)

    async def close(self) -> None:
        self.calls.append(("close", ()))
        self._loop = None
        await self._under_way.end()

    def _keep(self, key: bytes, buffer: memoryview) -> WriteOutcome:
        if key in self.chunks:
            return Write.ALREADY_THERE
        self.chunks[key] = checked(bytes(buffer))
        return Write.STORED

    def _fill(self, key: bytes, buffer: memoryview) -> ReadOutcome:
        if key not in self.chunks:
            return Read.MISS
        payload, _ = self.chunks[key]
        if checked(payload) != self.chunks[key]:
            del self.chunks[key]
            return Failed(DamagedChunk(self.name, key, "the checksum does not match"))
        buffer[:] = payload
        return Read.HIT

    @asynccontextmanager
    async def _call(self, operation: str, keys: Sequence[bytes]) -> AsyncIterator[None]:
        if not self.is_open:
            raise ClosedError(f"{self.name} is not open")
        self.calls.append((operation, tuple(keys)))
        with self._under_way.one():
            await asyncio.sleep(0)
            if operation in self._gates:
                await self._gates[operation].wait()
            if operation in self.errors:
                raise self.errors[operation]
            yield

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<MemoryTier {self.name} {state}, {len(self.chunks)} chunks>"
