"""What the benchmarks' options name. Pure."""

from __future__ import annotations

from collections.abc import Collection

from tiering.errors import ConfigError


def named_sides(given: str | None, known: Collection[str]) -> list[str]:
    """What `--sides` names, each once, in its order; all that are `known` where it is not given.
    ConfigError for what is none."""
    names = list(known) if given is None else list(dict.fromkeys(given.split(",")))
    for name in names:
        if name not in known:
            raise ConfigError("--sides", name, "is no side", f"write some of {', '.join(known)}")
    return names
