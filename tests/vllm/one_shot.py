"""A vLLM engine that answers a list of questions and is gone; it can be made to forget.

Two halves. `ask_engine` is the test's: it has this file run as a program and waits for that. The
other end is vLLM's offline engine with everything in one process, and no connector, so that a
question can make it lose a block of its own device cache: what a model is good for in tests.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from prompts import BLOCK
from tiering_benchmarks.server import ENVIRONMENT
from warm import fork

RUN_SECONDS = 300.0
TOKENS_MAX = 4096
DEVICE_BYTES = 64 << 20
ANSWER = 4


@dataclass(frozen=True, slots=True)
class Question:
    """`salt` makes it a stranger to what is cached under another salt. `adapter` is the folder of
    a LoRA. `lose` is a group of layers, and a block of it among those that the device's cache is
    found to hold of the prompt, 0 the first, -1 the last: its bytes become 0 before they are
    read, in that group's layers only."""

    prompt: Sequence[int]
    salt: str = ""
    adapter: str | None = None
    lose: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """`logprobs[i]` of the chosen `tokens[i]`."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Told:
    """`groups` has the names of the layers of each group of the KV cache; `drafted` is how many
    tokens a draft has guessed for all replies."""

    replies: list[Reply]
    groups: list[list[str]]
    drafted: int


def ask_engine(log: Path, questions: Sequence[Question], **options: Any) -> Told:
    """One after the other, of an engine of their own; `options` go to `vllm.LLM` as they are."""
    asked = {"questions": [asdict(question) for question in questions], "options": options}
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with TemporaryFile() as stdin, TemporaryFile() as stdout, log.open("ab") as stderr:
        stdin.write(json.dumps(asked).encode())
        stdin.seek(0)
        descriptors = [file.fileno() for file in (stdin, stdout, stderr)]
        engine = fork([__file__], descriptors, log.parent, environment)
        if not engine.ends_within(RUN_SECONDS):
            engine.kill()
        ended = engine.wait()
        stdout.seek(0)
        replied = stdout.read()
    assert ended == 0, f"{log} ends with\n{log.read_text(errors='replace')[-6000:]}"
    told = json.loads(replied)
    return Told(**{**told, "replies": [Reply(**reply) for reply in told["replies"]]})


class OneShot:
    """The child's half: the engine, and how to ask it."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        # A CPU without instructions for bfloat16 takes many times as long over it.
        usual = {"dtype": "float32", "block_size": BLOCK, "kv_cache_memory_bytes": DEVICE_BYTES}
        self._llm = LLM(
            enforce_eager=True,
            max_model_len=TOKENS_MAX,
            disable_log_stats=False,
            seed=0,
            **{**usual, **options},
        )
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._manager = scheduler.kv_cache_manager
        self._groups = self._manager.kv_cache_config.kv_cache_groups
        self._find = self._manager.get_computed_blocks
        self._adapters: dict[str, Any] = {}

    def tell(self, questions: list[dict[str, Any]]) -> dict[str, Any]:
        """What `Told` has, as JSON."""
        replies = [self._reply(**question) for question in questions]
        drafted = [
            metric.value
            for metric in self._llm.get_metrics()
            if metric.name == "vllm:spec_decode_num_draft_tokens"
        ]
        groups = [list(group.layer_names) for group in self._groups]
        return {"replies": replies, "groups": groups, "drafted": int(sum(drafted))}

    def _reply(
        self, prompt: list[int], salt: str, adapter: str | None, lose: list[int] | None
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=ANSWER, logprobs=0, ignore_eos=True)
        wanted = {"prompt_token_ids": prompt, "cache_salt": salt or None}
        lost: list[int] = []

        def find(request: Any) -> Any:
            found = self._find(request)
            if lose is not None:
                lost.append(self._lose(found[0].blocks[lose[0]], *lose))
            return found

        self._manager.get_computed_blocks = find
        lora = None if adapter is None else self._adapter(adapter)
        (output,) = self._llm.generate(wanted, sampling, use_tqdm=False, lora_request=lora)
        assert len(lost) == (lose is not None)
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        steps = zip(tokens, completion.logprobs, strict=True)
        return {
            "tokens": tokens,
            "logprobs": [step[token].logprob for token, step in steps],
            "cached_tokens": output.num_cached_tokens,
        }

    def _lose(self, found: Sequence[Any], group: int, which: int) -> int:
        # A window holds no blocks before it, a state only the last: in their place is one of
        # nothing.
        block: int = [block.block_id for block in found if not block.is_null][which]
        layers = self._llm.llm_engine.vllm_config.compilation_config.static_forward_context
        for name in self._groups[group].layer_names:
            kept = layers[name].kv_cache
            for tensor in [kept] if hasattr(kept, "dtype") else kept:
                assert tensor[block].any(), f"{name} has nothing in block {block}"
                tensor[block] = 0
        return block

    def _adapter(self, folder: str) -> Any:
        from vllm.lora.request import LoRARequest

        number = len(self._adapters) + 1
        return self._adapters.setdefault(folder, LoRARequest(folder, number, folder))


def main() -> None:
    """Answer what standard input asks."""
    replies = os.fdopen(os.dup(1), "w")
    # Whatever else is printed goes to the log.
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    print(json.dumps(OneShot(asked["options"]).tell(asked["questions"])), file=replies, flush=True)
    # Without the interpreter's own end, which takes seconds and is of no interest.
    os._exit(0)


if __name__ == "__main__":
    main()
