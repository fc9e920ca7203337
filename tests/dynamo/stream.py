"""A publisher of KV events in vLLM's format, fed by hand, and prompts to tell of.

`Stream` owns an XPUB socket on loopback and a ROUTER beside it for what was missed; both speak as
`vllm.distributed.kv_events` does. It knows when it is being read, so nothing is published into the
void unless a test wants that. One event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from selection import PATIENCE_SECONDS, Reach, Router, seeds
from tiering.events.blocks import (
    HASH_BYTES,
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    EventBatch,
)

BLOCK = 4
"""Tokens in a block of every stream here."""

GPU, CPU, STORAGE = MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE

AT = {
    GPU: lambda n: Reach(n, n, n),
    CPU: lambda n: Reach(0, n, n),
    STORAGE: lambda n: Reach(0, 0, n),
}
"""The reach of n blocks that one medium has."""

INDEXES = (*AT, "EXTERNAL")
"""A medium of each index that a router keeps. Each takes events in on its own, in order; what is in
the last is counted as storage."""

TOPIC = b"kv-events"
END = (-1).to_bytes(8, "big", signed=True)

encode = msgspec.msgpack.Encoder().encode


class Prompt:
    """Random tokens in `blocks` blocks, each with a hash, which is a random number, too: a router
    takes hashes as they come. `hashes[i]` may be set to those of another."""

    def __init__(self, blocks: int, seed: int | None = None) -> None:
        chance = random.Random(next(seeds) if seed is None else -seed)
        self.tokens = [chance.randrange(1 << 16) for _ in range(blocks * BLOCK)]
        self.hashes = [chance.getrandbits(8 * HASH_BYTES) for _ in range(blocks)]

    def stored(
        self, medium: str | None, start: int = 0, stop: int | None = None, **other: Any
    ) -> BlockStored:
        """Blocks `start` to `stop` are to be had from `medium`; `other` fields replace these."""
        hashes = self.hashes[start:stop]
        fields: dict[str, Any] = {
            "block_hashes": hashes,
            "parent_block_hash": self.hashes[start - 1] if start else None,
            "token_ids": self.tokens[start * BLOCK :][: len(hashes) * BLOCK],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
        }
        return BlockStored(**{**fields, **other})

    def removed(
        self, medium: str | None, start: int = 0, stop: int | None = None, **other: Any
    ) -> BlockRemoved:
        return BlockRemoved(**{"block_hashes": self.hashes[start:stop], "medium": medium, **other})


class Stream:
    """See the module's docstring. `endpoint` and `replay` are where to read it."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        # Else a second reader would not be told of.
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._router = self._context.socket(zmq.ROUTER)
        self.endpoint, self.replay = (
            _bound(socket, "tcp://127.0.0.1:*") for socket in (self._socket, self._router)
        )
        self.sequence = 0
        self.replays_asked: list[int] = []
        self._past: list[tuple[int, bytes]] = []

    async def read(self) -> None:
        """Wait for one more reader."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await self._socket.recv() != b"\x01":
                pass

    async def publish(self, *events: BlockEvent, is_lost: bool = False) -> None:
        """One batch. If it `is_lost`, readers miss it and can have it as a replay only."""
        await self.publish_raw(encode(EventBatch(0.0, list(events), self._rank)), is_lost)

    async def publish_raw(self, payload: bytes, is_lost: bool = False) -> None:
        number = self.sequence
        self.sequence += 1
        self._past.append((number, payload))
        if not is_lost:
            await self.send(TOPIC, number.to_bytes(8, "big"), payload)

    async def send(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    async def serve_replays(self) -> None:
        """Answer for ever whoever asks for the past."""
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays_asked.append(first := int.from_bytes(start, "big"))
            for number, payload in self._past:
                if number >= first:
                    sequence = number.to_bytes(8, "big")
                    await self._router.send_multipart([client, b"", TOPIC, sequence, payload])
            await self._router.send_multipart([client, b"", b"", END, b""])

    def close(self) -> None:
        self._context.destroy(linger=0)


def _bound(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    socket.bind(endpoint)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


@asynccontextmanager
async def running_stream(rank: int = 0) -> AsyncIterator[Stream]:
    """A stream that also answers for its past."""
    stream = Stream(rank)
    serving = asyncio.create_task(stream.serve_replays())
    try:
        yield stream
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        stream.close()


class Followed:
    """A router that reads one stream, as `worker` at rank 0."""

    def __init__(self, router: Router, stream: Stream, worker: int = 1) -> None:
        self.router = router
        self.stream = stream
        self._row = worker, 0

    async def tell(self, *events: BlockEvent) -> None:
        """Publish one batch, and wait until it is taken in."""
        await self.stream.publish(*events)
        await self.all_taken_in()

    async def all_taken_in(self) -> None:
        """All that was published until now: a prompt published behind it can be seen in each
        tier. Whatever was refused before is then known to be refused."""
        marker = Prompt(len(INDEXES))
        for i, medium in enumerate(INDEXES):
            await self.stream.publish(marker.stored(medium, i, i + 1))
        await self.router.until(marker.tokens, lambda seen: seen.get(self._row) == Reach(1, 2, 4))

    async def reach(self, prompt: Prompt, **request: Any) -> Reach:
        """Of all that was taken in."""
        return (await self.router.reach(prompt.tokens, **request))[self._row]
