"""From a module and a name in the settings to a class of the user's own.

Owns the words of what can go wrong with that: each problem is a ConfigError that names the key.
Importing runs the user's code, so this is called at the start of an engine only.
"""

from __future__ import annotations

import importlib
import inspect
from typing import NamedTuple, TypeVar

from tiering.config.problems import nearest
from tiering.errors import ConfigError

Base = TypeVar("Base")


class Given(NamedTuple):
    """A value from the settings and the path of its key, as a user reads it."""

    path: str
    value: str


def load_class(module: Given, name: Given, base: type[Base]) -> type[Base]:
    """The class of that name in that module; ConfigError unless it is one that is a `base` and
    leaves nothing of it unwritten."""
    try:
        found = importlib.import_module(module.value)
    except Exception as error:
        raise ConfigError(
            *module,
            f"cannot be imported: {type(error).__name__}: {error}",
            "install its package into the environment of the server, or correct the path",
        ) from error
    value = getattr(found, name.value, None)
    if not isinstance(value, type):
        reason = "is no class" if hasattr(found, name.value) else "is not there"
        others = [of for of, each in vars(found).items() if _is_written(each, base)]
        remedy = nearest(name.value, others) if others else _asked_for(base)
        raise ConfigError(*name, f"{reason} in the module {module.value}", remedy)
    if not issubclass(value, base):
        raise ConfigError(*name, _why_not(value, base), _asked_for(base))
    if not _is_written(value, base):
        raise ConfigError(*name, f"leaves out {', '.join(_methods(value))}", _asked_for(base))
    return value


def _is_written(value: object, base: type) -> bool:
    """Whether objects of it can be made."""
    return isinstance(value, type) and issubclass(value, base) and not inspect.isabstract(value)


def _why_not(value: type, base: type) -> str:
    if any(parent.__module__.partition(".")[0] == "vllm" for parent in value.__mro__):
        return f"is written for vLLM's own contract; the one here is {base.__name__}"
    return f"is no subclass of {base.__name__}"


def _asked_for(base: type) -> str:
    told = f"write a subclass of {base.__module__}.{base.__name__}"
    return f"{told}, with {', '.join(_methods(base))}"


def _methods(of: type) -> list[str]:
    """What a subclass of it has still to write, sorted."""
    return sorted(getattr(of, "__abstractmethods__", ()))
