"""What the secondary tiers are told of use: each request's whole prefix, once, when it has ended.

A tier sees reads and writes only, so without a word it would count the head of a prefix, which is
always in the host tier, as unused, and the last chunk written as the most recent. A prefix is
told of after its last chunk has been written, or its tail would be more recent than its head.
Part of the core; same owner, same rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiering.residency.holds import Request
from tiering.residency.known import KnownKeys
from tiering.residency.plan import Touch

WAITING_MAX = 256


@dataclass(slots=True)
class _Ended:
    """A request's prefix; the first `settled` chunks of it are on no way any more."""

    chain: Sequence[bytes]
    settled: int = 0


class TouchBook:
    """One for each core. Prefixes that wait are few: the oldest is told of early when there are
    more than WAITING_MAX."""

    def __init__(
        self,
        known: Sequence[KnownKeys],
        is_under_way: Callable[[bytes], bool],
        next_id: Callable[[], int],
    ) -> None:
        self._known = known
        self._is_under_way = is_under_way
        self._next_id = next_id
        self._ended: deque[_Ended] = deque()

    @staticmethod
    def note(request: Request, keys: Sequence[bytes]) -> None:
        """The request uses the prefix `keys`."""
        if len(keys) > len(request.chain):
            request.chain = keys

    def end(self, request: Request | None) -> None:
        """The request is over."""
        if request is not None and request.chain and self._known:
            self._ended.append(_Ended(request.chain))

    def clear(self) -> None:
        self._ended.clear()

    def due(self) -> list[Touch]:
        """What the tiers are to be told now."""
        waiting: deque[_Ended] = deque()
        touches: list[Touch] = []
        while self._ended:
            ended = self._ended.popleft()
            if self._is_settled(ended) or len(self._ended) + len(waiting) >= WAITING_MAX:
                touches += self._touches(ended.chain)
            else:
                waiting.append(ended)
        self._ended = waiting
        return touches

    def _is_settled(self, ended: _Ended) -> bool:
        chain = ended.chain
        while ended.settled < len(chain) and not self._is_under_way(chain[ended.settled]):
            ended.settled += 1
        if ended.settled < len(chain):
            return False
        # Another request may have sent one of them off again, once it had settled.
        is_settled = not any(map(self._is_under_way, chain))
        ended.settled = len(chain) if is_settled else 0
        return is_settled

    def _touches(self, chain: Sequence[bytes]) -> list[Touch]:
        held = [known.among(chain, ()) for known in self._known]
        return [Touch(self._next_id(), tier, tuple(keys)) for tier, keys in enumerate(held) if keys]
