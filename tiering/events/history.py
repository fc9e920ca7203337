"""The batches that were published last, bounded by number and by bytes: what a replay can answer.

Used by the publisher's own thread only. The newest batch is always there, however large, so that a
consumer can tell by it whether the publisher is the one it knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque


class History:
    """Payloads by sequence number, which grow, with holes where batches were dropped."""

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._numbers: deque[int] = deque()
        self._payloads: deque[bytes] = deque()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def newest(self) -> int | None:
        return self._numbers[-1] if self._numbers else None

    def add(self, number: int, payload: bytes) -> None:
        self._numbers.append(number)
        self._payloads.append(payload)
        self.bytes += len(payload)
        while len(self) > 1 and (len(self) > self._batches_max or self.bytes > self._bytes_max):
            self._numbers.popleft()
            self.bytes -= len(self._payloads.popleft())

    def at_or_after(self, number: int) -> tuple[int, bytes] | None:
        """The first batch whose number is at least `number`; None where there is none."""
        place = bisect_left(self._numbers, number)
        if place == len(self._numbers):
            return None
        return self._numbers[place], self._payloads[place]

    def __repr__(self) -> str:
        return f"<History of {len(self)} batches, {self.bytes} bytes>"
