"""`StripedTier`: one tier spread over several roots, each a tier of its own.

Owns which root has which key: the highest score of the key's and the root's hash (rendezvous), so
that a root that is added or removed moves only its own share. The roots' names decide, not their
order. A failed root costs its share: misses, refusals and failures of those keys alone. A root
that hangs holds up the batches that touch it, so each is to be a `GuardedTier`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from tiering.clock import Clock
from tiering.errors import ClosedError, ConfigError, DamagedChunk, TierError, TieringError
from tiering.tiers.base import (
    DeleteOutcome,
    Failed,
    Listener,
    Read,
    ReadOutcome,
    Tier,
    Write,
    WriteOutcome,
)

log = logging.getLogger("tiering")

Item = TypeVar("Item", ReadOutcome, WriteOutcome, DeleteOutcome)

DISK_IS_AWAY = (errno.ENOENT, errno.EROFS)
"""Causes of a ConfigError that a disk makes on its own: not mounted, or read-only after errors."""


class StripedTier(Tier):
    """Chunks over `tiers`, the roots, whose names differ.

    `open` raises what a root's user did wrong, such as a root that may not be written to; a root
    whose disk is away or fails is left out with a warning, as long as another one opens, and is
    tried again every `reopen_seconds` while calls come in.
    """

    def __init__(
        self, tiers: Sequence[Tier], clock: Clock, *, reopen_seconds: float = 30.0
    ) -> None:
        names = [tier.name for tier in tiers]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"roots need different names, and there is at least one: {names}")
        self._roots = tuple(tiers)
        self._clock = clock
        self._reopen_seconds = reopen_seconds
        self._seeds = np.array(
            [[xxhash.xxh3_64_intdigest(name.encode())] for name in names], np.uint64
        )
        self._is_open = False
        self._out: frozenset[int] = frozenset()
        self._reopen_at = 0.0
        self._reopening: asyncio.Task[None] | None = None
        self._refused_loads = self._refused_stores = 0

    def __repr__(self) -> str:
        state = f"{len(self._out)} roots out" if self._is_open else "closed"
        return f"<StripedTier {state}: {', '.join(map(repr, self._roots))}>"

    @property
    def name(self) -> str:
        """The first root's and how many more there are."""
        first, others = self._roots[0].name, len(self._roots) - 1
        return f"{first} +{others}" if others else first

    def watch(self, removed: Listener) -> None:
        for root in self._roots:
            root.watch(removed)

    async def open(self) -> None:
        if self._is_open:
            raise RuntimeError(f"{self.name} is already open")
        opened: set[int] = set()

        async def open_root(root: int) -> None:
            await self._roots[root].open()
            opened.add(root)

        try:
            errors = await _all_of([open_root(root) for root in range(len(self._roots))])
            self._raise_or_warn(errors)
        except BaseException:
            await _all_of([self._roots[root].close() for root in opened])
            raise
        self._out = frozenset(range(len(self._roots))) - opened
        self._reopen_at = self._clock.now() + self._reopen_seconds
        self._refused_loads = self._refused_stores = 0
        self._is_open = True

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        return await self._spread(
            keys, lambda root, mine: root.contains([keys[i] for i in mine]), self._missed
        )

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        _require_one_each(keys, buffers)
        return await self._spread(
            keys,
            lambda root, mine: root.read([keys[i] for i in mine], [buffers[i] for i in mine]),
            self._missed,
        )

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        _require_one_each(keys, buffers)
        return await self._spread(
            keys,
            lambda root, mine: root.write([keys[i] for i in mine], [buffers[i] for i in mine]),
            self._refused,
        )

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        return await self._spread(
            keys, lambda root, mine: root.delete([keys[i] for i in mine]), self._undeleted
        )

    async def touch(self, keys: Sequence[bytes]) -> None:
        """Every root's share; then TierError if one of them failed."""
        self._use()
        parts = [
            self._roots[root].touch([keys[i] for i in mine])
            for root, mine in self._shares(keys)
            if root not in self._out
        ]
        for error in await _all_of(parts):
            if error is not None:
                raise error

    def stats(self) -> dict[str, int]:
        """The sums over the roots; `now_roots_out`: how many could not be opened; their keys are
        counted as refused."""
        total = Counter(
            refused_loads=self._refused_loads,
            refused_stores=self._refused_stores,
            now_roots_out=len(self._out),
        )
        for root in self._roots:
            total.update(root.stats())
        return dict(total)

    async def scan(self) -> AsyncIterator[list[bytes]]:
        """Without what lies in another root than its own since a root came or went: nobody finds
        it there. A root that fails is told after the others have been listed."""
        self._use()
        failure: TierError | None = None
        for root, tier in enumerate(self._roots):
            if root in self._out:
                continue
            try:
                async for batch in tier.scan():
                    owners = self._owners(batch)
                    yield [batch[i] for i in np.flatnonzero(owners == root).tolist()]
            except TierError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Every root that is open, at once; raises afterwards what the first one raised."""
        self._is_open = False
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.wait({self._reopening})
            self._reopening = None
        roots = [tier for root, tier in enumerate(self._roots) if root not in self._out]
        for error in await _all_of([root.close() for root in roots]):
            if error is not None:
                raise error

    # Which root, and what it answers

    def _owners(self, keys: Sequence[bytes]) -> npt.NDArray[np.intp]:
        """The root of each key. What is stored depends on it: a change loses most chunks."""
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))
        owners: npt.NDArray[np.intp] = _mixed(hashes ^ self._seeds).argmax(axis=0)
        return owners

    def _shares(self, keys: Sequence[bytes]) -> list[tuple[int, list[int]]]:
        """Roots, and which of `keys` are theirs, in order."""
        owners = self._owners(keys)
        shares = [(root, np.flatnonzero(owners == root)) for root in range(len(self._roots))]
        return [(root, mine.tolist()) for root, mine in shares if len(mine)]

    async def _spread(
        self,
        keys: Sequence[bytes],
        operation: Callable[[Tier, list[int]], Coroutine[Any, Any, list[Item]]],
        answer_for: Callable[[Tier, Sequence[bytes]], list[Item]],
    ) -> list[Item]:
        """One outcome a key: `operation` on each root's share, `answer_for` that of roots out."""
        self._use()
        shares = self._shares(keys)
        asked = [share for share in shares if share[0] not in self._out]
        answers = await _all_of([operation(self._roots[root], mine) for root, mine in asked])
        parts = dict(zip([root for root, _ in asked], answers, strict=True))
        outcomes: list[Any] = [None] * len(keys)
        for root, mine in shares:
            tier, part = self._roots[root], parts.get(root)
            if part is None:
                part = answer_for(tier, [keys[i] for i in mine])
            elif isinstance(part, TieringError):
                part = [self._failed(tier, keys[i], part) for i in mine]
            elif len(self._roots) > 1:
                part = [
                    self._failed(tier, outcome.error.key, outcome.error)
                    if isinstance(outcome, Failed)
                    else outcome
                    for outcome in part
                ]
            for i, outcome in zip(mine, part, strict=True):
                outcomes[i] = outcome
        return outcomes

    def _failed(self, root: Tier, key: bytes | None, error: TieringError) -> Failed:
        """`error` of `root` as an error of this tier. A copy: the traceback of one that was
        raised would keep the caller's buffers alive."""
        kind = DamagedChunk if isinstance(error, DamagedChunk) else TierError
        reason = error.reason if isinstance(error, TierError) else str(error)
        return Failed(kind(self.name, key, f"{root.name}: {reason}"))

    def _missed(self, _: Tier, keys: Sequence[bytes]) -> list[ReadOutcome]:
        self._refused_loads += len(keys)
        return [Read.MISS] * len(keys)

    def _refused(self, _: Tier, keys: Sequence[bytes]) -> list[WriteOutcome]:
        self._refused_stores += len(keys)
        return [Write.REFUSED] * len(keys)

    def _undeleted(self, root: Tier, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        reason = f"{root.name}: out of service"
        return [Failed(TierError(self.name, key, reason)) for key in keys]

    # Roots that are out

    def _raise_or_warn(self, errors: Sequence[TieringError | None]) -> None:
        """`errors` of the roots, as they were opened."""
        found = [(root, error) for root, error in enumerate(errors) if error is not None]
        for root, error in found:
            if len(found) == len(self._roots) or not _is_a_disks(error):
                raise self._named(root, error)
        for root, error in found:
            told = "%s: left out, its chunks are missed; tried again from time to time: %s"
            log.warning(told, self._roots[root].name, error)

    def _named(self, root: int, error: TieringError) -> TieringError:
        name = self._roots[root].name
        if len(self._roots) == 1 or not isinstance(error, ConfigError) or name in str(error):
            return error
        return ConfigError(error.path, error.value, f"{name}: {error.reason}", error.remedy)

    def _use(self) -> None:
        if not self._is_open:
            raise ClosedError(f"{self.name} is not open")
        under_way = self._reopening is not None and not self._reopening.done()
        if not self._out or under_way or self._clock.now() < self._reopen_at:
            return
        # Not in a TaskGroup: it outlives the call, and `close` ends it.
        self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        try:
            await _all_of([self._reopen_root(root) for root in self._out])
        finally:
            self._reopen_at = self._clock.now() + self._reopen_seconds

    async def _reopen_root(self, root: int) -> None:
        try:
            await self._roots[root].open()
        except TieringError as error:
            log.debug("%s: still out: %s", self._roots[root].name, error)
            return
        self._out -= {root}
        log.info("%s: in service again", self._roots[root].name)


async def _all_of(parts: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of `parts`, run at once; a TieringError is the result of its part alone. Also
    when cancelled, and where one raises something else, all have come back before this does."""
    if len(parts) == 1:
        try:
            return [await parts[0]]
        except TieringError as error:
            return [error]
    results = await asyncio.gather(*parts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, TieringError):
            raise result
    return results


def _mixed(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of MurmurHash3: one to one, each bit of a result depends on all."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(factor)
    return hashes ^ (hashes >> np.uint64(33))


def _is_a_disks(error: TieringError) -> bool:
    """Whether a disk may have done this, rather than a user."""
    cause = error.__cause__
    away = isinstance(cause, OSError) and cause.errno in DISK_IS_AWAY
    return away or not isinstance(error, ConfigError)


def _require_one_each(keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys with {len(buffers)} buffers")
