"""One run of `tiering-bench serve`: a server of its own, warmed up, asked by `vllm bench serve`.

Owns each run's server, client process, directory and, for vLLM's connector, the name that it may
leave in /dev/shm; all are gone when the run ends. A run that did not do what it is to measure
raises WrongAnswer: an answer missing, or a prompt found where none can be.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tiering.errors import TieringError
from tiering_benchmarks.client import Client
from tiering_benchmarks.models import VOCABULARY
from tiering_benchmarks.serve_load import BLOCK_TOKENS, TAX, Load, trace_lines
from tiering_benchmarks.serve_sides import NONE, Memory, Side
from tiering_benchmarks.server import ENVIRONMENT, VllmServer
from tiering_benchmarks.tiers_run import WrongAnswer

DEVICE = "device"
CLIENT_SECONDS_MAX = 3600.0
LOG_TAIL_CHARACTERS = 2000
_FIRST_ORDINARY_TOKEN = 16
_WARM_ANSWER_TOKENS = 4
_RUNS = itertools.count()


class ClientFailed(TieringError):
    """`vllm bench serve` did not come to an end with a result; carries the end of its log."""


class _Result(msgspec.Struct):
    """What is used of what `vllm bench serve` saves."""

    completed: int
    failed: int
    duration: float
    total_input_tokens: int
    total_token_throughput: float
    mean_ttft_ms: float
    median_ttft_ms: float
    generated_texts: list[str]


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one run. `by_source` says where prompt tokens came from that were not computed;
    `cpu_seconds` is what all processes of the server took meanwhile."""

    ttft_mean_seconds: float
    ttft_median_seconds: float
    tokens_per_second: float
    cpu_seconds: float
    seconds: float
    prompt_tokens: int
    by_source: Mapping[str, int]
    answers: tuple[str, ...]

    def share(self, is_device: bool) -> float:
        """Of the prompt tokens, those that came from the device's cache, or from elsewhere."""
        found = sum(
            count for source, count in self.by_source.items() if (source == DEVICE) == is_device
        )
        return found / self.prompt_tokens


Samples = dict[str, list[Sample]]
"""By the side's name: one a repeat."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs share: the model's folder, the load, the memory, where to write."""

    model: Path
    load: Load
    memory: Memory
    directory: Path

    def run(self, side: Side) -> Sample:
        """A run of `side` from a cold start."""
        number = next(_RUNS)
        own = self.directory / f"run-{number}"
        root = own / "kv"
        root.mkdir(parents=True, mode=0o700)
        engine_id = f"tiering-bench-{os.getpid()}-{number}"
        server = VllmServer(
            self.model,
            own / "vllm.log",
            connector=side.config(self.memory, root, engine_id),
            device_bytes=self.memory.device_bytes,
            max_model_len=self.load.model_len,
            block_size=BLOCK_TOKENS,
        )
        try:
            with server:
                return self._measure(side, server, own)
        finally:
            shutil.rmtree(own)
            # vLLM's scheduler ends without removing the name where a signal ends it.
            for left in Path("/dev/shm").glob(f"vllm_offload_{engine_id}*"):
                left.unlink(missing_ok=True)

    def _measure(self, side: Side, server: VllmServer, own: Path) -> Sample:
        client = server.client
        self._warm_up(client)
        before, cpu_before = client.cached_by_source(), cpu_seconds(server.processes())
        result = self._ask(client, own)
        cpu = cpu_seconds(server.processes()) - cpu_before
        after = client.cached_by_source()
        gained = Counter(after)
        gained.subtract(before)
        sample = Sample(
            result.mean_ttft_ms / 1000,
            result.median_ttft_ms / 1000,
            result.total_token_throughput,
            cpu,
            result.duration,
            result.total_input_tokens,
            {source: count for source, count in gained.items() if count},
            tuple(result.generated_texts),
        )
        check(self.load, side, result.completed, result.failed, sample)
        return sample

    def _warm_up(self, client: Client) -> None:
        """A prompt that the load does not have, computed, and then found below the device."""
        chance = random.Random(0)
        tokens = self.load.longest_tokens - _WARM_ANSWER_TOKENS
        prompt = [chance.randrange(_FIRST_ORDINARY_TOKEN, VOCABULARY) for _ in range(tokens)]
        for _ in range(2):
            client.complete(prompt, _WARM_ANSWER_TOKENS)
            client.reset_prefix_cache()

    def _ask(self, client: Client, own: Path) -> _Result:
        result, log, trace = own / "result.json", own / "client.log", own / "trace.jsonl"
        trace.write_bytes(trace_lines(self.load.trace))
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            "--backend=openai",
            f"--base-url=http://{client.host}:{client.port}",
            f"--model={client.model}",
            f"--tokenizer={self.model}",
            *self.load.arguments,
            *([f"--dataset-path={trace}"] if self.load.trace else []),
            f"--num-prompts={self.load.requests}",
            *("--ignore-eos", "--temperature=0", "--seed=1", "--disable-tqdm"),
            *("--save-result", "--save-detailed"),
            f"--result-dir={result.parent}",
            f"--result-filename={result.name}",
        ]
        # Its traces make tokens from Python's hashes of strings, else other ones in each process.
        environment = {**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": "0"}
        with log.open("wb") as out:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=own,
                    env=environment,
                    timeout=CLIENT_SECONDS_MAX,
                )
                how = f"ended with {done.returncode}"
            except subprocess.TimeoutExpired as error:
                how = f"took more than {error.timeout:g} s"
        if not result.exists():
            tail = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
            raise ClientFailed(f"vllm bench serve {how} and has no result:\n{tail}")
        return msgspec.json.decode(result.read_bytes(), type=_Result)


def check(load: Load, side: Side, completed: int, failed: int, sample: Sample) -> None:
    """WrongAnswer where the run was not the one that was to be measured."""
    if failed or completed != load.requests:
        told = f"{completed} of {load.requests} requests were answered, {failed} failed"
        raise WrongAnswer(f"{side.name}: {told}")
    elsewhere = sample.share(is_device=False)
    if side.name == NONE and elsewhere:
        raise WrongAnswer(f"{side.name}: {elsewhere:.0%} of the tokens came from elsewhere")
    if load.name == TAX and sample.by_source:
        found = dict(sample.by_source)
        raise WrongAnswer(f"{side.name}: prompts that never repeat were found: {found}")


def measure(
    sides: Sequence[Side],
    run: Callable[[Side], Sample],
    repeats: int,
    seconds_max: float,
    tell: Callable[[str], None],
) -> Samples:
    """Each side once a repeat, in an order that rotates. The repeat in which `seconds_max` pass is
    the last one, and is whole."""
    samples: Samples = {side.name: [] for side in sides}
    start = time.monotonic()
    for repeat in range(repeats):
        at = repeat % len(sides)
        for side in [*sides[at:], *sides[:at]]:
            tell(f"repeat {repeat + 1} of {repeats}: {side.name}")
            samples[side.name].append(run(side))
        if time.monotonic() - start > seconds_max:
            break
    return samples


def cpu_seconds(pids: Sequence[int]) -> float:
    """What these processes have taken so far, in user and system mode."""
    ticks = 0
    for pid in pids:
        try:
            line = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a helper that ended
        # After the command, in parentheses: state is the third field, user time the 14th.
        fields = line.rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
