"""What engines that had to do with one another may not be left with once all is over.

Part of `tiering.testing.peersimulation`: every place where something is remembered for a peer, a
request or a read, with what it has to be when nothing is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tiering.peers.messages import Reference
from tiering.residency.state import SlotState
from tiering.testing.peerworld import PeerEngine


def left_over(engines: Iterable[PeerEngine]) -> list[str]:
    """What is, in words; of `engines`, which are all that live, while nothing is asked."""
    engines = list(engines)
    dialled = {session: engine for engine in engines for session in _dialled(engine)}
    return [
        f"{engine.process.name}: {told}" for engine in engines for told in _left(engine, dialled)
    ]


def _dialled(engine: PeerEngine) -> Iterator[bytes]:
    for _, peer in engine.tier._running()._directory:
        if peer.is_open:
            yield peer.session_id


def _left(engine: PeerEngine, dialled: dict[bytes, PeerEngine]) -> Iterator[str]:
    yield from _in_core(engine)
    yield from _in_tier(engine, dialled)
    tasks = len(engine.process.tasks)
    if tasks != engine.tasks_at_rest:
        yield f"{tasks} tasks, not {engine.tasks_at_rest}"


def _in_core(engine: PeerEngine) -> Iterator[str]:
    core = engine.core
    slots = core.index.slots
    if engine.log.out or core.steps_out:
        yield f"steps {list(engine.log.out.values())}, {core.steps_out} in the core"
    if len(core._holds) or core.peers._kept:
        yield f"holds of {core._holds.owners()}, kept {core.peers._kept}"
    if slots.load_pins.any() or slots.write_pins.any():
        yield f"pins {slots.load_pins.tolist()} {slots.write_pins.tolist()}"
    census = slots.census()
    if census[SlotState.FREE] + census[SlotState.READY] != len(slots):
        yield f"slots {census}"
    ready = np.flatnonzero(slots.states == SlotState.READY).tolist()
    there = {slots.keys[slot]: Reference(slot, int(engine.generations[slot])) for slot in ready}
    if there != engine.tier._serving.showcase._at:
        yield "what is shown is not what is there"


def _in_tier(engine: PeerEngine, dialled: dict[bytes, PeerEngine]) -> Iterator[str]:
    control, serving, links = engine.tier._running(), engine.tier._serving, engine.tier._links
    guests = set(control._guests.values())
    sessions = {guest.session_id for guest in guests}
    if not sessions <= dialled.keys():
        yield f"guests that nobody is any more: {guests}"
    if set(serving._visits) != guests:
        yield f"visits of {set(serving._visits)}, guests {guests}"
    for guest, visit in serving._visits.items():
        if visit.waiting or visit.given or guest.session.served:
            yield f"for {guest}: {visit}"
    if serving.showcase._kept:
        yield f"kept for {list(serving.showcase._kept)}"
    if set(engine.transport.tokens) != sessions:
        yield f"{len(engine.transport.tokens)} tokens for {len(sessions)} guests"
    for at, peer in control._directory:
        if not peer.is_open or not peer.is_idle:
            yield f"{peer} at {at}"
    if set(control._dealers) != {peer for _, peer in control._directory}:
        yield f"sockets to {set(control._dealers)}"
    if stray := [peer for peer in links._links if peer.over is not None]:
        yield f"links to {stray}"
    if len(engine.transport.links) > len(links):
        yield f"{len(engine.transport.links)} open links, {len(links)} known"
