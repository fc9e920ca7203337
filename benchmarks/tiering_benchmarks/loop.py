"""The command `tiering-bench loop`: what busy tiers cost a scheduler's steps.

Goals: the latency of a step, median, 99th percentile and worst, with the tiers' loop in a thread
and in a process, in turns, as ratios within each repeat; with what it moved meanwhile and for how
much CPU time. Beside them `none`, the same steps with nothing to hand out. Not a goal: the core,
the same for both (`tiering-bench control`), and how fast a tier is (`tiering-bench tiers`).

A step is `--work-us` of Python that holds the interpreter lock, as vLLM's scheduler does, and a
turn of the portal; then the thread lets go of the lock for `--gap-us`, as while a device computes.
What a step takes beyond that gap is its latency: waiting for the lock is in it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tiering.config import ConnectorConfig, load_json, parse
from tiering.errors import ConfigError
from tiering.layout import RowLayout
from tiering.portal import OwnLoopPortal, ThreadPortal
from tiering.process.portal import ProcessPortal
from tiering.residency.plan import Cascade, Outcome, Promote, Step, Verdict
from tiering.tiers.host import Region, region_name
from tiering.wiring import build_tiers
from tiering_benchmarks import tiers_report as report
from tiering_benchmarks.control import Spread
from tiering_benchmarks.naming import named_sides
from tiering_benchmarks.objects import rclone
from tiering_benchmarks.serve_run import cpu_seconds
from tiering_benchmarks.tiers import own_directory
from tiering_benchmarks.tiers_run import Plan, WrongAnswer
from tiering_benchmarks.tiers_sides import namespace

NONE, THREAD, PROCESS = "none", "thread", "process"
OBJ = "obj"
LOOPS = (NONE, THREAD, PROCESS)

DEADLINE_SECONDS = 120.0
SHARE_RIGHT = 0.98
"""Of what is asked of the tier: what it misses or refuses costs less than what it does."""

_MB = 1e6
# What is read may be there from the side before.
_RIGHT = (Verdict.HIT, Verdict.STORED, Verdict.ALREADY_THERE)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a run: `steps` of a side in each of `repeats`, and what is under way in them: `out`
    steps of `batch` chunks."""

    steps: int = 1000
    repeats: int = 5
    work_us: int = 2000
    gap_us: int = 3000
    chunk_bytes: int = 256 << 10
    batch: int = 16
    out: int = 8

    def __post_init__(self) -> None:
        least = {"steps": 100, "repeats": 1, "work_us": 1, "gap_us": 0, "batch": 1, "out": 2}
        for name, fewest in least.items():
            if getattr(self, name) < fewest:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(flag, getattr(self, name), "is too few", f"use {fewest} or more")

    @property
    def plan(self) -> Plan:
        """A pass is what is read again and again."""
        return Plan(self.chunk_bytes, 8 * self.batch * self.out, self.batch, self.out, self.repeats)


QUICK = Sizes(steps=100, repeats=1, work_us=100, gap_us=200, chunk_bytes=64 << 10, batch=4, out=4)


@dataclass(frozen=True, slots=True)
class Sample:
    """One side in one repeat. Microseconds of a step; bytes, and seconds of CPU of all threads and
    processes, in the `seconds` that it took."""

    p50: float
    p99: float
    worst: float
    moved_bytes: int
    cpu_seconds: float
    seconds: float


class Traffic:
    """Steps that keep a tier busy: half of them read what it holds, half write what is new."""

    def __init__(self, portal: OwnLoopPortal, plan: Plan) -> None:
        self.moved = 0
        self._wrong = 0
        self._portal = portal
        self._batch = plan.batch
        slots = range(plan.batch * plan.jobs)
        self._free = [tuple(slots[at : at + plan.batch]) for at in slots[:: plan.batch]]
        self._slots: dict[int, tuple[int, ...]] = {}
        self._ids = 0
        self._kept = [tuple(batch.keys) for batch in plan.batches(plan.keys(0), range(plan.chunks))]
        self._fresh = self._new_keys(plan)
        for keys in self._kept:
            while not self._free:
                self._settle()
            self._submit([self._cascade(keys)])
        self.finish()
        self.moved = 0

    @staticmethod
    def _new_keys(plan: Plan) -> Iterator[tuple[bytes, ...]]:
        generation = int.from_bytes(os.urandom(4), "big")
        while True:
            generation += 1
            for batch in plan.batches(plan.keys(generation), range(plan.chunks)):
                yield tuple(batch.keys)

    def turn(self) -> None:
        """What the scheduler's thread does about its tiers in a step."""
        self._settle()
        steps: list[Step] = []
        while self._free:
            number = self._ids + 1
            if number % 2:
                keys = self._kept[number // 2 % len(self._kept)]
                steps.append(self._promote(keys))
            else:
                steps.append(self._cascade(next(self._fresh)))
        self._submit(steps)

    def finish(self) -> None:
        """Wait for what is under way; WrongAnswer if the tier did not do what it was asked."""
        give_up = time.monotonic() + DEADLINE_SECONDS
        while self._slots:
            if time.monotonic() > give_up:
                raise WrongAnswer(f"{len(self._slots)} steps did not end: {self._portal!r}")
            self._settle()
            time.sleep(0.001)
        if self._wrong > (1 - SHARE_RIGHT) * (self.moved + self._wrong):
            raise WrongAnswer(f"{self._wrong} chunks were missed or refused, {self.moved} moved")

    def _settle(self) -> None:
        for each in self._portal.drain():
            if isinstance(each, Outcome) and each.final:
                self._free.append(self._slots.pop(each.id))
                right = sum(map(each.verdicts.count, _RIGHT))
                self.moved += right
                self._wrong += len(each.verdicts) - right

    def _submit(self, steps: Sequence[Step]) -> None:
        self._portal.submit(steps)

    def _cascade(self, keys: tuple[bytes, ...]) -> Cascade:
        return Cascade(self._next(), 0, keys, self._slots[self._ids])

    def _promote(self, keys: tuple[bytes, ...]) -> Promote:
        return Promote(self._next(), 0, keys, self._slots[self._ids], DEADLINE_SECONDS)

    def _next(self) -> int:
        self._ids += 1
        self._slots[self._ids] = self._free.pop()
        return self._ids


def work(rounds: int) -> int:
    """Python that holds the lock, and makes and drops objects as a scheduler does."""
    requests: dict[int, list[int]] = {}
    for number in range(rounds):
        requests.setdefault(number % 64, []).append(number)
        if number % 64 == 63:
            requests = {at: blocks[-8:] for at, blocks in requests.items()}
    return len(requests)


def rounds_of(work_us: int) -> int:
    """How many rounds of `work` take so long, alone, at their fastest."""
    rounds = 2000
    begun, fastest = 0.0, float("inf")
    for _ in range(50):
        begun = time.perf_counter()
        work(rounds)
        fastest = min(fastest, time.perf_counter() - begun)
    return max(1, round(rounds * work_us / 1e6 / fastest))


@contextmanager
def opened(name: str, entry: dict[str, Any], plan: Plan) -> Iterator[Callable[[], int] | None]:
    """The turn of a step with that loop, which gives the chunks moved so far; None for none."""
    if name == NONE:
        yield None
        return
    row = RowLayout(plan.chunk_bytes)
    rows = plan.batch * plan.jobs
    settings = {"cpu_bytes_to_use": (rows + 1) * row.row_bytes, "secondary_tiers": [entry]}
    config = parse(ConnectorConfig, settings)
    with Region.open(
        region_name(f"bench {os.getpid()} {time.monotonic_ns()}"), row, config.cpu_bytes_to_use
    ) as region:
        region.unlink()
        region.rows_view()[:] = np.random.default_rng(1).integers(0, 256, row.row_bytes, np.uint8)
        portal: OwnLoopPortal
        if name == PROCESS:
            portal = ProcessPortal(config, namespace(plan), region)
        else:
            tiers = build_tiers(config, namespace(plan), row.row_bytes)
            portal = ThreadPortal(tiers, region.row)
        portal.start()
        try:
            traffic = Traffic(portal, plan)

            def turn() -> int:
                traffic.turn()
                return traffic.moved

            yield turn
            traffic.finish()
        finally:
            portal.close(DEADLINE_SECONDS)


def measure(name: str, entry: dict[str, Any], sizes: Sizes, rounds: int) -> Sample:
    """A side, from its start to its end. The first tenth of the steps is not measured."""
    latencies: list[float] = []
    pids: list[int] = []
    others = set(_children())
    gap = sizes.gap_us / 1e6
    cpu = 0.0
    with opened(name, entry, sizes.plan) as turn:
        before = moved = 0
        for number in range(-(sizes.steps // 10), sizes.steps):
            if number == 0:
                # A store that was started is another machine's in earnest.
                pids = [os.getpid(), *(set(_children()) - others)]
                before, cpu, start = moved, cpu_seconds(pids), time.perf_counter()
            begun = time.perf_counter()
            time.sleep(gap)
            work(rounds)
            if turn is not None:
                moved = turn()
            if number >= 0:
                latencies.append((time.perf_counter() - begun - gap) * 1e6)
        seconds = time.perf_counter() - start
        cpu = cpu_seconds(pids) - cpu
    latencies.sort()
    return Sample(
        latencies[len(latencies) // 2],
        latencies[len(latencies) * 99 // 100],
        latencies[-1],
        (moved - before) * sizes.chunk_bytes,
        cpu,
        seconds,
    )


def _children() -> list[int]:
    """The pids of this process's own children."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing, by side, and how many times that of the thread the process's is."""

    name: str
    sides: dict[str, Spread]
    ratio: Spread | None


THINGS: dict[str, Callable[[Sample], float]] = {
    "step p50, us": lambda sample: sample.p50,
    "step p99, us": lambda sample: sample.p99,
    "step worst, us": lambda sample: sample.worst,
    "moved, MB/s": lambda sample: sample.moved_bytes / _MB / sample.seconds,
    "CPU of all, s/s": lambda sample: sample.cpu_seconds / sample.seconds,
}


def rows(samples: Sequence[dict[str, Sample]]) -> list[Row]:
    """Of each thing, by the repeats."""
    found = []
    for name, of in THINGS.items():
        sides = {side: Spread.of([of(each[side]) for each in samples]) for side in samples[0]}
        ratio = None
        if {THREAD, PROCESS} <= samples[0].keys():
            ratio = Spread.of([of(each[PROCESS]) / of(each[THREAD]) for each in samples])
        found.append(Row(name, sides, ratio))
    return found


def table(found: Sequence[Row]) -> str:
    """Lines of text; a median, and its lowest and highest in brackets."""
    sides = list(found[0].sides)
    lines = [f"{'':<16}" + "".join(f"{side:<26}" for side in sides) + "process / thread"]
    for row in found:
        digits = 2 if "CPU" in row.name else 0
        line = f"{row.name:<16}"
        line += "".join(f"{row.sides[side].shown(digits):<26}" for side in sides)
        lines.append(line + ("-" if row.ratio is None else row.ratio.shown()))
    return "\n".join(lines)


def run(entry: dict[str, Any], sizes: Sizes, sides: Sequence[str]) -> list[dict[str, Sample]]:
    """Every side in every repeat, in an order that rotates. Tells stderr how far it is."""
    rounds = rounds_of(sizes.work_us)
    samples = []
    for repeat in range(sizes.repeats):
        taken: dict[str, Sample] = {}
        for at in range(len(sides)):
            side = sides[(repeat + at) % len(sides)]
            print(f"repeat {repeat + 1} of {sizes.repeats}: {side}", file=sys.stderr, flush=True)
            taken[side] = measure(side, entry, sizes, rounds)
        samples.append({side: taken[side] for side in sides})
    return samples


def _run(args: argparse.Namespace) -> int:
    given = ("steps", "repeats", "work_us", "gap_us", "batch", "out")
    chunk_bytes = report.size_bytes(args.chunk)
    if not report.is_chunk_size(chunk_bytes) or chunk_bytes is None:
        told = "is no size of whole pages of 4 KiB"
        raise ConfigError("--chunk", args.chunk, told, "write one such as 256KiB")
    sizes = Sizes(chunk_bytes=chunk_bytes, **{name: getattr(args, name) for name in given})
    if args.quick:
        sizes = QUICK
    sides = named_sides(args.sides, LOOPS)
    plan = sizes.plan
    with ExitStack() as stack:
        parent = Path(args.dir or os.getcwd())
        directory = stack.enter_context(own_directory(parent, 2 * plan.capacity_bytes))
        machine = report.machine(directory)
        entry = _entry(args, directory, plan, stack)
        try:
            samples = run(entry, sizes, sides)
        except WrongAnswer as error:
            print(f"tiering-bench: {error}", file=sys.stderr)
            return 1
    found = rows(samples)
    if args.json:
        everything = {"machine": machine, "sizes": sizes, "samples": samples, "rows": found}
        print(orjson.dumps(everything, option=orjson.OPT_INDENT_2).decode())
        return 0
    for name, fact in machine.items():
        print(f"{name:<12} {fact}")
    print(
        f"\n{sizes.steps} steps of {sizes.work_us} us of Python and {sizes.gap_us} us without the "
        f"lock, {sizes.out} x {sizes.batch} chunks of {report.size_name(sizes.chunk_bytes)} under "
        f"way, {sizes.repeats} repeats: median [lowest highest]\n\n{table(found)}"
    )
    return 0


def _entry(
    args: argparse.Namespace, directory: Path, plan: Plan, stack: ExitStack
) -> dict[str, Any]:
    """The tier, as an entry of secondary_tiers. `stack` ends what it needs."""
    if args.tier == OBJ:
        bucket = stack.enter_context(rclone(directory))
        store = {"bucket": bucket.name, "endpoint_override": bucket.endpoint}
        store |= {"access_key": bucket.access_key, "secret_key": bucket.secret_key}
        return {"type": OBJ, "store_config": store, "io_threads": plan.batch}
    if args.tier is not None:
        entry = load_json(args.tier, "--tier")
        if not isinstance(entry, dict):
            remedy = 'write {"type": ...}, or obj'
            raise ConfigError("--tier", args.tier, "is no object", remedy)
        return entry
    return {
        "type": "fs",
        "root_dir": str(directory / "kv"),
        "layout": args.layout,
        # What is read stays, and as much again is written and evicted.
        "max_bytes": 2 * plan.capacity_bytes,
        "min_free_bytes": 0,
    }


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench loop` to the command line."""
    parser = commands.add_parser(
        "loop", help="latency of a scheduler's steps while tiers are busy, by where their loop is"
    )
    usual = Sizes()
    parser.add_argument("--dir", help="write under a fresh directory in this one; default: here")
    parser.add_argument("--layout", choices=("files", "segments"), default="files")
    parser.add_argument(
        "--tier",
        help="instead of a disk: an entry of secondary_tiers in JSON, or obj, for a bucket of an "
        "rclone that is started",
    )
    parser.add_argument("--sides", default=",".join(LOOPS), help="which to measure")
    parser.add_argument("--steps", type=int, default=usual.steps, help="of a side in each repeat")
    parser.add_argument("--repeats", type=int, default=usual.repeats, help="of all sides")
    parser.add_argument("--work-us", type=int, default=usual.work_us, help="of Python in a step")
    parser.add_argument("--gap-us", type=int, default=usual.gap_us, help="between two steps")
    parser.add_argument("--chunk", default="256KiB", help="size of a chunk")
    parser.add_argument("--batch", type=int, default=usual.batch, help="chunks in an operation")
    parser.add_argument("--out", type=int, default=usual.out, help="operations under way")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", action="store_true", help="for programs, not people")
    parser.set_defaults(run=_run)
