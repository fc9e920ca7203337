"""Which slot holds which chunk, and which chunk goes next: the memory of a segment tier.

Owns the map from keys to slots, and each slot's state and tick (microseconds; the larger, the
later used). Sans-IO; used by the tier, in its event loop's thread only. Each slot is exactly one
of free, being written, ready, doomed or retired, and a key is that of at most one ready slot and
one slot being written. Every use of a batch takes a block of ticks, the first key the latest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tiering.tiers.segments.slotmap import SlotMap

TICK_MAX = 1 << 62
"""Ticks above are nobody's: a damaged record's, which would end the order of all to come."""

TICKS_PER_PAGE = 512
"""Ticks that become dirty, and are written, together."""

VICTIMS_MIN = 1024

_FREE, _WRITING, _READY, _DOOMED, _RETIRED = range(5)

Ticks = npt.NDArray[np.int64]


@dataclass(slots=True)
class WritePlan:
    """What is to be done for the keys of a batch, by their positions in it.

    `there`: ready already. `busy`: being written, so ask again when that is over. `full`: no
    slot can be had. For the others, side by side, slots that are now theirs until `commit`,
    `release` or `retire`; `uncleared` are those of `slots` whose record the table may still hold.
    `evicted`: the keys, of other batches, that had to go for it.
    """

    there: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    uncleared: frozenset[int] = frozenset()
    evicted: list[bytes] = field(default_factory=list)


class SegmentIndex:
    """Up to `slots_max` slots, of which `extend` says how many there are by now.

    Where a batch would leave more than `slots_max * high` slots taken, the least recently used
    are evicted until at most `slots_max * low` are.
    """

    def __init__(self, slots_max: int, low: float = 1.0, high: float = 1.0) -> None:
        if slots_max < 1 or not 0 < low <= high <= 1:
            raise ValueError(f"{slots_max} slots, watermarks {low} and {high}")
        self.slots_max = slots_max
        self._limit = max(1, int(slots_max * high))
        self._low_limit = max(1, int(slots_max * low))
        self._keys: list[bytes | None] = []
        self._map = SlotMap(self._keys, slots_max)
        self._writing: dict[bytes, int] = {}
        self._pins: dict[int, int] = {}
        self._states = np.empty(0, np.uint8)
        self._recorded = np.empty(0, np.bool_)
        self._ticks: Ticks = np.empty(0, np.int64)
        self._dirty = np.empty(0, np.bool_)
        self._last_tick = 0
        self._free_slots: list[int] = []
        self._victims: Ticks = np.empty(0, np.int64)
        self._victim_ticks: Ticks = np.empty(0, np.int64)
        self.n_free = 0
        self.n_retired = 0
        self.n_evicted = 0

    def __repr__(self) -> str:
        taken = f"{len(self._map)} ready, {len(self._writing)} being written"
        return f"<SegmentIndex: {taken}, {self.n_free} free, {self.n_retired} retired>"

    def __len__(self) -> int:
        """The chunks that are ready."""
        return len(self._map)

    def __contains__(self, key: bytes) -> bool:
        return self._map.get(key) >= 0

    @property
    def n_slots(self) -> int:
        return len(self._keys)

    def keys(self) -> list[bytes]:
        """Those of the chunks that are ready."""
        ready = np.flatnonzero(self._states == _READY).tolist()
        return [self._key_of(slot) for slot in ready]

    def extend(self, n_slots: int) -> None:
        """There are `n_slots` slots now, none of the new ones used yet."""
        new = n_slots - self.n_slots
        if new < 0 or n_slots > self.slots_max:
            raise ValueError(f"{n_slots} slots of {self.n_slots}, at most {self.slots_max}")
        self._keys += [None] * new
        self._states = np.append(self._states, np.full(new, _FREE, np.uint8))
        self._recorded = np.append(self._recorded, np.zeros(new, np.bool_))
        self._ticks = np.append(self._ticks, np.zeros(new, np.int64))
        pages = -(-n_slots // TICKS_PER_PAGE)
        self._dirty = np.append(self._dirty, np.zeros(pages - len(self._dirty), np.bool_))
        self.n_free += new

    def restore(
        self,
        slots: npt.NDArray[np.int64],
        keys: Sequence[bytes],
        ticks: Ticks,
        recorded: npt.NDArray[np.int64],
    ) -> int:
        """Take over what a table says, and say how many of it were duplicates: of two slots with
        one key, the later used wins. `recorded` are the slots whose records say anything at all.
        REQUIRES: just extended, nothing used."""
        order = np.argsort(ticks, kind="stable")[::-1]
        kept = []
        for at, slot in zip(order.tolist(), slots[order].tolist(), strict=True):
            if self._map.put(keys[at], slot):
                self._keys[slot] = keys[at]
                kept.append(slot)
        self._states[kept] = _READY
        self._ticks[slots] = ticks
        self._recorded[recorded] = True
        self._last_tick = int(ticks[order[0]]) if len(ticks) else 0
        self.n_free -= len(kept)
        return len(keys) - len(kept)

    def touch(self, keys: Sequence[bytes], now_tick: int) -> None:
        """Use what is ready of `keys`, the first the latest."""
        self._use(keys, now_tick)

    def begin_read(self, keys: Sequence[bytes], now_tick: int) -> list[int]:
        """The slot of each key, -1 where none is ready; each is used, and pinned until `unpin`."""
        slots: list[int] = self._use(keys, now_tick).tolist()
        for slot in slots:
            if slot >= 0:
                self._pin(slot)
        return slots

    def lacks_slots(self, keys: Iterable[bytes]) -> bool:
        """Whether new slots, rather than evicted ones, should take what is new of `keys`."""
        if self.n_slots == self.slots_max or self._n_taken >= self._limit:
            return False
        new = {key for key in keys if key not in self and key not in self._writing}
        return self.n_free < len(new)

    def begin_write(self, keys: Sequence[bytes], now_tick: int) -> WritePlan:
        """Give slots to what is new of `keys`, evicting for it; the others are used, too."""
        plan = WritePlan()
        latest = self._take_ticks(len(keys), now_tick)
        new: dict[bytes, int] = {}
        for position, key in enumerate(keys):
            if key in self._writing or key in new:
                plan.busy.append(position)
            elif (slot := self._map.get(key)) >= 0:
                plan.there.append(position)
                self._ticks[slot] = latest - position
                self._dirty[slot // TICKS_PER_PAGE] = True
            else:
                new[key] = position
        slots, plan.evicted = self._reserve(len(new))
        plan.full = list(new.values())[len(slots) :]
        for (key, position), slot in zip(new.items(), slots, strict=False):
            self._writing[key] = slot
            self._keys[slot] = key
            plan.positions.append(position)
            plan.ticks.append(latest - position)
        plan.slots = slots
        at = np.array(slots, np.int64)
        self._ticks[at] = plan.ticks
        self._dirty[at // TICKS_PER_PAGE] = True
        plan.uncleared = frozenset(at[self._recorded[at]].tolist())
        return plan

    def commit(self, slot: int) -> None:
        """What was written to `slot` is whole, and the table says so: the key is ready."""
        self._map.put(self._end_write(slot, _READY), slot)
        self._recorded[slot] = True
        if len(self._victims) and self._ticks[slot] < self._victim_ticks[-1]:
            # It belongs among the queued, who were looked for while it was being written.
            self._victims = self._victims[:0]

    def release(self, slot: int) -> None:
        """`slot` was not written, or not wholly."""
        self._end_write(slot, _DOOMED)
        self._recorded[slot] = True
        self._free(slot)

    def retire(self, slot: int) -> None:
        """`slot` cannot be written to: never use it again."""
        self._end_write(slot, _RETIRED)
        self._keys[slot] = None
        self.n_retired += 1

    def doom(self, key: bytes, slot: int | None = None) -> int | None:
        """Forget `key`, if it is ready (in `slot`, where that is given); the slot it was in. That
        is free when its last pin is gone, so pin it for as long as its record is being cleared."""
        found = self._map.get(key)
        if found < 0 or slot not in (None, found):
            return None
        self._map.remove(key)
        self._keys[found] = None
        self._states[found] = _DOOMED
        if found not in self._pins:
            self._free(found)
        return found

    def doom_pinned(self, key: bytes) -> int | None:
        """`doom`, with a pin for the caller."""
        slot = self._map.get(key)
        if slot < 0:
            return None
        self._pin(slot)
        return self.doom(key)

    def unpin(self, slot: int, *, cleared: bool = False) -> None:
        """One who read `slot` or cleared its record is done; `cleared` where the record is gone."""
        self._recorded[slot] &= not cleared
        left = self._pins.pop(slot) - 1
        if left:
            self._pins[slot] = left
        elif self._states[slot] == _DOOMED:
            self._free(slot)

    def take_dirty(self) -> list[tuple[int, Ticks]]:
        """The ticks changed since they were last taken: runs, each from the slot given on."""
        pages = np.flatnonzero(self._dirty)
        self._dirty[pages] = False
        runs = np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1) if len(pages) else []
        return [
            (
                int(run[0]) * TICKS_PER_PAGE,
                self._ticks[run[0] * TICKS_PER_PAGE : (run[-1] + 1) * TICKS_PER_PAGE].copy(),
            )
            for run in runs
        ]

    def mark_dirty(self, runs: Iterable[tuple[int, Ticks]]) -> None:
        """`runs` could not be written."""
        for first, ticks in runs:
            page = first // TICKS_PER_PAGE
            self._dirty[page : page - (-len(ticks) // TICKS_PER_PAGE)] = True

    def tally(self) -> dict[str, int]:
        """Slots by state, counted anew; for tests and a closer look. Each slot is in one."""
        names = ("free", "writing", "ready", "doomed", "retired")
        counts = np.bincount(self._states, minlength=len(names)).tolist()
        return dict(zip(names, counts, strict=True))

    @property
    def _n_taken(self) -> int:
        return self.n_slots - self.n_free - self.n_retired

    def _use(self, keys: Sequence[bytes], now_tick: int) -> Ticks:
        """Use `keys`; the slot of each, -1 where it is not ready."""
        slots = np.fromiter(map(self._map.get, keys), np.int64, len(keys))
        latest = self._take_ticks(len(keys), now_tick)
        # The other way round, so that a key that comes twice has its first, later tick.
        found = np.flatnonzero(slots >= 0)[::-1]
        self._ticks[slots[found]] = latest - found
        self._dirty[slots[found] // TICKS_PER_PAGE] = True
        return slots

    def _take_ticks(self, count: int, now_tick: int) -> int:
        """The latest of `count` new ticks, later than all before."""
        self._last_tick = max(self._last_tick + count, now_tick)
        return self._last_tick

    def _reserve(self, count: int) -> tuple[list[int], list[bytes]]:
        """Up to `count` slots, in order, that are being written from now on, and the keys that had
        to go for them."""
        usable = min(self._limit, self.n_slots - self.n_retired)
        evicted: list[bytes] = []
        if self._n_taken + count > usable:
            evicted = self._evict(self._n_taken + count - min(self._low_limit, usable))
        count = min(count, max(0, usable - self._n_taken))
        taken: list[int] = []
        while len(taken) < count:
            if not self._free_slots:
                free = np.flatnonzero(self._states == _FREE)[
                    : max(count, VICTIMS_MIN, self.n_free // 16)
                ]
                self._free_slots = free[::-1].tolist()
            part = self._free_slots[len(taken) - count :]
            del self._free_slots[-len(part) :]
            self._states[part] = _WRITING
            taken += part
        self.n_free -= count
        return sorted(taken), evicted

    def _evict(self, count: int) -> list[bytes]:
        """Up to `count` of the least recently used; fewer where the others are pinned."""
        evicted: list[bytes] = []
        while count > 0 and (len(self._victims) or self._find_victims(count)):
            slots, ticks = self._victims[:count], self._victim_ticks[:count]
            self._victims, self._victim_ticks = self._victims[count:], self._victim_ticks[count:]
            # Whatever was pinned since was used since, too.
            still = (self._ticks[slots] == ticks) & (self._states[slots] == _READY)
            for slot in slots[still].tolist():
                evicted.append(self._key_of(slot))
                self._map.remove(evicted[-1])
                self._free(slot)
                self._free_slots.append(slot)
                self.n_evicted += 1
                count -= 1
        return evicted

    def _find_victims(self, count: int) -> bool:
        """Queue the least recently used, many at once, so that a look at all slots is rare."""
        ready = np.flatnonzero(self._states == _READY)
        if self._pins:
            ready = ready[~np.isin(ready, list(self._pins))]
        ticks = self._ticks[ready]
        count = max(count, VICTIMS_MIN, len(ready) // 16)
        if count < len(ready):
            oldest = np.argpartition(ticks, count)[:count]
            ready, ticks = ready[oldest], ticks[oldest]
        order = np.argsort(ticks, kind="stable")
        self._victims, self._victim_ticks = ready[order], ticks[order]
        return len(ready) > 0

    def _pin(self, slot: int) -> None:
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def _free(self, slot: int) -> None:
        self._keys[slot] = None
        self._states[slot] = _FREE
        self.n_free += 1

    def _end_write(self, slot: int, state: int) -> bytes:
        key = self._key_of(slot)
        if self._writing.get(key) != slot:
            raise ValueError(f"slot {slot} is not being written")
        del self._writing[key]
        self._states[slot] = state
        return key

    def _key_of(self, slot: int) -> bytes:
        key = self._keys[slot]
        if key is None:
            raise ValueError(f"slot {slot} has no key")
        return key
