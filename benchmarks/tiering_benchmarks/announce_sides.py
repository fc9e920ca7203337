"""What `tiering-bench events` compares: prompts, and our announcer, told of their chunks.

vLLM's tracker is in `upstream_events`, for it imports vLLM; this does not.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiering.clock import UnixClock
from tiering.errors import ConfigError
from tiering.events import HOST, ChunksRemoved, ChunksStored
from tiering.events.announcer import Announcer
from tiering.events.channels import Medium
from tiering.events.descriptions import Shape, describe
from tiering.keys import chunk_key

BLOCK_TOKENS = 16
VOCABULARY = 100_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """`blocks` in a prompt, of which `blocks_per_chunk` are a chunk, and how often each thing is
    done."""

    blocks: int = 512
    blocks_per_chunk: int = 16
    repeats: int = 40

    def __post_init__(self) -> None:
        if self.blocks_per_chunk < 1 or self.blocks % self.blocks_per_chunk or self.blocks < 1:
            raise ConfigError(
                "--blocks-per-chunk",
                self.blocks_per_chunk,
                f"does not divide the {self.blocks} blocks of a prompt",
                "use a divisor of it",
            )
        if self.repeats < 1:
            raise ConfigError("--repeats", self.repeats, "nothing to measure", "use at least 1")


class Prompt:
    """As both sides see a request: its tokens, hashes of its blocks, keys of its chunks."""

    lora_request = None

    def __init__(self, number: int, sizes: Sizes) -> None:
        chance = random.Random(number)
        count = sizes.blocks * BLOCK_TOKENS
        self.all_token_ids = [chance.randrange(VOCABULARY) for _ in range(count)]
        self.block_hashes = [
            hashlib.sha256(f"{number} {at}".encode()).digest() for at in range(sizes.blocks)
        ]
        per_chunk = sizes.blocks_per_chunk
        self.keys = [chunk_key(each) for each in self.block_hashes[per_chunk - 1 :: per_chunk]]


class Side(Protocol):
    """Each gives the events that vLLM's publisher is handed, of which there is at least one."""

    def stored(self, prompt: Prompt) -> Sequence[Any]: ...

    def written(self, prompt: Prompt) -> Sequence[Any]: ...

    def evicted(self, prompt: Prompt) -> Sequence[Any]: ...

    def gone(self, prompt: Prompt) -> Sequence[Any]: ...


class Ours:
    """The announcer; `convert` makes an event one of vLLM's."""

    def __init__(self, sizes: Sizes, convert: Callable[[Any], Any]) -> None:
        self._shape = Shape(0, BLOCK_TOKENS, sizes.blocks_per_chunk, "full_attention")
        self._convert = convert
        self._announcer = Announcer(
            self._shape,
            {HOST: Medium("CPU"), 0: Medium("STORAGE")},
            {},
            UnixClock(),
            descriptions_max=1 << 20,
        )

    def stored(self, prompt: Prompt) -> Sequence[Any]:
        # As many as a step computes, of a request that goes on to be changed.
        tokens = prompt.all_token_ids[:]
        run = describe(self._shape, prompt.keys, tokens, prompt.block_hashes)
        self._announcer.expect(run, tokens)
        return self._told(ChunksStored(HOST, tuple(prompt.keys)))

    def written(self, prompt: Prompt) -> Sequence[Any]:
        return self._told(ChunksStored(0, tuple(prompt.keys)))

    def evicted(self, prompt: Prompt) -> Sequence[Any]:
        return self._told(ChunksRemoved(HOST, tuple(prompt.keys)))

    def gone(self, prompt: Prompt) -> Sequence[Any]:
        return self._told(ChunksRemoved(0, tuple(prompt.keys)))

    def _told(self, event: ChunksStored | ChunksRemoved) -> list[Any]:
        self._announcer.publish([event])
        return [self._convert(each) for each in self._announcer.take(1 << 30)]
