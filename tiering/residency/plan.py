"""Steps that the core asks for and the news that comes back: plain data, nothing else.

These are all that crosses the portal, in either direction, so they are msgspec structs that can
be sent to another process as they are. A step is named by `id`, unique within an engine; its
outcome repeats it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class Verdict(enum.IntEnum):
    """What became of one key of a step."""

    HIT = 0
    MISS = 1
    BUSY = 2
    STORED = 3
    ALREADY_THERE = 4
    FULL = 5
    REFUSED = 6
    DELETED = 7
    FAILED = 8
    DAMAGED = 9
    LATE = 10


class Contains(msgspec.Struct, frozen=True, tag="contains"):
    """Ask tier `tier` which of `keys` it holds. Verdicts: HIT, MISS, BUSY, FAILED, LATE. `peer`
    names whom to ask, where `tier` is one of peers."""

    id: int
    tier: int
    keys: tuple[bytes, ...]
    deadline_seconds: float
    peer: bytes = b""


class Promote(msgspec.Struct, frozen=True, tag="promote"):
    """Read `keys` from `tier` into the host tier's `slots`; from `peer`, as in `Contains`.

    Verdicts: HIT, MISS, BUSY, FAILED, DAMAGED. If `deadline_seconds` pass first, an outcome with
    LATE for each key comes with `final=False`; the slots may still be written to until the
    outcome with `final=True`.
    """

    id: int
    tier: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    deadline_seconds: float
    peer: bytes = b""


class Cascade(msgspec.Struct, frozen=True, tag="cascade"):
    """Write the host tier's `slots` to `tier` under `keys`.

    Verdicts: STORED, ALREADY_THERE, FULL, REFUSED, FAILED.
    """

    id: int
    tier: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Delete `keys` from `tier`. Verdicts: DELETED, MISS, FAILED."""

    id: int
    tier: int
    keys: tuple[bytes, ...]


class Touch(msgspec.Struct, frozen=True, tag="touch"):
    """Tell `tier` that `keys`, a prefix in order, were used. A hint: its outcome has no verdicts,
    and nobody waits for it."""

    id: int
    tier: int
    keys: tuple[bytes, ...]


class Survey(msgspec.Struct, frozen=True, tag="survey"):
    """Name every key that `tier` holds: in any number of `Found`, then an outcome, without
    verdicts, or with one FAILED where they were not all."""

    id: int
    tier: int


class Show(msgspec.Struct, frozen=True, tag="show"):
    """Peers of `tier` may read `keys` from the host tier's `slots` while these have `generations`.
    As `Hide`: its outcome has no verdicts, and nobody waits for it."""

    id: int
    tier: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]


class Hide(msgspec.Struct, frozen=True, tag="hide"):
    """`keys`, or all that were shown where there are none, are not in the host tier any more."""

    id: int
    tier: int
    keys: tuple[bytes, ...]


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """`keys` are pinned in the host tier for whoever fetches them, through `tier`, for this request
    of the orchestrator's: say when they need not be. Without keys, nothing is pinned for it any
    more. Verdicts: HIT where it was fetched, MISS, FAILED."""

    id: int
    tier: int
    keys: tuple[bytes, ...]
    kv_request_id: str


class Release(msgspec.Struct, frozen=True, tag="release"):
    """A request wants nothing more of `peer`, whom it had compute for it: what is kept for it there
    need not be. Its outcome has no verdicts, and nobody waits for it."""

    id: int
    tier: int
    peer: bytes


OfKeys = Contains | Promote | Cascade | Drop | Touch | Show | Hide | Keep
Step = OfKeys | Survey | Release


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """One verdict per key of the step `id`. Each step has exactly one outcome with `final`."""

    id: int
    verdicts: tuple[Verdict, ...]
    final: bool = True


class Found(msgspec.Struct, frozen=True, tag="found"):
    """`tier` holds `keys`: a part of a survey."""

    tier: int
    keys: tuple[bytes, ...]


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """`keys` cannot be read from `tier` any more, though no step said so: they were evicted."""

    tier: int
    keys: tuple[bytes, ...]


News = Outcome | Found | Removed
"""What comes back over the portal, in the order in which it became true."""


def failed(step: Step) -> Outcome:
    """What becomes of a step that nobody can carry out."""
    if isinstance(step, Touch | Show | Hide | Release):
        return Outcome(step.id, ())
    return Outcome(step.id, (Verdict.FAILED,) * (1 if isinstance(step, Survey) else len(step.keys)))


def keys_with(step: OfKeys, outcome: Outcome, verdict: Verdict) -> Sequence[bytes]:
    """The keys of `step` that came out as `verdict`."""
    count = outcome.verdicts.count(verdict)
    if count in (0, len(step.keys)):
        return step.keys if count else ()
    return [key for key, told in zip(step.keys, outcome.verdicts, strict=True) if told is verdict]
