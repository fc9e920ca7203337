"""A process that has imported vLLM, and forks what tests would otherwise start as programs.

The imports take ten seconds and more of a core, and a server makes them in each of its three or
more processes; all else of a start takes a few. There is one warm process for all tests of a
process, started when it is first asked; `warm_process.py` is what it runs. The engines and workers
of a server, for which vLLM would start interpreters of their own, are forked from it as well.

What an interpreter draws at its start is the same in all: the seed of the hashes of strings. Tests
that are to see a server without any of this start the command: `server.start_command`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tiering_benchmarks.server import ENVIRONMENT
from warm_process import MESSAGE_BYTES_MAX

PROGRAM = Path(__file__).with_name("warm_process.py")


class Forked:
    """A process of the warm one's, which leaves it dead until it has been waited for here, so that
    its id cannot come to mean another one's meanwhile."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self.pid = pid
        self._warm = warm
        self._descriptor = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        return self.ends_within(0)

    def ends_within(self, seconds: float | None) -> bool:
        """Whether it does; None is for ever."""
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def wait(self) -> int:
        """What it ended with, as of a `subprocess.Popen`. Once only."""
        self.ends_within(None)
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(self._warm.ask({"forget": self.pid}))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._descriptor, number)


class Warm:
    """The test's end of the warm process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )

    def ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        packed = json.dumps(message).encode()
        assert len(packed) <= MESSAGE_BYTES_MAX
        with self._lock:
            socket.send_fds(self._control, [packed], descriptors)
            told = self._control.recv(MESSAGE_BYTES_MAX)
        assert told, "the process that has imported vLLM has ended"
        number: int = json.loads(told)
        return number

    def end(self) -> None:
        self._control.close()
        self._process.wait()


_making = threading.Lock()


@cache
def _made() -> Warm:
    warm = Warm()
    atexit.register(warm.end)
    return warm


def _warm() -> Warm:
    with _making:
        return _made()


def fork(
    command: Sequence[str],
    descriptors: Sequence[int],
    folder: Path,
    environment: Mapping[str, str],
    *,
    leads: bool = False,
) -> Forked:
    """Run the Python program at `command[0]` with the rest as arguments, in `folder`, its standard
    input, output and errors `descriptors`. `leads` a session of its own."""
    message = {
        "command": list(command),
        "folder": str(folder),
        "environment": dict(environment),
        "leads": leads,
    }
    warm = _warm()
    return Forked(warm, warm.ask(message, descriptors))


def fork_server(
    command: Sequence[str], output: int, folder: Path, environment: Mapping[str, str]
) -> Forked:
    """As `server.start_command`, sooner."""
    with open(os.devnull, "rb") as nothing:
        descriptors = [nothing.fileno(), output, output]
        return fork(command, descriptors, folder, environment, leads=True)
