"""One rank's chunk files, one key at a time: find, read, write, delete, put out of reach.

Blocking and safe in any thread; holds no lock and keeps no state about chunks: the directory is
the only truth, so that other processes and cleaners may share it. A file appears under its final
name only whole, by renaming; what is read is trusted only after `frame.check`. Nothing but a
damaged file is ever removed unasked.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from tiering.errors import DamagedChunk, TierError
from tiering.tiers import frame, fs_io
from tiering.tiers.base import Delete, DeleteOutcome, Failed, Read, ReadOutcome, Write, WriteOutcome
from tiering.tiers.fs_io import IoPath
from tiering.tiers.fs_paths import FsPaths, is_shard, key_of
from tiering.tiers.fs_temps import temp_name

QUARANTINED_FILES_MAX = 64


class ChunkFiles:
    """The chunks under `paths.rank_dir`, each of `chunk_bytes` and a header page."""

    def __init__(
        self, name: str, paths: FsPaths, digest: bytes, chunk_bytes: int, io_path: IoPath
    ) -> None:
        """`name` is the tier's, for errors; `digest` names what the frames must have been
        written for. REQUIRES: `paths.root` exists; the file system it is on now is the one that
        will be written to. Raises OSError."""
        self._name = name
        self._paths = paths
        self._digest = digest
        self._file_bytes = frame.HEADER_BYTES + chunk_bytes
        self.io_path = io_path
        self._device = paths.root.stat().st_dev
        self._local = threading.local()

    def contains(self, key: bytes) -> ReadOutcome:
        """HIT where there is a file of the right size."""
        try:
            return Read.HIT if self._is_there(key) else Read.MISS
        except (OSError, ValueError) as error:
            return self._failed(key, error)

    def read(self, key: bytes, buffer: memoryview) -> ReadOutcome:
        """Fill `buffer`, and believe it only if the frame vouches for it."""
        try:
            wrong = self._read(key, buffer)
        except FileNotFoundError:
            return Read.MISS
        except (OSError, ValueError) as error:
            return self._failed(key, error)
        return Read.HIT if wrong is None else self._condemn(key, wrong)

    def write(self, key: bytes, buffer: memoryview) -> WriteOutcome:
        """Store `buffer`, unless a file of the right size is there; publish it whole."""
        try:
            if self._is_there(key):
                return Write.ALREADY_THERE
            self._require_root()
            self._write(key, buffer)
        except (OSError, ValueError) as error:
            full = isinstance(error, OSError) and error.errno in fs_io.NO_SPACE
            return Write.FULL if full else self._failed(key, error)
        return Write.STORED

    def delete(self, key: bytes) -> DeleteOutcome:
        try:
            os.unlink(self._paths.chunk(key))
        except FileNotFoundError:
            return Delete.MISSING
        except (OSError, ValueError) as error:
            return self._failed(key, error)
        return Delete.DELETED

    def walk(self) -> Iterator[bytes]:
        """The keys that have a file, by name alone. Raises OSError; what vanishes is left out."""
        for shard in _children(self._paths.rank_dir):
            if not is_shard(shard.name):
                continue
            for group in _children(shard.path):
                for file in _children(group.path):
                    key = key_of(shard.name, group.name, file.name)
                    if key is not None:
                        yield key

    def _is_there(self, key: bytes) -> bool:
        try:
            found = os.stat(self._paths.chunk(key), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == self._file_bytes

    def _read(self, key: bytes, buffer: memoryview) -> str | None:
        """None where `buffer` now has the chunk of `key`, else what is wrong with its file."""
        descriptor = fs_io.open_for_reading(self._paths.chunk(key), self.io_path)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError("not a regular file")
            size, header = found.st_size, self._header()
            if size == self._file_bytes:
                size = fs_io.read_whole(descriptor, [header, buffer])
        finally:
            os.close(descriptor)
        if size != self._file_bytes:
            return f"file of {size} bytes, not {self._file_bytes}"
        return frame.check(header, key, self._digest, buffer)

    def _write(self, key: bytes, buffer: memoryview) -> None:
        header, path = self._header(), self._paths.chunk(key)
        frame.pack_header(header, key, self._digest, buffer)
        temp = self._paths.staging / temp_name()
        descriptor = self._create(temp)
        try:
            try:
                fs_io.write_whole(descriptor, [header, buffer])
            finally:
                os.close(descriptor)
            try:
                temp.rename(path)
            except FileNotFoundError:
                fs_io.make_private_dirs(self._paths.root, Path(path).parent)
                temp.rename(path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise

    def _create(self, temp: Path) -> int:
        try:
            return fs_io.create_for_writing(temp, self.io_path)
        except FileNotFoundError:
            # A cleaner took the directory.
            fs_io.make_private_dirs(self._paths.root, self._paths.staging)
            return fs_io.create_for_writing(temp, self.io_path)

    def _condemn(self, key: bytes, wrong: str) -> Failed:
        """Put the file of `key` out of reach: into quarantine while there is room, else away."""
        path, target = self._paths.chunk(key), self._paths.condemned(key)
        try:
            fs_io.make_private_dirs(self._paths.root, target.parent)
            os.rename(path, target)
            if len(os.listdir(target.parent)) > QUARANTINED_FILES_MAX:
                target.unlink(missing_ok=True)
        except OSError:
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:
                reason = f"{wrong}, and {path} cannot be removed: {error.strerror}"
                return Failed(TierError(self._name, key, reason))
        return Failed(DamagedChunk(self._name, key, f"{wrong}; {path} was taken out of use"))

    def _require_root(self) -> None:
        """Refuse to write where the root's file system is gone, since what is there instead is
        the mount point's own directory, on some other disk."""
        root = self._paths.root
        if root.stat().st_dev != self._device:
            raise OSError(f"{root} is on another file system than at start; mount it again")

    def _failed(self, key: bytes, error: OSError | ValueError) -> Failed:
        # No `from error`: its traceback would keep the caller's buffer alive.
        return Failed(TierError(self._name, key, str(error)))

    def _header(self) -> memoryview:
        """This thread's header page, its content left over from the last call."""
        page: memoryview | None = getattr(self._local, "page", None)
        if page is None:
            page = self._local.page = fs_io.aligned_page()
        return page


def _children(directory: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
