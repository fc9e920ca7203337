"""The command `tiering-bench tiers`: disk tiers against fio and vLLM's fs tier, in one run.

Goals: write, cold read, warm read and exists of each chunk size, as ratios to the disk's limit and
to vLLM's tier, with CPU time. Not a goal: what lies above a tier. Owns the command line, and the
directory that all is written under: bounded before it starts, removed however it ends. What is
measured is in `tiers_run`, by whom in `tiers_sides`, what it means in `tiers_report`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from tiering.errors import ConfigError
from tiering_benchmarks import objects, peers
from tiering_benchmarks import tiers_report as report
from tiering_benchmarks.naming import named_sides
from tiering_benchmarks.tiers_report import Sized
from tiering_benchmarks.tiers_run import (
    Plan,
    Region,
    Side,
    SideMissing,
    WrongAnswer,
    exists_keys,
    measure,
)
from tiering_benchmarks.tiers_sides import FIO, SIDES, VLLM, open_side

SIZES, BYTES = "64KiB,256KiB,1MiB,4MiB", "512MiB"
_FREE_FACTOR = 3
# As the engine hands them out: not more than 64 chunks to a step.
BATCH_BYTES, BATCH_MIN, BATCH_MAX = 16 << 20, 4, 64


@dataclass(slots=True)
class Found:
    """Of a run: its sizes, how each side was set up, and why others are missing."""

    sizes: list[Sized] = field(default_factory=list)
    sides: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def run(plans: Sequence[Plan], names: Sequence[str], directory: Path) -> Found:
    """Measure each plan under `directory`, which is left empty. Tells stderr how far it is."""
    found, start = Found(), time.monotonic()
    for plan in plans:
        size = report.size_name(plan.chunk_bytes)

        def tell(what: str, size: str = size) -> None:
            seconds = time.monotonic() - start
            print(f"[{seconds:4.0f} s] {size}: {what}", file=sys.stderr, flush=True)

        with _sides(plan, names, directory, found) as (sides, region):
            samples = measure(plan, sides, region, tell)
        sized = Sized(plan.chunk_bytes, plan.payload_bytes, exists_keys(plan), samples)
        found.sizes.append(sized)
    return found


@contextmanager
def _sides(
    plan: Plan, names: Sequence[str], directory: Path, found: Found
) -> Iterator[tuple[list[Side], Region]]:
    """Those of `names` that can be had, open, in a directory each; ConfigError if none can."""
    region = Region(plan)
    with ExitStack() as stack:
        sides: list[Side] = []
        for name in names:
            own = directory / name
            own.mkdir(mode=0o700)
            # Entered first, so that a side is closed before its files go.
            stack.callback(_remove, own)
            try:
                side = open_side(name, own, plan, region)
            except SideMissing as error:
                found.missing[name] = str(error)
                continue
            stack.callback(side.close)
            found.sides[name] = side.about()
            sides.append(side)
        if not sides:
            told = "; ".join(found.missing.values())
            raise ConfigError("--sides", ",".join(names), told, "name another side")
        yield sides, region


def needed_bytes(plan: Plan, names: Sequence[str]) -> int:
    """The most that lies on the disk at a time."""
    return sum(
        plan.capacity_bytes if name not in (VLLM, FIO) else plan.payload_bytes for name in names
    )


@contextmanager
def own_directory(parent: Path, need_bytes: int) -> Iterator[Path]:
    """A fresh directory in `parent`, gone afterwards; ConfigError where there is too little room
    for what is written, and for whoever else writes there meanwhile."""
    try:
        free_bytes = shutil.disk_usage(parent).free
        made = Path(tempfile.mkdtemp(prefix="tiering-bench-", dir=parent))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("--dir", str(parent), reason, "name a writable directory") from None
    try:
        if free_bytes < _FREE_FACTOR * need_bytes:
            reason = (
                f"{free_bytes >> 20} MiB are free, and {_FREE_FACTOR} times the "
                f"{need_bytes >> 20} MiB that it writes are wanted"
            )
            raise ConfigError("--dir", str(parent), reason, "give another, or fewer --bytes")
        yield made
    finally:
        _remove(made)


def _remove(directory: Path) -> None:
    """With all that is in it, and not to be interrupted in that."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        shutil.rmtree(directory)
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _plans(args: argparse.Namespace) -> list[Plan]:
    limit_bytes = report.size_bytes(args.bytes)
    if limit_bytes is None:
        raise ConfigError("--bytes", args.bytes, "is no size", "write one such as 512MiB")
    for name in ("batch", "jobs", "repeats"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name}", getattr(args, name), "measures nothing", "use 1 or more")
    plans = []
    for text in args.sizes.split(","):
        size = report.size_bytes(text)
        if size is None or not report.is_chunk_size(size):
            told = "is no size of whole pages of 4 KiB"
            raise ConfigError("--sizes", text, told, "write some such as 64KiB,1MiB")
        batch = args.batch or max(BATCH_MIN, min(BATCH_MAX, BATCH_BYTES // size))
        plans.append(Plan.within(limit_bytes, size, batch, args.jobs, args.repeats))
    return plans


def _run(args: argparse.Namespace) -> int:
    if args.tier == "obj":
        with own_directory(Path(args.dir or os.getcwd()), 0) as directory:
            try:
                return objects.run(args, directory)
            except WrongAnswer as error:
                print(f"tiering-bench: {error}", file=sys.stderr)
                return 1
    if args.tier == "p2p":
        return peers.run(args)
    return _run_disks(args)


def _run_disks(args: argparse.Namespace) -> int:
    args.sizes, args.bytes = args.sizes or SIZES, args.bytes or BYTES
    plans, names = _plans(args), named_sides(args.sides or None, SIDES)
    need_bytes = max(needed_bytes(plan, names) for plan in plans)
    with own_directory(Path(args.dir or os.getcwd()), need_bytes) as directory:
        machine = report.machine(directory)
        try:
            found = run(plans, names, directory)
        except WrongAnswer as error:
            print(f"tiering-bench: {error}", file=sys.stderr)
            return 1
    verdicts = report.verdicts(found.sizes)
    if args.json:
        everything = {
            "machine": machine,
            "plans": plans,
            "sides": found.sides,
            "missing": found.missing,
            "sizes": report.raw(found.sizes),
            "aims": verdicts,
        }
        Path(args.json).write_bytes(orjson.dumps(everything, option=orjson.OPT_INDENT_2))
    for facts in (machine, found.sides):
        for name, fact in facts.items():
            print(f"{name:<12} {fact}")
    for name, reason in found.missing.items():
        print(f"{name:<12} not measured: {reason}")
    batch = f"{args.batch}" if args.batch else f"16 MiB in {BATCH_MIN} to {BATCH_MAX}"
    print(
        f"\nup to {args.bytes} a pass, batches of {batch} chunks, {args.jobs} at once, "
        f"{args.repeats} repeats: median [lowest highest]; ratios repeat by repeat"
    )
    for sized in found.sizes:
        print(f"\n{report.table(sized)}")
    print("\naims, by the medians")
    print("\n".join(verdicts))
    return 0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench tiers` to the command line."""
    parser = commands.add_parser(
        "tiers",
        help="speed and CPU time of the disk tiers, against fio and vLLM's fs tier, of the object "
        "tier's client, against obstore and boto3, or speed of chunks from another engine, against "
        "a bare loop, memcpy and NIXL",
    )
    parser.add_argument("--tier", choices=("disk", "obj", "p2p"), default="disk", help="which kind")
    parser.add_argument("--dir", help="write under a fresh directory in this one; default: here")
    parser.add_argument(
        "--sizes",
        help=f"of a chunk; default: {SIZES}, of obj {objects.SIZES}, of p2p {peers.SIZES}",
    )
    parser.add_argument(
        "--bytes",
        help=f"most that a pass of a side moves; default: {BYTES}, of obj {objects.BYTES}, of p2p "
        f"{peers.BYTES}",
    )
    parser.add_argument(
        "--batch",
        type=int,
        help=f"chunks in a batch or job; default: 16 MiB of them, {BATCH_MIN} to {BATCH_MAX}",
    )
    parser.add_argument("--jobs", type=int, default=4, help="batches under way at once")
    parser.add_argument("--repeats", type=int, default=5, help="of each thing")
    parser.add_argument("--sides", help="which to measure; default: all")
    parser.add_argument("--concurrent", default="1,16", help="of obj: requests at once")
    parser.add_argument("--endpoint", help="of obj: a server; default: rclone, started for this")
    parser.add_argument("--bucket", default="bench", help="of obj: one of that server, to write to")
    parser.add_argument("--region", default="us-east-1", help="of obj: of that bucket")
    parser.add_argument("--json", metavar="FILE", help="write the raw figures there, too")
    parser.set_defaults(run=_run)
