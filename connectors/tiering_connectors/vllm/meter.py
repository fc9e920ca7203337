"""What the scheduler half measures beside the core's counters: copies, lookups, and room.

Owns bytes, seconds and samples since they were last taken. Called on the scheduler's thread, many
times a step: each call adds to a number or a list, and nothing is computed before `take`. Samples
are bounded, so a server that nobody asks for statistics forgets them.
"""

from __future__ import annotations

from tiering.residency.core import Residency
from tiering.residency.state import PinKind, SlotState
from tiering.tiers.base import GAUGE_PREFIX

METER_COUNTERS = (
    "load_bytes",
    "load_seconds",
    "loads_failed",
    "store_bytes",
    "store_seconds",
    "stores_failed",
)
"""`loads_failed`: loads whose tokens were computed instead; `stores_failed`: copies to the host
tier that did not come about. Seconds are those of the slowest rank of each copy."""

PORTAL_COUNTERS = ("portal_restarts",)
"""Times the process of the tiers had ended by itself and runs again."""

METER_SAMPLES = (
    "load_size",
    "store_size",
    "lookup_seconds",
    "answer_seconds",
    "reserved_chunks",
)
"""One number for each copy, lookup, answer of a tier and reservation."""

SAMPLES_MAX = 1024

HOST_TIER = "0:host"
"""How statistics name the host tier; secondary tiers are `<number from 1>:<name>`."""


class TransferMeter:
    """One for each scheduler half."""

    def __init__(self) -> None:
        self._counts: dict[str, int | float] = {}
        self._samples: dict[str, list[float]] = {}

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """A copy to the device has ended well; bytes of all ranks, seconds of the slowest."""
        self._add("load_bytes", size_bytes)
        self._add("load_seconds", seconds)
        self._sample("load_size", size_bytes)

    def stored(self, size_bytes: int, seconds: float) -> None:
        """A copy to the host tier has ended well; bytes of all ranks, seconds of the slowest."""
        self._add("store_bytes", size_bytes)
        self._add("store_seconds", seconds)
        self._sample("store_size", size_bytes)

    def load_failed(self) -> None:
        """A load was lost: what it was to bring is computed."""
        self._add("loads_failed", 1)

    def store_failed(self) -> None:
        """A copy to the host tier failed: its chunks are later misses."""
        self._add("stores_failed", 1)

    def looked_up(self, seconds: float) -> None:
        """One question of vLLM's was answered, if only with 'ask again'; the thread's time."""
        self._sample("lookup_seconds", seconds)

    def answered(self, seconds: float) -> None:
        """A request that was told 'ask again' has its answer, `seconds` after it first asked."""
        self._sample("answer_seconds", seconds)

    def reserved(self, chunks: int) -> None:
        """Slots for so many chunks were asked for, whether there was room or not."""
        self._sample("reserved_chunks", chunks)

    @property
    def is_empty(self) -> bool:
        return not self._counts and not self._samples

    def take(self) -> dict[str, int | float | list[float]]:
        """Everything since the last call, by name; what there was none of is left out."""
        taken: dict[str, int | float | list[float]] = {**self._counts, **self._samples}
        self._counts, self._samples = {}, {}
        return taken

    def _add(self, name: str, amount: float) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount

    def _sample(self, name: str, value: float) -> None:
        samples = self._samples.setdefault(name, [])
        if len(samples) < SAMPLES_MAX:
            samples.append(value)

    def __repr__(self) -> str:
        return f"<TransferMeter {self._counts} { ({n: len(s) for n, s in self._samples.items()}) }>"


def host_now(core: Residency) -> dict[str, int]:
    """How many slots the host tier has, by what may become of them: `free` + `evictable` +
    `pinned` + `filling` are all there are, and `used` the last two. `pinned`: by loads, by writes
    to a tier, or by both."""
    slots = core.index.slots
    states = slots.census()
    evictable = slots.evictable
    told = {
        "slots": len(slots),
        "slots_free": states[SlotState.FREE],
        "slots_used": len(slots) - states[SlotState.FREE] - evictable,
        "slots_evictable": evictable,
        "slots_pinned": states[SlotState.READY] - evictable + states[SlotState.DOOMED],
        "slots_filling": states[SlotState.FILLING] + states[SlotState.ABANDONED],
        "slots_pinned_by_loads": slots.held(PinKind.LOAD),
        "slots_pinned_by_writes": slots.held(PinKind.WRITE),
        "steps_out": core.steps_out,
        "writes_under_way": core.writes_under_way,
    }
    return {f"{HOST_TIER}|{GAUGE_PREFIX}{name}": value for name, value in told.items()}
