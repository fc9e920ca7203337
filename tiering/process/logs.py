"""Log records of the child in the logs of the engine.

`LogSender` is the child's end, a handler that never waits; `relay` is the engine's, and hands each
record to the logger of its name there. Records have a channel of their own, so that they come also
while nobody drains news.
"""

from __future__ import annotations

import logging
import socket

import msgspec

from tiering.process.messages import Line, lines

TEXT_CHARS_MAX = 16_000
LINE_BYTES_MAX = 1 << 17

OURS = "tiering"


class LogSender(logging.Handler):
    """Sends each record as one datagram over `channel`, a SOCK_SEQPACKET. Where the engine is too
    slow to take them, they are left out."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__()
        channel.setblocking(False)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[:TEXT_CHARS_MAX]
            line = Line(record.name, record.levelno, text, record.created)
            self._channel.send(msgspec.msgpack.encode(line))
        except (BlockingIOError, ConnectionError):
            pass
        except Exception:
            self.handleError(record)


def levels_here() -> tuple[int, int]:
    """What the engine's loggers take: the root's, and ours."""
    return logging.getLogger().getEffectiveLevel(), logging.getLogger(OURS).getEffectiveLevel()


def send_logs(channel: socket.socket, levels: tuple[int, int]) -> None:
    """The child's: have everything of these levels sent."""
    logging.getLogger().setLevel(levels[0])
    logging.getLogger(OURS).setLevel(levels[1])
    logging.getLogger().addHandler(LogSender(channel))


def relay(datagram: bytes) -> None:
    """The engine's: log what the child has sent."""
    line = lines.decode(datagram)
    log = logging.getLogger(line.logger)
    if not log.isEnabledFor(line.level):
        return
    record = log.makeRecord(line.logger, line.level, "", 0, "%s", (line.text,), None)
    record.created = line.created
    record.msecs = (line.created % 1) * 1000
    log.handle(record)
