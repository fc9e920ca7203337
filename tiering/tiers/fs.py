"""A file system as a secondary tier: one file for each chunk, self-verifying, shareable.

Owns the threads that do the I/O; the files belong to the directory, which other processes, hosts
and cleaners may share. Used from one event loop; every blocking call runs in the pool. Layout
and bytes: docs/format.md.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path

from tiering.errors import ClosedError, ConfigError, TierError
from tiering.namespace import Namespace
from tiering.tiers import fs_config, fs_io, fs_temps
from tiering.tiers.base import DeleteOutcome, ReadOutcome, Tier, WriteOutcome
from tiering.tiers.fs_chunks import ChunkFiles
from tiering.tiers.fs_io import IoPath
from tiering.tiers.fs_paths import CONFIG_NAME, FsPaths
from tiering.tiers.fs_pool import IoPool, Lane

SCAN_KEYS_MAX = 1024

_USER_ERRORS = {
    errno.EACCES: "give this user the right to write there",
    errno.EPERM: "give this user the right to write there",
    errno.EROFS: "mount it writable",
    errno.ENOENT: "create the parent directory or mount it, or name another directory",
    errno.ENOTDIR: "name a directory",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ELOOP: "name a directory, not a loop of symbolic links",
}


class FsTier(Tier):
    """Chunks of `chunk_bytes` under `root_dir`, for rank `rank` of `namespace`.

    Direct I/O is used where `open` finds that the root can do it and a buffer is aligned to 4096
    bytes. `n_read_threads` prefer reads and `n_write_threads` writes; each group helps the other
    when its own queue is empty. `root_dir` is created if only its last part is missing.
    """

    def __init__(
        self,
        root_dir: Path,
        namespace: Namespace,
        chunk_bytes: int,
        n_read_threads: int = 16,
        n_write_threads: int = 16,
        rank: int = 0,
    ) -> None:
        if chunk_bytes < 1 or rank < 0:
            raise ValueError(f"chunk_bytes {chunk_bytes} must be positive, rank {rank} not below 0")
        self._paths = FsPaths(Path(root_dir).absolute(), namespace.directory, rank)
        self._namespace = namespace
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self._pool = IoPool(self.name, n_read_threads, n_write_threads)
        self._files: ChunkFiles | None = None

    def __repr__(self) -> str:
        state = "not open" if self._files is None else self._files.io_path
        return f"<FsTier {self._paths.rank_dir}: {state}, {self._pool!r}>"

    @property
    def name(self) -> str:
        return f"fs:{self._paths.root}"

    @property
    def io_path(self) -> IoPath:
        """`direct` or `buffered`: what the root's probe found. ClosedError unless open."""
        return self._opened().io_path

    async def open(self) -> None:
        """Make the directories, agree on config.json, probe direct I/O, sweep dead temp files.

        ConfigError where the user can help it, TierError for the rest.
        """
        self._pool.start()
        try:
            try:
                await self._pool.call(Lane.WRITE, self._make_directories)
                config = self._paths.config_dir / CONFIG_NAME
                await fs_config.agree(config, self._namespace.describe())
                self._files = await self._pool.call(Lane.WRITE, self._prepare)
            except OSError as error:
                raise self._open_error(error) from error
        except BaseException:
            await self._pool.close()
            raise

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        files = self._opened()
        return await self._pool.run(
            Lane.READ, lambda i: files.contains(keys[i]), len(keys), spread=False
        )

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        files = self._opened()
        self._check_buffers(keys, buffers)
        return await self._pool.run(Lane.READ, lambda i: files.read(keys[i], buffers[i]), len(keys))

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        files = self._opened()
        self._check_buffers(keys, buffers)
        return await self._pool.run(
            Lane.WRITE, lambda i: files.write(keys[i], buffers[i]), len(keys)
        )

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        files = self._opened()
        return await self._pool.run(Lane.WRITE, lambda i: files.delete(keys[i]), len(keys))

    async def scan(self) -> AsyncIterator[list[bytes]]:
        keys = self._opened().walk()
        try:
            while batch := await self._pool.call(
                Lane.READ, lambda: list(islice(keys, SCAN_KEYS_MAX))
            ):
                yield batch
        except OSError as error:
            raise TierError(self.name, None, f"cannot list the chunks: {error}") from error

    async def close(self) -> None:
        self._files = None
        await self._pool.close()

    def _opened(self) -> ChunkFiles:
        if self._files is None:
            raise ClosedError(f"{self.name} is not open")
        return self._files

    def _check_buffers(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys with {len(buffers)} buffers")
        for buffer in buffers:
            if buffer.nbytes != self._chunk_bytes:
                raise ValueError(f"a buffer of {buffer.nbytes} bytes, not {self._chunk_bytes}")

    def _make_directories(self) -> None:
        root = self._paths.root
        fs_io.make_private_dir(root)
        for directory in (self._paths.config_dir, self._paths.staging):
            fs_io.make_private_dirs(root, directory)

    def _prepare(self) -> ChunkFiles:
        staging = self._paths.staging
        io_path = fs_io.probe(staging)
        # The probe's file has just come and gone, so this is now by the clock that stamps files.
        now_seconds = staging.stat().st_mtime
        fs_temps.sweep((staging, self._paths.config_dir), now_seconds)
        digest = self._namespace.digest_of_rank(self._rank)
        return ChunkFiles(self.name, self._paths, digest, self._chunk_bytes, io_path)

    def _open_error(self, error: OSError) -> ConfigError | TierError:
        remedy = _USER_ERRORS.get(error.errno or 0)
        if remedy is None:
            return TierError(self.name, None, f"cannot be opened: {error}")
        reason = f"{error.strerror}: {error.filename}"
        return ConfigError("secondary_tiers[].root_dir", str(self._paths.root), reason, remedy)
