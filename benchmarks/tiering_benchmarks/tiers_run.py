"""What `tiering-bench tiers` measures: the same passes over the same memory on every side.

A pass moves every chunk once, in batches of which `jobs` are under way at a time. Sides take
turns within a repeat and the order rotates, so that a disk that drifts meets all of them. Names
keep their first three bytes from pass to pass: every directory a name can ask for is there
after the first, as in a cache that has run for long. What is read is compared, outside the time.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import mmap
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from tiering.errors import ConfigError, TieringError
from tiering.keys import chunk_key
from tiering.layout import ALIGNMENT, aligned

WRITE, COLD, WARM, EXISTS = "write", "cold read", "warm read", "exists"
OPERATIONS = (WRITE, COLD, WARM, EXISTS)

CHUNKS_MAX = 4096
"""Of a pass: of small chunks fewer bytes tell as much, and a run takes minutes, not an hour."""
EXISTS_KEYS = 64
_EXISTS_BATCHES_MAX = 64
# Of each chunk, for directories that it may have to itself, and for indexes.
_BOOKS_BYTES = 2 * ALIGNMENT + 256
_NOWHERE = -1
_PLACE_BYTES = 3
_PIECE_BYTES = 1 << 20
_SEED = 3


class WrongAnswer(TieringError):
    """A side did not do, or not rightly, what was measured: its figures mean nothing."""


class SideMissing(TieringError):
    """A side that cannot be measured here: why, and how to get it."""


class Cost(NamedTuple):
    """Of one pass: wall time, and CPU time of the whole process, in user and system mode."""

    seconds: float
    cpu_seconds: float


class Batch(NamedTuple):
    """Keys, and for each the number of its row in the region."""

    keys: list[bytes]
    rows: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One chunk size's work: `chunks` a pass, in batches of `batch`, `jobs` of them at once."""

    chunk_bytes: int
    chunks: int
    batch: int
    jobs: int
    repeats: int

    @classmethod
    def within(
        cls, limit_bytes: int, chunk_bytes: int, batch: int, jobs: int, repeats: int
    ) -> Plan:
        """As many rounds of `jobs` batches as fit in `limit_bytes`, and in CHUNKS_MAX if more than
        one does; ConfigError if none does."""
        at_once = batch * jobs
        rounds = limit_bytes // (at_once * chunk_bytes)
        if rounds < 1:
            need = at_once * chunk_bytes
            reason = f"{jobs} batches of {batch} chunks of {chunk_bytes} bytes are more"
            remedy = f"give at least {need}, or smaller --sizes, --batch or --jobs"
            raise ConfigError("--bytes", limit_bytes, reason, remedy)
        rounds = min(rounds, max(1, CHUNKS_MAX // at_once))
        return cls(chunk_bytes, rounds * at_once, batch, jobs, repeats)

    @property
    def payload_bytes(self) -> int:
        """Moved by one pass."""
        return self.chunks * self.chunk_bytes

    @property
    def capacity_bytes(self) -> int:
        """Of a tier that keeps one pass whole while it writes it, and little more: what comes in
        and what it replaces both take room for a while."""
        chunks = self.chunks + self.chunks // 4 + 3 * self.batch * self.jobs
        return chunks * (self._frame_bytes + _BOOKS_BYTES) + (1 << 16)

    @property
    def held_max(self) -> int:
        """More chunks than this do not fit in `capacity_bytes`, whatever keeps them."""
        return self.capacity_bytes // self._frame_bytes

    @property
    def _frame_bytes(self) -> int:
        return aligned(self.chunk_bytes) + ALIGNMENT

    @property
    def passes_to_fill(self) -> int:
        return -(-self.held_max // self.chunks)

    def batches(self, keys: Sequence[bytes], rows: Sequence[int]) -> list[Batch]:
        return [
            Batch(list(keys[at : at + self.batch]), list(rows[at : at + self.batch]))
            for at in range(0, len(keys), self.batch)
        ]

    def keys(self, generation: int) -> list[bytes]:
        """The names of one pass; no two passes share one."""
        return [_key(i, generation) for i in range(self.chunks)]


def _key(number: int, generation: int) -> bytes:
    place = hashlib.sha256(b"place %d" % number).digest()
    name = hashlib.sha256(b"%d of %d" % (number, generation)).digest()
    return chunk_key(place[:_PLACE_BYTES] + name[_PLACE_BYTES:])


class Region:
    """Rows of one mapping, as in the host tier: `chunks` that are written, all random bytes, then
    as many to read into. Row `chunks + i` is for what was written from row `i`."""

    def __init__(self, plan: Plan) -> None:
        size = 2 * plan.payload_bytes
        self._half = plan.payload_bytes
        memory = memoryview(mmap.mmap(-1, size))
        self._bytes = np.frombuffer(memory, np.uint8)
        chance = random.Random(_SEED)
        for at in range(0, self._half, _PIECE_BYTES):
            count = min(_PIECE_BYTES, self._half - at)
            self._bytes[at : at + count] = np.frombuffer(chance.randbytes(count), np.uint8)
        # Every page exists before anything is timed.
        self.clear()
        self.view = memory.cast("B", (2 * plan.chunks, plan.chunk_bytes))
        self.rows = [memory[at : at + plan.chunk_bytes] for at in range(0, size, plan.chunk_bytes)]

    def clear(self) -> None:
        """Forget what was read."""
        self._bytes[self._half :] = 0

    def is_read_back(self) -> bool:
        written, read = self._bytes[: self._half], self._bytes[self._half :]
        # A piece at a time: the comparison of all at once would fill as much memory again.
        return all(
            np.array_equal(written[at : at + _PIECE_BYTES], read[at : at + _PIECE_BYTES])
            for at in range(0, self._half, _PIECE_BYTES)
        )


class Side(Protocol):
    """A way to keep chunks in files under a directory of its own, open from its making on."""

    name: str
    directory: Path
    passes_to_fill: int
    """How many passes bring it to where each write replaces something."""
    keeps_bytes: bool
    """Whether what is read is what was written; False for who moves bytes of its own."""

    def about(self) -> str:
        """How it is set up, for people."""

    def write(self, batches: Sequence[Batch]) -> Cost: ...

    def read(self, batches: Sequence[Batch]) -> Cost: ...

    def exists(self, batches: Sequence[Sequence[bytes]], expected: Sequence[bool]) -> Cost | None:
        """Batch after batch; each is answered by `expected`. None: has no such thing."""

    def make_room(self) -> None:
        """For another pass. Not measured; nothing to do for who evicts by itself."""

    def close(self) -> None: ...


Samples = dict[str, dict[str, list[Cost]]]
"""By operation, then by the side's name: one cost a repeat."""


def timed(work: Callable[[], None]) -> Cost:
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Cost(seconds, cpu)


def measure(
    plan: Plan, sides: Sequence[Side], region: Region, tell: Callable[[str], None]
) -> Samples:
    """Every operation on every side, `plan.repeats` times. WrongAnswer where a side fails."""
    run = _Run(plan, region)
    for side in sides:
        if side.passes_to_fill:
            tell(f"filling {side.name}")
        for generation in range(side.passes_to_fill):
            run.write(side, generation)
    # As a server does once it has started; else each collection walks all that was imported.
    gc.collect()
    gc.freeze()
    try:
        return _rounds(run, plan, sides, tell)
    finally:
        gc.unfreeze()


def _rounds(run: _Run, plan: Plan, sides: Sequence[Side], tell: Callable[[str], None]) -> Samples:
    samples: Samples = {operation: {} for operation in OPERATIONS}

    def note(operation: str, side: Side, cost: Cost | None) -> None:
        if cost is not None:
            samples[operation].setdefault(side.name, []).append(cost)

    for repeat in range(plan.repeats):
        tell(f"repeat {repeat + 1} of {plan.repeats}")
        at = repeat % len(sides)
        turns = [*sides[at:], *sides[:at]]
        generation = plan.passes_to_fill + repeat
        for side in turns:
            note(WRITE, side, run.write(side, generation))
        # Only what is on the disk can be dropped from the cache.
        os.sync()
        for side in turns:
            drop_cache(side.directory)
            note(COLD, side, run.read(side, generation))
            note(WARM, side, run.read(side, generation))
        for side in turns:
            note(EXISTS, side, run.exists(side, generation))
    return samples


class _Run:
    """The passes; whatever is not the side's own work is done before and after its time."""

    def __init__(self, plan: Plan, region: Region) -> None:
        self._plan = plan
        self._region = region

    def write(self, side: Side, generation: int) -> Cost:
        side.make_room()
        # What others, or the removal, left to the journal is not this pass's.
        os.sync()
        keys = self._plan.keys(generation)
        return side.write(self._plan.batches(keys, range(len(keys))))

    def read(self, side: Side, generation: int) -> Cost:
        """All chunks of the last pass, in random order."""
        plan = self._plan
        order = random.Random(generation).sample(range(plan.chunks), plan.chunks)
        keys = plan.keys(generation)
        batches = plan.batches([keys[i] for i in order], [plan.chunks + i for i in order])
        self._region.clear()
        cost = side.read(batches)
        if side.keeps_bytes and not self._region.is_read_back():
            raise WrongAnswer(f"{side.name} read other bytes than it had been given")
        return cost

    def exists(self, side: Side, generation: int) -> Cost | None:
        """Keys that are there and keys that are not, in turn."""
        there = self._plan.keys(generation)
        absent = self._plan.keys(_NOWHERE)
        mixed = [key for pair in zip(there, absent, strict=True) for key in pair]
        mixed = mixed[: EXISTS_KEYS * _EXISTS_BATCHES_MAX]
        batches = [mixed[at : at + EXISTS_KEYS] for at in range(0, len(mixed), EXISTS_KEYS)]
        return side.exists(batches, [True, False] * (EXISTS_KEYS // 2))


def exists_keys(plan: Plan) -> int:
    """How many keys one pass of `exists` asks for."""
    return min(2 * plan.chunks, EXISTS_KEYS * _EXISTS_BATCHES_MAX)


def drop_cache(directory: Path) -> None:
    """Let the kernel forget the content of the files under `directory`; not their names."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
