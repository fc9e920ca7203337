"""What crosses between the engine and the process of its tiers, and how it lies in the stream.

Owns the messages: plain data as msgpack, each with its length before it. The two ends are of one
installation and start together, so there is no version. Nothing here is shown or logged: `Setup`
holds the configuration with its secrets.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from tiering.errors import ConfigError, DamagedChunk, RegionError, TierError, TieringError
from tiering.namespace import Namespace
from tiering.residency.plan import News, Step

FRAME_BYTES_MAX = 1 << 30
"""No message is longer: what claims to be is no message."""

_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first message to the child. `config`: JSON of the settings of the tiers, with their
    secrets. `replica`: of the data-parallel ones. `levels`: those of the loggers "" and "tiering".
    `engine_pid`: who it dies with."""

    config: bytes
    namespace: Namespace
    region_path: str
    replica: int
    levels: tuple[int, int]
    engine_pid: int

    def __repr__(self) -> str:
        return "<Setup>"


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """To be carried out."""

    steps: list[Step]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Let what is under way end within `drain_seconds`, close the tiers, and end."""

    drain_seconds: float


Order = Setup | Steps | Stop
"""To the child."""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The tiers are open: their names, and what their `stats` say."""

    names: list[str]
    stats: list[dict[str, int]]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The tiers could not be opened: the exception, as `crossing` made it."""

    kind: str
    texts: list[str]
    key: bytes | None = None


class Came(msgspec.Struct, frozen=True, tag="came"):
    """What came back, in the order in which it became true."""

    news: list[News]


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """What each tier's `stats` says now."""

    stats: list[dict[str, int]]


Report = Opened | Refused | Came | Counted
"""From the child."""


class Line(msgspec.Struct, frozen=True):
    """A log record of the child's, over a channel of its own."""

    logger: str
    level: int
    text: str
    created: float


_encoder = msgspec.msgpack.Encoder()
orders = msgspec.msgpack.Decoder(Order)
reports = msgspec.msgpack.Decoder(Report)
lines = msgspec.msgpack.Decoder(Line)


def framed(message: Order | Report) -> bytes:
    """As it is in the stream."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def whole_frame(stream: socket.socket) -> bytes:
    """Wait for the next message of a stream that is read in no other way yet."""
    (length,) = _LENGTH.unpack(stream.recv(_LENGTH.size, socket.MSG_WAITALL))
    return stream.recv(length, socket.MSG_WAITALL)


class Frames:
    """Cuts what comes out of the stream into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> None:
        self._bytes += piece

    def take(self) -> list[bytes]:
        """Every message that is whole by now."""
        messages: list[bytes] = []
        at = 0
        while len(self._bytes) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, at)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a message of {length} bytes")
            end = at + _LENGTH.size + length
            if end > len(self._bytes):
                break
            messages.append(bytes(self._bytes[at + _LENGTH.size : end]))
            at = end
        del self._bytes[:at]
        return messages


class _AsShown:
    """Stands for a value that stayed in the child: its repr is what it was there."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def crossing(error: Exception) -> Refused:
    """`error` as a message: of the kinds that tiers raise when they are opened, themselves; of
    all others, what they say."""
    match error:
        case ConfigError():
            return Refused("config", [error.path, repr(error.value), error.reason, error.remedy])
        case TierError():
            kind = "damaged" if isinstance(error, DamagedChunk) else "tier"
            return Refused(kind, [error.tier, error.reason], error.key)
        case RegionError():
            return Refused("region", [str(error)])
        case _:
            return Refused("other", [f"{type(error).__name__}: {error}"])


def crossed(told: Refused) -> TieringError:
    """The exception that `told` was made of."""
    match told:
        case Refused("config", [path, value, reason, remedy]):
            return ConfigError(path, _AsShown(value), reason, remedy)
        case Refused("tier", [tier, reason], key):
            return TierError(tier, key, reason)
        case Refused("damaged", [tier, reason], key):
            return DamagedChunk(tier, key, reason)
        case Refused("region", [text]):
            return RegionError(text)
        case Refused(texts=texts):
            return TieringError(f"the process of the tiers could not open them: {texts[-1]}")
