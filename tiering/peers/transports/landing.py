"""Memory that READs land in: places of one row and two words each.

A READ that nobody waits for any more keeps its places until nothing of it can land: of a peer that
is stopped, for as long as it is. Other memory is had in their stead, up to a limit, so that a peer
that does not answer takes nobody else's away. Loop only, but for what is in a place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from tiering.underway import to_the_end

LANDING_BYTES = 64 << 20
TIMES_MAX = 4
"""How often there may be that much, where READs that were given up have not landed."""
PLACES_MIN = 4
WORD_BYTES = 8

Memory = npt.NDArray[np.uint8]


class Place:
    """A row, and two words behind it, in `memory` from `start`."""

    __slots__ = ("_at", "_memory", "_row_bytes", "_start", "_words")

    def __init__(self, memory: Memory, at: int, start: int, row_bytes: int) -> None:
        """`memory` begins at the address `at`."""
        self._memory = memory
        self._at = at
        self._start = start
        self._row_bytes = row_bytes
        self._words = start + _whole_words(row_bytes)

    @property
    def row_at(self) -> int:
        """The address of the row."""
        return self._at + self._start

    def word_at(self, number: int) -> int:
        """The address of word 0 or 1."""
        return self._at + self._words + number * WORD_BYTES

    @property
    def row(self) -> Memory:
        return self._memory[self._start : self._start + self._row_bytes]

    def word(self, number: int) -> int:
        at = self._words + number * WORD_BYTES
        return int.from_bytes(self._memory[at : at + WORD_BYTES].tobytes(), "little")


class NoRoom(Exception):
    """There is none to be had, and why."""


class Landing:
    """What there is at first is `memory`, for its maker to make known to who moves."""

    def __init__(self, row_bytes: int, lend: Callable[[Memory], asyncio.Future[object]]) -> None:
        """`lend` makes more memory known to who moves."""
        self._row_bytes = row_bytes
        self._lend = lend
        self._place_bytes = _whole_words(row_bytes) + 2 * WORD_BYTES
        self._wanted = max(PLACES_MIN, LANDING_BYTES // self._place_bytes)
        self._total = self._wanted
        self._adrift = 0
        self.memory = self._new(self._wanted)
        self._free = self._places(self.memory)
        self._waiting: list[asyncio.Future[str]] = []

    async def take(self, most: int, until: asyncio.Future[str]) -> list[Place]:
        """Some places, at most so many, as soon as there is one. NoRoom where there will be none,
        or none before `until` has come, which says why not."""
        while not self._free:
            if until.done():
                raise NoRoom(until.result())
            missing = self._wanted - (self._total - self._adrift)
            more = min(missing, TIMES_MAX * self._wanted - self._total)
            if more > 0:
                await self._have(more)
            elif self._adrift == self._total:
                raise NoRoom("all memory for READs is held up by peers that do not answer")
            else:
                given: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                self._waiting.append(given)
                await asyncio.wait([given, until], return_when=asyncio.FIRST_COMPLETED)
        taken, self._free = self._free[:most], self._free[most:]
        return taken

    def give(self, places: Sequence[Place], after: asyncio.Future[str] | None) -> None:
        """Nobody needs `places` any more; something may land there until `after`."""
        if after is None or after.done():
            self._free += places
        else:
            self._adrift += len(places)
            after.add_done_callback(partial(self._landed, places))
        self._wake()

    def __repr__(self) -> str:
        return f"<Landing {len(self._free)} of {self._total} free, {self._adrift} adrift>"

    def _landed(self, places: Sequence[Place], after: asyncio.Future[str]) -> None:
        self._adrift -= len(places)
        self._free += places
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for given in waiting:
            if not given.done():
                given.set_result("")

    async def _have(self, count: int) -> None:
        """That many more."""
        memory = self._new(count)
        self._total += count
        lending = self._lend(memory)
        try:
            await to_the_end(lending)
        except Exception as error:
            raise NoRoom(f"no more memory for READs: {error}") from error
        finally:
            if lending.cancelled() or lending.exception() is not None:
                self._total -= count
            else:
                self._free += self._places(memory)
                self._wake()

    def _new(self, count: int) -> Memory:
        return np.zeros(count * self._place_bytes, np.uint8)

    def _places(self, memory: Memory) -> list[Place]:
        at = int(memory.ctypes.data)
        starts = range(0, memory.nbytes, self._place_bytes)
        return [Place(memory, at, start, self._row_bytes) for start in starts]


def _whole_words(row_bytes: int) -> int:
    return -(-row_bytes // WORD_BYTES) * WORD_BYTES
