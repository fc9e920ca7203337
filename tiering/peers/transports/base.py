"""The contract of a transport: how rows of one engine's host tier get into another's memory.

The engine that wants rows reads them. It alone writes into its own memory, and so an abort is its
own business: what was cancelled is never touched again, whatever the other side does. What a row
holds is right if its slot had the wanted generation both before and after its bytes were moved: a
slot's generation is raised before the first byte of another chunk is written to it. Loop only.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiering.errors import PeerError
from tiering.peers.messages import Offer, Reference

ROWS_MAX = 4096
"""Rows that one request on a link is for; more are asked for in turn."""


class Moved(enum.Enum):
    """What became of one row. `HIT`: the whole buffer holds it, verified. `STALE`: its slot has
    another generation by now, or had at some time while its bytes were moved."""

    HIT = "hit"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Failed:
    """One row did not come, or came damaged; what the buffer holds is undefined."""

    error: PeerError


Outcome = Moved | Failed


@dataclass(frozen=True, slots=True)
class Space:
    """Memory that other processes can map: `size` bytes at `offset` of what `descriptor` is of."""

    descriptor: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: `rows`, uint8 of shape `(rows, row_bytes)`, and `generations`, uint64, one
    for each. `rows_space` and `generations_space` are the same for other processes of this host
    to map."""

    rows: npt.NDArray[np.uint8]
    generations: npt.NDArray[np.uint64]
    rows_space: Space | None = None
    generations_space: Space | None = None

    def __post_init__(self) -> None:
        count, row_bytes = self.rows.shape
        if self.rows.dtype != np.uint8 or not self.rows.flags.c_contiguous or row_bytes < 1:
            raise ValueError("rows are uint8 and contiguous")
        if self.generations.dtype != np.uint64 or self.generations.shape != (count,):
            raise ValueError(f"generations are uint64, one for each of {count} rows")

    @property
    def row_bytes(self) -> int:
        return int(self.rows.shape[1])


class Link(ABC):
    """Reads rows of one engine. Any number of `read` at a time."""

    @abstractmethod
    async def read(
        self, references: Sequence[Reference], into: Sequence[memoryview]
    ) -> list[Outcome]:
        """Fill `into[i]`, writable and of row_bytes, with the row of `references[i]`; one outcome
        for each; the other side's faults are not raised. Buffers are touched only until this
        returns or raises: a cancelled call must come back, with CancelledError, only when nothing
        of it will touch a buffer any more. A link on which nothing comes for as long as its
        transport says fails, and goes on failing; `ClosedError` after `close`."""

    @abstractmethod
    async def close(self) -> None:
        """End what is under way as Failed, and let go of everything. May be called twice."""


class Transport(ABC):
    """Serves this engine's rows, and links to those of others. Nothing here has a default."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What offers of it are called by: `tcp`, `shm`, `nixl`."""

    @abstractmethod
    async def open(self) -> None:
        """Begin to serve; raises ConfigError or PeerError with the way out."""

    @abstractmethod
    def offer(self) -> Offer:
        """What other engines need for `connect`. REQUIRES: open."""

    @abstractmethod
    def admit(self, session: bytes, token: bytes) -> None:
        """From now on serve those who prove that they have the `token` of `session`."""

    @abstractmethod
    def dismiss(self, session: bytes) -> None:
        """No longer; links of this session end at once. Nothing where it was not admitted."""

    @abstractmethod
    async def connect(self, offer: Offer, session: bytes, token: bytes) -> Link:
        """A link to what `offer` is of; PeerError where there is none to be had."""

    @abstractmethod
    async def close(self) -> None:
        """End links and serving, and let go of descriptors, threads and mappings. May be called
        twice."""


def check_read(references: Sequence[Reference], into: Sequence[memoryview], row_bytes: int) -> None:
    """ValueError where `into` are not writable buffers of `row_bytes`, one for each reference."""
    if len(references) != len(into):
        raise ValueError(f"{len(references)} rows with {len(into)} buffers")
    for buffer in into:
        if buffer.nbytes != row_bytes or buffer.readonly or not buffer.c_contiguous:
            raise ValueError(f"a buffer is writable, contiguous and of {row_bytes} bytes")
