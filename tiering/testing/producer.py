"""A process that serves rows by a transport until it is told to stop, for tests and benchmarks of
the reading end: another engine, as far as a link can tell, that can be stopped and killed.

`Producer` starts and ends it. It runs `python -m tiering.testing.producer MAKER ROWS ROW_BYTES`,
MAKER being `module:function` of what makes a transport of what is served, and prints how it can be
reached as one line of JSON.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Self

import orjson

from tiering.peers.messages import Offer
from tiering.peers.transports.base import Served, Transport
from tiering.testing.rowspace import RowSpace

SESSION = bytes(range(16))
TOKEN = bytes(range(32))
START_SECONDS_MAX = 60.0


class Producer:
    """Within `with`: serves `rows` rows of `row_bytes` to SESSION and TOKEN."""

    def __init__(self, maker: str, rows: int, row_bytes: int) -> None:
        """`maker` is `module:function`, importable in a fresh interpreter with this one's path."""
        command = [sys.executable, "-m", "tiering.testing.producer"]
        path = os.pathsep.join(each for each in sys.path if each)
        self.process = subprocess.Popen(
            [*command, maker, str(rows), str(row_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**_environment(), "PYTHONPATH": path},
        )
        try:
            self.offer = self._hear()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()
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

    def _hear(self) -> Offer:
        assert self.process.stdout is not None
        line = b""
        while not line.startswith(b"{"):  # a library may have something to say before
            ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS_MAX)
            line = self.process.stdout.readline() if ready else b""
            if not line:
                raise RuntimeError("the process that serves rows has not started")
        told = orjson.loads(line)
        return Offer(told["transport"], told["address"], base64.b64decode(told["details"]))


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}


async def _serve(maker: Callable[[Served], Transport], rows: int, row_bytes: int) -> None:
    space = RowSpace(rows, row_bytes)
    transport = maker(space.served)
    await transport.open()
    transport.admit(SESSION, TOKEN)
    offer = transport.offer()
    told = {
        "transport": offer.transport,
        "address": offer.address,
        "details": base64.b64encode(offer.details).decode(),
    }
    sys.stdout.buffer.write(orjson.dumps(told) + b"\n")
    sys.stdout.buffer.flush()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(0, ended.set)  # who started it has gone
    await ended.wait()
    await transport.close()


def main() -> None:
    """The process itself."""
    maker, rows, row_bytes = sys.argv[1:]
    module, _, function = maker.partition(":")
    made = getattr(importlib.import_module(module), function)
    asyncio.run(_serve(made, int(rows), int(row_bytes)))


if __name__ == "__main__":
    main()
