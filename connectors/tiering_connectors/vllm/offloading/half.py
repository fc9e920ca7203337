"""The scheduler's half: what vLLM's OffloadingConnector has under way, over the engine.

Owns the stores that workers carry out and the loads, until every rank has ended them. Who is where
is the core's business, what a request waits for that of `lookups`. Called on the scheduler's
thread; nothing here waits. vLLM can be told of no failure, so a chunk is given to the core only if
the ledger says that every rank has filled it; and after a reset, of which vLLM's own books keep
nothing, rows stay out of use until the ledger says that nobody touches them.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiering.engine import Engine
from tiering.events import HOST, ChunksRemoved, Event, EventSink
from tiering.residency.answers import Place, Reservation
from tiering.residency.state import NOWHERE
from tiering_connectors.vllm.meter import TransferMeter
from tiering_connectors.vllm.offloading.ledger import Ledger
from tiering_connectors.vllm.offloading.lookups import Lookups, Request
from tiering_connectors.vllm.offloading.rows import Rows
from tiering_connectors.vllm.pauses import Pause, take_pause
from tiering_connectors.vllm.peering import Peering

_EPOCH_BYTES = 16
_LOAD_OWNER = "\0load "
_ORDER_OWNER = "\0order"
"""Owners of their own in the core; no request of vLLM's is named like this."""


class Context(Protocol):
    """What is used of vLLM's ReqContext."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None

    def get_offload_key_position(self, key: Any) -> int | None:
        """The token at which the chunk ends in its request."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """`keys` are to be stored into `rows`, in the same order; `evicted` made room for them."""

    keys: tuple[bytes, ...]
    rows: Rows
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Load:
    number: int

    @property
    def owner(self) -> str:
        return f"{_LOAD_OWNER}{self.number}"


class Removals:
    """Passes events on to `sink`, and remembers what left the host tier."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._keys: list[bytes] = []

    def publish(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, ChunksRemoved) and event.tier == HOST:
                self._keys += event.keys
        self._sink.publish(events)

    def take(self) -> list[bytes]:
        keys, self._keys = self._keys, []
        return keys


class OffloadingHalf:
    """One for each engine. `removals` is the sink of `engine`; `groups` are the KV cache groups
    that vLLM offloads, by its own index. `pause` is what a step does that has nothing else to
    do."""

    def __init__(
        self,
        engine: Engine,
        removals: Removals,
        ledger: Ledger,
        lookups: Lookups,
        meter: TransferMeter,
        groups: Sequence[int],
        pause: Pause = take_pause,
    ) -> None:
        self._peering = Peering(engine.core)
        self._pause = pause
        self._engine = engine
        self._removals = removals
        self._meter = meter
        self._core = engine.core
        self._ledger = ledger
        self._lookups = lookups
        self._groups = tuple(groups)
        self._requests: dict[str, Request] = {}
        self._filling: dict[bytes, int] = {}
        self._loads: dict[str, _Load] = {}
        self._loads_begun = 0
        # What workers were at when the cache was reset: slots being filled, loads.
        self._orphans: list[int] = []
        self._orphan_loads: list[_Load] = []
        self._pumped_in = -1
        # Goes before every key since the last reset, so that nothing older is found again.
        self._epoch = b""
        self.stores_failed = 0
        self.stores_cut = 0

    # Requests

    def begin(self, context: Context, tiers: frozenset[int] | None = None) -> bool:
        """A request that may load from these secondary tiers, or from all. Whether all of it is to
        be offered for storing, also what is here already: another engine is to have it."""
        request = self._request(context.req_id)
        if tiers is not None:
            self._core.restrict(context.req_id, tiers)
        request.roles = self._peering.begin(request.owner, context.kv_transfer_params)
        return request.roles.kept_as is not None

    def end(self, context: Context) -> None:
        """It is over, but for copies that workers are still at."""
        request = self._requests.pop(context.req_id, None)
        if request is not None:
            self._lookups.start(request)
            self._peering.end(request.roles, request.chain)
            self._core.close(request.owner)
            self._engine.pump()

    def touch(self, keys: Collection[bytes], context: Context) -> None:
        """The request uses `keys`, from wherever."""
        owner = self._request(context.req_id).owner
        self._core.used(owner, self._in_order(keys, context))

    # Loads

    def look_up(self, key: bytes, context: Context) -> Place:
        """As `Lookups.look_up`."""
        if self._pumped_in != self._lookups.step:
            self._engine.pump()
            self._pumped_in = self._lookups.step
        return self._lookups.look_up(self._request(context.req_id), self._epoch + key)

    def was_promoted(self, key: bytes, context: Context) -> bool:
        """Whether the request has `key` in the host tier because it was brought there for it."""
        return self._epoch + key in self._request(context.req_id).promoted

    def load(self, keys: Collection[bytes], context: Context) -> Rows:
        """Pin `keys`, all of which were READY in this step, until the load has ended."""
        self._loads_begun += 1
        load = _Load(self._loads_begun)
        wanted = self._in_order(keys, context)
        self._core.open(load.owner)
        ready = self._core.hold_ready(load.owner, wanted)
        if ready < len(wanted):
            # Nothing is evicted between a hit and this; see `lookups`.
            raise AssertionError(f"{wanted[ready].hex()} was a hit and is not in the host tier")
        slot_of = dict(zip(wanted, self._core.claim(load.owner), strict=True))
        self._lookups.start(self._request(context.req_id), wanted)
        self._loads[context.req_id] = load
        slots = [slot_of[self._epoch + key] for key in keys]
        return Rows.of(slots, keys, self._groups, load.number)

    def loaded(self, context: Context) -> None:
        """Every rank has ended the request's load."""
        load = self._loads.pop(context.req_id, None)
        if load is not None:
            self._core.close(load.owner)
            self._core.peers.release(context.req_id)
            self._lookups.next_step()

    # Stores

    def store(self, keys: Collection[bytes], context: Context) -> Stored | None:
        """Rows for those of `keys` that are not in the host tier, as far as there is room, head
        first. None where there may be room later. vLLM does not offer a chunk twice, so where only
        a part fits, or nothing ever will, the request stores nothing behind it either: a chunk
        behind a gap is never found."""
        request = self._request(context.req_id)
        if request.is_cut or not keys:
            return Stored((), Rows.of([], [], self._groups), ())
        if not request.chain:
            request.chain = self._ancestors(keys, context)
        slots = self._core.index.lookup(self._named(keys))
        self._meter.reserved(int((slots == NOWHERE).sum()))
        # So that what makes room for this can be told from what was removed before.
        self._engine.pump()
        self._removals.take()
        offered = self._in_order(keys, context)
        named = set(offered)
        before = [key for key in request.chain if key not in named]
        chain = before + offered
        reservation = self._core.reserve(request.owner, chain, len(before))
        self._engine.pump()
        self._lookups.next_step()
        if reservation.end < len(chain):
            if not reservation.slots and self._core.may_make_room:
                return None
            request.is_cut = True
            self.stores_cut += len(chain) - reservation.end
        request.chain = self._put_in_order(chain[: reservation.end], context)
        return self._begun(keys, chain, reservation, self._removals.take())

    def stored(self, keys: Collection[bytes], context: Context, success: bool = True) -> None:
        """Every rank has ended its copies. Whole chunks are readable now; others are dropped."""
        named = [key for key in self._in_order(keys, context) if key in self._filling]
        slots = [self._filling.pop(key) for key in named]
        whole = self._ledger.are_whole(slots).tolist() if success else [False] * len(slots)
        self._core.filled([slot for slot, is_whole in zip(slots, whole, strict=True) if is_whole])
        bad = [slot for slot, is_whole in zip(slots, whole, strict=True) if not is_whole]
        self._core.unfilled(bad)
        self.stores_failed += len(bad)
        self._peering.go_on()
        self._lookups.next_step()
        self._engine.pump()

    # Steps

    def end_step(self, started: Iterable[str]) -> None:
        """vLLM has scheduled a step, in which the requests `started` begin to be computed."""
        if self._only_waits_for_writes:
            self._pause()
        self._engine.pump()
        self._bury()
        for owner in started:
            if owner in self._requests:
                self._lookups.start(self._requests[owner])
        self._lookups.end_step()
        self._engine.pump()

    @property
    def needs_steps(self) -> bool:
        """While workers may still be at rows that a reset has cleared, or chunks wait for their
        turn to be written. vLLM steps by itself for requests that wait."""
        return bool(self._orphans or self._orphan_loads) or self._core.needs_turns

    @property
    def writes_end(self) -> bool:
        """Whether chunks are under way to the tiers, and will soon have come."""
        return self._core.writes_end

    @property
    def _only_waits_for_writes(self) -> bool:
        """Whether no request and no copy is there that should not wait."""
        copies = self._filling or self._loads or self._orphans or self._orphan_loads
        return not (self._requests or copies) and self._core.writes_end

    def reset(self) -> None:
        """Nothing stored until now will be found again, in any tier."""
        self._core.reset()
        self._peering.forget()
        # What that removes has its names from before.
        self._engine.pump()
        self._epoch = secrets.token_bytes(_EPOCH_BYTES)
        self._orphans += self._filling.values()
        self._orphan_loads += self._loads.values()
        self._filling.clear()
        self._loads.clear()
        self._lookups.clear()
        for request in self._requests.values():
            request.forget()

    def name_of(self, key: bytes) -> bytes | None:
        """What vLLM calls a key of the core's; None for one from before the last reset."""
        return key[len(self._epoch) :] if key.startswith(self._epoch) else None

    def counters(self) -> dict[str, int]:
        """What the core and this have counted so far."""
        own = {"stores_failed": self.stores_failed, "stores_cut": self.stores_cut}
        return self._core.counters.snapshot() | own

    # Parts of the above

    def _request(self, owner: str) -> Request:
        request = self._requests.get(owner)
        if request is None:
            request = self._requests[owner] = Request(owner)
            self._core.open(owner)
        return request

    def _named(self, keys: Iterable[bytes]) -> list[bytes]:
        """`keys` as the core knows them."""
        return [self._epoch + key for key in keys]

    def _in_order(self, keys: Collection[bytes], context: Context) -> list[bytes]:
        """The same, head first: several groups go side by side."""
        position = context.get_offload_key_position
        return self._named(sorted(keys, key=lambda key: position(key) or 0))

    def _ancestors(self, keys: Collection[bytes], context: Context) -> list[bytes]:
        """The keys before `keys` in the request, which vLLM may have had on the device and so has
        never named. It keeps them where only its own classes look; without them, room could be
        made by giving up the head of the very prefix that is stored."""
        positions: dict[bytes, int] = getattr(context, "_offload_key_positions", {})
        first = min(positions.get(key, 0) for key in keys)
        return self._in_order([k for k, at in positions.items() if at < first], context)

    def _put_in_order(self, chain: list[bytes], context: Context) -> list[bytes]:
        """`chain`, head first. vLLM offers what a recurrent state was saved for before the chunks
        that lead there; the policy takes what a request stores last for its tail. A use of its own
        tells the policy the right order."""
        position, epoch = context.get_offload_key_position, len(self._epoch)
        ordered = sorted(chain, key=lambda key: position(key[epoch:]) or 0)
        if ordered != chain:
            self._core.open(_ORDER_OWNER)
            self._core.used(_ORDER_OWNER, ordered)
            self._core.close(_ORDER_OWNER)
        return ordered

    def _begun(
        self,
        keys: Collection[bytes],
        chain: Sequence[bytes],
        reservation: Reservation,
        evicted: Sequence[bytes],
    ) -> Stored:
        """In the order of `keys`, which is that of vLLM's block ids."""
        taken = {chain[i]: s for i, s in zip(reservation.indices, reservation.slots, strict=True)}
        self._filling |= taken
        self._ledger.begin(reservation.slots)
        kept = tuple(key for key in keys if self._epoch + key in taken)
        slots = [taken[self._epoch + key] for key in kept]
        epoch = len(self._epoch)
        return Stored(
            kept, Rows.of(slots, kept, self._groups), tuple(key[epoch:] for key in evicted)
        )

    def _bury(self) -> None:
        """Take back rows that a reset has cleared and that nobody touches any more."""
        if self._orphans:
            ended = self._ledger.have_ended(self._orphans).tolist()
            self._core.unfilled([s for s, e in zip(self._orphans, ended, strict=True) if e])
            self._orphans = [s for s, e in zip(self._orphans, ended, strict=True) if not e]
        if self._orphan_loads:
            done = self._ledger.loads_ended
            for load in self._orphan_loads:
                if load.number <= done:
                    self._core.close(load.owner)
            self._orphan_loads = [load for load in self._orphan_loads if load.number > done]

    def __repr__(self) -> str:
        return (
            f"<OffloadingHalf {len(self._requests)} requests, {len(self._filling)} chunks being "
            f"stored, {len(self._loads)} loads, {self._core!r}>"
        )
