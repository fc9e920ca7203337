"""Who of the engines that share a namespace may delete for `max_bytes`: one at a time.

A note in the bucket names the holder, which renews it. `Lease` is sans-IO and decides; what is
compared between machines is only whether a note has changed, by each one's own clock, so clocks
need not agree. `LeaseKeeper` reads and writes the note. Where a store heeds conditions, two cannot
take it at once; where it does not, both read back who was last. Were there two for a moment, more
would be deleted than needed, and nothing else would be wrong.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from tiering.clock import Clock
from tiering.tiers.obj.pacing import Lane, Pacer
from tiering.tiers.obj.store import ObjectStore, StoreError

log = logging.getLogger("tiering")

Result = TypeVar("Result")

CLOCKS_APART_SECONDS_MAX = 600.0
"""How far the clocks of two engines may differ: a note this long past its time is nobody's."""


GIVE_UP_SECONDS_MAX = 1.5
"""An engine that ends waits no longer for a store: less than its process has for its end."""


class Note(msgspec.Struct, frozen=True):
    """What lies in the bucket. `holder`: an id of one opened tier, empty where it was given up.
    `incarnation` grows with each new holder, `renewals` with each renewal; `expires` is in seconds
    since 1970, by the holder's clock."""

    holder: str
    incarnation: int
    renewals: int
    expires: float


class Step(enum.Enum):
    """What to do about a note that was found."""

    TAKE = "take"
    RENEW = "renew"
    WAIT = "wait"


class Lease:
    """`me` is as unique as an id can be; a lease lasts `seconds`. `now` is by a monotonic clock,
    `today` counts from 1970."""

    def __init__(self, me: str, seconds: float) -> None:
        if not me or seconds <= 0:
            raise ValueError(f"{me=}, {seconds=}: out of range")
        self._me = me
        self._seconds = seconds
        self._held_until = float("-inf")
        self._seen: Note | None = None
        self._seen_since = 0.0

    def __repr__(self) -> str:
        return f"<Lease of {self._me}, last seen {self._seen}>"

    def is_held(self, now: float) -> bool:
        return now < self._held_until

    def found(self, note: Note | None, now: float, today: float) -> Step:
        """`note` is what lies there, None where that is none."""
        if note != self._seen or note is None:
            self._seen, self._seen_since = note, now
        if note is None or not note.holder:
            return Step.TAKE
        if note.holder == self._me:
            return Step.RENEW
        self._held_until = float("-inf")
        # Half as long again, since its renewal may be on its way.
        is_silent = now - self._seen_since >= 1.5 * self._seconds
        is_ancient = today > note.expires + CLOCKS_APART_SECONDS_MAX
        return Step.TAKE if is_silent or is_ancient else Step.WAIT

    def note(self, today: float) -> Note:
        """What to write in order to take or renew what was found last."""
        expires = today + self._seconds
        last = self._seen
        if last is not None and last.holder == self._me:
            return Note(self._me, last.incarnation, last.renewals + 1, expires)
        return Note(self._me, last.incarnation + 1 if last is not None else 1, 0, expires)

    def is_mine(self, note: Note | None) -> bool:
        return note is not None and note.holder == self._me

    def held(self, since: float) -> None:
        """The note, which was written after `since`, is there."""
        self._held_until = since + self._seconds

    def lost(self) -> None:
        """Somebody else was quicker, or it is given up."""
        self._held_until = float("-inf")

    def given_up(self) -> Note | None:
        """What to write when it is not wanted any more; None where it is not ours."""
        last = self._seen
        if last is None or not self.is_mine(last):
            return None
        return Note("", last.incarnation, last.renewals, 0.0)


class LeaseKeeper:
    """Keeps asking for the lease in the object `name`, or renewing it, while `run` runs."""

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        lease: Lease,
        pacer: Pacer,
        clock: Clock,
        today: Clock,
        *,
        every_seconds: float,
        settle_seconds: float,
    ) -> None:
        """`settle_seconds`: how long after taking it the note is read back."""
        self._store = store
        self._name = name
        self._lease = lease
        self._pacer = pacer
        self._clock = clock
        self._today = today
        self._every_seconds = every_seconds
        self._settle_seconds = settle_seconds
        self._etag: str | None = None

    @property
    def is_held(self) -> bool:
        return self._lease.is_held(self._clock.now())

    async def run(self, taken: Callable[[], None]) -> None:
        """Until cancelled; `taken` is told whenever the lease has become ours."""
        while True:
            was_held = self.is_held
            try:
                await self.tend()
            except StoreError as error:
                log.debug("%s: cannot be tended now: %s", self._name, error)
            if self.is_held and not was_held:
                taken()
            await asyncio.sleep(self._every_seconds)

    async def tend(self) -> None:
        """Look at the note once, and take or renew it if that is due. StoreError where it cannot
        be read or written; what is held then is held until its time is over."""
        note = await self._read()
        step = self._lease.found(note, self._clock.now(), self._today.now())
        if step is Step.WAIT:
            return
        since = self._clock.now()
        if not await self._write(self._lease.note(self._today.now())):
            self._lease.lost()
            return
        if step is Step.TAKE:
            await asyncio.sleep(self._settle_seconds)
        # This also learns what is to be given up, or was written by who was quicker.
        note = await self._read()
        if self._lease.found(note, self._clock.now(), self._today.now()) is Step.RENEW:
            self._lease.held(since)
        else:
            self._lease.lost()

    async def give_up(self) -> None:
        """Let another have it at once, if it is ours. An error is of no account: it runs out."""
        note = self._lease.given_up() if self.is_held else None
        self._lease.lost()
        if note is not None:
            try:
                async with asyncio.timeout(GIVE_UP_SECONDS_MAX):
                    await self._write(note)
            except (StoreError, TimeoutError) as error:
                log.debug("%s: cannot be given up, and will run out: %r", self._name, error)

    async def _read(self) -> Note | None:
        found = await self._run(lambda: self._store.get_small(self._name))
        if found is None:
            self._etag = None
            return None
        body, self._etag = found
        try:
            return msgspec.json.decode(body, type=Note)
        except msgspec.DecodeError:
            return None

    async def _write(self, note: Note) -> bool:
        """Whether it was written, over what was read last."""
        body, etag = msgspec.json.encode(note), self._etag
        written = await self._run(
            lambda: self._store.put_small(self._name, body, if_etag=etag, if_absent=etag is None)
        )
        return written is not None

    async def _run(self, request: Callable[[], Awaitable[Result]]) -> Result:
        deadline = self._clock.now() + self._every_seconds
        return await self._pacer.run(Lane.UPKEEP, deadline, request)
