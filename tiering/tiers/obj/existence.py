"""What is known to be in the bucket, and how to find out the rest with few questions.

Sans-IO; owned by one tier. A key is there because a listing or a probe showed it or because we
put it, and not there for `absent_seconds` after something said so. All of it is a hint: what a GET
says goes before it. A walk, one listing of all, replaces what was known when it ends, so what
others deleted is forgotten; keys that it brings after `keys_max` are asked for when wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tiering.clock import Clock
from tiering_kernels.keytable import ABSENT, KeyBatch, KeyTable, open_table, select

KEYS_MAX = 2_000_000
ABSENT_KEYS_MAX = 200_000


class Existence:
    """Keys of one call may repeat. `clock` is monotonic."""

    def __init__(
        self,
        clock: Clock,
        *,
        absent_seconds: float = 5.0,
        keys_max: int = KEYS_MAX,
        absent_keys_max: int = ABSENT_KEYS_MAX,
    ) -> None:
        self._clock = clock
        self._keys_max = keys_max
        self._there = open_table()
        # What the walk under way has shown, and what came since it began.
        self._walked: KeyTable | None = None
        # What has gone since the walk's last page was asked for: the page may still show it.
        self._gone_meanwhile: set[bytes] = set()
        self._absent = _Absent(absent_seconds, absent_keys_max)

    def __len__(self) -> int:
        """How many keys are known to be there."""
        return len(self._there)

    def __repr__(self) -> str:
        walking = "" if self._walked is None else f", walk at {len(self._walked)}"
        return f"<Existence {len(self)} there, {len(self._absent)} not{walking}>"

    def ask(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Of each key, whether it is there; None where that is not known."""
        there = (self._there.get(keys) != ABSENT).tolist()
        absent = self._absent.holds(keys, self._clock.now())
        known = zip(there, absent, strict=True)
        return [True if is_there else (False if is_not else None) for is_there, is_not in known]

    def stored(self, keys: Sequence[bytes]) -> None:
        """We have put `keys`."""
        self.found(keys)
        self._gone_meanwhile.difference_update(keys)
        if self._walked is not None:
            self._add(self._walked, keys)

    def found(self, keys: Sequence[bytes]) -> None:
        """`keys` are there, or so it is concluded."""
        self._absent.discard(keys)
        self._add(self._there, keys)

    def missing(self, keys: Sequence[bytes]) -> None:
        """`keys` are not there, deleted or never put."""
        self._there.pop(keys)
        if self._walked is not None:
            self._walked.pop(keys)
            self._gone_meanwhile.update(keys)
        self._absent.add(keys, self._clock.now())

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nothing is known of `keys` any more."""
        self._there.pop(keys)
        self._absent.discard(keys)

    # The walk

    def walk_begins(self) -> None:
        self._walked = open_table()
        self._gone_meanwhile.clear()

    def page_asked(self) -> None:
        """Before each page of the walk is asked for."""
        self._gone_meanwhile.clear()

    def page(self, keys: Sequence[bytes]) -> None:
        """A page has shown `keys`."""
        if self._walked is None:
            raise AssertionError("a page without a walk")
        shown = [key for key in keys if key not in self._gone_meanwhile]
        self.found(shown)
        self._add(self._walked, shown)

    def walk_ends(self) -> None:
        """The walk has shown everything."""
        if self._walked is not None:
            self._there, self._walked = self._walked, None
        self._gone_meanwhile.clear()

    def walk_breaks_off(self) -> None:
        """It has not, and what was known before stays."""
        self._walked = None
        self._gone_meanwhile.clear()

    def _add(self, table: KeyTable, keys: Sequence[bytes]) -> None:
        if keys and (room := self._keys_max - len(table)) > 0:
            table.put(list(dict.fromkeys(keys[:room])), 0)


class _Absent:
    """Keys for a while, at most so many: the oldest are forgotten first."""

    def __init__(self, seconds: float, keys_max: int) -> None:
        self._seconds = seconds
        self._keys_max = keys_max
        # For each key the number of the batch that named it last.
        self._batch_of = open_table()
        self._batches: deque[tuple[float, int, KeyBatch]] = deque()
        self._listed = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._batch_of)

    def add(self, keys: Sequence[bytes], now: float) -> None:
        if not keys:
            return
        batch = KeyBatch(dict.fromkeys(keys))
        self._number += 1
        self._batch_of.put(batch, self._number)
        self._batches.append((now + self._seconds, self._number, batch))
        self._listed += len(batch)
        self._expire(now)

    def discard(self, keys: Sequence[bytes]) -> None:
        if self._batches:
            self._batch_of.pop(keys)

    def holds(self, keys: Sequence[bytes], now: float) -> list[bool]:
        self._expire(now)
        held: list[bool] = (self._batch_of.get(keys) != ABSENT).tolist()
        return held

    def _expire(self, now: float) -> None:
        while self._batches and (self._batches[0][0] <= now or self._listed > self._keys_max):
            _, number, oldest = self._batches.popleft()
            self._listed -= len(oldest)
            self._batch_of.pop(select(oldest, self._batch_of.get(oldest) == number))


class ChainSearch:
    """Which of `count` chunks in a row are there, supposing that it is a run that begins with the
    first or ends with the last: both of these are asked about at once, then halves, 2 + log2 of
    `count` questions at most.

    A prefix is such a run, for its tail is deleted before its head; so is the window that a
    sliding window group keeps, and what is left when a bucket's rules have taken the oldest. Any
    other is not found, or said to be longer than it is, until a walk or a GET says better.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError("nothing to search")
        self._last = count - 1
        self._ends: dict[int, bool] = {}
        # Where the first and the last differ: the places around the change.
        self._low, self._high = 0, self._last

    @property
    def questions(self) -> list[int]:
        """The places to ask about next, at once; none where all is known."""
        unasked = [place for place in dict.fromkeys((0, self._last)) if place not in self._ends]
        if unasked:
            return unasked
        if self._ends[0] == self._ends[self._last] or self._high - self._low < 2:
            return []
        return [(self._low + self._high) // 2]

    def answer(self, place: int, is_there: bool) -> None:
        """What became of a question."""
        if place in (0, self._last):
            self._ends[place] = is_there
        elif is_there == self._ends[0]:
            self._low = place
        else:
            self._high = place

    @property
    def found(self) -> range:
        """The places that are there, once there are no questions left."""
        first, last = self._ends[0], self._ends[self._last]
        if first == last:
            return range(self._last + 1 if first else 0)
        return range(self._high) if first else range(self._high, self._last + 1)
