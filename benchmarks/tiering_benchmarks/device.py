"""The command `tiering-bench device`: how fast a device's copies are, in every way there is.

Goals: GB/s by fragment size, direction and way, as a share of one large pinned copy in the same
run; what a matrix product loses to copies beside it; how long after its event a coroutine goes on.
Not a goal: a server. Run as `python -m tiering_benchmarks.device` it needs numpy, torch and
cuda-bindings only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from tiering.errors import TieringError
from tiering_benchmarks.device_report import (
    aims,
    as_json,
    checked,
    latency_lines,
    table,
    wakeup_lines,
)
from tiering_benchmarks.device_run import KIB, SIZES, Bench, Plan, WrongBytes
from tiering_benchmarks.device_sides import Side, open_side
from tiering_benchmarks.device_wakeups import WAYS, measure

REAL = Plan(256 << 20, SIZES, repeats=5, products=40, futures=400, wakeups=400, seconds_max=180)
EMULATED = Plan(8 << 20, SIZES, repeats=1, products=1, futures=50, wakeups=200, seconds_max=60)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "device",
        help="copies between a CUDA device and pinned memory, by batch, loop and kernel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime",
        choices=("cuda", "fake"),
        default="cuda",
        help="fake: an emulated device, to see that the benchmark works; it has no speeds",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="begin no further size after so many seconds (default: 180)",
    )


def run(args: argparse.Namespace) -> int:
    """0: all aims are met, or on an emulated device all bytes were right; 1: not; 2: it could not
    be run."""
    plan = EMULATED if args.runtime == "fake" else REAL
    if args.seconds is not None:
        plan = replace(plan, seconds_max=args.seconds)
    try:
        side = open_side(args.runtime)
    except ImportError as error:
        print(f"tiering-bench: device: {error}; --runtime fake needs none of it", file=sys.stderr)
        return 2
    try:
        return _measure(side, plan, args.json)
    except WrongBytes as error:
        print(f"tiering-bench: device: {error}", file=sys.stderr)
        return 1
    finally:
        side.close()


def _measure(side: Side, plan: Plan, into: Path | None) -> int:
    machine = {
        "device": side.name,
        "runtime": repr(side.runtime) if side.is_real else "emulated",
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }
    print(f"{machine['device']}, {machine['runtime']}, {machine['cores']} cores")
    print(f"{plan.total_bytes >> 20} MiB a pass, fragments of {plan.sizes[0] // KIB} KiB and up")
    bench = Bench(side, plan)
    try:
        samples = bench.run()
    finally:
        bench.close()
    wakeups = {way: measure(way, plan.wakeups) for way in WAYS}
    told = [table(samples), latency_lines(samples)] if side.is_real else [checked(samples)]
    for line in chain(*told, wakeup_lines(wakeups)):
        print(line)
    for what in samples.left_out:
        print(f"left out: {what}")
    if into is not None:
        into.write_text(
            json.dumps(as_json(samples, wakeups, machine, side.is_real), indent=1) + "\n"
        )
        print(f"all samples: {into}")
    if not side.is_real:
        return 0
    judged = aims(samples)
    for aim in judged:
        verdict = {True: "met", False: "NOT MET", None: "open"}[aim.is_met]
        print(f"{verdict.ljust(8)}{aim.what}: {aim.found}")
    return 0 if all(aim.is_met is not False for aim in judged) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command by itself, on a machine where the other commands lack what they need."""
    parser = argparse.ArgumentParser(
        prog="python -m tiering_benchmarks.device", description=__doc__
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return run(args)
    except TieringError as error:
        print(f"tiering-bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
