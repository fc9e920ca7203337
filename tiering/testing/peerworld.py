"""Engines of a simulated run that have chunks of one another: core, tier of peers, host memory.

Part of `tiering.testing.peersimulation`. A `PeerEngine` is one start of an engine in a process of
its own that may be stopped or killed at any moment. What a key stands for is known, so a wrong
byte is seen wherever it lies; a `StepLog` between core and shell sees which step is out for longer
than it may be.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tiering.engine import Engine
from tiering.events import Event
from tiering.keys import chunk_key
from tiering.peers.addresses import Address
from tiering.peers.agreement import Introduction
from tiering.peers.auth import SharedKey
from tiering.peers.control import new_engine_id
from tiering.peers.session import Patience
from tiering.peers.transports.base import Served
from tiering.policy.lru import LruPolicy
from tiering.portal import LoopPortal
from tiering.residency.core import Residency
from tiering.residency.plan import Contains, Keep, News, Outcome, Promote, Step, Verdict
from tiering.residency.state import SlotState
from tiering.testing.peerrequests import PeerRequests
from tiering.testing.simloop import SimClock
from tiering.testing.simnet import SimNet
from tiering.testing.simprocess import Process, ProcessLoop
from tiering.testing.simrows import QUIET_SECONDS_MAX, SimRows, SimTransport
from tiering.testing.simworld import expect
from tiering.tiers.peers.source import PeerSource
from tiering.tiers.peers.tier import PeerLimits, PeersTier

PEERS = 0
CHUNK_BYTES = 256
LOAD_DEADLINE_SECONDS = 5.0
DRAIN_SECONDS = 1.0
TURN_SECONDS = (0.02, 0.1, 0.2)
"""Between two steps of a scheduler."""
SLACK_SECONDS = 1.5
PATIENCE = Patience(pin_seconds_max=20.0)
LIMITS = PeerLimits(unbound_store_seconds=15.0, wait_seconds=8.0)
PROMOTE_SECONDS_MAX = (
    PATIENCE.handshake_seconds_max
    + 3 * QUIET_SECONDS_MAX  # to open a link, to read, and once more, as a flight may go before
    + max(PATIENCE.answer_seconds_max, LIMITS.wait_seconds)
) * 2
LOAD_SECONDS_MAX = 2 * LOAD_DEADLINE_SECONDS + SLACK_SECONDS
CLOSE_SECONDS_MAX = DRAIN_SECONDS + QUIET_SECONDS_MAX + SLACK_SECONDS

SECRET = bytes(range(32))


def key_of(number: int) -> bytes:
    return chunk_key(b"%032d" % number, 0)


def page_of(key: bytes) -> bytes:
    """The bytes of `key`, and of no other."""
    return hashlib.shake_128(key).digest(CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Terms:
    """What an engine is. `refusal` is what it is refused for by the others, empty where it is
    not."""

    at: Address
    slots: int
    is_mapped: bool
    limits: PeerLimits = LIMITS
    secret: bytes = SECRET
    hash_seed: str = "0"
    description: tuple[tuple[str, str], ...] = (("kv_dtype", "fp8"), ("tp_size", "1"))
    refusal: str = ""

    def odd(self, chance: random.Random) -> Terms:
        """The same, but for something that makes it no peer of the others."""
        return chance.choice(
            (
                replace(self, secret=SECRET[::-1], refusal="different shared keys"),
                replace(self, secret=b"", refusal="has a shared key and the"),
                replace(self, hash_seed="7", refusal="another hash seed"),
                replace(self, description=(("tp_size", "2"),), refusal="tp_size is '"),
                replace(self, description=(("kv_dtype", "bf16"),), refusal="kv_dtype is '"),
            )
        )

    def introduction(self) -> Introduction:
        told = dict(self.description)
        namespace = hashlib.sha256(repr(sorted(told.items())).encode()).digest()
        return Introduction(
            new_engine_id(), 0, namespace, told, self.hash_seed, self.slots, CHUNK_BYTES
        )


class StepLog:
    """A portal before the real one: each step has one final outcome, in time; what counts as read
    is right."""

    restarts = 0

    def __init__(self, portal: LoopPortal, owner: PeerEngine) -> None:
        self.out: dict[int, tuple[Step, float]] = {}
        self.hits = 0
        self._portal = portal
        self._owner = owner

    def submit(self, steps: Sequence[Step]) -> None:
        self._portal.submit(steps)
        now = self._owner.process.seconds
        self.out.update((step.id, (step, now)) for step in steps)

    def drain(self) -> list[News]:
        news = self._portal.drain()
        for each in news:
            if isinstance(each, Outcome):
                self._settle(each)
        return news

    def require_in_time(self) -> None:
        for step, since in self.out.values():
            seconds = self._owner.process.seconds - since
            expect(seconds <= self._seconds_max(step), f"{step} is out for {seconds:.1f} seconds")

    def _settle(self, outcome: Outcome) -> None:
        expect(outcome.id in self.out, f"an outcome of step {outcome.id}, which is not out")
        self.require_in_time()
        step, _ = self.out[outcome.id]
        if outcome.final:
            del self.out[outcome.id]
        if not isinstance(step, Contains | Promote):
            return
        hits = outcome.verdicts.count(Verdict.HIT)
        self.hits += hits
        expect(not (hits and self._owner.terms.refusal), f"{step} found something at a stranger's")
        if isinstance(step, Promote):
            for key, slot, verdict in zip(step.keys, step.slots, outcome.verdicts, strict=True):
                if verdict is Verdict.HIT:
                    self._owner.require_right(key, slot, "read from a peer")

    @staticmethod
    def _seconds_max(step: Step) -> float:
        if isinstance(step, Contains):
            return step.deadline_seconds + SLACK_SECONDS
        if isinstance(step, Keep):
            return LIMITS.unbound_store_seconds + SLACK_SECONDS
        return PROMOTE_SECONDS_MAX if isinstance(step, Promote) else SLACK_SECONDS


@dataclass(slots=True)
class _Sink:
    """Events for routers, of which there are none."""

    published: int = field(default=0)

    def publish(self, events: Sequence[Event]) -> None:
        self.published += len(events)


class PeerEngine:
    """Between `begin` and `end`, or the death of its process. Everything else is to be called from
    within its process."""

    def __init__(
        self, terms: Terms, name: str, net: SimNet, rows: SimRows, chance: random.Random
    ) -> None:
        loop = net.loop
        assert isinstance(loop, ProcessLoop)
        self.terms = terms
        self.process = Process(name, loop)
        self.node = net.add(terms.at.host, self.process)
        self.rows = np.zeros((terms.slots, CHUNK_BYTES), np.uint8)
        self.generations = np.zeros(terms.slots, np.uint64)
        clock = SimClock(loop)
        self.core = Residency(
            terms.slots,
            1,
            LruPolicy(terms.slots),
            clock,
            LOAD_DEADLINE_SECONDS,
            peers=[PEERS],
            generations=self.generations,
        )
        self.transport = SimTransport(rows, Served(self.rows, self.generations), terms.is_mapped)
        self.tier = PeersTier(
            terms.at,
            terms.introduction,
            [self.transport],
            CHUNK_BYTES,
            key=SharedKey(terms.secret),
            allow_unauthenticated=True,
            limits=terms.limits,
            patience=PATIENCE,
            clock=clock,
        )
        self.is_open = False
        self.tasks_at_rest = 0
        self._chance = chance
        self._begun, self._ended = asyncio.Event(), asyncio.Event()
        self._portal = LoopPortal([self.tier], self._row, self.pump)
        self.log = StepLog(self._portal, self)
        self._engine = Engine(self.core, self.log, _Sink())
        self._main: asyncio.Task[None] | None = None
        self._requests = PeerRequests(self.core, self.pump, lambda: chance.choice(TURN_SECONDS))

    async def begin(self) -> None:
        self._main = self.process.start(self._run())
        await self._begun.wait()
        if not self.is_open:
            await self._main
        self.tasks_at_rest = len(self.process.tasks)

    async def end(self) -> None:
        """Within a time that is bounded."""
        assert self._main is not None
        self.is_open = False
        self._ended.set()
        before = self.process.seconds
        while not self._main.done():
            await asyncio.sleep(0.05)
            expect(self.process.seconds - before <= CLOSE_SECONDS_MAX, "it does not close")
        self._main.result()
        await asyncio.sleep(0.01)
        expect(not self.process.tasks, f"tasks left behind: {self.process.tasks}")

    def pump(self) -> None:
        self._engine.pump()

    def require_right(self, key: bytes, slot: int, where: str) -> None:
        expect(self.rows[slot].tobytes() == page_of(key), f"wrong bytes of {key.hex()[:8]} {where}")

    def check(self) -> None:
        """What holds at any moment."""
        if self._main is not None and self._main.done():
            self._main.result()
        slots = self.core.index.slots
        for slot in np.flatnonzero(slots.states == SlotState.READY).tolist():
            key = slots.keys[slot]
            assert key is not None
            self.require_right(key, slot, "in the host tier")
        if not self.process.is_stopped:
            self.log.require_in_time()

    # What a scheduler does

    async def store(
        self, keys: Sequence[bytes], kept_for: str = "", queued_seconds: float = 0.0
    ) -> int:
        """Compute what of `keys` is not here, one after the other, and keep them for a decoder;
        how many."""
        await asyncio.sleep(queued_seconds)
        core, half = self.core, CHUNK_BYTES // 2
        with self._requests.opened("store") as owner:
            places = core.reserve(owner, keys, 0)
            for index, slot in zip(places.indices, places.slots, strict=True):
                page = np.frombuffer(page_of(keys[index]), np.uint8)
                self.rows[slot][:half] = page[:half]
                await self._requests.turn()
                self.rows[slot][half:] = page[half:]
                if self._chance.random() < 0.05:
                    core.unfilled([slot])
                else:
                    core.filled([slot])
                self.pump()
            if kept_for and self.is_open:
                core.peers.keep(kept_for, keys)
            return len(places.slots)

    async def load(self, keys: Sequence[bytes], whom: PeerSource, give_up_seconds: float) -> int:
        """As many leading `keys` as can be had, from here or from the peer; how many. The request
        is aborted after `give_up_seconds`."""
        before = self.process.seconds
        try:
            with self._requests.opened("load") as owner:
                async with asyncio.timeout(give_up_seconds):
                    slots = await self._requests.hold(owner, keys, whom)
                    for _ in range(2):
                        for key, slot in zip(keys, slots, strict=False):
                            self.require_right(key, slot, "while it is held")
                        await self._requests.turn()
                    return len(slots)
        except TimeoutError:
            return 0
        finally:
            seconds = self.process.seconds - before
            expect(seconds <= LOAD_SECONDS_MAX, f"a request took {seconds:.1f} seconds")

    async def drop(self, keys: Sequence[bytes]) -> None:
        self.core.drop(keys)
        self.pump()

    async def reset(self) -> None:
        self.core.reset()
        self.pump()

    def _row(self, slot: int) -> memoryview:
        return memoryview(self.rows[slot])

    async def _run(self) -> None:
        try:
            async with self._portal:
                self.is_open = True
                self._begun.set()
                await self._ended.wait()
                await self._portal.finish(DRAIN_SECONDS)
        finally:
            self._begun.set()
        self.pump()

    def __repr__(self) -> str:
        return f"<PeerEngine {self.process!r} {self.core!r} {self.tier!r}>"
