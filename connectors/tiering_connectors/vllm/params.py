"""What one request asks of the cache: the keys of its `kv_transfer_params` that are ours.

Owns their names, what they mean, and what becomes of a value that cannot be meant: it is ignored,
and a warning names key and value, so that no request fails for it. Keys of others are left alone.
"""

from __future__ import annotations

import logging
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from tiering.config import EngineConfig
from tiering.metrics import is_worth_a_line

log = logging.getLogger("tiering")

MEDIUMS = ("CPU", "STORAGE")
LOCALITIES = ("LOCAL", "REMOTE")


class TierKind(NamedTuple):
    """What a request can choose a tier by. `locality` None: the configuration does not say."""

    medium: str
    locality: str | None


def kinds_of(config: EngineConfig) -> list[TierKind]:
    """Of the secondary tiers, in their order."""
    return [TierKind("STORAGE", tier.locality) for tier in config.secondary_tiers]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much of a request may be stored and loaded, in tokens, and from which secondary tiers
    by their index; None is no limit. The host tier is never left out."""

    max_offload_tokens: int | None = None
    max_load_tokens: int | None = None
    load_tiers: frozenset[int] | None = None

    @classmethod
    def of(cls, params: object, tiers: Sequence[TierKind]) -> Self:
        """Whatever `params` are or hold, this does not raise."""
        if not isinstance(params, Mapping):  # which is told where roles are read
            return cls()
        return cls(
            _tokens(params, "max_offload_tokens"),
            _tokens(params, "max_load_tokens"),
            _load_tiers(params.get("kv_load_tiers"), tiers),
        )


def _tokens(params: Mapping[str, Any], key: str) -> int | None:
    value = params.get(key)
    if value is None or (type(value) is int and value >= 0):
        return value
    _warnings.tell(key, value, "must be a whole number, 0 or more")
    return None


def _load_tiers(value: object, tiers: Sequence[TierKind]) -> frozenset[int] | None:
    key = "kv_load_tiers"
    if value is None:
        return None
    if not isinstance(value, list):
        _warnings.tell(key, value, "must be a list of objects with medium and locality")
        return None
    wanted: list[tuple[str | None, str | None]] = []
    for entry in value:
        medium = _word(entry, "medium", MEDIUMS)
        locality = _word(entry, "locality", LOCALITIES)
        if isinstance(entry, Mapping) and medium != "" and locality != "":
            wanted.append((medium, locality))
        else:
            told = f"medium is one of {', '.join(MEDIUMS)}, locality one of {', '.join(LOCALITIES)}"
            _warnings.tell(key, entry, told)
    if value and not wanted:
        return None
    return frozenset(
        at
        for at, tier in enumerate(tiers)
        if any(_fits(m, tier.medium) and _fits(where, tier.locality) for m, where in wanted)
    )


def _word(entry: object, key: str, words: Sequence[str]) -> str | None:
    """The value in capitals; None if it is left out, '' if it is none of `words`."""
    value = entry.get(key) if isinstance(entry, Mapping) else None
    if value is None:
        return None
    word = value.upper() if isinstance(value, str) else ""
    return word if word in words else ""


def _fits(wanted: str | None, has: str | None) -> bool:
    """What is not said, by the request or by the configuration, fits everything."""
    return wanted is None or has is None or wanted == has


class _Warnings:
    """Tells of bad values, each key by itself, and more and more seldom."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def tell(self, key: str, value: object, reason: str) -> None:
        self._counts[key] += 1
        count = self._counts[key]
        if is_worth_a_line(count):
            shown = reprlib.repr(value)
            told = "kv_transfer_params.%s = %s: %s; ignored (%d so far)"
            log.warning(told, key, shown, reason, count)


_warnings = _Warnings()
