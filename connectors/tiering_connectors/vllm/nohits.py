"""Notices a cache that stores and never hits, and says so once.

Owns the thresholds and the sentence. Prompts that never repeat look the same, so it waits for
much to be stored and much to be asked for, speaks once, and is silent for good after one hit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHUNKS_STORED_MIN = 2000
CHUNKS_ASKED_MIN = 2000
SECONDS_MIN = 300.0

_CAUSES = (
    "Prompts that never repeat look like this. If yours do, look whether they differ early (a date "
    "or an id before the shared text, another cache_salt), whether the host tier is too small to "
    "keep one until it comes again, and "
)
_AFTER_RESTART = (
    "whether the engine that stored before hashed alike: --prefix-caching-hash-algo and "
    "PYTHONHASHSEED must be the same"
)
_ONE_ENGINE = "whether requests set skip_reading_prefix_cache"


@dataclass(frozen=True, slots=True)
class Seen:
    """Chunks so far: `stored` in the host tier, `asked` for beyond what the device had, and
    `found`; `at_start`: what the secondary tiers held before this engine stored anything."""

    stored: int
    asked: int
    found: int
    at_start: int = 0

    @classmethod
    def of(cls, counters: Mapping[str, int | float], at_start: int) -> Seen:
        """Read off the core's counters."""
        found = counters.get("chunks_hit_host", 0) + counters.get("chunks_hit_tier", 0)
        return cls(
            int(counters.get("chunks_stored", 0)),
            int(counters.get("chunks_asked", 0)),
            int(max(found, counters.get("chunks_loaded", 0))),
            at_start,
        )


class NeverHits:
    """Shown what was counted, from time to time; it has something to say at most once."""

    def __init__(self) -> None:
        self._is_over = False
        self._began: float | None = None

    def look(self, seen: Seen, now: float) -> str | None:
        """The sentence, once it is time; `now` in seconds of any clock that does not go back."""
        if self._is_over:
            return None
        if seen.found:
            self._is_over = True
            return None
        if seen.asked and self._began is None:
            self._began = now
        there = max(seen.stored, seen.at_start)
        if (
            self._began is None
            or now - self._began < SECONDS_MIN
            or there < CHUNKS_STORED_MIN
            or seen.asked < CHUNKS_ASKED_MIN
        ):
            return None
        self._is_over = True
        held = (
            f", {seen.at_start} of any model lay in the tiers at the start" if seen.at_start else ""
        )
        causes = _CAUSES + (_AFTER_RESTART if seen.at_start else _ONE_ENGINE)
        return (
            f"the cache stores and never hits: {seen.stored} chunks were stored{held}, "
            f"{seen.asked} were asked for, none was found. {causes}"
        )
