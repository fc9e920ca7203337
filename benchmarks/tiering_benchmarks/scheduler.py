"""What a request costs on the scheduler's thread: our core against vLLM's offloading manager.

Goals: microseconds of CPU time a chunk for each thing a scheduler asks of a cache, the worst
single call, and the ratio to vLLM's manager in the same run, repeat by repeat. Not a goal: bytes;
nothing is copied, and tiers answer at once. Measured as a server lives: a host tier that is full
and evicts, keys that are new objects each time, the garbage collector on and its heap frozen after
start. One thread; its CPU time, so that other processes on the machine disturb it little.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import orjson

from tiering.config import EngineConfig
from tiering.errors import ConfigError
from tiering.keys import chunk_key
from tiering.residency.plan import Outcome, Step, Verdict
from tiering.wiring import build_core

# After each call into the cache that is part of what is measured.
Calls = Iterator[None]

MATCH_HIT = "match, all in the host tier"
# vLLM's asks key by key and stops at the first miss; ours asks every tier for the whole batch.
MATCH_MISS = "match, in no tier"
PIN = "pin and unpin"
STORE = "reserve, evicting, and fill"
PROMOTE = "start a promotion"
ARRIVE = "end a promotion"
# Chains that only the secondary tier holds: promoted in turn, more than the host tier keeps.
CHAINS_PER_HOST_TIER = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """`slots` of the host tier, chunks in a `batch`, and how often each thing is done."""

    slots: int = 10_000
    batch: int = 512
    repeats: int = 40

    def __post_init__(self) -> None:
        most = self.slots // 4
        if not 0 < self.batch <= most:
            problem = "not a share of the slots that requests could take in turn"
            raise ConfigError("--batch", self.batch, problem, f"use 1 to {most}, or more --slots")
        if self.repeats < 1:
            raise ConfigError("--repeats", self.repeats, "nothing to measure", "use at least 1")


QUICK = Sizes(slots=256, batch=32, repeats=3)


class Side(Protocol):
    """A cache as the scheduler sees it: one method for each thing that is measured. Every request
    is begun and ended, because that is where a cache may put off its work to."""

    def match(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def pin(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def store(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def promote(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def arrive(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def learn(self, keys: Sequence[bytes]) -> None:
        """From now on the secondary tier holds `keys`. Not measured."""

    def settle(self) -> None:
        """What is under way to the secondary tier is done. Not measured."""


class Ours:
    """The core, with `tiers` secondary tiers that do at once what they are asked."""

    def __init__(self, slots: int, tiers: int) -> None:
        settings = EngineConfig(cpu_bytes_to_use=slots)
        self._core = build_core(settings, slots, tiers)

    def match(self, request: str, keys: Sequence[bytes]) -> Calls:
        core = self._core
        core.open(request)
        yield
        while core.match(keys, request).is_open:
            yield
            core.ask(request, keys)
            yield
            core.apply(_answers(core.take_steps(), Verdict.MISS))
            yield
        yield
        core.close(request)
        yield

    def pin(self, request: str, keys: Sequence[bytes]) -> Calls:
        core = self._core
        core.open(request)
        yield
        core.hold_ready(request, keys)
        yield
        core.claim(request)
        yield
        core.release(request)
        yield
        core.close(request)
        yield

    def store(self, request: str, keys: Sequence[bytes]) -> Calls:
        core = self._core
        core.open(request)
        yield
        reservation = core.reserve(request, keys, 0)
        yield
        core.filled(reservation.slots)
        yield
        core.close(request)
        yield

    def promote(self, request: str, keys: Sequence[bytes]) -> Calls:
        core = self._core
        core.open(request)
        yield
        core.match(keys, request)
        yield
        core.hold(request, keys)
        yield

    def arrive(self, request: str, keys: Sequence[bytes]) -> Calls:
        core = self._core
        core.apply(_answers(core.take_steps(), Verdict.HIT))
        yield
        if core.held(request) != len(keys):
            raise AssertionError(f"{core!r} did not promote {len(keys)} chunks")
        yield
        core.close(request)
        yield

    def learn(self, keys: Sequence[bytes]) -> None:
        core = self._core
        core.open("scout")
        core.ask("scout", keys)
        core.apply(_answers(core.take_steps(), Verdict.HIT))
        core.close("scout")

    def settle(self) -> None:
        core = self._core
        while steps := core.take_steps():
            core.apply(_answers(steps, Verdict.STORED))
        core.take_events()


def _answers(steps: Sequence[Step], verdict: Verdict) -> list[Outcome]:
    return [Outcome(step.id, (verdict,) * len(step.keys)) for step in steps]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        return cls(statistics.median(figures), min(figures), max(figures))


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds a chunk, the worst single call in microseconds, and how many times vLLM's cost
    ours is; None where vLLM's was not measured."""

    name: str
    ours: Spread
    ours_worst: float
    theirs: Spread | None = None
    theirs_worst: float | None = None
    ratio: Spread | None = None


def chain(name: str, count: int) -> list[bytes]:
    """`count` keys of the size that vLLM's have."""
    return [chunk_key(hashlib.sha256(f"{name} {i}".encode()).digest()) for i in range(count)]


def measure(sizes: Sizes, tiers: int, with_vllm: bool) -> list[Row]:
    """The rows for a host tier with `tiers` secondary ones, ours and vLLM's taking turns.
    ConfigError where vLLM is wanted and not installed."""
    sides: list[Side] = [Ours(sizes.slots, tiers)]
    if with_vllm:
        sides.append(_upstream(sizes.slots, tiers))
    runs = [_rounds(side, sizes, tiers) for side in sides]
    for run in runs:
        next(run)
    # vLLM's engine freezes its heap when it has started, too.
    gc.collect()
    gc.freeze()
    try:
        rounds = [[next(run) for run in runs] for _ in range(sizes.repeats)]
    finally:
        gc.unfreeze()
    by_side = list(zip(*rounds, strict=True))
    return [
        _row(name, [[costs[name] for costs in side] for side in by_side], sizes)
        for name in rounds[0][0]
    ]


def _rounds(side: Side, sizes: Sizes, tiers: int) -> Iterator[Mapping[str, list[int]]]:
    """Without end: each thing once, and the nanoseconds of each call that it took, by row."""
    chains = -(-sizes.slots // sizes.batch)
    for i in range(chains):
        _spent(side.store(f"warm {i}", chain(f"warm {i}", sizes.batch)))
        side.settle()
    on_disk = CHAINS_PER_HOST_TIER * chains if tiers else 0
    for i in range(on_disk):
        side.learn(chain(f"disk {i}", sizes.batch))
    turn = 0
    while True:
        turn += 1
        costs = {STORE: _spent(side.store(f"store {turn}", chain(f"{turn}", sizes.batch)))}
        side.settle()
        costs[MATCH_HIT] = _spent(side.match(f"match {turn}", chain(f"{turn}", sizes.batch)))
        costs[PIN] = _spent(side.pin(f"pin {turn}", chain(f"{turn}", sizes.batch)))
        costs[MATCH_MISS] = _spent(side.match(f"miss {turn}", chain(f"no {turn}", sizes.batch)))
        if on_disk:
            name, request = f"disk {turn % on_disk}", f"load {turn}"
            costs[PROMOTE] = _spent(side.promote(request, chain(name, sizes.batch)))
            costs[ARRIVE] = _spent(side.arrive(request, chain(name, sizes.batch)))
            side.settle()
        yield costs


def _spent(calls: Calls) -> list[int]:
    """This thread's nanoseconds in each of `calls`."""
    spent = []
    before = time.thread_time_ns()
    for _ in calls:
        spent.append(time.thread_time_ns() - before)
        before = time.thread_time_ns()
    return spent


def _row(name: str, sides: Sequence[Sequence[Sequence[int]]], sizes: Sizes) -> Row:
    """From the nanoseconds of each call, by side and repeat."""
    per_chunk = [[sum(calls) / 1000 / sizes.batch for calls in side] for side in sides]
    worst = [max(max(calls) for calls in side) / 1000 for side in sides]
    if len(sides) == 1:
        return Row(name, Spread.of(per_chunk[0]), worst[0])
    ours, theirs = per_chunk
    ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
    return Row(name, Spread.of(ours), worst[0], Spread.of(theirs), worst[1], ratio)


def _upstream(slots: int, tiers: int) -> Side:
    try:
        version("vllm")
    except PackageNotFoundError:
        raise ConfigError(
            "--ours-only", "absent", "vLLM is not installed here", "--ours-only, or install vLLM"
        ) from None
    # Heavy: loaded only by who compares.
    from tiering_benchmarks.upstream import UpstreamManager

    return UpstreamManager(slots, tiers)


def table(rows: Sequence[Row]) -> str:
    """Lines of text; a median, and its lowest and highest in brackets."""
    lines = [f"{'us a chunk':<28} {'ours':<22} {'vLLM':<22} {'ours / vLLM':<20} worst call, us"]
    for row in rows:
        worst = f"{row.ours_worst:.0f}"
        if row.theirs_worst is not None:
            worst += f" / {row.theirs_worst:.0f}"
        ours, theirs, ratio = (_shown(spread) for spread in (row.ours, row.theirs, row.ratio))
        lines.append(f"{row.name:<28} {ours:<22} {theirs:<22} {ratio:<20} {worst}")
    return "\n".join(lines)


def _shown(spread: Spread | None) -> str:
    return f"{spread.median:.3f} [{spread.low:.3f} {spread.high:.3f}]" if spread else "-"


def _run(args: argparse.Namespace) -> int:
    sizes = QUICK if args.quick else Sizes(args.slots, args.batch, args.repeats)
    with_vllm = not args.ours_only
    setups = {
        "a host tier alone": measure(sizes, 0, with_vllm),
        "a host tier over one that answers at once": measure(sizes, 1, with_vllm),
    }
    if args.json:
        found = {
            "python": platform.python_version(),
            "vllm": version("vllm") if with_vllm else None,
            "sizes": sizes,
            "setups": setups,
        }
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        return 0
    print(
        f"CPU time of the scheduler's thread, {sizes.batch} chunks a batch, {sizes.slots} slots, "
        f"{sizes.repeats} repeats: median [lowest highest]"
    )
    for name, rows in setups.items():
        print(f"\n{name}\n{table(rows)}")
    return 0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench scheduler` to the command line."""
    parser = commands.add_parser(
        "scheduler", help="CPU time a chunk on the scheduler's thread, against vLLM's own manager"
    )
    usual = Sizes()
    parser.add_argument("--slots", type=int, default=usual.slots, help="of the host tier")
    parser.add_argument("--batch", type=int, default=usual.batch, help="chunks in a request")
    parser.add_argument("--repeats", type=int, default=usual.repeats, help="of each thing")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--ours-only", action="store_true", help="without vLLM")
    parser.add_argument("--json", action="store_true", help="for programs, not people")
    parser.set_defaults(run=_run)
