"""A secondary tier of one's own, here over SQLite, named in the configuration like any other.

Run it twice: the second time, everything is found in the database.

    python docs/examples/own_tier.py /tmp/kv-example
"""

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import xxhash

from tiering import KVLayout, MiB, StoreConfig, TieredStore, UserTierConfig
from tiering.errors import ClosedError, DamagedChunk, TierError
from tiering.namespace import Namespace
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
    check_buffers,
)


class SqliteTier(Tier):
    """One row for each chunk, with a checksum. SQLite's calls are short, so they run in the event
    loop; what takes longer belongs into threads, and then a call may come back only when its
    thread has let go of the buffers, also when it is cancelled."""

    def __init__(self, namespace: Namespace, chunk_bytes: int, *, path: str) -> None:
        """`path` is a key of this tier's own: whatever its entry in the settings has."""
        if not path.startswith("/"):
            raise ValueError("path must begin with /")
        self._path = path
        self._namespace = namespace.digest
        self._chunk_bytes = chunk_bytes
        self._database: sqlite3.Connection | None = None

    @property
    def name(self) -> str:
        return f"sqlite:{self._path}"

    def watch(self, removed: Listener) -> None:
        """Nothing to do: nobody but `delete` removes anything here."""

    async def open(self) -> None:
        try:
            self._database = sqlite3.connect(self._path, isolation_level=None)
            # Nothing waits for the disk; what a power cut takes is computed again.
            self._database.execute("PRAGMA journal_mode = WAL").fetchall()
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS chunks (namespace BLOB, key BLOB, payload BLOB, "
                "checksum BLOB, PRIMARY KEY (namespace, key))"
            )
        except sqlite3.Error as error:
            raise TierError(self.name, None, str(error)) from error

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        wanted = "SELECT 1 FROM chunks WHERE namespace = ? AND key = ?"
        return [Read.HIT if self._rows(wanted, key) else Read.MISS for key in keys]

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        check_buffers(keys, buffers, self._chunk_bytes)
        return [self._fill(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        check_buffers(keys, buffers, self._chunk_bytes)
        put = "INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, ?) RETURNING 1"
        outcomes: list[WriteOutcome] = []
        for key, buffer in zip(keys, buffers, strict=True):
            is_new = self._rows(put, key, bytes(buffer), xxhash.xxh3_128_digest(buffer))
            outcomes.append(Write.STORED if is_new else Write.ALREADY_THERE)
        return outcomes

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        gone = "DELETE FROM chunks WHERE namespace = ? AND key = ? RETURNING 1"
        return [Delete.DELETED if self._rows(gone, key) else Delete.MISSING for key in keys]

    async def touch(self, keys: Sequence[bytes]) -> None:
        del keys  # It evicts nothing, so it need not know what was used.

    def stats(self) -> dict[str, int]:
        return {}

    async def scan(self) -> AsyncIterator[list[bytes]]:
        rows = self._rows("SELECT key FROM chunks WHERE namespace = ?")
        yield [key for (key,) in rows]

    async def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _fill(self, key: bytes, buffer: memoryview) -> ReadOutcome:
        found = "SELECT payload, checksum FROM chunks WHERE namespace = ? AND key = ?"
        for payload, checksum in self._rows(found, key):
            if len(payload) == len(buffer) and xxhash.xxh3_128_digest(payload) == checksum:
                buffer[:] = payload
                return Read.HIT
            self._rows("DELETE FROM chunks WHERE namespace = ? AND key = ?", key)
            return Failed(DamagedChunk(self.name, key, "the checksum does not match"))
        return Read.MISS

    def _rows(self, statement: str, *values: bytes) -> list[tuple[bytes, ...]]:
        if self._database is None:
            raise ClosedError(f"{self.name} is not open")
        try:
            return self._database.execute(statement, (self._namespace, *values)).fetchall()
        except sqlite3.Error as error:
            raise TierError(self.name, None, str(error)) from error


layout = KVLayout(layers=8, kv_heads=4, head_dim=64, block_tokens=16)


async def main(root: Path) -> None:
    config = StoreConfig(
        layout=layout,
        cpu_bytes_to_use=16 * MiB,
        secondary_tiers=[
            # For vLLM: {"type": "SqliteTier", "module_path": "own_tier", "path": "/mnt/kv.db"}
            UserTierConfig(type="SqliteTier", module_path="own_tier", path=str(root / "kv.db"))
        ],
    )
    keys = layout.keys(list(range(1000)))
    async with TieredStore(config) as store:
        found = await store.match(keys)
        print(f"{found} of {len(keys)} chunks are stored")
        fresh = keys[found:]
        await store.save(fresh, [bytearray(layout.chunk_bytes) for _ in fresh])
        await store.flush()  # until the database has them too
        print(store.stats().tiers)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).absolute()))
