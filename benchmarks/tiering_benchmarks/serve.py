"""The command `tiering-bench serve`: what a server gains and pays, end to end.

Goals: time to the first token, throughput and CPU time of a real `vllm serve` under load, with our
connector, with vLLM's own and with none, as ratios within one run: on prefixes that do not fit in
device memory, on a trace of sessions that come back, and, for what it costs, on prompts that never
repeat. Not a goal: absolute times, and how fast a device computes. Owns the command line and the
directory that all is written under. The load is in `serve_load`, the sides in `serve_sides`, a run
in `serve_run`, what it means in `serve_report`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import orjson

from tiering.errors import ConfigError
from tiering_benchmarks import serve_report as report
from tiering_benchmarks.models import SIZES, make_model
from tiering_benchmarks.naming import named_sides
from tiering_benchmarks.serve_load import (
    PREFIX,
    REQUESTS,
    REQUESTS_MIN,
    TAX,
    TRACE,
    Load,
    prefix_load,
    tax_load,
    trace_load,
)
from tiering_benchmarks.serve_run import Setup, measure
from tiering_benchmarks.serve_sides import SIDES, Memory, Side
from tiering_benchmarks.tiers import own_directory
from tiering_benchmarks.tiers_report import machine
from tiering_benchmarks.tiers_run import WrongAnswer

MODEL_BYTES = 512 << 20
"""More than any model that is made here takes on the disk."""


def _load(args: argparse.Namespace) -> Load:
    requests = REQUESTS[args.workload] if args.requests is None else args.requests
    if args.workload == PREFIX:
        return prefix_load(requests, args.concurrency)
    if args.workload == TAX:
        return tax_load(requests, args.concurrency)
    return trace_load(requests, args.interval, args.trace, args.trace_block)


def _checked(args: argparse.Namespace) -> list[Side]:
    """The sides; ConfigError for what measures nothing."""
    for name, least in (("repeats", 1), ("concurrency", 1), ("requests", REQUESTS_MIN)):
        given = getattr(args, name)
        if given is not None and given < least:
            raise ConfigError(f"--{name}", given, "measures nothing", f"use {least} or more")
    for name in ("interval", "minutes", "trace_block"):
        if not getattr(args, name) > 0:
            path = f"--{name.replace('_', '-')}"
            raise ConfigError(path, getattr(args, name), "is no span", "use more than 0")
    if args.trace is not None and args.workload != TRACE:
        raise ConfigError(
            "--trace",
            str(args.trace),
            f"is not asked by {args.workload}",
            "leave it out, or give --workload trace",
        )
    return [SIDES[name] for name in named_sides(args.sides, SIDES)]


def _run(args: argparse.Namespace) -> int:
    sides = _checked(args)
    load = _load(args)
    memory = Memory.of(load, SIZES[args.model].kv_bytes_per_token)
    # What a run leaves on the disk, never more than its host memory, is gone before the next.
    need_bytes = MODEL_BYTES + memory.host_bytes
    with own_directory(Path(args.dir or os.getcwd()), need_bytes) as directory:
        facts = {
            **machine(directory),
            "load": load.about,
            "model": f"{args.model}, float32",
            "memory": str(memory),
        }
        for name, fact in facts.items():
            print(f"{name:<12} {fact}")
        start = time.monotonic()

        def tell(what: str) -> None:
            print(f"[{time.monotonic() - start:5.0f} s] {what}", file=sys.stderr, flush=True)

        tell("making the model")
        setup = Setup(make_model(directory, args.model), load, memory, directory)
        try:
            samples = measure(sides, setup.run, args.repeats, args.minutes * 60, tell)
        except WrongAnswer as error:
            print(f"tiering-bench: {error}", file=sys.stderr)
            return 1
    repeats = len(samples[sides[0].name])
    if args.json:
        everything = {
            "machine": facts,
            "workload": args.workload,
            "requests": load.requests,
            "arguments": load.arguments,
            "memory": asdict(memory),
            "repeats": repeats,
            "sides": report.raw(samples),
        }
        Path(args.json).write_bytes(orjson.dumps(everything, option=orjson.OPT_INDENT_2))
    print(f"\n{args.workload}, {repeats} repeats of {args.repeats}: medians, times in seconds")
    print(report.figures(samples))
    print("\nratios, repeat by repeat: median [lowest highest]")
    print(report.ratios(samples))
    return 0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench serve` to the command line."""
    parser = commands.add_parser(
        "serve", help="what a real vLLM gains and pays: our connector, vLLM's own and none"
    )
    parser.add_argument("--workload", choices=list(REQUESTS), default=PREFIX)
    parser.add_argument("--sides", default=",".join(SIDES), help="which to measure")
    parser.add_argument("--model", choices=sorted(SIZES), default="demo", help="what is served")
    parser.add_argument("--repeats", type=int, default=3, help="of each side, on a new server each")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no repeat after so many"
    )
    requests = ", ".join(f"{name} {count}" for name, count in REQUESTS.items())
    parser.add_argument("--requests", type=int, help=f"in a run; default: {requests}")
    parser.add_argument(
        "--concurrency", type=int, default=1, help="requests at a time, not of trace"
    )
    parser.add_argument(
        "--interval", type=float, default=4.0, help="mean seconds between two requests of trace"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="a recorded one, in Mooncake's form; also .zst"
    )
    parser.add_argument(
        "--trace-block", type=int, default=512, help="tokens of a block of the recorded trace"
    )
    parser.add_argument("--dir", help="write under a fresh directory in this one; default: here")
    parser.add_argument("--json", metavar="FILE", help="write the raw figures there, too")
    parser.set_defaults(run=_run)
