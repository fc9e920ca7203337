"""What the object tier asks of an object store: whole objects by name, and how it can fail.

`ObjectStore` is one bucket. It moves bytes once and reports what came of that: it retries nothing
and waits for nobody, but for the one renewal of expired credentials, so that how many requests are
under way, and when one is tried again, is decided in one place, `pacing.py`. Used from one loop.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tiering.errors import TieringError


class StoreError(TieringError):
    """A request failed in a way that a repetition would not mend, such as 403 or 501. The message
    names what was asked for and the way out, and never a secret."""


class NotNowError(StoreError):
    """A request failed, and the same may succeed later: 503, 429, 500, a lost connection."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        """`retry_after_seconds`: where the store said how long to wait."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ThrottledError(NotNowError):
    """The store asks for fewer requests: 503 SlowDown, 429."""


class CredentialsError(StoreError):
    """The store does not accept the credentials, though they were read anew once: expired, revoked
    or wrong. Others may come to be there, so this passes."""


class LengthError(StoreError):
    """An object is not as long as what was asked for, or its body ended early."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing. `modified`: seconds since the epoch, by the store's clock."""

    name: str
    size_bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing, in order of names. `token` is None on the last."""

    objects: list[Listed]
    token: str | None


class ObjectStore(Protocol):
    """One bucket, between `open` and `close`. Names are whole, with the prefix.

    Any operation but `close` may raise StoreError or one of its kinds; none raises a library's. A
    cancelled one comes back when no buffer is touched any more.
    """

    @abstractmethod
    async def open(self) -> None:
        """Make one request that shows whether the bucket can be used, and raise ConfigError with
        the cause and the way out where it cannot."""

    @abstractmethod
    async def get(self, name: str, into: Sequence[memoryview]) -> bool:
        """Fill the buffers `into`, one after the other, with the whole object; False where there
        is none. LengthError where its body is not exactly as long as they are together."""

    @abstractmethod
    async def put(self, name: str, body: Sequence[memoryview]) -> None:
        """Store the buffers `body`, one after the other, as one object: all of it or nothing."""

    @abstractmethod
    async def get_small(self, name: str) -> tuple[bytes, str] | None:
        """An object of a few KiB and its ETag; None where there is none."""

    @abstractmethod
    async def put_small(
        self, name: str, body: bytes, *, if_etag: str | None = None, if_absent: bool = False
    ) -> str | None:
        """Store `body`, if what is there has `if_etag`, or if nothing is; its ETag, or None where
        that was not so. A store that knows no conditions may store it anyway: read it back."""

    @abstractmethod
    async def page(
        self, prefix: str, *, token: str | None = None, after: str = "", limit: int = 1000
    ) -> Page:
        """Up to `limit` objects whose names begin with `prefix`, behind the name `after`, or on
        from `token`."""

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> list[str]:
        """Remove up to 1,000 objects in one request; the names that could not be. One that was
        not there counts as removed."""

    @abstractmethod
    async def close(self) -> None:
        """End every connection. May be called twice."""

    @abstractmethod
    def requests(self) -> dict[str, int]:
        """How many requests were sent, by verb in lower case, such as `get`, since `open`; from
        any thread."""
