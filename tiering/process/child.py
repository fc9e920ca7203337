"""The child: opens the tiers over the engine's region, carries steps out, and reports.

Run by `keeper`, with descriptors that it was handed: the stream of messages, the channel of log
records, the region. It lives as long as the engine and no longer: the kernel ends it when the
thread that started it is gone, and a thread of its own does when the stream's other end is closed,
whatever the loop is doing. Signals that are meant for the engine are the engine's to answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tiering.config import EngineConfig, parse
from tiering.errors import TieringError
from tiering.pipeline.transfers import Transfers
from tiering.process.logs import send_logs
from tiering.process.messages import (
    Came,
    Counted,
    Frames,
    Opened,
    Report,
    Setup,
    Steps,
    Stop,
    crossing,
    framed,
    orders,
    whole_frame,
)
from tiering.residency.plan import News
from tiering.tiers.base import Tier
from tiering.tiers.host import Region
from tiering.wiring import build_tiers

log = logging.getLogger("tiering")

COUNT_SECONDS = 1.0
"""How often what the tiers count is told, while anything happens."""

READ_BYTES = 1 << 18

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_ORPHANED = 3


def main(stream_fd: int, logs_fd: int, region_fd: int) -> None:
    """What the child does with its life."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    # Nothing that a tier may start is to keep them open.
    for fd in (stream_fd, logs_fd, region_fd):
        os.set_inheritable(fd, False)
    stream = socket.socket(fileno=stream_fd)
    setup = orders.decode(whole_frame(stream))
    if not isinstance(setup, Setup):
        raise TypeError(f"the first order was {type(setup).__name__}")
    _die_with(setup.engine_pid)
    threading.Thread(
        target=_die_at_hangup, args=(stream_fd,), name="tiering-hangup", daemon=True
    ).start()
    send_logs(socket.socket(fileno=logs_fd), setup.levels)
    try:
        asyncio.run(_Service(stream, setup, region_fd).run())
    except Exception:
        log.exception("the tiers' loop ended")
        os._exit(1)
    # Without the interpreter's own end: the tiers are closed, and the engine waits.
    os._exit(0)


def _die_with(engine_pid: int) -> None:
    """Have the kernel end this process with the thread that started it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NAME, b"tiering-loop")
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != engine_pid:
        os._exit(_ORPHANED)  # It was gone before.


def _die_at_hangup(stream_fd: int) -> None:
    """The engine closes its end only when it, or this process, is at an end. Nothing has to be
    put in order: what is half done is as after a crash."""
    poll = select.poll()
    poll.register(stream_fd, select.POLLRDHUP)
    poll.poll()
    os._exit(_ORPHANED)


class _Service:
    """Everything on the loop."""

    def __init__(self, stream: socket.socket, setup: Setup, region_fd: int) -> None:
        self._stream = stream
        self._setup = setup
        self._region_fd = region_fd
        self._tiers: Sequence[Tier] = ()
        self._outbox: Outbox | None = None

    async def run(self) -> None:
        """Open the tiers and serve until told to stop; what goes wrong later than that is a bug,
        and raised."""
        reader, writer = await asyncio.open_connection(sock=self._stream, limit=READ_BYTES)
        self._outbox = outbox = Outbox(writer)
        async with AsyncExitStack() as stack:
            try:
                transfers = await stack.enter_async_context(self._transfers(outbox))
            except Exception as error:
                if not isinstance(error, TieringError):
                    log.exception("the tiers could not be opened")
                await outbox.empty(crossing(error))
                return
            names = [tier.name for tier in self._tiers]
            outbox.send(Opened(names, self._counted().stats))
            async with asyncio.TaskGroup() as group:
                counting = group.create_task(self._count(outbox))
                drain_seconds = await self._obey(reader, transfers)
                late = await transfers.drain(drain_seconds)
                counting.cancel()
            if late:
                log.warning("%d transfers were cut off at shutdown", late)
        outbox.flush()
        await outbox.empty(self._counted())

    def _transfers(self, outbox: Outbox) -> Transfers:
        region = Region.adopt(self._region_fd, Path(self._setup.region_path))
        config = parse(EngineConfig, self._setup.config)
        setup, chunk_bytes = self._setup, region.geometry.row_bytes
        self._tiers = build_tiers(config, setup.namespace, chunk_bytes, region, setup.replica)
        return Transfers(self._tiers, region.row, outbox.take)

    async def _obey(self, reader: asyncio.StreamReader, transfers: Transfers) -> float:
        """Carry out orders until the one to stop; how long that may take, in seconds."""
        frames = Frames()
        while piece := await reader.read(READ_BYTES):
            frames.feed(piece)
            for frame in frames.take():
                order = orders.decode(frame)
                if isinstance(order, Stop):
                    return order.drain_seconds
                if isinstance(order, Steps):
                    transfers.start(order.steps)
        os._exit(_ORPHANED)

    async def _count(self, outbox: Outbox) -> None:
        """While anything happens, say what the tiers count. Nobody asks for it, so that nobody
        has to wait for it, and while nothing happens nothing piles up."""
        told = self._counted()
        was_used = True
        while True:
            # Once more after the last news: some things are counted a little later.
            was_used, still_matters = outbox.was_used(), was_used
            counted = self._counted()
            if counted != told and (was_used or still_matters):
                told = counted
                outbox.send(counted)
            await asyncio.sleep(COUNT_SECONDS)

    def _counted(self) -> Counted:
        # A tier of the user's may count in what only looks like a whole number.
        return Counted([{n: int(v) for n, v in tier.stats().items()} for tier in self._tiers])


class Outbox:
    """What goes to the engine. It takes whatever there is, without a limit of its own: outcomes
    are as many as the engine has steps out, and what tiers say unasked, as many as their chunks."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        # So that `drain` waits for the last byte.
        writer.transport.set_write_buffer_limits(0)
        self._news: list[News] = []
        self._was_used = True

    def take(self, news: News) -> None:
        """News, sent with whatever else comes in this turn of the loop."""
        self._news.append(news)
        if len(self._news) == 1:
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        if self._news:
            self._was_used = True
            news, self._news = self._news, []
            self.send(Came(news))

    def send(self, report: Report) -> None:
        self._writer.write(framed(report))

    def was_used(self) -> bool:
        """Whether news has been sent since the last call."""
        used, self._was_used = self._was_used, False
        return used

    async def empty(self, report: Report) -> None:
        """Send a last report, and wait until the engine has them all."""
        self.send(report)
        await self._writer.drain()
