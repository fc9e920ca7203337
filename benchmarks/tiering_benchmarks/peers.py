"""`tiering-bench tiers --tier p2p`: what it costs to get chunks from another engine of this host.

Goals: rows over TCP as a ratio to a bare loop of `recv_into` of the same size, and to NIXL in the
same run; rows through shared memory as a ratio to memcpy; the round trip of a lookup. Not a goal:
what a network adds. Sides take turns within a repeat; ratios are taken repeat by repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import orjson

from tiering.errors import ConfigError
from tiering_benchmarks import tiers_report as report
from tiering_benchmarks.control import Spread
from tiering_benchmarks.naming import named_sides
from tiering_benchmarks.peers_sides import (
    AGAINST,
    SHM,
    SIDES,
    TCP,
    Landing,
    control,
    lookup_keys,
    side,
    why_not,
)
from tiering_benchmarks.tiers_run import WrongAnswer

SIZES = "64KiB,256KiB,1MiB,4MiB"
"""Of a row."""
BYTES = "64MiB"
"""What a side moves in its turn."""
LOOKUP_KEYS = 1000
LOOKUPS = 100
AIMS = {TCP: (0.8, 256 << 10), SHM: (0.7, 0)}
"""The least ratio that is aimed at, from which size of rows on."""
LOOKUP_MILLISECONDS_MAX = 2.0

Figures = dict[str, list[float]]


async def speeds(row_bytes: int, limit_bytes: int, repeats: int, names: Sequence[str]) -> Figures:
    """GB/s of each side, for each repeat. WrongAnswer where a row is not what was served."""
    rows = max(1, limit_bytes // row_bytes)
    found: Figures = {name: [] for name in names}
    landing = Landing(rows, row_bytes)
    async with AsyncExitStack() as stack:
        sides = {
            name: await stack.enter_async_context(side(name, rows, row_bytes)) for name in names
        }
        for name in names:  # once, so that connections have grown and memory is touched
            landing.clear()
            await sides[name].move(landing)
            landing.require(name)
        for repeat in range(repeats):
            turn = repeat % len(names)
            for name in [*names[turn:], *names[:turn]]:
                start = time.perf_counter()
                await sides[name].move(landing)
                found[name].append(rows * row_bytes / (time.perf_counter() - start) / 1e9)
    return found


async def lookups(keys: int, repeats: int) -> list[float]:
    """Milliseconds of a lookup of `keys`, the median of LOOKUPS for each repeat."""
    asked = lookup_keys(keys)
    expected = bytes(key[-1] % 2 == 0 for key in asked)
    medians = []
    async with control(keys) as peer:
        for repeat in range(repeats + 1):
            times = []
            for _ in range(LOOKUPS):
                start = time.perf_counter()
                hits = await peer.lookup("bench", asked)
                times.append(1000 * (time.perf_counter() - start))
                if hits != expected:
                    raise WrongAnswer("a lookup's answer is not what is held")
            if repeat:
                medians.append(statistics.median(times))
    return medians


def ratios(found: Figures) -> Figures:
    """Of each side to what it is measured against, repeat by repeat."""
    return {
        name: [ours / theirs for ours, theirs in zip(found[name], found[other], strict=True)]
        for name, other in AGAINST.items()
        if name in found and other in found
    }


def table(sizes: dict[int, Figures]) -> str:
    """Median GB/s, and ratios with the lowest and highest, one line for each size and side."""
    lines = [f"{'row':>8} {'side':<9} {'GB/s':<18} {'of':<9} ratio"]
    for row_bytes, found in sizes.items():
        compared = ratios(found)
        for name, figures in found.items():
            line = f"{row_bytes >> 10:>4} KiB {name:<9} {Spread.of(figures).shown():<18}"
            if name in compared:
                line += f" {AGAINST[name]:<9} {Spread.of(compared[name]).shown()}"
            lines.append(line.rstrip())
    return "\n".join(lines)


def verdicts(sizes: dict[int, Figures], lookup: Sequence[float]) -> list[str]:
    """Which aims are met, by the medians."""
    told = []
    for name, (aim, from_bytes) in AIMS.items():
        medians = {
            row_bytes: statistics.median(compared[name])
            for row_bytes, found in sizes.items()
            if row_bytes >= from_bytes and name in (compared := ratios(found))
        }
        for row_bytes, ratio in medians.items():
            met = "met" if ratio >= aim else "missed"
            told.append(f"{met}: {name} at {row_bytes >> 10} KiB {ratio:.2f}, aim {aim}")
    median = statistics.median(lookup)
    met = "met" if median < LOOKUP_MILLISECONDS_MAX else "missed"
    aim_told = f"aim under {LOOKUP_MILLISECONDS_MAX:g} ms"
    told.append(f"{met}: a lookup of {LOOKUP_KEYS} keys {median:.2f} ms, {aim_told}")
    return told


def run(args: argparse.Namespace) -> int:
    """`tiering-bench tiers --tier p2p`, its options as they were given."""
    if find_spec("zmq") is None:
        told = "needs a package that is not installed: pyzmq"
        raise ConfigError("--tier", "p2p", told, "run pip install 'kv-tiering[p2p]'")
    args.sizes, args.bytes = args.sizes or SIZES, args.bytes or BYTES
    sizes = [report.size_bytes(text) for text in args.sizes.split(",")]
    limit_bytes = report.size_bytes(args.bytes)
    if not all(report.is_chunk_size(size) for size in sizes):
        told = "is no size of whole pages of 4 KiB"
        raise ConfigError("--sizes", args.sizes, told, "write some such as 64KiB,1MiB")
    if not limit_bytes:
        raise ConfigError("--bytes", args.bytes, "is no size", "write one such as 64MiB")
    if args.repeats < 1:
        raise ConfigError("--repeats", args.repeats, "measures nothing", "use 1 or more")
    wanted = named_sides(args.sides or None, SIDES)
    names = [name for name in wanted if why_not(name) is None]
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, ", end="")
    print(f"kernel {platform.release()}, Python {platform.python_version()}")
    for name in wanted:
        if (why := why_not(name)) is not None:
            print(f"{name} is not measured: {why}")
    try:
        found = {
            size: asyncio.run(speeds(size, limit_bytes, args.repeats, names))
            for size in sizes
            if size
        }
        lookup = asyncio.run(lookups(LOOKUP_KEYS, args.repeats))
    except WrongAnswer as error:
        print(f"tiering-bench: {error}", file=sys.stderr)
        return 1
    if args.json:
        whole = {"speeds": {str(size): each for size, each in found.items()}, "lookups_ms": lookup}
        Path(args.json).write_bytes(orjson.dumps(whole, option=orjson.OPT_INDENT_2))
    print(f"\n{args.bytes} a turn, {args.repeats} repeats: median [lowest highest]\n{table(found)}")
    print(f"\na lookup of {LOOKUP_KEYS} keys: {Spread.of(lookup).shown()} ms")
    print("\naims, by the medians")
    print("\n".join(verdicts(found, lookup)))
    return 0
