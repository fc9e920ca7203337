"""What a request costs on the scheduler's thread: our core against vLLM's offloading managers.

Goals: microseconds of CPU time a chunk for each thing a scheduler asks of a cache, the 99th
percentile and the worst of single calls, and the ratio to vLLM's manager in the same run, repeat by
repeat. Not a goal: bytes; nothing is copied, and tiers answer at once. Measured as a server lives:
a host tier that is full and evicts, keys that are new objects each time, the garbage collector on
and its heap frozen after start. One thread; its CPU time, so that other processes on the machine
disturb it less: they still take its caches.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import orjson

from tiering.config import EngineConfig
from tiering.engine import Engine
from tiering.errors import ConfigError
from tiering.events import NoEvents
from tiering.keys import chunk_key
from tiering.portal import ThreadPortal
from tiering.residency.plan import Outcome, Release, Step, Survey, Verdict
from tiering.wiring import build_core

# After each call into the cache that is part of what is measured.
Calls = Iterator[None]

MATCH_HIT = "match, all in the host tier"
# vLLM's asks key by key and stops at the first miss; ours asks every tier for the whole batch.
MATCH_MISS = "match, in no tier"
LOAD = "start a load"
LOADED = "end a load"
STORE = "start a store, evicting"
STORED = "end a store"
WRITTEN = "end its writes to a tier"
PROMOTE = "start a promotion"
PROMOTED = "end a promotion"
# Of a whole step, not of a chunk.
IDLE = "a step with nothing to do"
# Chains that only the secondary tier holds: promoted in turn, more than the host tier keeps.
CHAINS_PER_HOST_TIER = 2
# Requests that are open all the time and want nothing.
RUNNING = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """`slots` of the host tier, chunks in a `batch`, and how often each thing is done."""

    slots: int = 65_536
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
    is begun by what starts something and ended by what ends it, because that is where a cache may
    put off its work to."""

    def match(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def load(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def loaded(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def store(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def stored(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def written(self) -> Calls:
        """The secondary tier has taken what was stored."""
        ...

    def promote(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def promoted(self, request: str, keys: Sequence[bytes]) -> Calls: ...

    def idle(self) -> Calls: ...

    def learn(self, keys: Sequence[bytes]) -> None:
        """From now on the secondary tier holds `keys`. Not measured."""

    def close(self) -> None:
        """Let go of threads."""


class Ours:
    """The core, with `tiers` secondary tiers that do at once what they are asked, and a portal
    whose loop has nothing to do."""

    def __init__(self, slots: int, tiers: int) -> None:
        settings = EngineConfig(cpu_bytes_to_use=slots)
        self._core = build_core(settings, slots, tiers)
        self._portal = ThreadPortal([], lambda slot: memoryview(b""))
        self._portal.start()
        self._engine = Engine(self._core, self._portal, NoEvents())
        self._filling: Sequence[int] = ()
        for i in range(RUNNING):
            self._core.open(f"running {i}")

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

    def load(self, request: str, keys: Sequence[bytes]) -> Calls:
        core = self._core
        core.open(request)
        yield
        core.hold_ready(request, keys)
        yield
        core.claim(request)
        yield

    def loaded(self, request: str, keys: Sequence[bytes]) -> Calls:
        self._core.release(request)
        yield
        self._core.close(request)
        yield
        self._core.take_steps()
        yield

    def store(self, request: str, keys: Sequence[bytes]) -> Calls:
        self._core.open(request)
        yield
        self._filling = self._core.reserve(request, keys, 0).slots
        yield

    def stored(self, request: str, keys: Sequence[bytes]) -> Calls:
        self._core.filled(self._filling)
        yield
        self._core.close(request)
        yield

    def written(self) -> Calls:
        core = self._core
        while True:
            steps = core.take_steps()
            yield
            if not steps:
                break
            answers = _answers(steps, Verdict.STORED)
            yield
            core.apply(answers)
            yield
        core.take_events()

    def promote(self, request: str, keys: Sequence[bytes]) -> Calls:
        core = self._core
        core.open(request)
        yield
        core.match(keys, request)
        yield
        core.hold(request, keys)
        yield

    def promoted(self, request: str, keys: Sequence[bytes]) -> Calls:
        core = self._core
        core.apply(_answers(core.take_steps(), Verdict.HIT))
        yield
        if core.held(request) != len(keys):
            raise AssertionError(f"{core!r} did not promote {len(keys)} chunks")
        yield
        core.close(request)
        yield

    def idle(self) -> Calls:
        """As the connector does before and after it plans a step."""
        self._engine.pump()
        self._engine.pump()
        yield

    def learn(self, keys: Sequence[bytes]) -> None:
        core = self._core
        core.open("scout")
        core.ask("scout", keys)
        core.apply(_answers(core.take_steps(), Verdict.HIT))
        core.close("scout")

    def close(self) -> None:
        self._portal.close(0.0)


def _answers(steps: Sequence[Step], verdict: Verdict) -> list[Outcome]:
    return [
        Outcome(step.id, (verdict,) * len(step.keys))
        for step in steps
        if not isinstance(step, Survey | Release)
    ]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        return cls(statistics.median(figures), min(figures), max(figures))

    def shown(self, digits: int = 2) -> str:
        """The median, and the lowest and highest in brackets."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f} {self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Slowest:
    """Of single calls, in microseconds: one in a hundred takes longer than `p99`."""

    p99: float
    worst: float

    @classmethod
    def of(cls, calls: Iterable[int]) -> Slowest:
        """From nanoseconds."""
        ordered = sorted(calls)
        return cls(ordered[len(ordered) * 99 // 100] / 1000, ordered[-1] / 1000)


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds a chunk, or of a whole step for IDLE; the slowest of single calls in
    microseconds; and how many times vLLM's cost ours is. None where vLLM's was not measured."""

    name: str
    ours: Spread
    ours_calls: Slowest
    theirs: Spread | None = None
    theirs_calls: Slowest | None = None
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
    try:
        for run in runs:
            next(run)
        # vLLM's engine freezes its heap when it has started, too.
        gc.collect()
        gc.freeze()
        rounds = [[next(run) for run in runs] for _ in range(sizes.repeats)]
    finally:
        gc.unfreeze()
        for side in sides:
            side.close()
    by_side = list(zip(*rounds, strict=True))
    return [
        _row(name, [[costs[name] for costs in side] for side in by_side], sizes)
        for name in rounds[0][0]
    ]


def _rounds(side: Side, sizes: Sizes, tiers: int) -> Iterator[Mapping[str, list[int]]]:
    """Without end: each thing once, and the nanoseconds of each call that it took, by row."""
    chains = -(-sizes.slots // sizes.batch)
    for i in range(chains):
        _spent(side.store(f"warm {i}", keys := chain(f"warm {i}", sizes.batch)))
        _spent(side.stored(f"warm {i}", keys))
        _spent(side.written())
    on_disk = CHAINS_PER_HOST_TIER * chains if tiers else 0
    for i in range(on_disk):
        side.learn(chain(f"disk {i}", sizes.batch))
    turn = 0
    while True:
        turn += 1
        costs = {
            STORE: _spent(side.store(f"store {turn}", chain(f"{turn}", sizes.batch))),
            STORED: _spent(side.stored(f"store {turn}", chain(f"{turn}", sizes.batch))),
        }
        written = _spent(side.written())
        if tiers:
            costs[WRITTEN] = written
        costs[IDLE] = _spent(side.idle())
        costs[MATCH_HIT] = _spent(side.match(f"match {turn}", chain(f"{turn}", sizes.batch)))
        costs[LOAD] = _spent(side.load(f"load {turn}", chain(f"{turn}", sizes.batch)))
        costs[LOADED] = _spent(side.loaded(f"load {turn}", chain(f"{turn}", sizes.batch)))
        costs[MATCH_MISS] = _spent(side.match(f"miss {turn}", chain(f"no {turn}", sizes.batch)))
        if on_disk:
            name, request = f"disk {turn % on_disk}", f"promote {turn}"
            costs[PROMOTE] = _spent(side.promote(request, chain(name, sizes.batch)))
            costs[PROMOTED] = _spent(side.promoted(request, chain(name, sizes.batch)))
            _spent(side.written())
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
    chunks = 1 if name == IDLE else sizes.batch
    costs = [[sum(calls) / 1000 / chunks for calls in side] for side in sides]
    slowest = [Slowest.of(call for calls in side for call in calls) for side in sides]
    if len(sides) == 1:
        return Row(name, Spread.of(costs[0]), slowest[0])
    ours, theirs = costs
    ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
    return Row(name, Spread.of(ours), slowest[0], Spread.of(theirs), slowest[1], ratio)


def require_vllm() -> None:
    """ConfigError where there is none to compare with."""
    try:
        version("vllm")
    except PackageNotFoundError:
        raise ConfigError(
            "--ours-only", None, "vLLM is not installed here", "give --ours-only, or install vLLM"
        ) from None


def _upstream(slots: int, tiers: int) -> Side:
    require_vllm()
    # Heavy: loaded only by who compares.
    from tiering_benchmarks.upstream import UpstreamManager

    return UpstreamManager(slots, tiers)


def table(rows: Sequence[Row]) -> str:
    """Lines of text; a median, and its lowest and highest in brackets."""
    lines = [
        f"{'us a chunk':<28} {'ours':<22} {'vLLM':<22} {'ours / vLLM':<20} "
        "a call, us: p99, worst / vLLM's"
    ]
    for row in rows:
        calls = f"{row.ours_calls.p99:.0f}, {row.ours_calls.worst:.0f}"
        if row.theirs_calls is not None:
            calls += f" / {row.theirs_calls.p99:.0f}, {row.theirs_calls.worst:.0f}"
        ours, theirs, ratio = (shown(spread, 3) for spread in (row.ours, row.theirs, row.ratio))
        lines.append(f"{row.name:<28} {ours:<22} {theirs:<22} {ratio:<20} {calls}")
    return "\n".join(lines)


def shown(spread: Spread | None, digits: int = 2) -> str:
    """A dash for what was not measured."""
    return "-" if spread is None else spread.shown(digits)


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
    """Add `tiering-bench control` to the command line."""
    parser = commands.add_parser(
        "control", help="CPU time a chunk on the scheduler's thread, against vLLM's own manager"
    )
    usual = Sizes()
    parser.add_argument("--slots", type=int, default=usual.slots, help="of the host tier")
    parser.add_argument("--batch", type=int, default=usual.batch, help="chunks in a request")
    parser.add_argument("--repeats", type=int, default=usual.repeats, help="of each thing")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--ours-only", action="store_true", help="without vLLM")
    parser.add_argument("--json", action="store_true", help="for programs, not people")
    parser.set_defaults(run=_run)
