"""The contract of a secondary tier, and the values its operations answer with.

A tier is an awaitable backend that holds whole chunks by key. It is used from the engine's event
loop only. It owns no policy: who is stored where and when is decided in `residency`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tiering.errors import TierError

GAUGE_PREFIX = "now_"
"""What the name of a value begins with, in `Tier.stats`, that can fall as well as rise."""


class Read(enum.Enum):
    """What became of one key that was asked for. `BUSY`: not now, try again later."""

    HIT = "hit"
    MISS = "miss"
    BUSY = "busy"


class Write(enum.Enum):
    """What became of one chunk handed over. Only `STORED` and `ALREADY_THERE` can be read back."""

    STORED = "stored"
    ALREADY_THERE = "already there"
    FULL = "full"
    REFUSED = "refused"


class Delete(enum.Enum):
    """What became of one key to be removed."""

    DELETED = "deleted"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Failed:
    """One key's operation failed; the others of its batch are not affected.

    A `DamagedChunk` error means that the stored bytes were wrong: the tier has already put them
    out of reach, and the key is a miss from now on.
    """

    error: TierError


Listener = Callable[[Sequence[bytes]], None]
"""Takes keys that are gone, on the loop; does not wait and does not raise."""

ReadOutcome = Read | Failed
WriteOutcome = Write | Failed
DeleteOutcome = Delete | Failed


class Tier(ABC):
    """What an implementor must write; nothing here has a default.

    Every operation is batched and gives one outcome per key, in the order of `keys`, and does not
    raise for a single key. It raises `TierError` where the tier as a whole cannot work, and
    `ClosedError` outside `open`..`close`.

    Buffers are C-contiguous views of the tier's chunk size in bytes, as given to its constructor.
    The tier may touch them only until its await returns or raises: a cancelled call must come
    back, with CancelledError, only when nothing of it will touch a buffer any more.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """How logs, errors and metrics call this tier, such as `fs:/mnt/kv`."""

    @abstractmethod
    def watch(self, removed: Listener) -> None:
        """Before `open`: tell `removed` of chunks that are gone though no outcome of a `read` or
        `delete` said so, such as those that are evicted. Before a later write of the same chunk
        can come back as stored; the read or write under way of one that has just gone may still
        come back as if it were there."""

    @abstractmethod
    async def open(self) -> None:
        """Make ready for use; raises TierError or ConfigError with the way out."""

    @abstractmethod
    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        """HIT where a read is expected to succeed. Moves no payload; promises nothing."""

    @abstractmethod
    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        """Fill `buffers[i]` with the chunk of `keys[i]`. HIT means verified bytes in the whole
        buffer; with any other outcome the buffer's content is undefined."""

    @abstractmethod
    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        """Store `buffers[i]` under `keys[i]`; a chunk becomes readable whole or not at all.
        A key that is already stored is not written again: equal keys mean equal bytes."""

    @abstractmethod
    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        """Remove the chunks; afterwards they read as MISS."""

    @abstractmethod
    async def touch(self, keys: Sequence[bytes]) -> None:
        """`keys`, a prefix in order, head first, were just used, from whatever tier: what is held
        of them is as recent as a read now would make it, the head more recent than the tail, so
        that eviction takes the tail of a prefix before its head. A hint: it gives no outcome, and
        reads and writes need none, since they count as use themselves, in the order of `keys`."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Counters and gauges since `open`, by name; a gauge's name begins with GAUGE_PREFIX. Never
        waits, and may be called from any thread, also of a closed tier."""

    @abstractmethod
    def scan(self) -> AsyncIterator[list[bytes]]:
        """The keys held, in batches, in no particular order; may miss what is written meanwhile."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what is under way and let go of threads and descriptors. May be called twice."""


class Reading(Protocol):
    """The two operations of a tier that bring chunks; see Tier."""

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]: ...

    async def read(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[ReadOutcome]: ...


class PeerTier(Tier):
    """A tier that holds nothing by itself: its chunks are in other engines' host memory, and this
    engine's are there for them. Without a peer it has none, and it stores none."""

    @abstractmethod
    def at(self, peer: bytes) -> Reading:
        """The chunks of one peer; `peer` is what a request named. Does not wait."""

    @abstractmethod
    def release(self, peer: bytes) -> None:
        """Who named `peer` wants nothing more of him. A hint: without it, or if it is lost, he
        keeps for a while what nobody fetches."""

    @abstractmethod
    def show(self, keys: Sequence[bytes], slots: Sequence[int], generations: Sequence[int]) -> None:
        """Peers may read `keys` from `slots` of the host tier while these have `generations`."""

    @abstractmethod
    def hide(self, keys: Sequence[bytes]) -> None:
        """`keys`, or all where there are none, are no longer there."""

    @abstractmethod
    async def keep(self, kv_request_id: str, keys: Sequence[bytes]) -> list[ReadOutcome]:
        """Returns when a peer has fetched `keys` for that request, or nobody will: then they need
        not be pinned any more. HIT for each that was fetched. Another call for the same request
        takes the place of the one before, whose chunks need not be pinned, either."""


def nobody(removed: Sequence[bytes]) -> None:
    """The Listener where nobody listens."""


def check_buffers(keys: Sequence[bytes], buffers: Sequence[memoryview], chunk_bytes: int) -> None:
    """ValueError where `buffers` are not one for each key, each of `chunk_bytes`."""
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys with {len(buffers)} buffers")
    for buffer in buffers:
        if buffer.nbytes != chunk_bytes:
            raise ValueError(f"a buffer of {buffer.nbytes} bytes, not {chunk_bytes}")
