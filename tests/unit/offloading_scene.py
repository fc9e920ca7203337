"""An engine behind TieredOffloadingSpec, driven as vLLM's OffloadingConnector drives it.

vLLM scans a request's keys in every step, loads what were hits at once, and ends the step; stores
are offered where the step ends. `Scene` does just that, with ranks that fill rows when told to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gated import GatedPortal
from tiering.engine import Engine
from tiering.events import EventSink, NoEvents
from tiering.keys import chunk_key
from tiering.policy.admission import AdmissionPolicy
from tiering.policy.lru import LruPolicy
from tiering.residency.answers import Place
from tiering.residency.core import Residency
from tiering.residency.state import SlotState
from tiering.testing.clocks import ManualClock
from tiering_connectors.vllm.meter import TransferMeter
from tiering_connectors.vllm.offloading.half import OffloadingHalf, Removals, Stored
from tiering_connectors.vllm.offloading.ledger import NOTE_BYTES, Ledger, Told, slots_in
from tiering_connectors.vllm.offloading.lookups import Lookups

ROW = 4096
DEADLINE_SECONDS = 30.0
TOKENS = 16


@dataclass
class Context:
    """vLLM's ReqContext, as far as it is used."""

    req_id: str
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._offload_key_positions.get(key)


def chain(name: str, count: int, group: int = 0) -> list[bytes]:
    return [chunk_key(f"{name} {i}".encode(), group) for i in range(count)]


def stamp(key: bytes) -> bytes:
    return key.ljust(ROW, b".")


class Scene:
    """A half over a gated portal, with `ranks` workers that do as the test says."""

    def __init__(
        self,
        slots: int,
        tiers: int = 1,
        ranks: int = 1,
        groups: Sequence[int] = (0,),
        events: EventSink | None = None,
        peers: Sequence[int] = (),
        admission: AdmissionPolicy | None = None,
    ) -> None:
        spare = NOTE_BYTES // ROW + 1
        assert slots_in(slots + spare, ROW, ranks) == slots
        self.rows = np.zeros((slots + spare, ROW), np.uint8)
        self.clock = ManualClock()
        self.portal = GatedPortal(self.rows, tiers)
        self.core = Residency(
            slots, tiers, LruPolicy(slots), self.clock, DEADLINE_SECONDS, admission, peers=peers
        )
        self.ledger = Ledger(self.rows, ranks, ranks)
        lookups = Lookups(self.core, tiers, self.clock, DEADLINE_SECONDS)
        removals = Removals(events or NoEvents())
        engine = Engine(self.core, self.portal, removals)
        meter = TransferMeter()
        self.pauses = 0
        self.half = OffloadingHalf(
            engine, removals, self.ledger, lookups, meter, groups, self._pause
        )
        self.ranks = range(ranks)
        self.contexts: dict[str, Context] = {}

    def _pause(self) -> None:
        self.pauses += 1

    def request(
        self, name: str, *keys: Sequence[bytes], tiers: Any = None, **roles: Any
    ) -> Context:
        """Its keys, one list for each group, chunks of TOKENS tokens each."""
        positions = {k: (i + 1) * TOKENS for each in keys for i, k in enumerate(each)}
        context = self.contexts[name] = Context(name, positions, roles or None)
        self.half.begin(context, tiers)
        return context

    def scan(self, context: Context, keys: Iterable[bytes]) -> int | None:
        """How many leading `keys` are hits, as vLLM counts them; None: ask again."""
        hits, is_deferred = 0, False
        for key in keys:
            match self.half.look_up(key, context):
                case Place.ABSENT:
                    break
                case Place.READY:
                    hits += 1
                case Place.UNKNOWN:
                    is_deferred = True
                case _:
                    hits += 1
                    is_deferred = True
        return None if is_deferred else hits

    def fill(self, stored: Stored, told: Told = Told.WHOLE, ranks: Iterable[int] = ()) -> None:
        """What workers do with a store: those of `ranks`, or all of them."""
        for key, slot in zip(stored.keys, stored.rows.slots.tolist(), strict=True):
            self.rows[slot] = np.frombuffer(stamp(key), np.uint8)
        for rank in ranks or self.ranks:
            self.ledger.tell(rank, stored.rows.slots, told)

    def offer(self, context: Context, keys: Collection[bytes]) -> Stored:
        stored = self.half.store(keys, context)
        assert stored is not None
        return stored

    def store(self, context: Context, keys: Collection[bytes]) -> Stored:
        """All the way: offered, filled, completed."""
        stored = self.offer(context, keys)
        self.fill(stored)
        # vLLM gives the keys back as a set.
        self.half.stored(set(stored.keys), context)
        return stored

    def put_in_tier(self, keys: Iterable[bytes], tier: int = 0) -> None:
        self.portal.stored[tier].update({key: stamp(key) for key in keys})

    def settle(self, context: Context, keys: Sequence[bytes], steps: int = 20) -> int:
        """Scan until there is an answer, with a tier that answers at once."""
        for _ in range(steps):
            hits = self.scan(context, keys)
            if hits is not None:
                return hits
            self.half.end_step(())
            self.portal.finish_all()
        raise AssertionError(f"no answer within {steps} steps")

    def load(self, context: Context, keys: Sequence[bytes]) -> None:
        """Checks that every row is of its key, all the way to the end of the load."""
        rows = self.half.load(keys, context)
        self.half.end_step(())
        for key, slot in zip(keys, rows.slots.tolist(), strict=True):
            assert self.rows[slot].tobytes() == stamp(key)
        self.half.loaded(context)

    def submitted(self, kind: type) -> list[Any]:
        return [step for step in self.portal.submitted if isinstance(step, kind)]

    def assert_at_rest(self) -> None:
        """Nobody holds anything, and every slot is free or can be had."""
        for context in self.contexts.values():
            self.half.end(context)
        for _ in range(5):
            self.half.end_step(())
            self.portal.finish_all()
        self.half.end_step(())
        slots = self.core.index.slots
        census = slots.census()
        assert not slots.load_pins.any()
        assert not slots.write_pins.any()
        assert census[SlotState.FREE] + census[SlotState.READY] == len(slots), census
        assert not self.half.needs_steps
