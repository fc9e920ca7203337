"""Who may talk to this engine: a key that all peers share, and what is derived from it.

A session's key comes from the shared key and every byte of both greetings: engine ids,
incarnations, both nonces. Whoever seals a message with it has the shared key and means this
session, so nothing can be replayed, reflected, or moved to another peer. Sealing authenticates and
does not hide: what is said and moved can be read on the wire. Without a shared key the same is done
with an empty one, which protects against mix-ups only. `SharedKey.read` and `require_bindable`
block, for starts; the rest is pure.

HMAC rather than ZeroMQ's CURVE: CURVE drops whoever it does not like without a word, where an
operator needs to read "the peer has another key"; it needs a libzmq that has it, and a handler
thread; and the data plane, which is no ZeroMQ, needs a secret of each session all the same.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
from pathlib import Path
from typing import Literal

from tiering.errors import ConfigError
from tiering.peers.messages import Auth
from tiering.peers.names import is_loopback

KEY_BYTES_MIN = 32
KEY_BYTES_MAX = 4096
DIFFERENT_BYTES_MIN = 8
TOKEN_BYTES = 32

Side = Literal["dialling", "dialled"]

_SEAL = struct.Struct(">Q32s")
SEAL_BYTES = _SEAL.size
_MAKE_ONE = "make one with `head -c 32 /dev/urandom | base64`, the same file for all peers"


class SharedKey:
    """What all peers know. Never shows itself."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes = b"") -> None:
        """`secret` has KEY_BYTES_MIN bytes or more, or none at all: then anybody has it."""
        if secret and len(secret) < KEY_BYTES_MIN:
            raise ValueError(f"a shared key has {KEY_BYTES_MIN} bytes or more, not {len(secret)}")
        self._secret = secret

    @classmethod
    def read(cls, key: str, path: Path) -> SharedKey:
        """Of the file at `path`, without line ends around it. ConfigError under `key` where it
        cannot be read, can be read by everybody, or is no secret."""
        try:
            with open(path, "rb", opener=_at_once) as file:
                status = os.fstat(file.fileno())
                secret = file.read(KEY_BYTES_MAX + 1) if stat.S_ISREG(status.st_mode) else b""
        except OSError as error:
            raise ConfigError(
                key, str(path), f"cannot be read: {error.strerror}", _MAKE_ONE
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(key, str(path), "is no file", _MAKE_ONE)
        if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ConfigError(
                key,
                str(path),
                f"can be read or changed by others (mode {status.st_mode & 0o777:o})",
                f"chmod 600 {path}",
            )
        secret = secret.strip(b"\r\n")
        if not KEY_BYTES_MIN <= len(secret) <= KEY_BYTES_MAX:
            told = f"has {len(secret)} bytes, not {KEY_BYTES_MIN} to {KEY_BYTES_MAX}"
            raise ConfigError(key, str(path), told, _MAKE_ONE)
        if len(set(secret)) < DIFFERENT_BYTES_MIN:
            raise ConfigError(key, str(path), "repeats itself and can be guessed", _MAKE_ONE)
        return cls(secret)

    @property
    def auth(self) -> Auth:
        return "hmac-sha256" if self._secret else "none"

    def derive(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes for one purpose; `parts` are taken in injectively."""
        return _mac(self._secret, purpose.encode(), *parts)

    def __repr__(self) -> str:
        return f"<SharedKey {self.auth}>"

    def __reduce__(self) -> str:
        raise TypeError("a shared key is not to be written anywhere")


class Seals:
    """Seals what one side of one session sends, and opens what it receives: each once, in order."""

    def __init__(self, secret: bytes, side: Side) -> None:
        self._secret = secret
        self._mine: bytes = side.encode()
        self._theirs = b"dialled" if side == "dialling" else b"dialling"
        self._sealed = 0
        self._opened = 0

    def seal(self, payload: bytes) -> bytes:
        """What goes behind `payload`: a number that rises, and a MAC over both."""
        self._sealed += 1
        return _SEAL.pack(self._sealed, _numbered(self._secret, self._mine, self._sealed, payload))

    def opens(self, payload: bytes, seal: bytes) -> bool:
        """Whether the other side has sealed `payload`, in this session, and after all before."""
        if len(seal) != SEAL_BYTES:
            return False
        number, mac = _SEAL.unpack(seal)
        if number <= self._opened:
            return False
        if not hmac.compare_digest(mac, _numbered(self._secret, self._theirs, number, payload)):
            return False
        self._opened = number
        return True

    @property
    def token(self) -> bytes:
        """What the two prove to one another on the data plane."""
        return _mac(self._secret, b"data plane")

    def __repr__(self) -> str:
        return f"<Seals {self._mine.decode()}: {self._sealed} sealed, {self._opened} opened>"


def greeting_seal(key: SharedKey, payload: bytes) -> bytes:
    """What goes behind a `connect`, which no session has a key for yet: whoever sent it, or who it
    was copied from, has the shared key. Enough to be answered, not to be believed."""
    return _SEAL.pack(0, key.derive("greeting", payload))


def greeting_opens(key: SharedKey, payload: bytes, seal: bytes) -> bool:
    return hmac.compare_digest(seal, greeting_seal(key, payload))


def seals_of(key: SharedKey, side: Side, connect: bytes, connect_ack: bytes) -> Seals:
    """For the session of these two greetings, byte for byte as they were sent."""
    return Seals(key.derive("session", connect, connect_ack), side)


def require_bindable(key: str, host: str, shared: SharedKey, allow_unauthenticated: bool) -> None:
    """ConfigError under `key` where `host` may not be bound: other hosts could reach it, and no
    shared key says who may. Blocks, for names."""
    if shared.auth != "none" or allow_unauthenticated or is_loopback(host):
        return
    raise ConfigError(
        key,
        host,
        "can be reached from other hosts, and whoever does could read this engine's KV cache",
        "set auth to a file with a shared key, bind 127.0.0.1, or, in a network that keeps others "
        "out, set allow_unauthenticated: true",
    )


def proof(token: bytes, purpose: str, *parts: bytes) -> bytes:
    """That one has `token`, for one purpose and one exchange."""
    return _mac(token, purpose.encode(), *parts)


def _at_once(path: str, flags: int) -> int:
    # A pipe without a writer would be waited for.
    return os.open(path, flags | os.O_NONBLOCK)


def _numbered(secret: bytes, sender: bytes, number: int, payload: bytes) -> bytes:
    # One MAC over a few bytes and the payload as it is, without copying it.
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    mac.update(struct.pack(">8sQ", sender, number))
    mac.update(payload)
    return mac.digest()


def _mac(secret: bytes, *parts: bytes) -> bytes:
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(struct.pack(">Q", len(part)))
        mac.update(part)
    return mac.digest()
