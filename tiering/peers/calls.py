"""The two ends of sessions as a program uses them: `Peer`, which is asked, and `Guest`, which asks.

Each owns its session's frames on the way out and, for a peer, who waits for which answer. Made by
`control`, which brings what comes in. Loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

from tiering.clock import Clock
from tiering.errors import PeerError
from tiering.peers.addresses import Address
from tiering.peers.messages import (
    Connect,
    Ending,
    Fetch,
    FetchResp,
    Lookup,
    LookupResp,
    Reference,
    references_of,
)
from tiering.peers.rounds import Round
from tiering.peers.session import (
    Answered,
    Event,
    Frames,
    Greeted,
    Opened,
    Over,
    Released,
    RequestOver,
    Session,
    State,
    Unanswered,
    Wanted,
)

Send = Callable[[Frames], bool]
"""Hands frames to a socket; whether it took them."""


class Fetched(NamedTuple):
    """A round whose chunks are pinned, with a reference for each key, None where it was no hit.
    `Peer.done` is to be called for it."""

    of: Round
    places: list[Reference | None]


class Source(Protocol):
    """The engine that serves. Called on the loop; does not wait and does not raise."""

    def greeted(self, guest: Guest) -> None:
        """Somebody was answered who may ask once it has proven the key: let the transports know
        its token, which it may prove there first."""
        ...

    def wanted(self, guest: Guest, of: Round, question: Lookup | Fetch) -> None:
        """Answer with `guest.hits` or `guest.places`, now or later."""
        ...

    def released(self, guest: Guest, of: Round, success: bool | None) -> None:
        """Let go of what is pinned for `of`, and forget the question if it is not answered yet."""
        ...

    def request_over(self, guest: Guest, kv_request_id: str) -> None:
        """Nothing more will be asked for this request by this guest."""
        ...

    def over(self, guest: Guest, reason: str) -> None:
        """After `greeted`, and after everything else about `guest`: close its links."""
        ...


class _End:
    """What both ends have: a session, and a way out for its frames."""

    def __init__(self, session: Session, clock: Clock) -> None:
        self.session = session
        self.over: Over | None = None
        self._clock = clock
        self._send: Send | None = None
        self._untold: deque[Event] = deque()
        self._is_telling = False

    @property
    def is_open(self) -> bool:
        return self.session.state is State.OPEN

    @property
    def introduction(self) -> Connect:
        """How the other engine introduced itself. REQUIRES: open, or once open."""
        assert self.session.peer is not None
        return self.session.peer

    @property
    def session_id(self) -> bytes:
        return self.session.session_id

    @property
    def token(self) -> bytes:
        return self.session.token

    @property
    def is_idle(self) -> bool:
        return self.session.is_idle

    @property
    def used_at(self) -> float:
        return self.session.used_at

    def sends_with(self, send: Send) -> None:
        """From now on frames can leave, and those that wait do."""
        self._send = send
        self.flush()

    def received(self, frames: Sequence[bytes]) -> None:
        self._after(self.session.received(frames, self._clock.now()))

    def tick(self, now: float) -> None:
        self._after(self.session.tick(now))

    def hurry(self, now: float) -> None:
        self.session.hurry(now)

    def close(self, ending: Ending, reason: str) -> None:
        self._after(self.session.close(ending, reason))

    def flush(self) -> None:
        if self._send is None:
            return
        for frames in self.session.take():
            if not self._send(frames):
                told = "it takes no messages: it is gone, or has not read any for long"
                self._after(self.session.close("failed", told))
                return

    def _after(self, events: list[Event]) -> None:
        """Send what there is to be sent, and tell of `events`. Either may show that the other side
        is gone: what comes of that is told behind them, so that nothing comes after the end."""
        self._untold += events
        self.flush()
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._untold:
                event = self._untold.popleft()
                self._happened(event)
                if isinstance(event, Over):
                    self.over = event
        finally:
            self._is_telling = False

    def _happened(self, event: Event) -> None:
        raise NotImplementedError


class Peer(_End):
    """An engine that this one has dialled. Raises PeerError for all that goes wrong."""

    def __init__(self, at: Address, session: Session, clock: Clock) -> None:
        super().__init__(session, clock)
        self.at = at
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: dict[Round, asyncio.Future[LookupResp | FetchResp]] = {}
        # The other side ends a session of which more rounds are open with it, those included whose
        # chunks are being read: who comes too many waits here.
        self._turns = asyncio.Semaphore(session.patience.rounds_max)
        self._reading: set[Round] = set()

    @property
    def is_idle(self) -> bool:
        # Rows are read when nothing is asked any more, and somebody waits for it to open.
        return super().is_idle and not self._reading and self._opened.done()

    async def opened(self) -> None:
        """Returns once the session is open."""
        await asyncio.shield(self._opened)

    async def lookup(self, kv_request_id: str, keys: Sequence[bytes]) -> bytes:
        """For each of `keys` 1 where it could be fetched, else 0. At most `messages.KEYS_MAX`."""
        async with self._turns:
            self._require_open()
            with self._askable():
                of = self.session.lookup(kv_request_id, keys, self._clock.now())
            answer = await self._answer(of)
        return answer.hits

    async def fetch(
        self, kv_request_id: str, keys: Sequence[bytes], seconds_max: float | None = None
    ) -> Fetched:
        """Have `keys` pinned and learn where they are; `seconds_max`: wait that long for those that
        have yet to be computed. Cancelled, it leaves nothing pinned."""
        await self._turns.acquire()
        try:
            self._require_open()
            with self._askable():
                of = self.session.fetch(kv_request_id, keys, self._clock.now(), seconds_max)
            answer = await self._answer(of)
        except BaseException:
            self._turns.release()
            raise
        assert of is not None
        assert isinstance(answer, FetchResp)
        self._reading.add(of)
        return Fetched(of, references_of(answer))

    def done(self, of: Round, success: bool) -> None:
        """What was fetched in `of` is read, or is not wanted: it may be unpinned. Never raises."""
        self.session.done(of, success, self._clock.now())
        self.flush()
        if of in self._reading:
            self._reading.remove(of)
            self._turns.release()

    def request_over(self, kv_request_id: str) -> None:
        """Nothing more will be asked for this request. Never raises."""
        with suppress(ValueError):  # a request that cannot be named: nothing was asked for it
            self.session.request_over(kv_request_id, self._clock.now())
        self.flush()

    def heard_since(self, then: float) -> bool:
        return self.session.heard_since(then)

    def __repr__(self) -> str:
        return f"<Peer {self.at}: {self.session}>"

    def _require_open(self) -> None:
        if not self.is_open:
            reason = "the session is not open" if self.over is None else self.over.reason
            raise PeerError(str(self.at), reason)

    @contextmanager
    def _askable(self) -> Iterator[None]:
        """What cannot be put into a message is no question for a peer."""
        try:
            yield
        except ValueError as error:
            raise PeerError(str(self.at), f"cannot be asked: {error}") from error

    async def _answer(self, of: Round | None) -> LookupResp | FetchResp:
        if of is None:
            told = f"{self.session.asked.rounds_max} questions wait for an answer already"
            raise PeerError(str(self.at), told)
        waiting: asyncio.Future[LookupResp | FetchResp]
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[of] = waiting
        self.flush()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.done(of, success=False)
            self.session.abort(of, self._clock.now())
            self.flush()
            raise
        finally:
            self._waiting.pop(of, None)

    def _happened(self, event: Event) -> None:
        match event:
            case Opened():
                self._opened.set_result(None)
            case Answered(of, message):
                if (waiting := self._waiting.get(of)) is not None and not waiting.done():
                    waiting.set_result(message)
                elif isinstance(message, FetchResp):
                    # Whoever waited was cancelled just now, and has not come to say so.
                    self.done(of, success=False)
            case Unanswered(of, reason):
                if (waiting := self._waiting.get(of)) is not None and not waiting.done():
                    waiting.set_exception(PeerError(str(self.at), reason))
            case Over(_, reason):
                if not self._opened.done():
                    self._opened.set_exception(PeerError(str(self.at), reason))
                    self._opened.exception()  # nobody may wait for it any more


class Guest(_End):
    """An engine that has dialled this one."""

    def __init__(self, session: Session, clock: Clock, source: Source) -> None:
        super().__init__(session, clock)
        self._source = source

    @property
    def was_greeted(self) -> bool:
        """Whether the source knows it. Before, nobody can refuse anybody but this engine."""
        return self.session.peer is not None

    def hits(self, of: Round, hits: bytes) -> bool:
        """Answer a lookup: for each key 1 where it is there, else 0. False where nobody waits for
        it any more."""
        is_told = self.session.hits(of, hits, self._clock.now())
        self.flush()
        return is_told

    def places(self, of: Round, found: Sequence[Reference | None]) -> bool:
        """Answer a fetch: where each chunk is pinned, or None. False where nobody waits for it any
        more: `Source.released` was called before, and what was pinned since is to be let go."""
        is_told = self.session.places(of, found, self._clock.now())
        self.flush()
        return is_told

    def __repr__(self) -> str:
        return f"<Guest {self.session}>"

    def _happened(self, event: Event) -> None:
        match event:
            case Greeted():
                self._source.greeted(self)
            case Wanted(of, question):
                self._source.wanted(self, of, question)
            case Released(of, success):
                self._source.released(self, of, success)
            case RequestOver(kv_request_id):
                self._source.request_over(self, kv_request_id)
            case Over(_, reason) if self.was_greeted:
                self._source.over(self, reason)
