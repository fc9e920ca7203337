"""`GuardedTier`: a tier around a tier, so that a sick one does not hurt the server.

Owns two breakers, for loads and for stores, and the calls inside the inner tier. A stall opens
both: a call hangs and no other of its operation comes back, for `stall_seconds`. Errors in a row
open one of them, a full tier that of stores. Whoever hands over no buffer is let go at a stall or
when cancelled; calls with buffers wait, for the buffers are the inner tier's until it answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from tiering.clock import Clock
from tiering.errors import ClosedError, TierError, TieringError
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
from tiering.tiers.wrappers.breaker import Breaker, Entry, State

log = logging.getLogger("tiering")

Item = TypeVar("Item", ReadOutcome, WriteOutcome, DeleteOutcome)
Result = TypeVar("Result")

MOVES_PAYLOAD = ("read", "write")

_WAY_OUT = "check its mount, disk or store, or take the tier out of the configuration"


class GuardState(NamedTuple):
    """What is let into the inner tier."""

    loads: State
    stores: State


@dataclass(slots=True, eq=False)
class _Call:
    """A call inside the inner tier. `answer` is done when its caller need not wait any more."""

    operation: str
    breaker: Breaker
    began: float
    is_trial: bool
    has_stalled: bool = False
    answer: asyncio.Future[None] | None = None


class GuardedTier(Tier):
    """`inner` while it is well. Out of service, it misses and refuses at once; see `Breaker`.

    `touch` is passed on in full health only. A `scan` waits as long as the inner tier does.
    """

    def __init__(
        self,
        inner: Tier,
        clock: Clock,
        *,
        stall_seconds: float = 10.0,
        errors_max: int = 8,
        retry_seconds: tuple[float, float] = (1.0, 30.0),
        open_seconds: float = 60.0,
    ) -> None:
        """Errors in a row up to `errors_max`; `retry_seconds`: first and longest pause before a
        trial; `open_seconds`: how long `open` may take."""
        if not (stall_seconds > 0 and errors_max >= 1 and 0 < retry_seconds[0] <= retry_seconds[1]):
            raise ValueError(f"{stall_seconds=}, {errors_max=}, {retry_seconds=}: out of range")
        self._inner = inner
        self._clock = clock
        self._stall_seconds = stall_seconds
        self._open_seconds = open_seconds
        self._errors_max, self._retry_seconds = errors_max, retry_seconds
        self._is_open = False
        self._is_wanted = False
        self._closing: asyncio.Task[TieringError | None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._calls: set[_Call] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._reset()

    def _reset(self) -> None:
        self._loads = Breaker(f"{self.name}: loads", self._errors_max, self._retry_seconds)
        self._stores = Breaker(f"{self.name}: stores", self._errors_max, self._retry_seconds)
        self._back_at: dict[str, float] = {}
        self._look_at: float | None = None
        self._returns = 0
        self._refused_loads = self._refused_stores = self._stalls = self._abandoned = 0

    def __repr__(self) -> str:
        loads, stores = self.state
        told = f"loads {loads.value}, stores {stores.value}, {len(self._calls)} calls inside"
        return f"<GuardedTier {told}: {self._inner!r}>"

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def state(self) -> GuardState:
        now = self._clock.now()
        return GuardState(self._loads.state(now), self._stores.state(now))

    def watch(self, removed: Listener) -> None:
        self._inner.watch(removed)

    async def open(self) -> None:
        """TierError also where it takes longer than `open_seconds`, or where something of an
        earlier use still hangs. What opens too late is closed again."""
        if self._is_open:
            raise RuntimeError(f"{self.name} is already open")
        if self._background or self._calls:
            raise TierError(self.name, None, f"hangs since it was last used; {_WAY_OUT}")
        self._is_wanted = True
        opening = self._own(self._open_inner())
        try:
            await asyncio.wait({opening}, timeout=self._open_seconds)
        except asyncio.CancelledError:
            self._is_wanted = False
            if not opening.cancel() and opening.result() is None:
                self._own(_error_of(self._inner.close()))
            raise
        if not opening.done():
            self._is_wanted = False
            reason = f"not open after {self._open_seconds:g} s: it hangs; {_WAY_OUT}"
            raise TierError(self.name, None, reason)
        error = opening.result()
        if error is not None:
            raise error
        self._reset()
        self._is_open = True

    async def contains(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        call = self._enter("contains", self._loads, keys)
        outcomes = await self._aside(call, lambda: self._inner.contains(keys))
        return self._missed(keys) if outcomes is None else outcomes

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        call = self._enter("read", self._loads, keys)
        if call is None:
            return self._missed(keys)
        return await self._inside(call, lambda: self._inner.read(keys, buffers))

    async def write(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[WriteOutcome]:
        call = self._enter("write", self._stores, keys)
        if call is None:
            self._refused_stores += len(keys)
            return [Write.REFUSED] * len(keys)
        return await self._inside(call, lambda: self._inner.write(keys, buffers))

    async def delete(self, keys: Sequence[bytes]) -> list[DeleteOutcome]:
        """Failed, out of service, also where it hangs: the chunks may be deleted later, or not."""
        call = self._enter("delete", self._stores, keys)
        outcomes = await self._aside(call, lambda: self._inner.delete(keys))
        if outcomes is None:
            return [Failed(TierError(self.name, key, "out of service")) for key in keys]
        return outcomes

    async def touch(self, keys: Sequence[bytes]) -> None:
        async def touch() -> list[ReadOutcome]:
            await self._inner.touch(keys)
            return []

        self._require_open()
        if self.state.loads is State.CLOSED:
            await self._aside(self._enter("touch", self._loads, keys), touch)

    def stats(self) -> dict[str, int]:
        """The inner tier's, and: keys that were refused or missed unasked, calls that stalled,
        trips of either breaker, and what was left hanging at `close`."""
        loads, stores = self.state
        return self._inner.stats() | {
            "refused_loads": self._refused_loads,
            "refused_stores": self._refused_stores,
            "stalls": self._stalls,
            "trips": self._loads.trips + self._stores.trips,
            "abandoned_calls": self._abandoned,
            "now_loads_out": int(loads is not State.CLOSED),
            "now_stores_paused": int(stores is not State.CLOSED),
        }

    def scan(self) -> AsyncIterator[list[bytes]]:
        return self._inner.scan()

    async def close(self) -> None:
        """As the inner tier does, but what hangs is left behind once nothing has come back for
        `stall_seconds`; counted and logged."""
        self._is_open = False
        if self._closing is None or self._closing.done():
            self._closing = self._own(_error_of(self._inner.close()))
        closing = self._closing
        pending: set[asyncio.Task[Any]] = set(self._background)
        while pending:
            returns = self._returns
            _, pending = await asyncio.wait(pending, timeout=self._stall_seconds)
            if pending and returns == self._returns:
                self._abandon(pending)
                return
        error = closing.result()
        if error is not None:
            raise error

    def _abandon(self, pending: set[asyncio.Task[Any]]) -> None:
        self._abandoned += len(pending)
        self._disarm()
        told = "%s: hangs while it is closed; calls left behind in it: %d; %s"
        log.warning(told, self.name, len(pending), _WAY_OUT)

    async def _open_inner(self) -> TieringError | None:
        error = await _error_of(self._inner.open())
        if error is None and not self._is_wanted:
            log.info("%s: opened too late, and is closed again", self.name)
            await self._inner.close()
        return error

    def _own(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Have `work` done, whoever waits for it. Not in a TaskGroup, whose end waits for ever
        for a call that hangs."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError(f"{self.name} is not open")

    def _missed(self, keys: Sequence[bytes]) -> list[ReadOutcome]:
        self._refused_loads += len(keys)
        return [Read.MISS] * len(keys)

    # Calls on their way through

    def _enter(self, operation: str, breaker: Breaker, keys: Sequence[bytes]) -> _Call | None:
        """None where the call may not go into the inner tier, or has nothing to do there."""
        self._require_open()
        now = self._clock.now()
        self._look(now)
        entry = breaker.enter(operation, now) if keys else Entry.REFUSED
        if entry is Entry.REFUSED:
            return None
        call = _Call(operation, breaker, now, is_trial=entry is Entry.TRIAL)
        self._calls.add(call)
        if self._look_at is None:
            self._look_at = now + self._stall_seconds
        self._arm(now)
        return call

    async def _inside(self, call: _Call, work: Callable[[], Awaitable[list[Item]]]) -> list[Item]:
        try:
            outcomes = await work()
        except TierError as error:
            self._leave(call, [Failed(TierError(error.tier, error.key, error.reason))])
            raise
        except BaseException:
            self._leave(call, None)
            raise
        self._leave(call, outcomes)
        return outcomes

    async def _aside(
        self, call: _Call | None, work: Callable[[], Awaitable[list[Item]]]
    ) -> list[Item] | None:
        """The outcomes of a call without buffers; None if it was refused or if it hangs. Then,
        and where the caller is cancelled, it goes on in the background."""
        if call is None:
            return None
        answer = call.answer = asyncio.get_running_loop().create_future()
        task = self._own(_value_or_error(self._inside(call, work)))
        task.add_done_callback(lambda _: _resolve(answer))
        try:
            await answer
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            return None
        result = task.result()
        if isinstance(result, TieringError):
            raise result
        return result

    def _leave(
        self, call: _Call, outcomes: Sequence[ReadOutcome | WriteOutcome | DeleteOutcome] | None
    ) -> None:
        """`outcomes` is None where the call was cut off, which tells nothing about the tier."""
        self._calls.remove(call)
        if not self._calls:
            self._disarm()
        now = self._clock.now()
        if call.is_trial:
            call.breaker.leave(call.operation, hung=call.has_stalled)
        self._returns += 1
        if outcomes is None:
            return
        self._back_at[call.operation] = now
        call.breaker.came_back(
            outcomes,
            now,
            moves_payload=call.operation in MOVES_PAYLOAD,
            is_trial=call.is_trial,
        )
        if call.has_stalled and not any(other.has_stalled for other in self._calls):
            for breaker in (self._loads, self._stores):
                breaker.unstalled(now)

    # Stalls

    def _look(self, now: float) -> None:
        """Find what has stalled by `now`, and say when to look again."""
        if self._look_at is None or now < self._look_at:
            return
        self._look_at = None
        for call in [call for call in self._calls if not call.has_stalled]:
            since = max(call.began, self._back_at.get(call.operation, call.began))
            due = since + self._stall_seconds
            if due <= now:
                self._stall(call, now)
            elif self._look_at is None or due < self._look_at:
                self._look_at = due

    def _stall(self, call: _Call, now: float) -> None:
        call.has_stalled = True
        self._stalls += 1
        for breaker in (self._loads, self._stores):
            is_trial = call.is_trial and breaker is call.breaker
            breaker.stalled(call.operation, now - call.began, now, is_trial=is_trial)
        for waiting in self._calls:
            if waiting.answer is not None:
                _resolve(waiting.answer)

    def _arm(self, now: float) -> None:
        if self._timer is None and self._look_at is not None:
            delay_seconds = max(0.0, self._look_at - now)
            self._timer = asyncio.get_running_loop().call_later(delay_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._clock.now()
        self._look(now)
        self._arm(now)

    def _disarm(self) -> None:
        self._look_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _resolve(answer: asyncio.Future[None]) -> None:
    if not answer.done():
        answer.set_result(None)


async def _value_or_error(work: Awaitable[Result]) -> Result | TieringError:
    """An error that is expected comes as a value, so that one nobody waits for raises nothing."""
    try:
        return await work
    except TieringError as error:
        return error


async def _error_of(work: Awaitable[None]) -> TieringError | None:
    return await _value_or_error(work)
