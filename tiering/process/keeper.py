"""Keeps a child running: starts it, relays its logs, notices its end, and starts it again.

Owns the thread that all of this happens in, for the kernel ends a child with the thread that
started it. A child is a fresh interpreter, not a fork: the engine has threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque

from tiering.clock import Clock
from tiering.process.link import Link
from tiering.process.messages import Setup
from tiering.tiers.host import Region

log = logging.getLogger("tiering")

PAUSE_SECONDS = 0.5
PAUSE_SECONDS_MAX = 60.0
STEADY_SECONDS = 60.0
"""A child that lived this long is started again as soon as the first time."""

LOOK_SECONDS = 1.0
LINKS_MAX = 3
"""Children that nobody has looked at yet: a new one waits until somebody does."""

BUFFER_BYTES = 1 << 20

# What a terminal sends to the engine's whole group is the engine's to answer, from the first moment
# on. What was on the engine's path is on the child's: a user's tier is found where it was found.
_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = sys.argv[4:]; "
    "from tiering.process.child import main; main(*map(int, sys.argv[1:4]))"
)


class Keeper:
    """`links`: the children that were started, oldest first; the portal takes out those that are
    over and that it is done with."""

    def __init__(self, region: Region, setup: Setup, clock: Clock) -> None:
        self.links: deque[Link] = deque()
        self._setup = setup
        self._clock = clock
        self._region_fd = region.descriptor()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_up = threading.Event()
        self._may_go_on = threading.Event()
        self._is_stopped = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tiering-keeper", daemon=True)

    def start(self) -> Link:
        """The first child, which has not opened its tiers yet; OSError if it cannot be started.
        When it ends, nothing follows until `keep` or `stop`."""
        self._thread.start()
        self._is_up.wait()
        if self._failure is not None:
            self.stop()
            self.close()
            raise self._failure
        return self.links[0]

    def keep(self) -> None:
        """From now on start another child whenever one ends."""
        self._may_go_on.set()

    def stop(self) -> None:
        """Start no other child. Returns at once; the thread ends with the last one."""
        self._is_stopped.set()
        self._may_go_on.set()

    def has_stopped(self, patience_seconds: float) -> bool:
        """Whether, after `stop`, no child will be started any more."""
        self._thread.join(patience_seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """After it has stopped and all links are over."""
        self._thread.join()
        os.close(self._waker)

    def _run(self) -> None:
        pause = PAUSE_SECONDS
        try:
            while not self._is_stopped.is_set():
                began = self._clock.now()
                how = self._one_life()
                self._may_go_on.wait()
                if self._is_stopped.is_set():
                    return
                if self._clock.now() - began >= STEADY_SECONDS:
                    pause = PAUSE_SECONDS
                log.warning(
                    "the process of the tiers ended (%s): they are out of use, and it is started "
                    "again in %g seconds",
                    how,
                    pause,
                )
                self._is_stopped.wait(pause)
                while len(self.links) >= LINKS_MAX and not self._is_stopped.wait(pause):
                    pass
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
        finally:
            os.close(self._region_fd)

    def _one_life(self) -> str:
        """Of a child, from its start to its end; how it ended."""
        try:
            link = self._launched()
        except OSError as error:
            self._failure = error
            self._is_up.set()
            return f"it could not be started: {error}"
        self.links.append(link)
        self._is_up.set()
        try:
            self._attend(link)
        finally:
            link.process.wait()
            link.relay_logs()
            link.ended.set()
        return link.how_it_ended()

    def _launched(self) -> Link:
        stream, childs_stream = socket.socketpair()
        logs, childs_logs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (stream, childs_stream):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        fds = (childs_stream.fileno(), childs_logs.fileno(), self._region_fd)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *map(str, fds), *path],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
        except BaseException:
            stream.close()
            logs.close()
            raise
        finally:
            childs_stream.close()
            childs_logs.close()
        link = Link(process, stream, logs, self._wake)
        link.send(self._setup)
        return link

    def _attend(self, link: Link) -> None:
        """Until the process is at its end."""
        while link.relay_logs():
            poll = select.poll()
            poll.register(link.logs, select.POLLIN)
            poll.register(self._waker, select.POLLIN)
            if link.has_backlog:
                poll.register(link.stream, select.POLLOUT)
            has_come = poll.poll(LOOK_SECONDS * 1000)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._waker)
            link.flush()
            # Something that it has forked may hold the channel open.
            if not has_come and link.process.poll() is not None:
                return

    def _wake(self) -> None:
        os.eventfd_write(self._waker, 1)

    def __repr__(self) -> str:
        state = "stopped" if self._is_stopped.is_set() else "keeping"
        return f"<Keeper {state} {list(self.links)}>"
