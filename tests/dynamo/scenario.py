"""Dynamo's frontend before two vLLM workers with our connector: does it find what they have?

`scenario.py MODEL FOLDER` is run by `run.py`, with the Python of an environment that has Dynamo,
in a network namespace of its own, because Dynamo listens on all addresses. Prints a line for each
thing that it saw; exit code 1 if one of them was not so. Logs and tiers lie under FOLDER.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiering_benchmarks.server import ENVIRONMENT

HOST = "127.0.0.1"
HTTP_PORT = 8000
MODEL_NAME = "m"
WORKER = Path(__file__).with_name("dynamo_vllm.py")

BLOCK = 32
PROMPT_BLOCKS = 20
DEVICE_BLOCKS = 64
HOST_BYTES = 128 << 20
"""Room for everything that is asked here."""

START_SECONDS = 600.0
NOTICE_SECONDS = 120.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.2
QUIET_SECONDS = 2.0

SIOCSIFFLAGS = 0x8914
IFF_UP = 1

ENVIRONMENT_OF_DYNAMO = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_TCP_RPC_HOST": HOST,
    "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
    "DYN_EVENT_PLANE_HOST": HOST,
    "PYTHONHASHSEED": "0",
    "DYN_SYSTEM_HOST": HOST,
    "DYN_LOGGING_JSONL": "false",
}

ANSI = re.compile(r"\x1b\[[0-9;]*m")
QUERIED = r"Queried lower-tier indexer.*storage_tier={tier} .*matched_workers=[1-9]"
APPLIED = "kv_cache_events_applied"


class NotSeen(Exception):
    """Something that has to be so is not."""


@dataclass
class Process:
    """One program and its log; it has a process group of its own, which ends with it."""

    name: str
    command: Sequence[str]
    folder: Path
    environment: dict[str, str]
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={
                    **os.environ,
                    **ENVIRONMENT,
                    **ENVIRONMENT_OF_DYNAMO,
                    # Dynamo keeps copies of models' settings at home.
                    "HOME": str(self.folder),
                    "DYN_FILE_KV": str(self.folder / "discovery"),
                    **self.environment,
                },
                start_new_session=True,
            )

    def check(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise NotSeen(f"{self.name} has ended; {self.log} ends with\n{self.text()[-3000:]}")

    def text(self, start: int = 0) -> str:
        """Its log, from byte `start` on, without colours."""
        with self.log.open("rb") as log:
            log.seek(start)
            return ANSI.sub("", log.read().decode(errors="replace"))

    def stop(self) -> None:
        """As an operator does, so that it takes leave; and whatever is left is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def frontend(folder: Path) -> Process:
    command = ["-m", "dynamo.frontend", f"--http-host={HOST}", f"--http-port={HTTP_PORT}"]
    return Process(
        "frontend",
        [*command, "--router-mode=kv"],
        folder,
        {"DYN_LOG": "debug"},
    )


def worker(number: int, model: Path, folder: Path, endpoint: str) -> Process:
    """Its metrics are at port 8080 + `number`; its chunks survive it."""
    root = folder / f"kv-{number}"
    connector = {
        "kv_connector": "TieredConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": HOST_BYTES,
            "blocks_per_chunk": 2,
            "self_describing_kv_events": True,
            "secondary_tiers": [{"type": "fs", "root_dir": str(root), "enable_kv_events": True}],
        },
    }
    events = {"publisher": "zmq", "endpoint": endpoint, "enable_kv_cache_events": True}
    command = [
        str(WORKER),
        f"--model={model}",
        f"--served-model-name={MODEL_NAME}",
        # The tiny model's tokenizer has no template for a chat.
        "--endpoint-types=completions",
        "--enforce-eager",
        "--dtype=float32",
        "--max-model-len=1024",
        f"--block-size={BLOCK}",
        # Of the two, the tiny model's block has 128 KiB.
        f"--num-gpu-blocks-override={DEVICE_BLOCKS}",
        f"--kv-cache-memory-bytes={DEVICE_BLOCKS * (128 << 10)}",
        f"--kv-transfer-config={json.dumps(connector)}",
        f"--kv-events-config={json.dumps(events)}",
    ]
    environment = {"DYN_SYSTEM_PORT": str(8080 + number), "DYN_LOG": "info"}
    return Process(f"worker-{number}", command, folder, environment)


def fetch(port: int, path: str, body: Any = None) -> str:
    """What comes back; NotSeen if that is an error, or nothing."""
    connection = http.client.HTTPConnection(HOST, port, timeout=300)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise NotSeen(f"{path} answers with {response.status}: {text[:500]}")
        return text
    except (OSError, http.client.HTTPException) as error:
        raise NotSeen(f"port {port}, {path}: {error}") from error
    finally:
        connection.close()


def ask(prompt: list[int]) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer: dict[str, Any] = json.loads(fetch(HTTP_PORT, "/v1/completions", body))
    return answer


def sample(port: int, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels; 0 while there is none."""
    total = 0.0
    for line in fetch(port, "/metrics").splitlines():
        if re.match(rf"\w*{name}(_total)?[{{ ]", line) and all(
            f'{label}="{value}"' in line for label, value in labels.items()
        ):
            total += float(line.rsplit(maxsplit=1)[-1])
    return total


def cached(number: int, source: str) -> float:
    """Prompt tokens that worker `number` had from `source`."""
    return sample(8080 + number, "vllm:prompt_tokens_cached_by_source", source=source)


def prompts(name: str, count: int, blocks: int = PROMPT_BLOCKS) -> list[list[int]]:
    chance = random.Random(name)
    return [[chance.randrange(300, 4096) for _ in range(blocks * BLOCK + 8)] for _ in range(count)]


def wait(
    what: str, holds: Callable[[], bool], processes: Sequence[Process], seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    reason = "it is not so"
    while True:
        for process in processes:
            process.check()
        try:
            if holds():
                return
        except NotSeen as error:
            reason = str(error)
        if time.monotonic() > deadline:
            raise NotSeen(f"within {seconds:g} s not seen: {what}; {reason}")
        time.sleep(POLL_SECONDS)


def accepted_for_prefill(*names: str) -> bool:
    """Whether a worker that does prefill only may have this connector, or these in one."""
    from dynamo.vllm.kv_connector_protocols import make_kv_connector_protocol

    alone = len(names) == 1
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    given = SimpleNamespace(
        kv_connector=names[0] if alone else "MultiConnector",
        kv_connector_extra_config={} if alone else {"connectors": children},
    )
    try:
        make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=given))
    except ValueError:
        return False
    return True


def check_prefill() -> None:
    for ours in ("TieredConnector", "OffloadingConnector"):
        pair = ("NixlConnector", ours)
        accepted = [accepted_for_prefill(*names) for names in (pair, pair[::-1], pair[1:])]
        if accepted != [True, True, False]:
            raise NotSeen(f"{ours} for prefill: after, before, without NIXL: {accepted}")
    print("seen: with NixlConnector ours is accepted for prefill, as vLLM's is", flush=True)


def raise_loopback() -> None:
    """What `ip link set lo up` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


class Scenario:
    """Owns the programs of a run, in the order in which things are tried."""

    def __init__(self, model: Path, folder: Path) -> None:
        check_prefill()
        self._front = frontend(folder)
        self._workers = {
            # Both ways that vLLM listens in.
            1: worker(1, model, folder, "tcp://*:20081"),
            2: worker(2, model, folder, f"ipc://{folder}/kv-events-2"),
        }
        self._all = [self._front, *self._workers.values()]

    def run(self) -> None:
        with ExitStack() as stack:
            for process in self._all:
                stack.callback(process.stop)
                process.start()
            self._wait_until_served(2)
            self._say("both workers are registered, and answer")
            (prompt,) = prompts("the one", 1)
            owner = self._first_time(prompt)
            self._evict(prompt, owner)
            self._again(prompt, owner, "host", "HostPinned")
            self._restart(owner)
            self._again(prompt, owner, "disk", "Disk")
            applied = sample(HTTP_PORT, APPLIED, event_type="stored", status="ok")
            self._say(f"{APPLIED} of stored blocks is {applied:g}")
            if not applied:
                raise NotSeen(f"{APPLIED} stays 0")
            self._without_events()

    def _without_events(self) -> None:
        """The router goes by what it has sent where; nothing of the tiers takes part."""
        self._front.stop()
        self._front.command = [*self._front.command, "--no-router-kv-events"]
        self._front.start()
        self._wait_until_served(len(self._workers))
        # One alone would go to the right one of two by chance.
        for prompt in prompts("approximately", 4):
            owner = self._first_time(prompt)
            before = cached(owner, "device")
            ask(prompt)
            if cached(owner, "device") - before != PROMPT_BLOCKS * BLOCK:
                raise NotSeen(f"without events, a prompt goes to worker {owner} again")
        self._say("without events, each prompt goes where it went before")

    def _say(self, what: str) -> None:
        print(f"seen: {what}", flush=True)

    def _wait(self, what: str, holds: Callable[[], bool], seconds: float = NOTICE_SECONDS) -> None:
        wait(what, holds, self._all, seconds)

    def _wait_until_served(self, count: int) -> None:
        """By `count` workers, of which each has answered something: new ones announce their disk
        from then on."""

        def is_served() -> bool:
            return len(list_instances(self._front)) == count

        self._wait(f"{count} workers at the frontend", is_served, START_SECONDS)
        fresh = iter(prompts(f"hello {time.monotonic()}", 1000, 1))
        before = {number: self._answered(number) for number in self._workers}

        def all_have_answered() -> bool:
            ask(next(fresh))
            return all(self._answered(n) > before[n] for n in self._workers)

        self._wait("an answer by each worker", all_have_answered)

    def _answered(self, number: int) -> float:
        return sample(8080 + number, "vllm:request_success")

    def _first_time(self, prompt: list[int]) -> int:
        before = {number: self._answered(number) for number in self._workers}
        ask(prompt)
        (owner,) = (n for n in self._workers if self._answered(n) > before[n])
        self._say(f"worker {owner} computes a prompt of {PROMPT_BLOCKS} blocks")
        return owner

    def _evict(self, prompt: list[int], owner: int) -> None:
        """By other prompts, until the owner's device has taken in more than it holds."""
        for other in prompts("others", 4 * DEVICE_BLOCKS // PROMPT_BLOCKS):
            ask(other)
        self._wait_for_quiet()
        self._say(f"other prompts, {4 * DEVICE_BLOCKS} blocks for two devices of {DEVICE_BLOCKS}")

    def _again(self, prompt: list[int], owner: int, source: str, tier: str) -> None:
        """It goes to the worker that has it, which has it from where the router knew it to be."""
        wanted = PROMPT_BLOCKS * BLOCK
        others = [number for number in self._workers if number != owner]
        before = {n: cached(n, source) for n in self._workers}
        answered = {n: self._answered(n) for n in self._workers}
        read = self._front.log.stat().st_size
        ask(prompt)
        gained = {n: cached(n, source) - before[n] for n in self._workers}
        if any(self._answered(n) > answered[n] for n in others) or gained[owner] != wanted:
            raise NotSeen(
                f"{wanted} tokens from {source} at worker {owner}: tokens by worker are {gained}"
            )
        found = re.search(QUERIED.format(tier=tier), self._front.text(read))
        if found is None:
            raise NotSeen(f"the router did not look into {tier}; see {self._front.log}")
        self._say(f"worker {owner} is asked again and has {wanted} tokens from {source}")
        self._say(" ".join(found[0].split()))

    def _wait_for_quiet(self) -> None:
        """Until the router has taken in what there was to tell."""
        last: list[tuple[float, float]] = []

        def is_quiet() -> bool:
            told, now = sample(HTTP_PORT, APPLIED), time.monotonic()
            if not last or last[-1][0] != told:
                last.append((told, now))
            return now - last[-1][1] > QUIET_SECONDS

        self._wait("events that come to an end", is_quiet)

    def _restart(self, number: int) -> None:
        again = self._workers[number]
        again.stop()
        others = [process for process in self._all if process is not again]
        remaining = len(self._workers) - 1
        wait(
            "the frontend misses the worker that was stopped",
            lambda: len(list_instances(self._front)) == remaining,
            others,
            NOTICE_SECONDS,
        )
        again.start()
        self._wait_until_served(len(self._workers))
        self._wait_for_quiet()
        self._say(f"worker {number} was started anew, over the same directory")


def list_instances(front: Process) -> list[str]:
    """Names of the instances that answer requests, of those registered at present."""
    front.check()
    told = json.loads(fetch(HTTP_PORT, "/health"))
    return [
        str(instance["instance_id"])
        for instance in told.get("instances", ())
        if instance.get("endpoint") == "generate"
    ]


def main() -> int:
    model, folder = (Path(argument) for argument in sys.argv[1:])
    raise_loopback()
    # So that what was started ends with this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        Scenario(model, folder).run()
    except NotSeen as error:
        print(f"NOT SEEN: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
