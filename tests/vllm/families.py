"""The model families with several KV cache groups, and the engines that tests ask about them.

A `World` is one family with one size of chunks: it has one engine at a time, and a directory that
outlives it. Prompts are counted in the family's blocks, whose size vLLM chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inproc import BLOCK_BYTES, Answer, EngineProcess, connector_config
from prompts import BLOCK, random_prompt

ROOMY_BYTES = 128 << 20
DEVICE_BYTES = 64 << 20
TOKENS_MAX = 4096
TAIL = 8
"""Tokens of a prompt behind its last block."""

SMALL_FACTOR = 2
SMALL_ROWS = 6
HEADER_BYTES_MAX = 8192

FACTORS = (SMALL_FACTOR, 1, 16)


@dataclass(frozen=True, slots=True)
class Sizes:
    """For one size of chunk. `whole`: blocks of a prompt that all groups' chunks end with, and
    `loads`: the chunks of each group that it takes to go on there. `head`: where others part
    from one of `long` blocks, of which vLLM and the connector keep no window there."""

    chunks: tuple[int, ...]
    whole: int
    loads: tuple[int, ...]
    long: int
    head: int


@dataclass(frozen=True, slots=True)
class Family:
    """`kinds` of its groups. `at_once`: blocks of a head from which a request can go on though
    nobody has kept anything for it. `parts`: whether what the first to part from a prompt has kept
    lets the next go on there. Of a small engine: `small_blocks` of the device; blocks of a prompt
    that `fits` into its host tier; and of one that does not, those that are loaded, `cut_to`, or
    None where it has to be quick to be stored: a state is gone from the device in a few steps."""

    name: str
    kinds: tuple[str, ...]
    sizes: Mapping[int, Sizes]
    fits: int
    block: int = BLOCK
    block_bytes: int = BLOCK_BYTES // 2
    small_blocks: int = 160
    cut_to: int | None = 0
    at_once: int = 0
    parts: bool = True
    rounding: float = 1e-3
    options: Mapping[str, Any] = field(default_factory=dict)

    def alike(self, answer: Answer, reference: Answer) -> bool:
        """Whether `answer` is `reference` up to `rounding` of logprobs: steps of other shapes
        round otherwise, and where two tokens are as likely, either may come, and another text
        from there on."""
        for i, token in enumerate(reference.tokens):
            if abs(answer.logprobs[i] - reference.logprobs[i]) > self.rounding:
                return False
            if answer.tokens[i] != token:
                return reference.logprobs[i] - reference.runner_up[i] < self.rounding
        return True


GEMMA2 = Family(
    "gemma2",
    ("WINDOW", "FULL"),
    {
        1: Sizes((1, 1), whole=34, loads=(8, 34), long=34, head=18),
        2: Sizes((2, 2), whole=34, loads=(4, 17), long=34, head=18),
        16: Sizes((4, 16), whole=32, loads=(2, 2), long=48, head=16),
    },
    fits=4,
)
# Three groups share their bytes: a block belongs to one of them at a time.
GEMMA3 = Family(
    "gemma3",
    ("WINDOW", "WINDOW", "FULL"),
    {
        1: Sizes((1, 1, 1), whole=34, loads=(8, 8, 34), long=34, head=18),
        2: Sizes((2, 2, 2), whole=34, loads=(4, 4, 17), long=34, head=18),
        16: Sizes((4, 4, 16), whole=32, loads=(2, 2, 2), long=48, head=16),
    },
    fits=2,
    small_blocks=240,
)
# Blocks are as large as a state. Of states there are those at the ends of steps, and where a prompt
# parts from another no step ends.
QWEN3NEXT = Family(
    "qwen3next",
    ("STATE", "FULL"),
    {
        1: Sizes((1, 1), whole=6, loads=(1, 6), long=8, head=4),
        2: Sizes((1, 2), whole=6, loads=(1, 3), long=8, head=4),
        16: Sizes((1, 16), whole=16, loads=(1, 1), long=20, head=16),
    },
    fits=4,
    block=96,
    block_bytes=98304,
    small_blocks=48,
    cut_to=None,
    parts=False,
    # In bfloat16 a logit of 8 has the next 1/16 further.
    rounding=0.3,
    # Named, or it and so the size of a block would be the processor's to choose.
    options={"dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"},
)
# Every 8 blocks attention starts anew: to go on there takes no block of such a group.
CHUNKED = Family(
    "chunked",
    ("LOCAL", "FULL"),
    {
        1: Sizes((1, 1), whole=34, loads=(2, 34), long=34, head=18),
        2: Sizes((2, 2), whole=34, loads=(1, 17), long=34, head=18),
        16: Sizes((8, 16), whole=32, loads=(0, 2), long=48, head=16),
    },
    fits=4,
    cut_to=8,
    at_once=16,
)
FAMILIES = (GEMMA2, GEMMA3, QWEN3NEXT, CHUNKED)


class World:
    """`engine` and `restarted` start what they name, once, and end the other; a context manager.
    The restarted one is small: a host tier of `SMALL_ROWS` chunks, and a device that a few
    requests fill."""

    def __init__(self, family: Family, factor: int, model: Path, folder: Path) -> None:
        self.family = family
        self.factor = factor
        self.sizes = family.sizes[factor]
        self.root = folder / "kv"
        self._log = folder / "vllm.log"
        self._model = model
        self._running: tuple[str, EngineProcess] | None = None

    @property
    def engine(self) -> EngineProcess:
        return self._run("first", ROOMY_BYTES, {})

    @property
    def restarted(self) -> EngineProcess:
        row_bytes = self.family.block_bytes * self.factor
        return self._run(
            "restarted",
            HEADER_BYTES_MAX + SMALL_ROWS * row_bytes,
            {
                "num_gpu_blocks_override": self.family.small_blocks,
                "max_model_len": TOKENS_MAX // 2,
            },
        )

    def _run(self, name: str, host_bytes: int, options: dict[str, Any]) -> EngineProcess:
        if self._running is None or self._running[0] != name:
            self.end()
            config = connector_config(self.root, host_bytes, blocks_per_chunk=self.factor)
            engine = EngineProcess(
                self._log,
                model=str(self._model),
                connector=config,
                kv_cache_memory_bytes=DEVICE_BYTES,
                **{"max_model_len": TOKENS_MAX, **self.family.options, **options},
            )
            self._running = name, engine.__enter__()
        return self._running[1]

    def end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running[1].kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def prompt(self, seed: object, blocks: int, tail: int = TAIL) -> list[int]:
        """Random tokens, `blocks` blocks of them and `tail` more."""
        return random_prompt((self.family.name, seed), blocks * self.family.block + tail)

    def tokens(self, blocks: int) -> int:
        return blocks * self.family.block


def empty(engine: EngineProcess, *, host: bool = False) -> None:
    """Let all stores end, and the device forget, to the last byte; the host tier, too, if so
    told."""
    engine.call("settle")
    engine.call("reset")
    engine.call("wipe")
    if host:
        engine.call("empty_host")


def ask_with_sources(
    engine: EngineProcess, prompt: list[int], tokens: int = 4, **how: Any
) -> tuple[Answer, dict[str, int]]:
    """The answer, and how many tokens of the prompt each source had; the rest was computed."""
    with engine.counting() as grown:
        answer = engine.ask(prompt, tokens, **how)
    sources = {name: n for name, n in grown.items() if name in ("device", "host", "disk")}
    assert sum(sources.values()) == answer.cached_tokens
    return answer, sources
