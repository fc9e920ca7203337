"""One session between two engines, from greeting to end. Sans-IO: frames and times in, events and
frames out; `control` carries them.

The engine that dials asks, the dialled one serves; two that pull from one another have two
sessions. Nothing that the other side says is believed before it has proven the shared key: the
dialled engine by sealing its greeting, the dialling one by its first sealed message. What is said
of a round is valid in its session only, and so for these two incarnations only. Deadlines are of
words, not of connections: a peer that is stopped keeps its connections.
"""

from __future__ import annotations

import enum
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiering.peers import auth
from tiering.peers.agreement import Introduction, refusal, stranger
from tiering.peers.auth import Seals, SharedKey
from tiering.peers.messages import (
    ID_BYTES,
    NONCE_BYTES,
    REASON_CHARS_MAX,
    Abort,
    AbortAck,
    Connect,
    ConnectAck,
    Disconnect,
    Ending,
    Fetch,
    FetchResp,
    Heartbeat,
    Lookup,
    LookupResp,
    Malformed,
    Message,
    Reference,
    TransferDone,
    decode,
    encode,
    fetched,
    joined,
)
from tiering.peers.rounds import Asked, Round, Served, Waits

_OTHER_KEY = (
    "the two engines have different shared keys, or somebody has changed their greeting; give both "
    "the same file as auth"
)

Frames = tuple[bytes, bytes]
"""A message, and its seal, which is empty where nothing can be sealed yet."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds until something is given up, and how much may be open at once."""

    handshake_seconds_max: float = 5.0
    heartbeat_seconds: float = 1.0
    silence_seconds_max: float = 4.0
    """Without any word of the other side, a session is over."""
    answer_seconds_max: float = 10.0
    pin_seconds_max: float = 60.0
    """How long chunks stay pinned for a peer that lives and does not say that it is done."""
    rounds_max: int = 1024


class State(enum.Enum):
    GREETING = "greeting"
    PROVING = "proving"
    """Dialled: answered, and waiting for the first sealed message."""
    OPEN = "open"
    OVER = "over"


class Greeted(NamedTuple):
    """To the engine that serves: it has answered a greeting, and the other side may come over the
    data plane before its first sealed message does. Whoever knows the token there has proven the
    key just as well."""


class Opened(NamedTuple):
    """Both sides have proven the key and fit one another. `peer` is the other's introduction."""

    peer: Connect


class Answered(NamedTuple):
    """To the engine that asked: the answer of one of its rounds."""

    of: Round
    message: LookupResp | FetchResp


class Unanswered(NamedTuple):
    """The round has failed, though the session goes on."""

    of: Round
    reason: str


class Wanted(NamedTuple):
    """To the engine that serves: answer this round with `hits` or `places`."""

    of: Round
    question: Lookup | Fetch


class Released(NamedTuple):
    """To the engine that serves: nothing needs to be pinned for this round any more, nor looked
    for. `success` is what the other side said of it, None where it said nothing."""

    of: Round
    success: bool | None


class RequestOver(NamedTuple):
    """To the engine that serves: nothing more will be asked for this request."""

    kv_request_id: str


class Over(NamedTuple):
    """The last event of a session. `is_told`: the other side said so, and `reason` is its."""

    ending: Ending
    reason: str
    is_told: bool


def _told(goodbye: Disconnect) -> Over:
    # Anybody may have written it, and it goes to the log: as one line.
    reason = "".join(each if each.isprintable() else "?" for each in goodbye.reason)
    return Over(goodbye.ending, reason, is_told=True)


Event = Greeted | Opened | Answered | Unanswered | Wanted | Released | RequestOver | Over


class Session:
    """`take` what is to be sent after every call. `received` and `tick` give events, in order."""

    def __init__(
        self,
        me: Introduction,
        key: SharedKey,
        side: auth.Side,
        now: float,
        patience: Patience | None = None,
        chance: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """`now` is in seconds, of any monotonic clock. `chance` gives unpredictable bytes."""
        self.side: auth.Side = side
        self.state = State.GREETING
        self.patience = patience or Patience()
        self.peer: Connect | None = None
        self.session_id = b""
        self.asked = Asked(self.patience.rounds_max)
        self.served = Served(self.patience.rounds_max)
        self._me = me
        self._key = key
        self._chance = chance
        self._seals: Seals | None = None
        self._greeting = b""
        self._out: deque[Frames] = deque()
        self._heard_at = self._said_at = self._began_at = self.used_at = now
        if side == "dialling":
            self._greeting = encode(me.connect(key, chance(NONCE_BYTES)))
            self._out.append((self._greeting, auth.greeting_seal(key, self._greeting)))

    @property
    def token(self) -> bytes:
        """For the data plane. REQUIRES: `Greeted` or `Opened` was told."""
        assert self._seals is not None
        return self._seals.token

    @property
    def is_idle(self) -> bool:
        return not self.asked and not self.served

    def take(self) -> list[Frames]:
        """What is to be sent, in order; it is forgotten here."""
        out = list(self._out)
        self._out.clear()
        return out

    def __repr__(self) -> str:
        whom = "nobody yet" if self.peer is None else self.peer.engine_id.hex()[:8]
        rounds = f"{len(self.asked)} asked, {len(self.served)} served"
        return f"<Session {self.side} {self.state.value} with {whom}: {rounds}>"

    # What comes in

    def received(self, frames: Sequence[bytes], now: float) -> list[Event]:
        """What one message of the other side comes to. An unsealed `disconnect` is believed, since
        whoever can write into a connection can cut it as well. All else has to be sealed."""
        if self.state is State.OVER:
            return []
        if len(frames) != 2:
            return self._end("malformed", f"a message of {len(frames)} frames, not 2")
        payload, seal = frames
        if self.state is State.GREETING and self.side == "dialled":
            return self._greeted(payload, seal, now)
        message = decode(payload)
        if isinstance(message, Malformed):
            return self._end("malformed", message.reason)
        if isinstance(message, Disconnect):
            return self._over(_told(message))
        if self.state is State.GREETING:
            return self._acknowledged(message, payload, seal, now)
        assert self._seals is not None
        if not self._seals.opens(payload, seal):
            return self._end("refused", "a message that this session's key did not seal")
        self._heard_at = now
        events: list[Event] = []
        if self.state is State.PROVING:
            assert self.peer is not None
            self.state = State.OPEN
            events.append(Opened(self.peer))
        return events + self._said(message, now)

    def _greeted(self, payload: bytes, seal: bytes, now: float) -> list[Event]:
        """The first message to a dialled engine. Who has not the key is told no more than that."""
        message = decode(payload)
        if isinstance(message, Malformed):
            return self._end("malformed", message.reason)
        if isinstance(message, Disconnect):
            return self._over(_told(message))
        if type(message) is not Connect:
            kind = type(message).__name__
            return self._end("unknown", f"a {kind} of no session that is known here: connect first")
        self.session_id = self._chance(ID_BYTES)
        mine = self._me.connect_ack(self._key, self._chance(NONCE_BYTES), self.session_id)
        if why := stranger(message, mine):
            return self._end("refused", why)
        if not auth.greeting_opens(self._key, payload, seal):
            return self._end("refused", _OTHER_KEY)
        if why := refusal(message, mine):
            return self._end("refused", why)
        greeting = encode(mine)
        self._seals = auth.seals_of(self._key, self.side, payload, greeting)
        self._out.append((greeting, self._seals.seal(greeting)))
        self.peer, self.state = message, State.PROVING
        self._heard_at = self._said_at = now
        return [Greeted()]

    def _acknowledged(
        self, message: Message, payload: bytes, seal: bytes, now: float
    ) -> list[Event]:
        """The first message to a dialling engine."""
        if not isinstance(message, ConnectAck):
            kind = type(message).__name__
            return self._end("malformed", f"a {kind} before the session was acknowledged")
        seals = auth.seals_of(self._key, self.side, self._greeting, payload)
        mine = decode(self._greeting)
        assert isinstance(mine, Connect)
        if why := stranger(mine, message):
            return self._end("refused", why)
        if not seals.opens(payload, seal):
            return self._end("refused", _OTHER_KEY)
        if why := refusal(mine, message):
            return self._end("refused", why)
        self._seals, self.peer, self.session_id = seals, message, message.session
        self.state = State.OPEN
        self._heard_at = now
        self._say(Heartbeat(), now)  # the proof that this engine has the key
        return [Opened(message)]

    def _said(self, message: Message, now: float) -> list[Event]:
        serves = self.side == "dialled"
        match message:
            case Heartbeat():
                return []
            case Lookup() | Fetch() if serves:
                return self._wanted(message, now)
            case TransferDone() if serves:
                of = Round(message.kv_request_id, message.round_seq)
                return [Released(of, message.success)] if self.served.end(of) else []
            case Abort() if serves:
                of = Round(message.kv_request_id, message.round_seq)
                was_open = self.served.end(of)
                self._say(AbortAck(*of), now)
                return [Released(of, None)] if was_open else []
            case LookupResp() | FetchResp() if not serves:
                answers = self.asked.answered(message)
                if answers is None:
                    return []
                self.used_at = now
                return [Answered(answers, message)]
            case AbortAck() if not serves:
                self.asked.released(Round(message.kv_request_id, message.round_seq))
                return []
            case _:
                kind = type(message).__name__
                return self._end("malformed", f"a {kind}, which is not for the other side to say")

    def _wanted(self, question: Lookup | Fetch, now: float) -> list[Event]:
        self.used_at = now
        if isinstance(question, Fetch) and not question.keys:
            return [RequestOver(question.kv_request_id)]
        if self.served.is_full:
            return self._end("refused", f"more than {self.served.rounds_max} rounds at a time")
        of = self.served.begin(question)
        return [] if of is None else [Wanted(of, question)]

    def tick(self, now: float) -> list[Event]:
        """To be called a few times within `heartbeat_seconds`."""
        patience = self.patience
        if self.state is State.OVER:
            return []
        if self.state is not State.OPEN:
            if now - self._began_at < patience.handshake_seconds_max:
                return []
            told = f"no answer to our greeting within {patience.handshake_seconds_max:g} seconds"
            return self._end("failed", told)
        if now - self._heard_at >= patience.silence_seconds_max:
            return self._end("failed", f"no word for {patience.silence_seconds_max:g} seconds")
        if now - self._said_at >= patience.heartbeat_seconds:
            self._say(Heartbeat(), now)
        events: list[Event] = []
        for of, waits in self.asked.overdue(now):
            if waits is Waits.FOR_RELEASE:
                # The abort was lost, or its answer: what waits there would wait for ever.
                self.asked.wait_on(of, now + patience.answer_seconds_max)
                self._say(Abort(*of), now)
                continue
            events.append(Unanswered(of, "no answer in time"))
            self.abort(of, now)
        for of in self.served.overdue(now):
            self.served.end(of)
            events.append(Released(of, None))
        return events

    def hurry(self, now: float) -> None:
        """There is a reason to doubt that the other side lives: wait no longer than two heartbeats
        from now for a word of it."""
        left = self.patience.silence_seconds_max - 2 * self.patience.heartbeat_seconds
        self._heard_at = min(self._heard_at, now - max(left, 0.0))

    def heard_since(self, then: float) -> bool:
        return self._heard_at > then

    # What the engine that asks says

    def lookup(self, kv_request_id: str, keys: Sequence[bytes], now: float) -> Round | None:
        """Ask which of `keys` are there; None where too many rounds are open. REQUIRES: open."""
        give_up_at = now + self.patience.answer_seconds_max
        of = self.asked.begin(kv_request_id, Waits.FOR_HITS, len(keys), give_up_at)
        if of is not None:
            self._ask(of, lambda: Lookup(*of, *joined(keys)), now)
        return of

    def fetch(
        self,
        kv_request_id: str,
        keys: Sequence[bytes],
        now: float,
        seconds_max: float | None = None,
    ) -> Round | None:
        """Have `keys` pinned; None where too many rounds are open. `seconds_max` where the answer
        is to wait for what the other engine has yet to compute. REQUIRES: open, some keys."""
        waits = seconds_max is not None
        seconds = self.patience.answer_seconds_max if seconds_max is None else seconds_max
        of = self.asked.begin(kv_request_id, Waits.FOR_PLACES, len(keys), now + seconds)
        if of is not None:
            self._ask(of, lambda: Fetch(*of, *joined(keys), waits), now)
        return of

    def _ask(self, of: Round, question: Callable[[], Lookup | Fetch], now: float) -> None:
        """Say it; ValueError where it cannot be said, and then nothing was asked."""
        self.used_at = now
        try:
            self._say(question(), now)
        except ValueError:
            self.asked.forget(of)
            raise

    def done(self, of: Round, success: bool, now: float) -> None:
        """What was fetched in `of` was read, or will not be. Nothing where the session is over."""
        self.used_at = now
        if self.state is State.OPEN:
            self._say(TransferDone(*of, success), now)

    def abort(self, of: Round, now: float) -> None:
        """No answer to `of` is wanted any more."""
        give_up_at = now + self.patience.answer_seconds_max
        if self.state is State.OPEN and self.asked.abandon(of, give_up_at):
            self._say(Abort(*of), now)

    def request_over(self, kv_request_id: str, now: float) -> None:
        """Nothing more will be asked for this request."""
        if self.state is State.OPEN:
            self._say(Fetch(kv_request_id, 1, 1, b""), now)

    # What the engine that serves says

    def hits(self, of: Round, hits: bytes, now: float) -> bool:
        """Answer a lookup; False where nobody waits for it any more."""
        question = self.served.question(of)
        if self.state is not State.OPEN or not isinstance(question, Lookup):
            return False
        self.served.answered(of, now, pins=False)
        self._say(LookupResp(*of, hits), now)
        return True

    def places(self, of: Round, found: Sequence[Reference | None], now: float) -> bool:
        """Answer a fetch: where each chunk is pinned, or None. False where nobody waits for it any
        more, and whatever was pinned is to be let go at once."""
        question = self.served.question(of)
        if self.state is not State.OPEN or not isinstance(question, Fetch):
            return False
        is_any = any(each is not None for each in found)
        self.served.answered(of, now + self.patience.pin_seconds_max, pins=is_any)
        self._say(fetched(question, found), now)
        return True

    def close(self, ending: Ending, reason: str) -> list[Event]:
        """End the session, and have the other side told."""
        return [] if self.state is State.OVER else self._end(ending, reason)

    # The ends of all

    def _end(self, ending: Ending, reason: str) -> list[Event]:
        reason = reason[:REASON_CHARS_MAX]
        goodbye = encode(Disconnect(ending, reason))
        self._out.append((goodbye, b"" if self._seals is None else self._seals.seal(goodbye)))
        return self._over(Over(ending, reason, is_told=False))

    def _over(self, over: Over) -> list[Event]:
        self.state = State.OVER
        events: list[Event] = [Unanswered(of, over.reason) for of in list(self.asked)]
        for of in list(self.asked):
            self.asked.forget(of)
        events += [Released(of, None) for of in self.served.end_all()]
        return [*events, over]

    def _say(self, message: Message, now: float) -> None:
        assert self._seals is not None
        payload = encode(message)
        self._out.append((payload, self._seals.seal(payload)))
        self._said_at = now
