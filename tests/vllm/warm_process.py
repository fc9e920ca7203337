"""The warm process of `warm`: run as a program, it imports vLLM and forks for each message.

It has no thread and none of our modules, which what it forks imports anew. What it forks becomes
what a new program would be: its environment, folder, descriptors and arguments are those that it is
sent, and it ends as a program does.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MESSAGE_BYTES_MAX = 1 << 17
IMPORTED = (
    "vllm",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def serve(control: socket.socket) -> tuple[Mapping[str, Any], Sequence[int]] | None:
    """Returns in what has been forked: what to run, with which descriptors. And with None once
    nobody asks any more."""
    while True:
        packed, descriptors, *_ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 3)
        if not packed:
            return None
        message = json.loads(packed)
        if "forget" in message:
            told = os.waitpid(message["forget"], 0)[1]
        elif not (told := os.fork()):
            return message, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(told).encode())


def become(message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """What a new program would be."""
    if message["leads"]:
        os.setsid()
    for at, descriptor in enumerate(descriptors):
        os.dup2(descriptor, at)
        os.close(descriptor)
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.argv[:] = message["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def fork_instead_of_spawning() -> None:
    """vLLM's CPU backend insists on new interpreters for engines and workers."""
    anew = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return anew("fork" if method == "spawn" else method)

    multiprocessing.get_context = get_context  # type: ignore[assignment]
    os.register_at_fork(after_in_child=_as_an_interpreter_starts)


def _as_an_interpreter_starts() -> None:
    from prometheus_client import values

    # Or the loop of whoever forks would be told of the signals that the forked process gets.
    signal.set_wakeup_fd(-1)
    # Whether there are several front ends is asked of the environment when this is imported.
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    # Or each process would look through all of this in collections of its own, and copy it.
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        asked = serve(control)
    if asked is None:
        # Without the interpreter's own end, which takes seconds and says what leaked.
        os._exit(0)
    become(*asked)
    fork_instead_of_spawning()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
