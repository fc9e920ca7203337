"""The demonstration: one long prompt, answered from each tier in turn by a real vLLM.

Owns a temporary folder with model, log and fs tier, and two servers, one after the other. Claims
nothing that it does not check: where a row's tokens came from is read from vLLM's own counters,
and what was answered is compared with the first answer. One thread.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering.errors import TieringError
from tiering_benchmarks.client import Client, Completion
from tiering_benchmarks.models import SIZES, VOCABULARY, make_model
from tiering_benchmarks.server import VllmServer

BLOCK_TOKENS = 32
BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
# Whole chunks and a bit, but less than a block: device and lower tiers can then serve equally
# many tokens, and only between equal splits are vLLM's logprobs equal to the bit.
PROMPT_CHUNKS = 31
PROMPT_TOKENS = PROMPT_CHUNKS * CHUNK_TOKENS + 8
ANSWER_TOKENS = 16
MAX_MODEL_LEN = 2048
# Room for the longest request and a few blocks more, which vLLM wants; two prompts do not fit.
DEVICE_TOKENS = 2560
HOST_BYTES = 512 << 20
FIRST_ORDINARY_TOKEN = 16
AT_REST_SECONDS = 1.0
AT_REST_DEADLINE_SECONDS = 120.0

HEADER = ("", "first token", "computed", "device", "host", "fs", "tokens", "logprobs")


class ClaimFailed(TieringError):
    """The demonstration ran into something other than what it is to show."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer, and where its prompt's tokens came from."""

    name: str
    answer: Completion
    by_source: Mapping[str, int]

    @property
    def computed(self) -> int:
        return self.answer.prompt_tokens - sum(self.by_source.values())


def connector_config(root: Path, host_bytes: int, blocks_per_chunk: int) -> dict[str, Any]:
    """What --kv-transfer-config takes: our connector over a host tier and an fs tier."""
    return {
        "kv_connector": "TieredConnector",
        "kv_connector_module_path": "tiering_connectors.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": host_bytes,
            "blocks_per_chunk": blocks_per_chunk,
            "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        },
    }


def ask(client: Client, name: str, prompt: list[int]) -> Row:
    """Send `prompt`; what the counters gained meanwhile is this answer's, as no one else asks."""
    before = client.cached_by_source()
    answer = client.complete(prompt, ANSWER_TOKENS, logprobs=True)
    after = client.cached_by_source()
    gained = {source: count - before.get(source, 0) for source, count in after.items()}
    row = Row(name, answer, {source: count for source, count in gained.items() if count})
    _say(f"{name}: first token after {answer.first_token_seconds:.2f} s")
    return row


def run_demo(workspace: Path) -> list[Row]:
    """Serve the prompt cold, from device, from host and, after a restart, from the fs tier."""
    _say("making a model of random weights")
    model = make_model(workspace, "demo")
    root = workspace / "kv"
    root.mkdir()
    server = VllmServer(
        model,
        workspace / "vllm.log",
        connector=connector_config(root, HOST_BYTES, BLOCKS_PER_CHUNK),
        device_bytes=DEVICE_TOKENS * SIZES["demo"].kv_bytes_per_token,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_TOKENS,
    )
    prompts = _prompts()
    prompt = next(prompts)
    with _served(server) as client:
        cold = ask(client, "cold", prompt)
        device = ask(client, "device hit", prompt)
        for _ in range(-(-DEVICE_TOKENS // PROMPT_TOKENS)):
            ask(client, "another prompt, to push it out of device memory", next(prompts))
        host = ask(client, "host hit", prompt)
        chunks = wait_at_rest(root, PROMPT_CHUNKS)
        _say(f"the fs tier is at rest, with {chunks} chunks; restarting the server")
    with _served(server) as client:
        fs = ask(client, "fs hit, restarted", prompt)
    return [cold, device, host, fs]


def check(rows: list[Row]) -> list[str]:
    """What is not as the demonstration claims, one sentence each; empty if all is well."""
    cold, device, host, fs = rows
    cached = PROMPT_CHUNKS * CHUNK_TOKENS
    wrong = []
    for row, source in ((cold, None), (device, "device"), (host, "host"), (fs, "disk")):
        expected = {source: cached} if source else {}
        if row.by_source != expected:
            wrong.append(f"{row.name}: tokens came from {dict(row.by_source)}, not {expected}")
        if row.answer.cached_tokens != sum(expected.values()):
            wrong.append(f"{row.name}: vLLM reports {row.answer.cached_tokens} cached tokens")
        if row.answer.token_ids != cold.answer.token_ids:
            wrong.append(f"{row.name}: the answer's tokens differ from the cold run's")
    for row in (host, fs):
        if row.answer.logprobs != device.answer.logprobs:
            wrong.append(f"{row.name}: logprobs differ from the device hit's")
    return wrong


def table(rows: list[Row]) -> str:
    """The rows as text, under `HEADER`."""
    cold, device = rows[:2]
    lines: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        tokens = "equal" if row.answer.token_ids == cold.answer.token_ids else "DIFFER"
        # Cold and cached runs round differently by themselves, without any connector.
        logprobs = "equal" if row.answer.logprobs == device.answer.logprobs else "DIFFER"
        lines.append(
            (
                row.name,
                f"{row.answer.first_token_seconds:.2f} s",
                str(row.computed),
                *(str(row.by_source.get(source, 0)) for source in ("device", "host", "disk")),
                "-" if row is cold else tokens,
                "-" if row in (cold, device) else logprobs,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def wait_at_rest(root: Path, chunks_min: int) -> int:
    """Wait until nothing more is written under `root`; returns how many chunks are there.

    Raises ClaimFailed if there are fewer than `chunks_min` after the deadline.
    """
    deadline = time.monotonic() + AT_REST_DEADLINE_SECONDS
    seen: dict[Path, int] = {}
    since = time.monotonic()
    while True:
        now = {path: path.stat().st_size for path in root.rglob("*.bin")}
        if now != seen:
            seen, since = now, time.monotonic()
        elif len(seen) >= chunks_min and time.monotonic() - since > AT_REST_SECONDS:
            return len(seen)
        if time.monotonic() > deadline:
            raise ClaimFailed(
                f"{root} holds {len(seen)} chunks after {AT_REST_DEADLINE_SECONDS:g} s, "
                f"not at rest with {chunks_min} or more"
            )
        time.sleep(0.05)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tiering-bench demo` to the command line."""
    parser = commands.add_parser(
        "demo", help="one long prompt, answered from device, host and fs by a real vLLM"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="kv-tiering-demo-") as workspace:
        rows = run_demo(Path(workspace))
    print(
        f"\nA prompt of {PROMPT_TOKENS} tokens: where they came from, and whether the answer's "
        "tokens equal\nthe cold run's and its logprobs the device hit's, to the bit.\n"
    )
    print(table(rows))
    wrong = check(rows)
    for sentence in wrong:
        print(f"NOT AS CLAIMED: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


def _prompts() -> Iterator[list[int]]:
    """Prompts without end, of one length and with nothing in common."""
    chance = random.Random(1)
    while True:
        yield [chance.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY) for _ in range(PROMPT_TOKENS)]


@contextmanager
def _served(server: VllmServer) -> Iterator[Client]:
    _say("starting vllm serve (half a minute or more)")
    with server:
        yield server.client


def _say(line: str) -> None:
    print(line, flush=True)
