"""Answers what peers ask: which chunks are here, and where.

Owns the questions that wait for chunks that are still being computed: as a decoder asks its
prefiller, and until all are here, the request is complete, or the round is given up. Anything said
to a guest may show that it is gone. Loop only; never waits, never raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiering.metrics import Counters
from tiering.peers.calls import Guest
from tiering.peers.messages import Fetch, Lookup, keys_of
from tiering.peers.rounds import Round
from tiering.peers.transports.base import Transport
from tiering.tiers.peers.showcase import Showcase

COUNTERS = ("peers_asked", "peers_found", "peers_fetched", "peers_not_come")
"""Chunks that peers have looked for, those of them that were here, and chunks that they have
read; and such as were kept for a peer until others' took their place."""


@dataclass(slots=True)
class _Visit:
    """One guest: its fetches that wait, and what it was given."""

    waiting: dict[Round, list[bytes]] = field(default_factory=dict)
    given: dict[Round, list[bytes]] = field(default_factory=dict)


class Serving:
    """A `Source`. `transports` move the rows."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.showcase = Showcase(self._has_come)
        self.counters = Counters(COUNTERS)
        self._transports = transports
        self._visits: dict[Guest, _Visit] = {}

    def greeted(self, guest: Guest) -> None:
        self._visits[guest] = _Visit()
        for transport in self._transports:
            transport.admit(guest.session_id, guest.token)

    def wanted(self, guest: Guest, of: Round, question: Lookup | Fetch) -> None:
        visit, keys = self._visits[guest], keys_of(question)
        if isinstance(question, Lookup):
            places = self.showcase.places(keys)
            hits = bytes(place is not None for place in places)
            self._count(hits)
            guest.hits(of, hits)
            return
        visit.waiting[of] = keys
        if question.waits:
            self._answer_if_complete(guest, visit, of)
        else:
            self._answer(guest, visit, of)

    def released(self, guest: Guest, of: Round, success: bool | None) -> None:
        visit = self._visits[guest]
        visit.waiting.pop(of, None)
        given = visit.given.pop(of, [])
        if success:
            self.counters.add("peers_fetched", len(given))
            self.showcase.fetched(of.kv_request_id, given)

    def request_over(self, guest: Guest, kv_request_id: str) -> None:
        self.showcase.request_over(kv_request_id)

    def over(self, guest: Guest, reason: str) -> None:
        del self._visits[guest]
        for transport in self._transports:
            transport.dismiss(guest.session_id)

    async def keep(self, kv_request_id: str, keys: Sequence[bytes], seconds: float) -> set[bytes]:
        """Those of `keys` that were fetched, when all were, or when they need not be kept any
        more: nobody has come for so long, or others were kept in their stead."""
        if not keys:
            self.counters.add("peers_not_come", self.showcase.left(kv_request_id))
        return await self.showcase.keep(kv_request_id, keys, seconds)

    def __repr__(self) -> str:
        return f"<Serving {self.showcase!r} to {len(self._visits)} peers>"

    def _has_come(self, keys: Sequence[bytes]) -> None:
        """Chunks have come to be here, or a request is complete: somebody may wait for that."""
        for guest, visit in list(self._visits.items()):
            for of in list(visit.waiting):
                # The answer before may have shown that the guest is gone, and all of it released.
                if of in visit.waiting:
                    self._answer_if_complete(guest, visit, of)

    def _answer_if_complete(self, guest: Guest, visit: _Visit, of: Round) -> None:
        places = self.showcase.places(visit.waiting[of])
        if None not in places or self.showcase.is_complete(of.kv_request_id):
            self._count(bytes(place is not None for place in places))
            self._answer(guest, visit, of)

    def _answer(self, guest: Guest, visit: _Visit, of: Round) -> None:
        keys = visit.waiting.pop(of)
        places = self.showcase.places(keys)
        found = [key for key, place in zip(keys, places, strict=True) if place is not None]
        if found:
            visit.given[of] = found
        if not guest.places(of, places):
            visit.given.pop(of, None)

    def _count(self, hits: bytes) -> None:
        self.counters.add("peers_asked", len(hits))
        self.counters.add("peers_found", hits.count(1))
