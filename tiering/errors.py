"""The one tree of exceptions, and what each carries.

Expected outcomes (a miss, a full tier) are values, see `tiers.base`; what is here is failure.
A library's errors are translated at a backend's edge, so nothing above it sees an OSError.
"""

from __future__ import annotations


class TieringError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(TieringError):
    """A setting that cannot be used: says which, what it was, and what to write instead."""

    def __init__(self, path: str, value: object, reason: str, remedy: str) -> None:
        """`path` is the key's dotted path, `remedy` the way out, both as a user reads them."""
        super().__init__(f"{path} = {value!r}: {reason}; {remedy}")
        self.path = path
        self.value = value
        self.reason = reason
        self.remedy = remedy

    def under(self, where: str) -> ConfigError:
        """The same of a key that the user finds under `where`."""
        return ConfigError(f"{where}.{self.path}", self.value, self.reason, self.remedy)


class RegionError(TieringError):
    """The host tier's shared memory could not be had or attached."""


class CopyError(TieringError):
    """A copy between device and host memory failed; `slots` are the host tier's rows in it."""

    def __init__(self, reason: str, slots: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.slots = slots


class DeviceLostError(CopyError):
    """The device takes no copies, now or any more. What is wrong with it was told once."""


class DeviceCallError(TieringError):
    """A call of a device's driver failed: which, with what code. After a sticky failure every
    other call in this process fails, too."""

    def __init__(self, call: str, code: int, reason: str, is_sticky: bool = False) -> None:
        super().__init__(f"{call} failed with {reason} ({code})")
        self.call = call
        self.code = code
        self.reason = reason
        self.is_sticky = is_sticky


class ClosedError(TieringError):
    """Used before it was opened or after it was closed."""


class TierError(TieringError):
    """A tier failed at one key or as a whole: carries the tier's name and the key, if any."""

    def __init__(self, tier: str, key: bytes | None, reason: str) -> None:
        where = tier if key is None else f"{tier}: {key.hex()}"
        super().__init__(f"{where}: {reason}")
        self.tier = tier
        self.key = key
        self.reason = reason


class DamagedChunk(TierError):
    """Stored bytes are not what was written: a flipped bit, a short file, a swapped name."""


class PeerError(TieringError):
    """Another engine cannot be had, or not for this: carries its address and the reason."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"peer {peer}: {reason}")
        self.peer = peer
        self.reason = reason


class EngineError(TieringError):
    """An engine's HTTP API cannot be had, or broke off: its URL and the reason. `is_sent`: it may
    have begun what it was asked for."""

    def __init__(self, url: str, reason: str, is_sent: bool) -> None:
        super().__init__(f"engine {url}: {reason}")
        self.url = url
        self.reason = reason
        self.is_sent = is_sent
