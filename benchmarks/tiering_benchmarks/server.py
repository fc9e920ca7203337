"""A `vllm serve` of one's own: started, waited for, stopped or killed with all its processes.

Owns the server's process group from start to end: the leader is reaped only when no other process
of the group lives, so its id cannot come to mean anyone else's processes meanwhile. Uses the
vLLM of this Python's environment, listens on 127.0.0.1 only. Linux. One thread.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tiering.errors import TieringError
from tiering.testing.ports import free_port
from tiering_benchmarks.client import Client

HOST = "127.0.0.1"
MODEL_NAME = "model"
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 40
ERROR_LINE = re.compile(r"^(?!.* (INFO|WARNING) ).*\b\w+(Error|Exception): ")

ENVIRONMENT = {
    # Nothing is compiled: this is about the KV cache, and a compiler need not be there.
    "TORCHDYNAMO_DISABLE": "1",
    # On few cores a second OpenMP thread spends its time spinning.
    "OMP_NUM_THREADS": "1",
    # Binding to cores refuses to start where there are fewer memory nodes than ranks, and makes
    # servers that run side by side share a core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


class ServerFailed(TieringError):
    """The server did not come up; carries the end of its log."""


class Leader(Protocol):
    """A server's first process, which leads a session and a process group of its own. Its id stays
    its own until it has been waited for."""

    @property
    def pid(self) -> int: ...

    def has_ended(self) -> bool: ...

    def wait(self) -> int: ...


Start = Callable[[Sequence[str], int, Path, Mapping[str, str]], Leader]
"""Runs a command that is a Python program: with its output's descriptor, its folder and its whole
environment."""


class _Command(subprocess.Popen[bytes]):
    def has_ended(self) -> bool:
        """Without reaping it: its id stays taken."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None


def start_command(
    command: Sequence[str], output: int, folder: Path, environment: Mapping[str, str]
) -> Leader:
    """As a shell would."""
    return _Command(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )


class VllmServer:
    """Serves `model`; a context manager, healthy on entry, gone with all its processes on exit.

    `connector` is what --kv-transfer-config takes, or None for no connector. `device_bytes` is
    the size of the device's KV cache, which must hold `max_model_len` tokens and a block. `dtype`
    is that of weights and KV cache: a CPU without instructions for bfloat16 takes a hundred times
    as long over it as over float32. `log` gets all output, appended. `environment` and
    `arguments` add to, or replace, what is set here. `start` runs the command. An object can be
    entered again after it was stopped, as a restarted server.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        device_bytes: int = 32 << 20,
        max_model_len: int = 4096,
        block_size: int = 32,
        dtype: str = "float32",
        tensor_parallel_size: int = 1,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        start_seconds: float = 300.0,
        stop_seconds: float = 60.0,
        start: Start = start_command,
    ) -> None:
        self.log = log
        self._start_leader = start
        self._environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._process: Leader | None = None
        self._client: Client | None = None
        self._options = [
            f"--host={HOST}",
            f"--served-model-name={MODEL_NAME}",
            "--enforce-eager",
            "--enable-prompt-tokens-details",
            f"--dtype={dtype}",
            f"--max-model-len={max_model_len}",
            f"--block-size={block_size}",
            f"--kv-cache-memory-bytes={device_bytes}",
            f"--tensor-parallel-size={tensor_parallel_size}",
        ]
        if connector is not None:
            self._options.append(f"--kv-transfer-config={json.dumps(dict(connector))}")
        self._command = [str(_vllm()), "serve", str(model.absolute())]
        self._arguments = list(arguments)

    def __repr__(self) -> str:
        state = "stopped" if self._process is None else f"pid {self._process.pid}"
        return f"<VllmServer {state}, log {self.log}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not ended since by what is here."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The id of the server's first process, which is its process group's as well."""
        return self._running().pid

    @property
    def client(self) -> Client:
        """Where to ask it."""
        if self._client is None:
            raise ServerFailed("the server is not running")
        return self._client

    def start(self) -> None:
        """Start it and wait until it is healthy; ServerFailed if it ends or takes too long."""
        if self._process is not None:
            raise ServerFailed(f"already running: {self!r}")
        port = free_port()
        command = [*self._command, f"--port={port}", *self._options, *self._arguments]
        with self.log.open("ab") as log:
            self._process = self._start_leader(
                command, log.fileno(), self.log.parent, self._environment
            )
        try:
            client = Client(HOST, port, MODEL_NAME)
            self._wait_until_healthy(client)
        except BaseException:
            self.kill()
            raise
        self._client = client

    def stop(self) -> bool:
        """Ask it to end with SIGTERM, and kill what still lives after `stop_seconds`.

        True if nothing had to be killed. Does nothing where it has already ended.
        """
        if self._process is None:
            return True
        os.kill(self._process.pid, signal.SIGTERM)
        in_time = _holds_within(self._stop_seconds, lambda: not self.processes())
        self.kill()
        return in_time

    def kill(self) -> None:
        """SIGKILL every process of it, and wait until none is left.

        All but Python's resource trackers: with everyone else gone they remove vLLM's own shared
        memory and semaphores, which otherwise no one would ever do, and end by themselves.
        """
        if self._process is None:
            return
        if not _holds_within(self._stop_seconds, self._is_gone_after_kill):
            os.killpg(self._process.pid, signal.SIGKILL)
            raise ServerFailed(f"processes of {self!r} outlived SIGKILL to all the others")
        self._process.wait()
        self._process = self._client = None

    def _is_gone_after_kill(self) -> bool:
        living = self.processes()
        for pid in living:
            if not _is_resource_tracker(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return not living

    def processes(self) -> list[int]:
        """Ids of the processes of the server that live: front end, engine, workers, helpers."""
        return group_members(self._running().pid)

    def log_tail(self) -> str:
        """The end of the log, for a message about what went wrong."""
        with self.log.open(errors="replace") as lines:
            return "".join(deque(lines, LOG_TAIL_LINES))

    def first_error(self) -> str:
        """The log's first line that names an exception: the cause, where the end has only its
        consequences."""
        with self.log.open(errors="replace") as lines:
            return next((line.strip() for line in lines if ERROR_LINE.search(line)), "none")

    def _running(self) -> Leader:
        if self._process is None:
            raise ServerFailed("the server is not running")
        return self._process

    def _wait_until_healthy(self, client: Client) -> None:
        process = self._running()
        healthy = _holds_within(
            self._start_seconds, lambda: process.has_ended() or client.is_healthy()
        )
        if not healthy:
            reason = f"is not healthy after {self._start_seconds:g} s"
        elif process.has_ended():
            reason = "ended while starting"
        else:
            return
        raise ServerFailed(
            f"vllm serve {reason}; {self.log} ends with\n{self.log_tail()}\n"
            f"and its first error is: {self.first_error()}"
        )


def group_members(group: int) -> list[int]:
    """Ids of the processes of a process group, without those that have ended (zombies)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            line = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        # The command, in parentheses, may hold anything; after it: state, parent, group.
        state, _, process_group = line.rpartition(")")[2].split()[:3]
        if int(process_group) == group and state not in "ZX":
            found.append(int(entry.name))
    return found


def _is_resource_tracker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"multiprocessing.resource_tracker" in command


def _holds_within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _vllm() -> Path:
    """The `vllm` command of the environment that runs this."""
    command = Path(sysconfig.get_path("scripts")) / "vllm"
    if not command.exists():
        raise ServerFailed(
            f"no vLLM beside {sys.executable}: install one there, or run `make demo`"
        )
    return command
