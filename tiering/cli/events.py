"""`tiering events`: what a publisher of KV events says, as it says it, and whether it is so."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from tiering import maintenance
from tiering.cli import events_check, exits, words
from tiering.cli.events_check import Check
from tiering.clock import Clock, MonotonicClock
from tiering.errors import TieringError
from tiering.events.mirror import EventMirror, MediumCounts
from tiering.events.subscriber import EventSubscriber, Received, SubscriberStats

_HASHES_SHOWN_MAX = 10
_TITLES = (
    *("medium", "stored", "removed", "resident", "stored again", "removed unknown"),
    "placeholders",
)


def run(arguments: argparse.Namespace) -> int:
    roots = [Path(root) for root in arguments.check]
    for root in roots:
        maintenance.require_root(root)
    interval = arguments.interval
    subscriber = EventSubscriber(
        arguments.endpoint,
        replay_endpoint=arguments.replay,
        topic=arguments.topic,
        probe_seconds=interval / 2,
    )
    view = _View(subscriber, MonotonicClock(), interval, arguments.seconds, arguments.json)
    check, interrupted = None, False
    try:
        check = asyncio.run(_watch(view, roots, arguments.namespace))
    except KeyboardInterrupt:
        interrupted = True
    if arguments.json:
        _print_json(view.as_json(interrupted) | ({} if check is None else {"check": _told(check)}))
    else:
        view.print_summary(interrupted)
        if check is not None:
            _print_check(check)
    if interrupted:
        return exits.INTERRUPTED
    if not view.stats.connects and not view.stats.batches:
        raise TieringError(f"{subscriber.endpoint}: nobody published there")
    if check is None:
        return exits.OK
    if check.problems:
        return exits.FAILED
    return exits.OK if check.is_equal else exits.DIFFERENT


async def _watch(view: _View, roots: Sequence[Path], only: Sequence[str]) -> Check | None:
    """Until it is time; the last comparison, where there are `roots` to compare with."""
    async with view.subscriber:
        while True:
            came = await view.watch_an_interval()
            is_over = view.is_over
            if roots and (is_over or (not came and view.may_be_complete)):
                stored = await asyncio.to_thread(events_check.on_disk, roots, only)
                check = events_check.compare(view.mirror, stored)
                # What is told meanwhile, or soon, may be the reason for a difference.
                if check.is_equal or is_over or not await view.take(view.interval):
                    return check
            elif is_over:
                return None


class _View:
    """The mirror of one stream, and what is printed of it. `seconds`: None for without end."""

    def __init__(
        self,
        subscriber: EventSubscriber,
        clock: Clock,
        interval: float,
        seconds: float | None,
        as_json: bool,
    ) -> None:
        self.subscriber = subscriber
        self.mirror = EventMirror()
        self._clock = clock
        self.interval = interval
        self._began = clock.now()
        self._ends = None if seconds is None else self._began + seconds
        self._as_json = as_json
        self._incarnation = 0
        self._saw_start = True
        self._missed = 0
        self._was_connected: bool | None = None

    @property
    def stats(self) -> SubscriberStats:
        return self.subscriber.stats()

    @property
    def seconds(self) -> float:
        return self._clock.now() - self._began

    @property
    def is_over(self) -> bool:
        return self._ends is not None and self._clock.now() >= self._ends

    @property
    def may_be_complete(self) -> bool:
        """Whether what can be known by now is: something came, or was asked for and answered."""
        stats = self.stats
        answered = stats.replays > stats.replays_failed and self.subscriber.is_connected
        return self.subscriber.is_settled and bool(stats.batches or answered)

    async def watch_an_interval(self) -> bool:
        """Print a line when it is over. Whether anything came."""
        began, before = self._clock.now(), _blocks(self.mirror)
        ends = began + self.interval
        if self._ends is not None:
            ends = min(ends, self._ends)
        came = False
        while (left := ends - self._clock.now()) > 0:
            came |= await self.take(left)
        self._tell_connection()
        self._print_line(before, max(self._clock.now() - began, 1e-9))
        return came

    async def take(self, seconds_max: float) -> bool:
        """Whether anything came."""
        received = await self.subscriber.receive(seconds_max)
        for each in received:
            self._apply(each)
        return bool(received)

    def _apply(self, received: Received) -> None:
        if received.incarnation != self._incarnation:
            self._incarnation = received.incarnation
            self._saw_start, self._missed = True, 0
            self.mirror.forget()
            _notice("the publisher was restarted: what it had announced is forgotten")
        if received.missed:
            self._missed += received.missed
            self._saw_start &= received.sequence > received.missed
            _notice(f"{words.count(received.missed, 'batch')} before {received.sequence} missed")
        self.mirror.apply(received.batch.events)

    def _tell_connection(self) -> None:
        connected = self.subscriber.is_connected
        if connected == self._was_connected or self.subscriber.endpoint.startswith("inproc://"):
            return
        if connected:
            _notice(f"connected to {self.subscriber.endpoint}")
        elif self._was_connected is None:
            _notice(f"nobody publishes at {self.subscriber.endpoint} yet; waiting")
        else:
            _notice(f"the connection to {self.subscriber.endpoint} is lost; waiting")
        self._was_connected = connected

    # What is printed

    def _print_line(self, before: dict[str, tuple[int, int]], seconds: float) -> None:
        resident, rates = _resident(self.mirror), {}
        for medium, (stored, removed) in _blocks(self.mirror).items():
            stored_before, removed_before = before.get(medium, (0, 0))
            rates[medium] = (
                (stored - stored_before) / seconds,
                (removed - removed_before) / seconds,
            )
        if self._as_json:
            media = {
                medium: {
                    "stored_per_second": round(rates[medium][0], 3),
                    "removed_per_second": round(rates[medium][1], 3),
                    "resident": resident.get(medium, 0),
                }
                for medium in sorted(rates)
            }
            _print_json({"seconds": round(self.seconds, 3), "media": media, **self._totals()})
            return
        cells = [
            f"{words.printable(medium)} {resident.get(medium, 0)} (+{plus:.1f} -{minus:.1f}/s)"
            for medium, (plus, minus) in sorted(rates.items())
        ]
        totals = [f"{name} {value}" for name, value in self._totals().items()]
        print(f"{self.seconds:6.0f} s  " + "  ".join(cells or ["no blocks"]), *totals, sep="  ")
        sys.stdout.flush()

    def _totals(self) -> dict[str, int]:
        stats = self.stats
        return {
            "batches": stats.batches,
            "missed": stats.missed,
            "undecodable": stats.undecodable_batches + stats.undecodable_events + stats.malformed,
            "anomalies": self.mirror.anomalies,
            "restarts": stats.restarts,
        }

    def print_summary(self, interrupted: bool) -> None:
        stats, resident = self.stats, _resident(self.mirror)
        held = f"{words.count(stats.batches, 'batch')}, {words.count(stats.events, 'event')}"
        rest = [f"{name} {value}" for name, value in list(self._totals().items())[1:]]
        ended = ", interrupted" if interrupted else ""
        print(f"{self.subscriber.endpoint}: {self.seconds:.1f} s{ended}; {held}", *rest, sep="; ")
        rows = [
            _row(medium, counts, resident.get(medium, 0))
            for medium, counts in sorted(self.mirror.counts.items())
        ]
        if rows:
            words.print_table([_TITLES, *rows])
        for told in self._doubts():
            print(told)

    def _doubts(self) -> list[str]:
        """Why the mirror may be wrong."""
        found = []
        if stats_batches := self.stats.batches:
            if not self._saw_start:
                remedy = "give --replay, or start before the publisher does"
                found.append(f"the stream was not seen from its start (batch 0): {remedy}")
            elif self._missed:
                found.append(f"{self._missed} of {self._missed + stats_batches} batches are missed")
        return found

    def as_json(self, interrupted: bool) -> dict[str, Any]:
        resident = _resident(self.mirror)
        media = {
            medium: dataclasses.asdict(counts) | {"resident": resident.get(medium, 0)}
            for medium, counts in sorted(self.mirror.counts.items())
        }
        return {
            "summary": {
                "endpoint": words.printable(self.subscriber.endpoint),
                "seconds": round(self.seconds, 3),
                "interrupted": interrupted,
                "saw_start": self._saw_start and self.stats.batches > 0,
                "missed_since_start": self._missed,
                "media": media,
                "cleared": self.mirror.cleared,
                "malformed_events": self.mirror.malformed,
                "stream": dataclasses.asdict(self.stats),
            }
        }


def _blocks(mirror: EventMirror) -> dict[str, tuple[int, int]]:
    """Stored and removed so far, by medium, placeholders too."""
    return {
        medium: (
            counts.stored + counts.placeholders_stored,
            counts.removed + counts.placeholders_removed,
        )
        for medium, counts in mirror.counts.items()
    }


def _resident(mirror: EventMirror) -> dict[str, int]:
    found: dict[str, int] = {}
    for place, count in mirror.resident_counts().items():
        found[place.medium] = found.get(place.medium, 0) + count
    return found


def _row(medium: str, counts: MediumCounts, resident: int) -> tuple[str, ...]:
    numbers = (
        *(counts.stored, counts.removed, resident, counts.stored_again, counts.removed_unknown),
        counts.placeholders_stored,
    )
    return (words.printable(medium), *map(str, numbers))


def _print_check(check: Check) -> None:
    told = f"{words.count(check.chunks, 'chunk')} of {words.count(check.blocks, 'block')}"
    if check.is_equal:
        print(f"check: STORAGE is what is on the disk, {told}")
    else:
        sides = f"{check.missing_count} missing, {check.surplus_count} surplus"
        print(f"check: STORAGE differs from what is on the disk, {told}: {sides}")
    for what, found in (
        ("on the disk, and not announced", check.missing),
        ("announced, and not on the disk", check.surplus),
    ):
        for group, hashes in found.items():
            shown = ", ".join(f"{each:#018x}" for each in hashes[:_HASHES_SHOWN_MAX])
            more = ", ..." if len(hashes) > _HASHES_SHOWN_MAX else ""
            print(f"  {what}, group {group}: {len(hashes)}: {shown}{more}")
    for group, chunks in check.left_out.items():
        print(f"  left out: group {group}, not of full attention: {words.count(chunks, 'chunk')}")
    for problem in check.problems:
        print(f"  not looked into: {words.printable(problem)}")


def _told(check: Check) -> dict[str, Any]:
    return {
        "equal": check.is_equal,
        "chunks": check.chunks,
        "blocks": check.blocks,
        "missing": _by_group(check.missing),
        "surplus": _by_group(check.surplus),
        "left_out": {str(group): chunks for group, chunks in check.left_out.items()},
        "problems": list(map(words.printable, check.problems)),
    }


def _by_group(found: dict[int, list[int]]) -> dict[str, Any]:
    return {
        str(group): {"count": len(hashes), "first": hashes[:_HASHES_SHOWN_MAX]}
        for group, hashes in found.items()
    }


def _print_json(value: object) -> None:
    """On a line of its own: the stream of them has no end."""
    print(orjson.dumps(value).decode(), flush=True)


def _notice(told: str) -> None:
    print(f"events: {told}", file=sys.stderr, flush=True)
