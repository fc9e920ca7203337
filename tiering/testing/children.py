"""A Python process that a test or a benchmark starts, stops and kills.

`Child` owns it and both of its pipes. The process does its work in `stay`: it says, in one line of
JSON, how it can be reached, and goes on until its standard input ends, as it does with whoever
started it.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from typing import Any, Self

import orjson

START_SECONDS_MAX = 60.0


class Child:
    """Within `with`. `told` is what the process has said in `stay`."""

    def __init__(self, *arguments: object) -> None:
        """`python ARGUMENTS`, with this interpreter's path and little else of its environment.
        RuntimeError where the process does not get as far as `stay`."""
        command = [sys.executable, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_environment(),
        )
        try:
            self.told = self._hear()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def stop(self) -> None:
        """As SIGSTOP does: it lives, and does nothing."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = b""
        while not line.startswith(b"{"):  # a library may have something to say before
            ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS_MAX)
            line = self.process.stdout.readline() if ready else b""
            if not line:
                raise RuntimeError(f"{self.process.args!r} has not started")
        told: dict[str, Any] = orjson.loads(line)
        return told


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}


async def stay(**told: object) -> None:
    """For the process itself: be reached by what is `told`, plain data, for as long as whoever
    started it wants it."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    sys.stdout.buffer.write(orjson.dumps(told) + b"\n")
    sys.stdout.buffer.flush()
    loop.add_reader(0, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(0)
