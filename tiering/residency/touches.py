"""What the secondary tiers are told of use: each request's whole prefix, once, when it has ended.

A tier sees reads and writes only, so without a word it would count the head of a prefix, which is
always in the host tier, as unused, and the last chunk written as the most recent. A prefix is
told of after its last chunk has been written, or its tail would be more recent than its head.
Part of the core; same owner, same rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiering.keys import GROUP_BYTES, by_group, group_of
from tiering.residency.cascades import CascadeBook
from tiering.residency.holds import Request
from tiering.residency.known import KnownKeys
from tiering.residency.plan import Step, Touch
from tiering_kernels.keytable import KeyBatch

WAITING_MAX = 256


@dataclass(slots=True)
class _Ended:
    """A request's prefix, and the last chunk of it that was seen on its way to a tier."""

    chain: Sequence[bytes]
    busy: bytes | None = None


class TouchBook:
    """One for each core. Prefixes that wait are few: the oldest is told of early when there are
    more than WAITING_MAX."""

    def __init__(
        self,
        known: Mapping[int, KnownKeys],
        cascades: CascadeBook,
        next_id: Callable[[], int],
    ) -> None:
        self._known = known
        self._cascades = cascades
        self._next_id = next_id
        self._ended: deque[_Ended] = deque()

    def __bool__(self) -> bool:
        """Whether there is anything to tell, now or later."""
        return bool(self._ended)

    @staticmethod
    def note(request: Request, chain: Sequence[bytes]) -> None:
        """The request uses `chain`, a prefix: of one KV cache group, or of several side by side,
        which count as the first one's."""
        if chain:
            group = group_of(chain[0])
            if len(chain) > len(request.chains.get(group, ())):
                request.chains[group] = chain

    def note_all(self, request: Request, keys: Sequence[bytes]) -> None:
        """The request uses `keys`, of each KV cache group a prefix."""
        for chain in _by_group(keys):
            self.note(request, chain)

    def end(self, request: Request) -> None:
        """The request is over."""
        if self._known:
            self._ended.extend(map(_Ended, request.chains.values()))

    def clear(self) -> None:
        self._ended.clear()

    def due(self) -> list[Step]:
        """What the tiers are to be told now."""
        waiting: deque[_Ended] = deque()
        touches: list[Step] = []
        while self._ended:
            ended = self._ended.popleft()
            if self._is_settled(ended) or len(self._ended) + len(waiting) >= WAITING_MAX:
                touches += self._touches(ended.chain)
            else:
                waiting.append(ended)
        self._ended = waiting
        return touches

    def _is_settled(self, ended: _Ended) -> bool:
        # The last one is written last, so all of them are seldom looked at more than twice.
        if ended.busy is None or not self._cascades.is_under_way(ended.busy):
            ended.busy = self._cascades.last_under_way(ended.chain)
        return ended.busy is None

    def _touches(self, chain: Sequence[bytes]) -> list[Touch]:
        held = [(tier, known.among(chain)) for tier, known in self._known.items()]
        return [Touch(self._next_id(), tier, tuple(keys)) for tier, keys in held if keys]


def _by_group(keys: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
    if not keys or _are_of_one_group(KeyBatch.of(keys)):
        return [keys]
    return by_group(keys)


def _are_of_one_group(keys: KeyBatch) -> bool:
    """Quickly true of most that are; those of different lengths are looked at one by one."""
    packed, lengths = keys.packed
    size = lengths[0]
    if lengths.count(size) < len(keys):
        return False
    columns = [packed[at::size] for at in range(max(0, size - GROUP_BYTES), size)]
    return size <= GROUP_BYTES or all(column.count(column[0]) == len(keys) for column in columns)
