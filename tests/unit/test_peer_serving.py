"""What serves peers, over sessions without a network: a guest may be gone in the middle of anything
that is said to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from peer_frames import KEY, introduction, keys
from peer_sessions import PATIENCE
from tiering.peers.calls import Guest
from tiering.peers.rounds import Round
from tiering.peers.session import Frames, Session
from tiering.testing.clocks import ManualClock
from tiering.tiers.peers.serving import Serving

CHUNKS = keys(4)


class Rig:
    """An engine that serves, and a guest of it, whose connection may be cut."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.serving = Serving([])
        self.asks = Session(introduction(1), KEY, "dialling", 0.0, PATIENCE)
        serves = Session(introduction(2), KEY, "dialled", 0.0, PATIENCE)
        self.guest = Guest(serves, self.clock, self.serving)
        self.is_cut = False
        self.guest.sends_with(self._send)
        for _ in range(3):
            self.across()
        assert self.guest.is_open

    def fetch(self, kv_request_id: str, wanted: Sequence[bytes], waits: bool = True) -> Round:
        seconds = 30.0 if waits else None
        of = self.asks.fetch(kv_request_id, wanted, self.clock.now(), seconds)
        assert of is not None
        self.across()
        return of

    def across(self) -> None:
        for frames in self.asks.take():
            self.guest.received(frames)

    def show(self, some: Sequence[bytes]) -> None:
        self.serving.showcase.show(some, range(len(some)), [1] * len(some))

    @property
    def is_forgotten(self) -> bool:
        return self.guest.over is not None and not self.serving._visits

    def _send(self, frames: Frames) -> bool:
        if not self.is_cut:
            self.asks.received(frames, self.clock.now())
        return not self.is_cut


def test_a_guest_that_is_gone_costs_nobody_anything_when_what_it_waits_for_comes() -> None:
    rig = Rig()
    for number in range(3):
        rig.fetch(f"r{number}", CHUNKS)
    rig.is_cut = True
    rig.show(CHUNKS)
    assert rig.is_forgotten


def test_a_guest_that_is_gone_is_forgotten_by_what_it_still_had_said() -> None:
    rig = Rig()
    rounds = [rig.fetch(f"r{number}", CHUNKS) for number in range(3)]
    rig.is_cut = True
    rig.asks.abort(rounds[0], 0.0)
    rig.across()
    assert rig.is_forgotten


def test_a_guest_that_is_gone_is_forgotten_when_its_time_is_up() -> None:
    """A heartbeat that cannot be said, and chunks that were kept for long enough, at one time."""
    rig = Rig()
    rig.show(CHUNKS)
    for number in range(3):
        rig.fetch(f"r{number}", CHUNKS)
        rig.clock.advance(PATIENCE.pin_seconds_max / 2)
        rig.guest.session._heard_at = rig.clock.now()
    rig.is_cut = True
    rig.guest.tick(rig.clock.now())
    assert rig.is_forgotten


def test_a_guest_is_not_remembered_for_requests_that_are_over() -> None:
    rig = Rig()
    rig.show(CHUNKS[:2])
    for number in range(100):
        assert rig.asks.lookup(f"r{number}", CHUNKS, 0.0)
        rig.across()
        rig.asks.done(rig.fetch(f"r{number}", CHUNKS, waits=False), True, 0.0)
        rig.across()
    (visit,) = rig.serving._visits.values()
    assert not any(getattr(visit, name) for name in visit.__dataclass_fields__)
    assert rig.serving.counters["peers_asked"] == 400
    assert rig.serving.counters["peers_fetched"] == 200


def test_only_who_says_so_waits_for_what_is_not_there() -> None:
    rig = Rig()
    rig.show(CHUNKS[:2])
    rig.fetch("r", CHUNKS, waits=False)
    assert not rig.asks.asked
    rig.fetch("r", CHUNKS)
    assert len(rig.asks.asked) == 1
    rig.show(CHUNKS)
    assert not rig.asks.asked


async def test_what_is_kept_for_nobody_any_more_is_let_go_of_and_counted() -> None:
    rig = Rig()
    rig.show(CHUNKS)
    rig.fetch("r", CHUNKS[:1], waits=False)
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(rig.serving.keep("r", CHUNKS, 30.0))
        await asyncio.sleep(0)
        rig.serving.showcase.fetched("r", CHUNKS[:1])
        assert rig.serving.showcase.kept_chunks == 3
        assert await rig.serving.keep("r", (), 30.0) == set()
    assert keeping.result() == {CHUNKS[0]}
    assert rig.serving.counters["peers_not_come"] == 3
    assert rig.serving.showcase.kept_chunks == 0
    assert rig.serving.showcase.is_complete("r")
