"""Finding what a request can load: the furthest boundary, held until it can be copied.

Sans-IO, on the scheduler's thread; never waits. It looks where each chunk is, lets the tiers be
asked about those it cannot tell of, and holds what the boundary takes, as one unit: chunks in the
host tier are pinned, the others promoted. What is promised to vLLM stays until it was copied or
the request ends. A chunk that could not be had is not tried again for the same request.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiering.engine import Engine
from tiering.residency.answers import Place
from tiering_connectors.vllm.announcing import Silence
from tiering_connectors.vllm.geometry import Geometry
from tiering_connectors.vllm.groups import Kind
from tiering_connectors.vllm.spans import (
    AFTER_A_LOSS,
    AT_HAND,
    OBTAINABLE,
    TOO_LATE,
    WAITING,
    Sight,
    boundary,
)
from tiering_connectors.vllm.tracked import END, Load, Tracked, floor_to, interleaved


class Finder:
    """Part of the scheduler half; same owner, same rules."""

    def __init__(self, engine: Engine, geometry: Geometry, announcing: Silence) -> None:
        self._announcing = announcing
        self._engine = engine
        self._core = engine.core
        self._geometry = geometry
        self._align = geometry.align
        self._full = [i for i, g in enumerate(geometry.groups) if g.kind is Kind.FULL]

    def find(self, tracked: Tracked, local: int) -> int | None:
        """How many tokens beyond `local` are or were made ready, or None: ask again next step."""
        core, owner = self._core, tracked.owner
        self._engine.pump()
        if core.is_holding(owner):
            held, load = core.held(owner), tracked.load
            if load is not None and load.local <= local < load.boundary:
                if held is None:
                    return None
                if held == len(load.keys):
                    return load.boundary - local
                tracked.has_lost = True
                # Another boundary is waited for only in what is left of the time, which is over.
                tracked.is_late |= core.seconds_left(owner) <= 0
            core.release(owner)
        if core.is_asking(owner) or (
            tracked.deferred_at == core.changes and core.seconds_left(owner) > 0
        ):
            return None
        found = self._search(tracked, local)
        self._engine.pump()
        return found

    def _search(self, tracked: Tracked, local: int) -> int | None:
        core, owner, align = self._core, tracked.owner, self._align
        # At least one token is always computed: its logits are what the request is for.
        limit = tracked.request.num_tokens - 1
        if tracked.limits.max_load_tokens is not None:
            limit = min(limit, local + tracked.limits.max_load_tokens)
        limit = floor_to(limit, align)
        if limit <= local:
            core.release(owner)
            return 0
        sights = self._look(tracked, local, limit)
        counting = WAITING
        if tracked.is_late or core.seconds_left(owner) <= 0:
            counting = TOO_LATE
        elif tracked.has_lost:
            counting = AFTER_A_LOSS
        load, is_cut = None, False
        while True:
            best = boundary(sights, local, limit, align, counting.known)
            hoped = boundary(sights, local, limit, align, counting.hoped)
            if hoped > best:
                core.ask(owner, self._unknown(tracked, sights, local, hoped))
                tracked.rounds += 1
                return None
            if best == local:
                load = None
                break
            load = self._load(tracked, sights, best)
            room, count = self._room(tracked, load), len(load.keys)
            if count <= room:
                break
            is_cut = True
            # Where less fits, another window is wanted, which may have to be asked about.
            limit = min(floor_to(local + load.tokens * room // count, align), best - align)
        core.counters.add("loads_cut", int(is_cut))
        self._note_branch(tracked, sights)
        self._count(tracked, sights, load)
        if load is None:
            core.release(owner)
            return 0
        return self._hold(tracked, load)

    def _look(self, tracked: Tracked, local: int, limit: int) -> list[Sight]:
        """Where the chunks of each group are, as far as they can matter."""
        sights = []
        for group, keys in zip(self._geometry.groups, tracked.keys, strict=True):
            first = local // group.tokens_per_chunk
            end = -(-(limit + group.spare) // group.tokens_per_chunk)
            places = self._core.places(keys[first:end], tracked.owner)
            sights.append(Sight(group, first, places))
        return sights

    def _unknown(
        self, tracked: Tracked, sights: Sequence[Sight], local: int, hoped: int
    ) -> list[bytes]:
        """Keys to ask the tiers about. Of a window at first only what the best boundary takes:
        most of the others were never stored; but not one window a time for ever."""
        wanted = []
        for sight, keys in zip(sights, tracked.keys, strict=True):
            group = sight.group
            chunks = group.evidence(local, hoped)
            if group.kind not in (Kind.WINDOW, Kind.LOCAL) or tracked.rounds >= 2:
                chunks = range(sight.first, max(chunks.stop, -(-hoped // group.tokens_per_chunk)))
            places = sight.of(chunks)
            wanted += [
                key
                for key, place in zip(keys[chunks.start : chunks.stop], places, strict=False)
                if place == Place.UNKNOWN
            ]
        return wanted

    def _note_branch(self, tracked: Tracked, sights: Sequence[Sight]) -> None:
        """Where the whole history that others share ends. If that is not where the request can go
        on, because the windows at that place were not kept, it will keep them."""
        full = [sights[i] for i in self._full]
        if full and len(full) < len(sights):
            last = max(sight.first + len(sight.places) for sight in full)
            most = last * max(sight.group.tokens_per_chunk for sight in full)
            reach = boundary(full, tracked.local, most, self._align, OBTAINABLE)
            tracked.branch = reach if reach > tracked.local else 0

    def _room(self, tracked: Tracked, load: Load) -> int:
        """How many chunks of `load` the host tier can have room for, or has where there is no
        more to be waited for."""
        core = self._core
        if load.is_ready:
            return len(load.keys)
        if core.seconds_left(tracked.owner) <= 0 or not core.may_make_room:
            return min(core.room_limit, core.room_for(load.keys, tracked.owner))
        return core.room_limit

    def _load(self, tracked: Tracked, sights: Sequence[Sight], best: int) -> Load:
        host_end, ready, own = best, 0, []
        for sight in sights:
            chunks = sight.group.chunks(tracked.local, best)
            own.append(chunks)
            places = sight.of(chunks)
            ready += places.count(Place.READY)
            behind = places.translate(AT_HAND).find(b"\0")
            if behind >= 0:
                host_end = min(host_end, (chunks.start + behind) * sight.group.tokens_per_chunk)
        order = interleaved(self._geometry.groups, own)
        keys = [tracked.keys[at][chunk] for at, chunk in order]
        # What was promoted for a load that then lost a chunk is in the host tier by now.
        host_end = max(tracked.local, min(host_end, tracked.promoted_from))
        return Load(tracked.local, best, order, keys, ready, host_end)

    def _count(self, tracked: Tracked, sights: Sequence[Sight], load: Load | None) -> None:
        """What the request asked for: what it takes to go on as far as it can, and of groups that
        keep all history what is behind that."""
        found = len(load.keys) if load is not None else 0
        ready = load.ready if load is not None else 0
        whole = set(self._full) or {0}
        there = sum(at in whole for at, _ in load.chunks) if load is not None else 0
        asked = sum(len(sights[i].places) for i in whole)
        self._core.count_lookup(tracked.owner, ready, found - ready, max(0, asked - there))

    def _hold(self, tracked: Tracked, load: Load) -> int | None:
        core, owner = self._core, tracked.owner
        tracked.load = load
        if load.is_ready:
            # Nothing to wait for: pinned when there are blocks to copy to.
            core.release(owner)
            return load.tokens
        if self._announcing.is_heard:
            self._announcing.expect(tracked, self._missing(load))
        if not core.hold(owner, load.keys):
            tracked.deferred_at = core.changes
            return None
        tracked.promoted_from = load.host_end
        return load.tokens if core.held(owner) == len(load.keys) else None

    def _missing(self, load: Load) -> list[tuple[int, int]]:
        """The chunks that have to be brought to the host tier."""
        places = self._core.index.places(self._core.index.lookup(load.keys))
        return [
            chunk for chunk, place in zip(load.chunks, places, strict=True) if place == Place.ABSENT
        ]

    def claim(self, tracked: Tracked, end: int) -> dict[tuple[int, int], int] | None:
        """For the copy up to `end`, which `find` promised: each chunk, as the group's position and
        its number, and the slot that it is pinned in. None if it cannot be had any more."""
        core, owner, load = self._core, tracked.owner, tracked.load
        if load is None or load.boundary != end:
            return None
        if not core.is_holding(owner):
            core.hold_ready(owner, load.keys)
        if core.held(owner) != len(load.keys):
            core.release(owner)
            return None
        core.used(owner, self._history(tracked, load))
        tracked.promoted_from = END
        return dict(zip(load.chunks, core.claim(owner), strict=True))

    def _history(self, tracked: Tracked, load: Load) -> list[bytes]:
        """All that the request uses from its first token on, head first."""
        full = [
            keys[: -(-load.boundary // group.tokens_per_chunk)]
            for group, keys in zip(self._geometry.groups, tracked.keys, strict=True)
            if group.kind is Kind.FULL
        ]
        head = [key for keys in full for key in keys]
        if len(self._geometry.groups) == 1:
            return head
        loaded = set(load.keys)
        return [key for key in head if key not in loaded] + load.keys
