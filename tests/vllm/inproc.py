"""vLLM's engine in a process of its own, driven by a test one call at a time.

Two halves. `EngineProcess` is the test's: it has this file run as a program, sends it a line of
JSON for each call and waits, with a deadline, for the line that answers. `Calls` is the other
end: vLLM's offline engine with everything in one process, so a call can look into the connector
and make its copier fail. Only the child imports vLLM.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from prompts import BLOCK, random_prompt
from tiering_benchmarks.server import ENVIRONMENT
from warm import Forked, fork

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiering.device.base import BlockMap
    from tiering.device.host import HostCopier

BLOCK_BYTES = 128 << 10
"""Of the tiny model in float32, in the device and in the host tier."""

CALL_SECONDS = 240.0
SETTLE_SECONDS = 30.0
LATE_SECONDS = 0.05


class EngineFailed(AssertionError):
    """The engine raised, ended or hung; with the child's own words."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`logprobs[i]` of the chosen `tokens[i]`; `runner_up[i]` of the best of all others."""

    tokens: list[int]
    logprobs: list[float]
    runner_up: list[float]
    cached_tokens: int


def connector_config(root: Path | None, host_bytes: int, **extra: Any) -> dict[str, Any]:
    """Our connector, by its name alone: vLLM must find it through the plugin entry point."""
    tiers = [] if root is None else [{"type": "fs", "root_dir": str(root)}]
    return {
        "kv_connector": "TieredConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": tiers,
            **extra,
        },
    }


class EngineProcess:
    """The test's half; a context manager. `options` go to `vllm.LLM` as they are."""

    PROGRAM = __file__
    """What runs the other half."""

    def __init__(self, log: Path, *, within: Sequence[str] = (), **options: Any) -> None:
        """`within` is the command that runs it, such as one that enters a namespace; without one
        it is forked from a warm process."""
        self._within = within
        self._log = log
        self._options = options
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._questions: IO[bytes]
        self._answers: IO[bytes]

    def __enter__(self) -> Self:
        (stdin, questions), (answers, stdout) = os.pipe(), os.pipe()
        self._questions, self._answers = os.fdopen(questions, "wb"), os.fdopen(answers, "rb")
        with self._log.open("ab") as log, os.fdopen(stdin), os.fdopen(stdout, "wb"):
            self._process = self._started(stdin, stdout, log.fileno())
        try:
            if self._options:
                self.call("start", **self._options)
        except BaseException:
            self.kill()
            raise
        return self

    def _started(self, stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes] | Forked:
        folder = self._log.parent
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if not self._within:
            return fork([self.PROGRAM], [stdin, stdout, stderr], folder, environment)
        command = [*self._within, sys.executable, self.PROGRAM]
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder, env=environment
        )

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once: nothing may depend on more."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._questions.close()
            self._answers.close()

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def call(self, name: str, **arguments: Any) -> Any:
        """`Calls.<name>(**arguments)` in the child; EngineFailed if it raised, ended or hung, for
        longer than the `seconds` that it was told to take."""
        patience = CALL_SECONDS + 4 * arguments.get("seconds", 0)
        if self._process is None:
            raise EngineFailed("the engine is not running")
        self._questions.write(json.dumps([name, arguments]).encode() + b"\n")
        self._questions.flush()
        if not select.select([self._answers], [], [], patience)[0]:
            raise EngineFailed(f"{name}: no answer within {patience:g} s; {self.log_tail()}")
        line = self._answers.readline()
        if not line:
            raise EngineFailed(f"{name}: the engine ended; {self.log_tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{name}: {reply['error']}")
        return reply["result"]

    def log_tail(self) -> str:
        return f"{self._log} ends with\n{self._log.read_text(errors='replace')[-6000:]}"

    def ask(self, prompt: Sequence[int], tokens: int = 4, **how: Any) -> Answer:
        (answer,) = self.ask_all([prompt], tokens, **how)
        return answer

    def ask_all(
        self, prompts: Iterable[Sequence[int]], tokens: int = 4, **how: Any
    ) -> list[Answer]:
        """All at once. `salt` makes them strangers to everything that is cached."""
        asked = [list(prompt) for prompt in prompts]
        return [Answer(**told) for told in self.call("ask", prompts=asked, tokens=tokens, **how)]

    def counters(self) -> dict[str, int]:
        counted: dict[str, int] = self.call("state")["counters"]
        return counted

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Filled, at the end of the block, with what counters and sources grew by in it."""
        grown: dict[str, int] = {}
        before = self._counts()
        yield grown
        grown.update({n: v - before[n] for n, v in self._counts().items() if v != before[n]})

    def _counts(self) -> dict[str, int]:
        state = self.call("state")
        return {**state["counters"], **state["cached"], "preemptions": state["preemptions"]}


def assert_at_rest(engine: EngineProcess) -> None:
    """Nobody holds, waits for or copies anything, and every slot is free or can be had."""
    engine.call("settle")
    state = engine.call("state")
    left = {name: state[name] for name in ("pins", "jobs", "requests", "waited_for", "steps")}
    assert not any(left.values()), left
    ready, free = (state["slots"].get(name, 0) for name in ("READY", "FREE"))
    assert ready + free == state["rows"], state["slots"]
    assert ready == state["indexed"]


def assert_one_block_left_out_is_seen(
    engine: EngineProcess, prompt: Sequence[int], hit: int
) -> None:
    """The negative control: without it, no equality of answers would prove anything. `hit` tokens
    of `prompt` can be had."""
    engine.ask(prompt)
    warm = engine.ask(prompt)
    restored = []
    for fault in ("none", "drop"):
        # Device blocks go through other hands, so that the one left out is not right by chance.
        engine.ask_all([random_prompt((fault, i), 62 * BLOCK) for i in range(3)], 1)
        if fault != "none":
            engine.call("break_copies", direction="scatter", fault=fault, copies=1)
        with engine.counting() as grown:
            restored.append(engine.ask(prompt))
        assert grown["host"] == hit
    assert engine.call("copies_broken") == 1
    whole, broken = restored
    assert whole == warm
    assert broken.cached_tokens == warm.cached_tokens
    change = max(abs(b - w) for b, w in zip(broken.logprobs, warm.logprobs, strict=True))
    assert change > 0.01
    engine.call("reset")


class Calls:
    """The child's half: each method is a call; arguments and results are JSON."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._adapters: dict[str, Any] = {}
        self._copies_broken = 0

    def start(self, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        connector = options.pop("connector", None)
        if connector is not None:
            options["kv_transfer_config"] = KVTransferConfig(**connector)
        # A CPU without instructions for bfloat16 takes many times as long over it.
        fixed = {"dtype": "float32", "block_size": BLOCK, "seed": 0}
        self._llm = LLM(enforce_eager=True, disable_log_stats=False, **{**fixed, **options})

    def start_in_vain(self, **options: Any) -> str:
        """The error that a start ends with."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        try:
            self.start(**options)
        except Exception as error:
            # Otherwise the next start would find this one's worker half.
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()
            return f"{type(error).__name__}: {error}"
        raise AssertionError("the engine started")

    def ask(
        self,
        prompts: list[list[int]],
        tokens: int,
        salt: str | None = None,
        adapter: str | None = None,
        params: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """`adapter` is the folder of a LoRA, `params` the requests' kv_transfer_params."""
        wanted = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts]
        lora = None if adapter is None else self._adapter(adapter)
        sampling = _sampling(tokens, params)
        outputs = self._llm.generate(wanted, sampling, use_tqdm=False, lora_request=lora)
        return [_answer(output) for output in outputs]

    def _adapter(self, folder: str) -> Any:
        from vllm.lora.request import LoRARequest

        number = len(self._adapters) + 1
        return self._adapters.setdefault(folder, LoRARequest(folder, number, folder))

    def ask_and_abort(
        self, prompts: list[list[int]], tokens: int, abort_at: list[int]
    ) -> dict[str, list[int]]:
        """Request i is aborted before step `abort_at[i]`; the tokens of those that end first."""
        engine = self._llm.llm_engine
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, _sampling(tokens))
        ended: dict[str, list[int]] = {}
        step = 0
        while engine.has_unfinished_requests():
            engine.abort_request([str(i) for i, at in enumerate(abort_at) if at == step])
            for output in engine.step():
                if output.finished:
                    ended[output.request_id] = list(output.outputs[0].token_ids)
            step += 1
        return ended

    def storm(self, prompts: list[list[int]], tokens: int, **how: Any) -> dict[str, Any]:
        """As `storm.run_storm` has it."""
        from storm import run_storm

        return run_storm(self._llm.llm_engine, _sampling(tokens), prompts, **how)

    def reset(self, connector: bool = False) -> bool:
        """Empty the device's prefix cache, and the connector's tiers with it if so told."""
        done: bool = self._llm.reset_prefix_cache(reset_connector=connector)
        return done

    def wipe(self) -> None:
        """Zero the device's KV cache: what is read from it without having been brought back is
        told. Nothing may be under way."""
        config = self._llm.llm_engine.vllm_config.compilation_config
        for layer in config.static_forward_context.values():
            kept: Any = getattr(layer, "kv_cache", ())
            for tensor in [kept] if hasattr(kept, "dtype") else kept:
                tensor.zero_()

    def empty_host(self) -> None:
        """Evict all of the host tier, as other prompts would."""
        self._half()._core.index.clear()

    def settle(self) -> None:
        """Step until nothing is under way: no copy, no read, no write."""
        scheduler, half = self._scheduler(), self._half()
        deadline = time.monotonic() + SETTLE_SECONDS
        while scheduler.has_requests():
            if time.monotonic() > deadline:
                raise AssertionError(f"never idle: {half!r} {half._core!r}")
            self._llm.llm_engine.step()
        # As a server would do nothing more now, every chunk must be on its way.
        assert not half._core._cascades.waiting, "chunks wait for a step that may never come"
        while not half._core.is_settled:
            if time.monotonic() > deadline:
                raise AssertionError(f"not settled: {half!r} {half._core!r}")
            time.sleep(0.001)
            half._engine.pump()

    def state(self) -> dict[str, Any]:
        """What there is to know of the connector's scheduler half, and vLLM's own counts."""
        half = self._half()
        core = half._core
        slots = core.index.slots
        metrics = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value"):
                metrics[metric.name, metric.labels.get("source", "")] = metric.value
        name = "vllm:prompt_tokens_cached_by_source"
        return {
            "connector": type(self._scheduler().connector).__name__,
            "counters": half.counters(),
            "cached": {s: int(v) for (n, s), v in metrics.items() if n == name},
            "preemptions": int(metrics["vllm:num_preemptions", ""]),
            "slots": {state.name: count for state, count in slots.census().items() if count},
            "rows": len(slots),
            "indexed": len(core.index),
            "pins": int(slots.load_pins.sum()) + int(slots.write_pins.sum()),
            "jobs": len(half._jobs),
            "requests": len(half._requests) + len(core._holds),
            "waited_for": core._holds.slots_waited_for,
            "steps": core.steps_out,
        }

    def groups(self) -> list[tuple[str, int, int]]:
        """Of each KV cache group what it keeps, and the tokens of a block and of a chunk."""
        groups = self._half()._geometry.groups
        return [(g.kind.name, g.tokens_per_block, g.tokens_per_chunk) for g in groups]

    def break_copies(
        self,
        direction: str,
        fault: str,
        copies: int,
        group: int | None = None,
        block: int = 0,
    ) -> None:
        """The next `copies` of `direction` (`gather` or `scatter`), of KV cache group `group` if
        given, leave out their first block, or `block`, without a word (`drop`), end with an error
        (`fail`), or are whole and end late (`late`)."""
        from tiering.device.host import HostCopier
        from tiering.errors import CopyError

        whole = getattr(HostCopier, direction)
        self._copies_broken = 0

        def broken(copier: HostCopier, blocks: BlockMap) -> Future[None]:
            if group not in (None, blocks.group):
                intact: Future[None] = whole(copier, blocks)
                return intact
            self._copies_broken += 1
            if self._copies_broken == copies:
                setattr(HostCopier, direction, whole)
            if fault != "late":
                blocks = _without(blocks, block)
            future: Future[None] = whole(copier, blocks)
            if fault == "drop":
                return future
            future.result()
            told: Future[None] = type(future)()
            if fault == "fail":
                told.set_exception(CopyError("broken on purpose"))
            else:
                threading.Timer(LATE_SECONDS, told.set_result, [None]).start()
            return told

        setattr(HostCopier, direction, broken)

    def copies_broken(self) -> int:
        """How many copies `break_copies` has broken since it was called."""
        return self._copies_broken

    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _half(self) -> Any:
        return self._scheduler().connector._scheduler


def _without(blocks: BlockMap, block: int) -> BlockMap:
    """All of the copy but `block`, counted from its end if negative."""
    keep = [i for i in range(len(blocks)) if i != block % len(blocks)]
    return replace(
        blocks,
        blocks=blocks.blocks[keep],
        slots=blocks.slots[keep],
        positions=blocks.positions[keep],
    )


def _sampling(tokens: int, params: dict[str, Any] | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=tokens,
        logprobs=2,
        ignore_eos=True,
        extra_args={"kv_transfer_params": params} if params else None,
    )


def _answer(output: Any) -> dict[str, Any]:
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    steps = list(zip(tokens, completion.logprobs, strict=True))
    return {
        "tokens": tokens,
        "logprobs": [step[token].logprob for token, step in steps],
        "runner_up": [max(e.logprob for t, e in s.items() if t != token) for token, s in steps],
        "cached_tokens": output.num_cached_tokens,
    }


def main(calls: Calls) -> None:
    """Answer calls until nobody asks any more."""
    replies = os.fdopen(os.dup(1), "w")
    # Whatever else is printed goes to the log.
    os.dup2(2, 1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        reply: Mapping[str, Any]
        try:
            reply = {"result": getattr(calls, name)(**arguments)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)
    # Without the interpreter's own end, which takes seconds and is of no interest.
    os._exit(0)


if __name__ == "__main__":
    main(Calls())
