"""A real vLLM whose KV events a router reads, and whether the router is right about it.

`Worker` owns one engine at a time, over a directory that outlives it. `Audience` owns nothing: it
is a router and the workers that it reads, and compares how far the router sees a prompt with what
each engine holds of it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from events_inproc import EventEngine, Held
from inproc import connector_config
from prompts import BLOCK, random_prompt
from selection import PATIENCE_SECONDS, Reach, Reaches, Router
from stream import END
from tiering.events.blocks import BlockEvent, EventBatch

ROUNDS_MAX = 10
SETTLED_SECONDS = 1.0

decode = msgspec.msgpack.Decoder(EventBatch).decode


@dataclass(frozen=True)
class Setting:
    """What a worker's engines are made of. `factor`: blocks in a chunk. `host_bytes` and
    `device_bytes`: of the two caches. `options` go to `vllm.LLM`, `tier` has further keys of the fs
    tier. `engine` runs what `connector` makes the configuration of."""

    model: Path
    factor: int
    host_bytes: int
    device_bytes: int
    options: dict[str, Any]
    tier: dict[str, Any] = field(default_factory=dict)
    engine: type[EventEngine] = EventEngine
    connector: Callable[..., dict[str, Any]] = connector_config


class Worker:
    """A context manager; its engine runs inside of it. `number` is what a router calls it."""

    def __init__(self, number: int, setting: Setting, folder: Path) -> None:
        self.number = number
        self._setting = setting
        self._folder = folder
        self._engine: EventEngine | None = None
        # Sockets of the file system: vLLM would listen on all addresses, or on none.
        self.endpoint, self.replay = (f"ipc://{folder}/{name}" for name in ("kv", "past"))

    @property
    def engine(self) -> EventEngine:
        assert self._engine is not None, "no engine runs"
        return self._engine

    def __enter__(self) -> Self:
        setting = self._setting
        config = setting.connector(
            self._folder / "tier",
            setting.host_bytes,
            blocks_per_chunk=setting.factor,
            self_describing_kv_events=True,
        )
        for tier in config["kv_connector_extra_config"]["secondary_tiers"]:
            tier |= {"enable_kv_events": True, **setting.tier}
        self._engine = setting.engine(
            self._folder / "vllm.log",
            model=str(setting.model),
            connector=config,
            kv_cache_memory_bytes=setting.device_bytes,
            events={"endpoint": self.endpoint, "replay_endpoint": self.replay, "topic": "kv"},
            **setting.options,
        ).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.kill()

    def restart(self) -> None:
        """Kill the engine; another one begins with what is on the disk."""
        self.__exit__()
        self.__enter__()

    def history(self) -> list[BlockEvent]:
        """All that the engine has published."""
        context = zmq.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.rcvtimeo = int(PATIENCE_SECONDS * 1000)
            dealer.connect(self.replay)
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            batches: list[EventBatch] = []
            while (frames := dealer.recv_multipart())[-2] != END:
                assert int.from_bytes(frames[-2], "big") == len(batches)
                batches.append(decode(frames[-1]))
        context.term()
        return [event for batch in batches for event in batch.events]


_nudges = itertools.count()


class Audience:
    """A router that reads `workers`. It is there from now on only; the past is replayed to it."""

    def __init__(self, router: Router, workers: Sequence[Worker]) -> None:
        self.router = router
        self.workers = workers

    async def sit_down(self) -> None:
        """Read all workers. vLLM sends nothing as long as nothing happens, and what was missed is
        asked for when something is sent: so something is computed."""
        for worker in self.workers:
            await self._follow(worker)

    async def follow_anew(self, worker: Worker) -> None:
        """As a frontend does that sees it go and come again."""
        await self.router.forget(worker.number)
        await self._follow(worker)

    async def _follow(self, worker: Worker) -> None:
        await self.router.follow(worker.number, worker.endpoint, replay=worker.replay)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            prompt = random_prompt(("seen", next(_nudges)), BLOCK + 1)
            worker.engine.ask(prompt, 1)
            try:
                await self.router.until(
                    prompt, lambda seen: _row(seen, worker).device == 1, SETTLED_SECONDS
                )
            except AssertionError:
                # The subscription came after the first of them.
                if time.monotonic() > deadline:
                    raise
            else:
                return

    async def assert_right(
        self, prompts: Sequence[Sequence[int]], salt: str | None = None
    ) -> list[Reach]:
        """What the first worker has of each prompt, once the router is right about all workers
        and prompts. Engines publish when they step: they are made to, without any effect on what
        they hold."""
        wrong: list[str] = []
        for _ in range(ROUNDS_MAX):
            truths = [self._truth(worker, prompts, salt) for worker in self.workers]
            wrong = await self._differences(prompts, truths)
            if not wrong:
                return truths[0]
            for worker in self.workers:
                worker.engine.ask(random_prompt(("nudge", next(_nudges)), BLOCK // 2), 1)
        raise AssertionError("\n".join(wrong))

    def _truth(
        self, worker: Worker, prompts: Sequence[Sequence[int]], salt: str | None
    ) -> list[Reach]:
        worker.engine.call("settle")
        return [reach_of(held) for held in worker.engine.held(prompts, salt=salt)]

    async def _differences(
        self, prompts: Sequence[Sequence[int]], truths: Sequence[Sequence[Reach]]
    ) -> list[str]:
        """Of what is still different after a moment, one line each."""
        deadline = time.monotonic() + SETTLED_SECONDS
        while True:
            seen = [await self.router.reach(prompt) for prompt in prompts]
            wrong = [
                f"worker {worker.number}, prompt {i}: {_row(seen[i], worker)} is seen, {real} is so"
                for worker, truth in zip(self.workers, truths, strict=True)
                for i, real in enumerate(truth)
                if _row(seen[i], worker) != real
            ]
            if not wrong or time.monotonic() > deadline:
                return wrong
            await asyncio.sleep(0.01)


def reach_of(held: Held) -> Reach:
    """As a router walks: the device from the beginning, then host memory, then storage."""
    ends = [0]
    for has in (held.device, held.host, held.disk):
        end = ends[-1]
        while end < len(has) and has[end]:
            end += 1
        ends.append(end)
    return Reach(*ends[1:])


def _row(seen: Reaches, worker: Worker) -> Reach:
    return seen.get((worker.number, 0), Reach(-1, -1, -1))
