"""How many requests are under way, when the next may begin, and whether one is tried again.

`Pace` and `RetryBudget` are sans-IO: they are told the time and what came of requests. A store
that asks for less gets less: half as many at once, at most once a round trip, then one more each
round trip that goes well; a pause where one at a time is still too much; and hardly any
repetitions while nothing succeeds. So requests per second fall under throttling rather than rise.
`Pacer` is the loop's side: turns, loads before stores, and deadlines. No request is sent twice at
once on the chance that one is faster.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from tiering.clock import Clock
from tiering.metrics import Counters
from tiering.tiers.obj.store import NotNowError, StoreError, ThrottledError

Result = TypeVar("Result")

COUNTERS = ("throttled", "retries", "retry_budget_spent", "requests_failed", "requests_late")

RETRY_AFTER_SECONDS_MAX = 30.0
"""A store may ask for longer; after this one request asks whether it still does."""

TURNS_OUT_OF_ORDER = 16
"""Of so many turns one goes to whoever comes last, so that loads without end starve nobody."""


class Lane(enum.IntEnum):
    """Who goes first: somebody waits for a load, nobody for the upkeep."""

    LOAD = 0
    STORE = 1
    UPKEEP = 2


class LateError(NotNowError):
    """A request's deadline came first. `hangs`: it had been under way for half of its time and for
    as long as the pacer wants, and the store has answered none since; otherwise it waited for its
    turn or for its next try, had no time left, or others were quicker."""

    def __init__(self, message: str, *, hangs: bool) -> None:
        super().__init__(message)
        self.hangs = hangs


class Pace:
    """Between 1 and `most` requests under way. `backoff_seconds`: the first and the longest time
    that a pause is taken from, at random, where the store does not say how long it wants one."""

    def __init__(
        self, most: int, chance: random.Random, backoff_seconds: tuple[float, float] = (0.1, 2.0)
    ) -> None:
        if most < 1 or not 0 < backoff_seconds[0] <= backoff_seconds[1]:
            raise ValueError(f"{most=}, {backoff_seconds=}: out of range")
        self._most = most
        self._chance = chance
        self._backoff_seconds = backoff_seconds
        self._limit = float(most)
        self._halved_at = float("-inf")
        self._throttled_in_a_row = 0
        self.under_way = 0
        self.quiet_until = float("-inf")

    def __repr__(self) -> str:
        return f"<Pace {self.under_way} of {self.limit} (at most {self._most}) under way>"

    @property
    def limit(self) -> int:
        """How many may be under way."""
        return int(self._limit)

    def may_begin(self, now: float) -> bool:
        return self.under_way < self.limit and now >= self.quiet_until

    def begins(self) -> None:
        self.under_way += 1

    def cut_off(self) -> None:
        """A request ended without an answer."""
        self.under_way -= 1

    def answered(self) -> None:
        """A request went well: the limit has grown by one once as many have as it allows."""
        self.under_way -= 1
        self._throttled_in_a_row = 0
        # Large limits grow faster, so that 32 round trips bring back any.
        growth = max(1.0, self._most / 32) / self._limit
        self._limit = min(float(self._most), self._limit + growth)

    def failed(self) -> None:
        """A request failed for another reason than the number of them."""
        self.under_way -= 1

    def throttled(self, began: float, now: float, retry_after_seconds: float | None) -> None:
        """The store asked for fewer. What began before it was heeded last says nothing new."""
        self.under_way -= 1
        if retry_after_seconds is not None:
            # All come back a little apart.
            pause = min(retry_after_seconds, RETRY_AFTER_SECONDS_MAX) * self._chance.uniform(1, 1.1)
            self.quiet_until = max(self.quiet_until, now + pause)
        if began < self._halved_at:
            return
        if self._limit < 2 and retry_after_seconds is None:
            self.quiet_until = max(self.quiet_until, now + self.backoff(self._throttled_in_a_row))
        self._throttled_in_a_row += 1
        self._limit = max(1.0, self._limit / 2)
        self._halved_at = now

    def backoff(self, tries: int) -> float:
        """Seconds before the next, after `tries` that failed: anything up to twice as long each
        time, so that many who were refused at once do not come back at once."""
        first, longest = self._backoff_seconds
        return self._chance.uniform(0, min(longest, first * 2.0 ** min(tries, 30)))


class RetryBudget:
    """Repetitions: `reserve` at first and at most, and one more for every ten requests that
    succeed."""

    SHARE = 0.1

    def __init__(self, reserve: float = 10.0) -> None:
        self._reserve = reserve
        self._left = reserve

    def __repr__(self) -> str:
        return f"<RetryBudget {self._left:.1f} left>"

    def succeeded(self) -> None:
        self._left = min(self._reserve, self._left + self.SHARE)

    def take(self) -> bool:
        """Whether one may be tried again, and that it will be."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Pacer:
    """Sends requests when it is their turn. `clock` is monotonic. One that was cut off within
    `hang_seconds` says nothing about the store: what was left of its time may be less than any
    answer takes."""

    def __init__(
        self,
        requests_max: int,
        clock: Clock,
        chance: random.Random,
        *,
        tries_max: int = 4,
        hang_seconds: float = 1.0,
    ) -> None:
        self._pace = Pace(requests_max, chance)
        self._budget = RetryBudget()
        self._clock = clock
        self._tries_max = tries_max
        self._hang_seconds = hang_seconds
        self._waiting: dict[Lane, deque[asyncio.Future[None]]] = {lane: deque() for lane in Lane}
        self._turns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._answered_at = float("-inf")
        self.counters = Counters(COUNTERS)

    def __repr__(self) -> str:
        waiting = ", ".join(f"{len(self._waiting[lane])} {lane.name.lower()}" for lane in Lane)
        return f"<Pacer {self._pace!r}, waiting: {waiting}, {self._budget!r}>"

    @property
    def limit(self) -> int:
        """How many requests may be under way now."""
        return self._pace.limit

    async def insist(
        self, lane: Lane, deadline: float, request: Callable[[], Awaitable[Result]]
    ) -> Result:
        """`run`, begun anew for as long as the store asks for fewer requests: many that come at
        once are asked to slow down, and that is no failure."""
        while True:
            with suppress(ThrottledError):
                return await self.run(lane, deadline, request)

    async def run(
        self, lane: Lane, deadline: float, request: Callable[[], Awaitable[Result]]
    ) -> Result:
        """What `request`, sent when it is its turn, returns. What fails for now is sent again a few
        times, while the budget and the time until `deadline`, by the clock, allow it; after that
        its error is raised. LateError at the deadline: then nothing of it is under way."""
        sent_at: float | None = None
        began = self._clock.now()
        try:
            async with asyncio.timeout(deadline - began):
                for tries in range(self._tries_max):
                    sent_at = None
                    await self._turn(lane)
                    sent_at = self._clock.now()
                    try:
                        return await self._sent(sent_at, request)
                    except NotNowError as error:
                        pause = self._pause_before_next(tries, error, deadline)
                        if pause is None:
                            raise
                    sent_at = None
                    await asyncio.sleep(pause)
                raise AssertionError("the last try has raised or returned")
        except TimeoutError:
            self.counters.add("requests_late")
            hangs = (
                sent_at is not None
                and self._answered_at <= sent_at
                and self._clock.now() - sent_at >= max((deadline - began) / 2, self._hang_seconds)
            )
            why = "it does not answer" if hangs else "too slow, or asked for fewer requests"
            raise LateError(f"not done by its deadline: {why}", hangs=hangs) from None

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _sent(self, began: float, request: Callable[[], Awaitable[Result]]) -> Result:
        """`request`, whose turn it is; however it ends, the next one's has come."""
        try:
            result = await request()
        except StoreError as error:
            self._failed(error, began)
            raise
        except BaseException:
            self._pace.cut_off()
            raise
        else:
            self._answered_at = self._clock.now()
            self._pace.answered()
            self._budget.succeeded()
            return result
        finally:
            self._wake()

    def _failed(self, error: StoreError, began: float) -> None:
        now = self._clock.now()
        if isinstance(error, ThrottledError):
            self._answered_at = now
            self.counters.add("throttled")
            self._pace.throttled(began, now, error.retry_after_seconds)
            return
        if not isinstance(error, NotNowError):
            self._answered_at = now
        self.counters.add("requests_failed")
        self._pace.failed()

    def _pause_before_next(self, tries: int, error: NotNowError, deadline: float) -> float | None:
        """Seconds until the next try; None where there is none."""
        pause = self._pace.backoff(tries)
        if error.retry_after_seconds is not None:
            pause += min(error.retry_after_seconds, RETRY_AFTER_SECONDS_MAX)
        if tries + 1 >= self._tries_max or self._clock.now() + pause >= deadline:
            return None
        if not self._budget.take():
            self.counters.add("retry_budget_spent")
            return None
        self.counters.add("retries")
        return pause

    # Turns

    async def _turn(self, lane: Lane) -> None:
        """Returns when a request may be sent, which then counts as under way."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(turn)
        self._wake()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It had its turn already, and leaves it to the next one.
                self._pace.cut_off()
                self._wake()
            raise

    def _wake(self) -> None:
        """Give their turn to as many as may have one."""
        now = self._clock.now()
        while self._pace.may_begin(now) and (turn := self._next()) is not None:
            self._pace.begins()
            turn.set_result(None)
        is_quiet = now < self._pace.quiet_until
        if is_quiet and self._timer is None and any(self._waiting.values()):
            delay = self._pace.quiet_until - now
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _next(self) -> asyncio.Future[None] | None:
        is_out_of_order = self._turns % TURNS_OUT_OF_ORDER == TURNS_OUT_OF_ORDER - 1
        for lane in sorted(Lane, reverse=is_out_of_order):
            while self._waiting[lane]:
                turn = self._waiting[lane].popleft()
                if not turn.done():
                    self._turns += 1
                    return turn
        return None

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()


async def at_once(parts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of `parts`, run at the same time. Cancelled, it comes back when all have."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in parts]
    return [task.result() for task in tasks]
