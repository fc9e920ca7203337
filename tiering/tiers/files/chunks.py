"""One rank's chunk files in batches: find, read, write, delete, make room, put out of reach.

Blocking and safe in any thread; holds no lock and keeps no state about chunks: the directory is
the only truth, so that other processes and cleaners may share it. A file appears under its final
name only whole, by renaming; what is read is trusted only if the frame vouches for it. Only
damaged files and victims that it is given are ever removed unasked.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tiering.errors import DamagedChunk, TierError
from tiering.tiers import frame
from tiering.tiers.base import Delete, DeleteOutcome, Failed, Read, ReadOutcome, Write, WriteOutcome
from tiering.tiers.disk import diskio, temps
from tiering.tiers.disk.paths import (
    FsPaths,
    is_shard,
    key_of,
    parse_directory,
    place_of,
    why_not_a_key,
)
from tiering.tiers.files.bookings import Booked, Flight
from tiering.tiers.files.limits import QUARANTINED_FILES_MAX
from tiering_kernels.chunkio import BAD_CHECKSUM, HEADER_BYTES, UNNAMED, ChunkIo

# The file is not there, for sure; or, for who wants to read it, not any more.
ABSENT = (-errno.ENOENT, -errno.ENOTDIR)
GONE = (*ABSENT, -errno.ESTALE)


class ChunkFiles:
    """The chunks under `paths.rank_dir`, each of `chunk_bytes` and a header page."""

    def __init__(
        self,
        name: str,
        paths: FsPaths,
        digest: bytes,
        chunk_bytes: int,
        io: ChunkIo,
        direct: diskio.Direct,
        sync: bool,
        quarantined_max: int = QUARANTINED_FILES_MAX,
    ) -> None:
        """`name` is the tier's, for errors; `digest` names what the frames must have been
        written for; with `sync` a chunk is on the disk before it counts as stored. REQUIRES:
        `paths.root` exists, on the file system that is to be written to. Raises OSError."""
        self._name = name
        self._paths = paths
        self._root = str(paths.root)
        self._staging = str(paths.staging)
        self._digest = digest
        self._chunk_bytes = chunk_bytes
        self.file_bytes = HEADER_BYTES + chunk_bytes
        self._io = io
        self._direct = direct
        self._sync = sync
        self._quarantined_max = quarantined_max
        self._device = paths.root.stat().st_dev
        self._pages = diskio.HeaderPages()
        # By cause; each thread adds to its own key's count, and a lost update loses one count.
        self.damage: Counter[str] = Counter()

    def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        """HIT where there is a file of the right size."""
        return [
            self._contained(key, size) for key, size in zip(keys, self.sizes(keys), strict=True)
        ]

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """What `ChunkIo.sizes` says of the files of `keys`; -EINVAL for what cannot be a key."""
        numbers = [-errno.EINVAL] * len(keys)
        places, paths = self._placed(keys)
        for at, size in zip(places, self._io.sizes(paths), strict=True):
            numbers[at] = size
        return numbers

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """Fill `buffers`, and believe each only if its frame vouches for it."""
        places, paths = self._placed(keys)
        outcomes: list[ReadOutcome] = [Read.MISS] * len(keys)
        self._tell_others(keys, places, outcomes)
        if not places:
            return outcomes
        headers = self._pages.lease(len(places))
        wanted = [buffers[at] for at in places]
        try:
            numbers = self._io.read_files(paths, headers, wanted, self._direct.reads)
        finally:
            del wanted
        for at, number, header in zip(places, numbers, diskio.pages(headers), strict=True):
            outcomes[at] = self._read_outcome(keys[at], number, header)
        return outcomes

    def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], spares: Sequence[str | None]
    ) -> list[WriteOutcome]:
        """Store `buffers` under `keys`, each published whole. `spares[i]`, where it is given, is
        a file in the staging directory that is overwritten instead of making a new one."""
        places, finals = self._placed(keys)
        outcomes: list[WriteOutcome] = [Write.REFUSED] * len(keys)
        self._tell_others(keys, places, outcomes)
        if not places:
            return outcomes
        try:
            self.require_root()
        except OSError as error:
            return [self._failed(key, str(error)) for key in keys]
        headers = self._pages.lease(len(places))
        for at, header in zip(places, diskio.pages(headers), strict=True):
            frame.pack_fields(header, keys[at], self._digest, self._chunk_bytes)
        names = [spares[at] or f"{self._staging}/{temps.temp_name()}" for at in places]
        reuse = [spares[at] is not None for at in places]
        wanted = [buffers[at] for at in places]
        try:
            numbers = self._write(names, finals, headers, wanted, reuse)
        finally:
            del wanted
        for at, number, temp, final in zip(places, numbers, names, finals, strict=True):
            outcomes[at] = self._write_outcome(keys[at], number, temp, final)
        if self._sync:
            try:
                diskio.sync_directories({os.path.dirname(final) for final in finals})
            except OSError as error:
                return self.failed(keys, error)
        return outcomes

    def failed(self, keys: Sequence[bytes], error: OSError) -> list[WriteOutcome]:
        """What a write gives where nothing can be written."""
        return [self._failed(key, str(error)) for key in keys]

    def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        places, paths = self._placed(keys)
        outcomes: list[DeleteOutcome] = [Delete.MISSING] * len(keys)
        self._tell_others(keys, places, outcomes)
        for at, path in zip(places, paths, strict=True):
            try:
                os.unlink(path)
                outcomes[at] = Delete.DELETED
            except (FileNotFoundError, NotADirectoryError):
                outcomes[at] = Delete.MISSING
            except OSError as error:
                outcomes[at] = self._failed(keys[at], str(error))
        return outcomes

    def take(self, victims: Sequence[Booked]) -> list[tuple[str | None, Booked | None]]:
        """Move each victim's file out of reach: `(spare, None)` where it is a file that can be
        overwritten now, `(None, None)` where it is gone, `(None, victim)` where it stays."""
        return [self._take(victim) for victim in victims]

    def remove(self, victims: Iterable[Booked]) -> list[Booked]:
        """Remove the files of `victims`; those that stay."""
        kept = []
        for victim in victims:
            path = self._victim_path(victim)
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                kept.append(victim)
        return kept

    def clean_up(self, flight: Flight, now_seconds: float) -> list[Booked]:
        """Remove what a process that is gone has left of `flight`: temp files, the files of its
        victims and their directories; victims that stay."""
        ends = (*flight.arriving, *flight.victims)
        for directory in {each.directory for each in ends}:
            name = parse_directory(directory)
            if name is not None and name.rank is not None:
                paths = FsPaths(self._paths.root, name.namespace, name.rank)
                with contextlib.suppress(OSError):
                    temps.sweep([paths.staging], now_seconds)
        kept = self.remove(flight.victims)
        self.prune(flight.victims)
        return kept

    def there(self, chunks: Sequence[Booked]) -> list[Booked]:
        """Those of `chunks` that have a file, or may have one where nothing can be said. One of
        another size holds no chunk and is removed."""
        chunks = [each for each in chunks if not why_not_a_key(each.key)]
        if not chunks:
            return []
        sizes = self._io.sizes([self._victim_path(each) for each in chunks])
        told = list(zip(chunks, sizes, strict=True))
        kept = self.remove(each for each, size in told if 0 <= size != each.file_bytes)
        return kept + [
            each
            for each, size in told
            if size == each.file_bytes or (size < 0 and size not in ABSENT)
        ]

    def prune(self, victims: Iterable[Booked]) -> None:
        """Remove the directories that `victims` have left empty."""
        for leaf in {os.path.dirname(self._victim_path(victim)) for victim in victims}:
            with contextlib.suppress(OSError):
                os.rmdir(leaf)
                os.rmdir(os.path.dirname(leaf))

    def walk(self) -> Iterator[bytes]:
        """The keys that have a file, by name alone. Raises OSError; what vanishes is left out."""
        for shard in diskio.children(self._paths.rank_dir):
            if not is_shard(shard.name):
                continue
            for group in diskio.children(shard.path):
                for file in diskio.children(group.path):
                    key = key_of(shard.name, group.name, file.name)
                    if key is not None:
                        yield key

    # Parts of the above

    def _placed(self, keys: Sequence[bytes]) -> tuple[Sequence[int], list[str]]:
        """Which of `keys` can have a file, and its path."""
        with contextlib.suppress(ValueError):
            return range(len(keys)), self._paths.chunks(keys)
        places = [at for at, key in enumerate(keys) if not why_not_a_key(key)]
        return places, self._paths.chunks([keys[at] for at in places])

    def _tell_others(
        self, keys: Sequence[bytes], places: Sequence[int], outcomes: list[Any]
    ) -> None:
        """The outcome of what is not among `places`: it cannot be a key."""
        if len(places) < len(keys):
            for at in set(range(len(keys))).difference(places):
                outcomes[at] = self._not_a_key(keys[at])

    def _contained(self, key: bytes, size: int) -> ReadOutcome:
        if size == self.file_bytes:
            return Read.HIT
        # Something else under a chunk's name holds no chunk, and is replaced or refused by a write.
        if size >= 0 or size in GONE:
            return Read.MISS
        if size == -errno.EINVAL:
            return self._not_a_key(key) if why_not_a_key(key) else Read.MISS
        return self._failed(key, os.strerror(-size))

    def _read_outcome(self, key: bytes, number: int, header: memoryview) -> ReadOutcome:
        if number == self.file_bytes or number == BAD_CHECKSUM:
            wrong = frame.check_fields(header, key, self._digest, self._chunk_bytes)
            if number == BAD_CHECKSUM:
                wrong = wrong or "bad checksum"
            return Read.HIT if wrong is None else self._condemn(key, wrong)
        if number >= 0:
            return self._condemn(key, f"file of {number} bytes, not {self.file_bytes}")
        if number in GONE:
            return Read.MISS
        if number == -errno.EINVAL:
            return self._failed(key, "not a regular file")
        return self._failed(key, os.strerror(-number))

    def _write_outcome(self, key: bytes, number: int, temp: str, final: str) -> WriteOutcome:
        if number == UNNAMED:
            number = self._give_name(temp, final)
        if number == self.file_bytes:
            return Write.STORED
        if -number in diskio.NO_SPACE:
            return Write.FULL
        return self._failed(key, os.strerror(-number))

    def _give_name(self, temp: str, final: str) -> int:
        """Make the directory of `final` and rename `temp` to it; as `ChunkIo.write_files` says."""
        try:
            for _ in range(diskio.MAKING_TRIES_MAX):
                diskio.make_leaf(self._paths.root, os.path.dirname(final))
                with contextlib.suppress(FileNotFoundError):
                    os.rename(temp, final)
                    return self.file_bytes
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), final)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            return -(error.errno or errno.EIO)

    def _condemn(self, key: bytes, wrong: str) -> Failed:
        """Put the file of `key` out of reach: into quarantine while there is room, else away."""
        self.damage[frame.cause_of(wrong)] += 1
        path, target = self._paths.chunk(key), self._paths.condemned(key)
        try:
            diskio.make_private_dirs(self._paths.root, target.parent)
            os.rename(path, target)
            if len(os.listdir(target.parent)) > self._quarantined_max:
                target.unlink(missing_ok=True)
        except OSError:
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:
                reason = f"{wrong}, and {path} cannot be removed: {error.strerror}"
                return self._failed(key, reason)
        return Failed(DamagedChunk(self._name, key, f"{wrong}; {path} was taken out of use"))

    def _take(self, victim: Booked) -> tuple[str | None, Booked | None]:
        if victim.file_bytes == self.file_bytes:
            spare = f"{self._staging}/{temps.temp_name()}"
            with contextlib.suppress(OSError):
                os.rename(self._victim_path(victim), spare)
                return spare, None
        return None, victim if self.remove([victim]) else None

    def _victim_path(self, victim: Booked) -> str:
        return f"{self._root}/{victim.directory}/{place_of(victim.key)}"

    def _write(
        self,
        names: Sequence[str],
        finals: Sequence[str],
        headers: memoryview,
        payloads: Sequence[memoryview],
        reuse: Sequence[bool],
    ) -> list[int]:
        """`ChunkIo.write_files`; what found no staging directory, because a cleaner took it, is
        written again after making it, once."""
        write, direct = self._io.write_files, self._direct.writes
        numbers = write(names, finals, headers, payloads, reuse, direct, self._sync)
        again = [at for at, number in enumerate(numbers) if number == -errno.ENOENT]
        if not again:
            return numbers
        try:
            diskio.make_private_dirs(self._paths.root, self._paths.staging)
        except OSError:
            return numbers
        for at in again:
            page = headers[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]
            (numbers[at],) = write(
                [names[at]], [finals[at]], page, [payloads[at]], [False], direct, self._sync
            )
        return numbers

    def require_root(self) -> None:
        """OSError where the root or its file system is gone: what is there instead is the mount
        point's own directory, on some other disk, and is not to be written to."""
        root = self._paths.root
        if root.stat().st_dev != self._device:
            raise OSError(f"{root} is on another file system than at start; mount it again")

    def _failed(self, key: bytes, reason: str) -> Failed:
        return Failed(TierError(self._name, key, reason))

    def _not_a_key(self, key: bytes) -> Failed:
        return self._failed(key, why_not_a_key(key))
