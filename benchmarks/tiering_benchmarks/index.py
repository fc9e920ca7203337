"""The command `tiering-bench index`: what knowing about many chunks costs each layout.

Goals: seconds from a cold start until the first chunk is stored, and resident memory a chunk, in
a process that does nothing else. Not a goal: payloads. The index is put on the disk as the tier
would leave it, and no chunk's bytes are written: segments are only allocated, files are missing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import multiprocessing
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from tiering.errors import ConfigError
from tiering.keys import chunk_key
from tiering.layout import ALIGNMENT
from tiering.tiers.base import Tier, Write
from tiering.tiers.disk.diskio import Direct
from tiering.tiers.files.bookings import Booked
from tiering.tiers.files.manifest import Manifest
from tiering.tiers.segments.files import SegmentFiles
from tiering_benchmarks.control import Spread
from tiering_benchmarks.tiers import own_directory
from tiering_benchmarks.tiers_run import Plan, WrongAnswer, drop_cache
from tiering_benchmarks.tiers_sides import FILES, SEGMENTS, build_tier, namespace

LAYOUTS = (FILES, SEGMENTS)
CHUNKS_MAX = 1_000_000
_AT_ONCE = 4096
_FRAME_BYTES = 2 * ALIGNMENT
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Restart:
    """Until the first chunk is stored; memory is what the process has gained by then."""

    seconds: float
    cpu_seconds: float
    resident_bytes: int
    peak_bytes: int


def measure(layout: str, chunks: int, repeats: int, directory: Path) -> list[Restart]:
    """Restart over an index of `chunks`, each time in a process of its own; WrongAnswer where
    one does not find them. `directory` is left as it was."""
    root, empty = directory / layout, directory / f"{layout}-empty"
    try:
        for made in (root, empty):
            made.mkdir(mode=0o700)
            asyncio.run(_open_and_close(build_tier(layout, made, _plan(chunks))))
        (_fill_manifest if layout == FILES else _fill_table)(root, chunks)
        return [_in_a_process(layout, chunks, root, empty) for _ in range(repeats)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(empty, ignore_errors=True)


def _in_a_process(layout: str, chunks: int, root: Path, empty: Path) -> Restart:
    os.sync()
    drop_cache(root)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(restart, layout, chunks, root, empty).result()


def restart(layout: str, chunks: int, root: Path, empty: Path) -> Restart:
    """Open the tier in `root` and store a chunk; first one in `empty`, for the code's own memory
    and start. For a process of its own."""
    plan = _plan(chunks)

    async def first_stored(where: Path) -> tuple[Tier, float, float]:
        tier, row = build_tier(layout, where, plan), memoryview(bytearray(ALIGNMENT))
        start, cpu_start = time.perf_counter(), time.process_time()
        await tier.open()
        (outcome,) = await tier.write([_key(chunks + 1)], [row])
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        if outcome is not Write.STORED:
            raise WrongAnswer(f"{layout}: the first chunk after a restart: {outcome}")
        return tier, seconds, cpu_seconds

    async def leave(tier: Tier) -> None:
        """As it was, for the next restart."""
        await tier.delete([_key(chunks + 1)])
        await tier.close()

    async def both() -> Restart:
        other, _, _ = await first_stored(empty)
        await leave(other)
        gc.collect()
        resident, peak = _resident_bytes(), _peak_bytes()
        tier, seconds, cpu_seconds = await first_stored(root)
        gc.collect()
        gained, most = _resident_bytes() - resident, _peak_bytes() - peak
        found = tier.stats()["now_chunks"]
        await leave(tier)
        if found < chunks:
            raise WrongAnswer(f"{layout}: {found} of {chunks} chunks after a restart")
        return Restart(seconds, cpu_seconds, gained, max(most, gained))

    return asyncio.run(both())


def _plan(chunks: int) -> Plan:
    """For a tier that has room for `chunks` of the smallest size, and for some more."""
    return Plan(ALIGNMENT, chunks, batch=1, jobs=1, repeats=1)


async def _open_and_close(tier: Tier) -> None:
    await tier.open()
    await tier.close()


def _key(number: int) -> bytes:
    return chunk_key(hashlib.sha256(b"chunk %d" % number).digest())


def _stretches(chunks: int) -> Iterator[range]:
    for at in range(0, chunks, _AT_ONCE):
        yield range(at, min(at + _AT_ONCE, chunks))


def _fill_manifest(root: Path, chunks: int) -> None:
    """Book files that are not there; a sound manifest is believed."""
    (path,) = root.rglob("manifest.sqlite3")
    directory = f"{namespace(_plan(chunks)).directory}_r0"
    manifest = Manifest(path, "tiering-bench", time.monotonic())
    try:
        for span in _stretches(chunks):
            manifest.adopt(Booked(directory, _key(i), _FRAME_BYTES, i + 1) for i in span)
        manifest.leave()
    finally:
        manifest.close()


def _fill_table(root: Path, chunks: int) -> None:
    """Allocate slots, and say in the table that they hold chunks."""
    plan = _plan(chunks)
    whose = namespace(plan)
    directory = root / f"{whose.directory}_r0.segments"
    digest = whose.digest_of_rank(0)
    files = SegmentFiles(directory, digest, plan.chunk_bytes, plan.capacity_bytes, 0)
    try:
        files.take_lock()
        files.open(Direct(reads=False, writes=False))
        if files.needs_rebuild:
            files.rebuild([None] * files.n_slots)
        while files.n_slots < chunks:
            if not files.grow():
                raise WrongAnswer(f"segments: room for {files.n_slots} of {chunks} chunks only")
        for span in _stretches(chunks):
            files.set_records(span, [_key(i) for i in span], [i + 1 for i in span])
    finally:
        files.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _run(args: argparse.Namespace) -> int:
    if not 0 < args.chunks <= CHUNKS_MAX:
        reason = "is no number of chunks that this measures"
        raise ConfigError("--chunks", args.chunks, reason, f"use 1 to {CHUNKS_MAX}")
    if args.repeats < 1:
        raise ConfigError("--repeats", args.repeats, "measures nothing", "use 1 or more")
    need_bytes = _plan(args.chunks).capacity_bytes
    with own_directory(Path(args.dir or os.getcwd()), need_bytes) as directory:
        try:
            found = {
                layout: measure(layout, args.chunks, args.repeats, directory) for layout in LAYOUTS
            }
        except WrongAnswer as error:
            print(f"tiering-bench: {error}", file=sys.stderr)
            return 1
    if args.json:
        raw = {layout: [asdict(each) for each in restarts] for layout, restarts in found.items()}
        whole = {"chunks": args.chunks, "restarts": raw}
        Path(args.json).write_bytes(orjson.dumps(whole, option=orjson.OPT_INDENT_2))
    print(f"{args.chunks} chunks, {args.repeats} restarts: median [lowest highest]\n")
    titles = ("seconds to first store", "CPU seconds", "bytes a chunk", "at its peak")
    print(f"{'layout':<10}" + "".join(f" {title:<22}" for title in titles).rstrip())
    for layout, restarts in found.items():
        cells = (
            _shown([each.seconds for each in restarts], 2),
            _shown([each.cpu_seconds for each in restarts], 2),
            _shown([each.resident_bytes / args.chunks for each in restarts]),
            _shown([each.peak_bytes / args.chunks for each in restarts]),
        )
        print(f"{layout:<10}" + "".join(f" {cell:<22}" for cell in cells).rstrip())
    return 0


def _shown(figures: Sequence[float], digits: int = 0) -> str:
    return Spread.of(figures).shown(digits)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench index` to the command line."""
    parser = commands.add_parser(
        "index", help="restart time and memory of the disk tiers' indexes, without payloads"
    )
    parser.add_argument("--dir", help="write under a fresh directory in this one; default: here")
    parser.add_argument("--chunks", type=int, default=100_000, help="that the index knows")
    parser.add_argument("--repeats", type=int, default=3, help="restarts of each layout")
    parser.add_argument("--json", metavar="FILE", help="write the raw figures there, too")
    parser.set_defaults(run=_run)
