"""What the host tier and requests have to do with other engines.

Owns the Keep steps, and says what peers can read here: they are told of it as it comes and goes, so
that they are served without asking the core. What is kept for a peer is a hold like any other, with
an owner of its own. Part of the core; same owner, same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from tiering.events import HOST, ChunksCleared, ChunksRemoved, ChunksStored, Event
from tiering.residency.budget import LoadBudget
from tiering.residency.holds import Holds, Peer
from tiering.residency.index import HostIndex
from tiering.residency.known import Everything, KnownKeys
from tiering.residency.plan import Hide, Keep, Outcome, Release, Show, Step
from tiering.residency.state import SlotArray
from tiering_kernels.keytable import KeyBatch


class _Kept(NamedTuple):
    owner: str
    tier: int
    kv_request_id: str


class PeerBook:
    """One for each core. `tiers`: those that are of peers."""

    def __init__(
        self,
        tiers: Collection[int],
        index: HostIndex,
        holds: Holds,
        budget: LoadBudget,
        next_id: Callable[[], int],
    ) -> None:
        self._tiers = sorted(tiers)
        self._index = index
        self._holds = holds
        self._budget = budget
        self._next_id = next_id
        # By the id of the step, the newest last.
        self._kept: dict[int, _Kept] = {}
        self._steps: list[Step] = []

    def __bool__(self) -> bool:
        """Whether there is a tier of peers at all."""
        return bool(self._tiers)

    def name(self, owner: str, tier: int, peer: bytes, *, has_all: bool = False) -> None:
        """The request may have chunks of `tier`, which is of peers, from `peer`; `has_all`: which
        is not asked whether it holds them, and must say so when it does not."""
        if tier not in self._tiers:
            raise AssertionError(f"tier {tier} is not one of peers")
        known = Everything() if has_all else KnownKeys()
        self._holds[owner].peers[tier] = Peer(peer, known, keeps=has_all)

    def ask(self, owner: str, peer: bytes, *, has_all: bool = False) -> None:
        """The same for every tier that is of peers."""
        for tier in self._tiers:
            self.name(owner, tier, peer, has_all=has_all)

    def promise(self, owner: str) -> None:
        """A peer will come for what the request computes: all of it is worth storing."""
        self._holds[owner].is_promised = True

    def release(self, owner: str) -> None:
        """The request needs nothing more of whom it named. Unknown owners are ignored."""
        request = self._holds.get(owner)
        for tier, peer in request.peers.items() if request is not None else ():
            if peer.keeps:
                peer.keeps = False
                self._steps.append(Release(self._next_id(), tier, peer.name))

    def told(self, events: Sequence[Event]) -> list[Step]:
        """What peers are to know of `events`, which have just happened, and of what has been kept:
        all of it is shown before."""
        steps: list[Step] = []
        for event in events if self._tiers else ():
            if isinstance(event, ChunksStored | ChunksRemoved) and event.tier == HOST:
                for tier in self._tiers:
                    steps += self._of(tier, event)
            elif isinstance(event, ChunksCleared):
                steps += [Hide(self._next_id(), tier, ()) for tier in self._tiers]
        more, self._steps = self._steps, []
        return steps + more

    def told_anew(self) -> list[Step]:
        """What peers are to know where nothing was said yet: the tiers have been made anew."""
        if not self._tiers:
            return []
        stored = ChunksStored(HOST, tuple(self._index.keys()))
        return [step for tier in self._tiers for step in self._of(tier, stored)]

    def keep(self, kv_request_id: str, keys: Sequence[bytes]) -> None:
        """For whoever has chunks of this engine for that request of the orchestrator's: all that
        there will be are those of `keys` that can be read now. They are pinned, as far as loads
        may, until they were fetched, or nobody has come; what is more than may be kept in all
        lets go of what was kept longest."""
        self._steps += [self._keep(tier, kv_request_id, keys) for tier in self._tiers]

    def _keep(self, tier: int, kv_request_id: str, keys: Sequence[bytes]) -> Keep:
        step_id = self._next_id()
        owner = f"kept {step_id}"
        ready = self._index.ready(keys)
        slots = np.fromiter(ready.values(), np.int64, len(ready))[: self._budget.kept_limit]
        self._make_room(slots)
        fit = self._budget.fitting(slots)
        kept = KeyBatch.of(list(ready)[:fit])
        self._holds.open(owner)
        self._holds.pin(slots[:fit])
        self._holds.begin(owner, kept, slots[:fit])
        self._kept[step_id] = _Kept(owner, tier, kv_request_id)
        return Keep(step_id, tier, tuple(kept), kv_request_id)

    def is_mine(self, step_id: int) -> bool:
        return step_id in self._kept

    def settle(self, outcome: Outcome) -> None:
        """A peer has come, or none."""
        self._holds.close(self._kept.pop(outcome.id).owner)

    def _make_room(self, slots: SlotArray) -> None:
        """Who comes for the oldest finds what was not evicted by then, and computes the rest."""
        newest_first = (self._holds[kept.owner].slots for kept in reversed(self._kept.values()))
        for step_id in list(self._kept)[: self._budget.giving_way(newest_first, slots)]:
            kept = self._kept.pop(step_id)
            self._holds.close(kept.owner)
            self._steps.append(Keep(self._next_id(), kept.tier, (), kept.kv_request_id))

    def _of(self, tier: int, event: ChunksStored | ChunksRemoved) -> list[Step]:
        if isinstance(event, ChunksRemoved):
            return [Hide(self._next_id(), tier, event.keys)]
        # Some of them may have gone since, and another event says so.
        ready = self._index.ready(event.keys)
        if not ready:
            return []
        slots = tuple(ready.values())
        generations = tuple(self._index.slots.generations_of(slots).tolist())
        return [Show(self._next_id(), tier, tuple(ready), slots, generations)]
