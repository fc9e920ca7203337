"""The command `tiering-bench events`: what telling routers costs on the scheduler's thread.

Goals: microseconds of CPU time a block for each thing that a router is told of, and the ratio to
vLLM's own tracker of offloading events in the same run, repeat by repeat. Not a goal: what vLLM's
publisher does with events, which is the same for both. One thread, its CPU time; fresh prompts each
time, many others held, the collector on and its heap frozen after start.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from tiering_benchmarks.announce_sides import BLOCK_TOKENS, Ours, Prompt, Side, Sizes
from tiering_benchmarks.control import Spread, require_vllm, shown

STORED = "stored in host memory"
WRITTEN = "written to a disk"
EVICTED = "evicted from host memory"
GONE = "evicted from the disk"
THINGS = (STORED, WRITTEN, EVICTED, GONE)

HELD_PROMPTS = 32


def measure(sizes: Sizes, with_vllm: bool) -> dict[str, list[Spread | None]]:
    """By thing: ours and vLLM's microseconds a block, and the ratio; None where vLLM's was not
    measured. ConfigError where vLLM is wanted and not installed."""
    sides: list[Side] = [Ours(sizes, _converter(with_vllm))]
    if with_vllm:
        from tiering_benchmarks.upstream_events import UpstreamEvents

        sides.append(UpstreamEvents(sizes.blocks_per_chunk))
    runs = [_rounds(side, sizes) for side in sides]
    for run in runs:
        next(run)
    gc.collect()
    gc.freeze()
    try:
        rounds = [[next(run) for run in runs] for _ in range(sizes.repeats)]
    finally:
        gc.unfreeze()
    found: dict[str, list[Spread | None]] = {}
    for thing in THINGS:
        costs = [[side[thing] for side in each] for each in rounds]
        spreads: list[Spread | None] = [Spread.of([each[0] for each in costs]), None, None]
        if with_vllm:
            spreads[1] = Spread.of([each[1] for each in costs])
            spreads[2] = Spread.of([each[0] / each[1] for each in costs])
        found[thing] = spreads
    return found


def _rounds(side: Side, sizes: Sizes) -> Iterator[dict[str, float]]:
    """Without end: a prompt comes, and one that came long before goes."""
    held: list[Prompt] = []
    number = 0
    while True:
        number += 1
        prompt = Prompt(number, sizes)
        held.append(prompt)
        costs = {
            STORED: _spent(side.stored, prompt, sizes),
            WRITTEN: _spent(side.written, prompt, sizes),
        }
        if len(held) > HELD_PROMPTS:
            oldest = held.pop(0)
            costs[EVICTED] = _spent(side.evicted, oldest, sizes)
            costs[GONE] = _spent(side.gone, oldest, sizes)
            yield costs


def _spent(thing: Callable[[Prompt], Sequence[Any]], prompt: Prompt, sizes: Sizes) -> float:
    """This thread's microseconds a block."""
    before = time.thread_time_ns()
    events = thing(prompt)
    spent = time.thread_time_ns() - before
    if sum(len(event.block_hashes) for event in events) != sizes.blocks:
        raise AssertionError(f"{thing} did not tell of {sizes.blocks} blocks")
    return spent / 1000 / sizes.blocks


def _converter(with_vllm: bool) -> Callable[[Any], Any]:
    if not with_vllm:
        return lambda event: event
    require_vllm()
    from tiering_connectors.vllm.announcing import Converter

    return Converter()


def table(found: dict[str, list[Spread | None]]) -> str:
    """Lines of text; a median, and its lowest and highest in brackets."""
    lines = [f"{'us a block':<28} {'ours':<22} {'vLLM':<22} ours / vLLM"]
    for thing, spreads in found.items():
        ours, theirs, ratio = map(shown, spreads)
        lines.append(f"{thing:<28} {ours:<22} {theirs:<22} {ratio}")
    return "\n".join(lines)


def _run(args: argparse.Namespace) -> int:
    sizes = Sizes(args.blocks, args.blocks_per_chunk, args.repeats)
    found = measure(sizes, not args.ours_only)
    if args.json:
        told = {"sizes": sizes, "us_a_block": found}
        print(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
        return 0
    print(
        f"CPU time of the scheduler's thread, {sizes.blocks} blocks of {BLOCK_TOKENS} tokens in "
        f"chunks of {sizes.blocks_per_chunk}, {sizes.repeats} repeats: median [lowest highest]"
    )
    print(table(found))
    return 0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench events` to the command line."""
    parser = commands.add_parser(
        "events", help="CPU time a block for KV events, against vLLM's own tracker"
    )
    usual = Sizes()
    parser.add_argument("--blocks", type=int, default=usual.blocks, help="in a prompt")
    parser.add_argument(
        "--blocks-per-chunk", type=int, default=usual.blocks_per_chunk, help="blocks in a chunk"
    )
    parser.add_argument("--repeats", type=int, default=usual.repeats, help="of each thing")
    parser.add_argument("--ours-only", action="store_true", help="without vLLM")
    parser.add_argument("--json", action="store_true", help="for programs, not people")
    parser.set_defaults(run=_run)
