"""The eviction policies that have a name: those that are built in, and those registered.

Owns where each one's class is; loads none. A process has one registry, as it has one set of
modules: a program that makes its own engine registers before, from whatever thread.
"""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a class is, for whoever imports it."""

    module: str
    name: str


_PLACES = {
    "lru": Place("tiering.policy.lru", "LruPolicy"),
    "arc": Place("tiering.policy.arc", "ArcPolicy"),
}


def register_policy(name: str, module_path: str, class_name: str) -> None:
    """Let `eviction_policy` be `name`: from now on, in this process, that class of that module,
    an EvictionPolicy made with the number of slots. It is imported when it is first used.
    ValueError if the name is taken."""
    if name in _PLACES:
        raise ValueError(f"an eviction policy {name!r} is there already: {_PLACES[name]}")
    _PLACES[name] = Place(module_path, class_name)


def policy_names() -> tuple[str, ...]:
    """The names that are known."""
    return tuple(_PLACES)


def place_of(name: str) -> Place | None:
    """Where the class of that name is; None if it is not known."""
    return _PLACES.get(name)
