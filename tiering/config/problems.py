"""From whatever is wrong with a configuration to one ConfigError: path, value, reason, way out.

Owns the words. The value shown is short and never a secret: text under a key that sounds like one
is hidden, and so is all that is nested, since it may hold one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic_core import PydanticCustomError

from tiering.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    # The model whose keys stand where the last part of a path stands.
    OwnerOf = Callable[[Sequence[int | str]], type[BaseModel]]

_TEXT_MAX = 80
_PATHS_MAX = 5
_SECRET = re.compile(r"secret|passw|token|key|auth|session|credential|signature", re.IGNORECASE)
_URL_LOGIN = re.compile(r"://[^/]*@")

_REASONS = {
    "bool_type": "must be true or false",
    "dataclass_exact_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_type": "must be a number, without quotes",
    "int_type": "must be a whole number, without quotes",
    "model_type": "must be an object",
    "string_too_short": "must not be empty",
    "string_type": "must be text",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
}

# Keys that mean nothing where they stand, or something else than they seem to.
_FOREIGN = {
    "cpu_bytes_to_use_per_rank": "write cpu_bytes_to_use, the total over all workers",
    "module_path": "leave it out: a tier of this type is built in",
    "loop": "leave it out: a program's store uses the program's own loop, and a tier the engine's",
}
_NAMES_MAX = 8


class Shown:
    """Stands for a value that cannot be shown as it is; its repr is what the user reads."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return f"({self._text})"


ABSENT = Shown("absent")


class _Twice:
    """Stands for the value of a key that a JSON object has more than once."""

    def __init__(self, value: object) -> None:
        self.value = value


def refused(reason: str, remedy: str, key: str = "", value: object = None) -> PydanticCustomError:
    """For validators to raise. `key` is the path below the model, where the value alone is not
    what is wrong; `value` is that key's."""
    about = {"reason": reason, "remedy": remedy, "key": key, "value": value}
    return PydanticCustomError("refused", "{reason}", about)


def load_json(text: bytes | str, where: str = "") -> object:
    """The value of a JSON text; ConfigError if it is none or an object has a key twice."""
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=_pairs, parse_constant=_no_constant)
        _refuse_twice(value, where)
    except json.JSONDecodeError as error:
        reason = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError:
        reason = "is not JSON: it is not text in UTF-8"
    except RecursionError:
        reason = "is nested too deeply"
    except ValueError as error:
        reason = f"is not JSON: {error}"
    else:
        return value
    raise ConfigError(
        where or "configuration",
        Shown(f"{len(text)} {'bytes' if isinstance(text, bytes) else 'characters'}"),
        reason,
        'write one JSON object, such as {"cpu_bytes_to_use": 10737418240}',
    )


def as_object(value: object, where: str) -> dict[str, object]:
    """`value` as a dict; ConfigError if it is no object."""
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigError(
        where or "configuration",
        _shown("", value),
        "must be an object",
        'write one JSON object, such as {"cpu_bytes_to_use": 10737418240}',
    )


def config_error(error: ValidationError, owner_of: OwnerOf, where: str) -> ConfigError:
    """The first problem in full, and the paths of the others."""
    problems = error.errors(include_url=False)
    # A misspelled key is the reason why another one is missing, so it is told first.
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    first, *others = (_explained(problem, owner_of, where) for problem in problems)
    if not others:
        return first
    paths = ", ".join(other.path for other in others[:_PATHS_MAX])
    more = f"{first.remedy}; and {len(others)} more: {paths}"
    if len(others) > _PATHS_MAX:
        more += ", ..."
    return ConfigError(first.path, first.value, first.reason, more)


def _explained(problem: ErrorDetails, owner_of: OwnerOf, where: str) -> ConfigError:
    # A tag in angle brackets says which form of a value was meant; no user wrote it.
    path = tuple(part for part in problem["loc"] if not str(part).startswith("<"))
    value = problem["input"]
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    dotted = _dotted(path, where)
    if problem["type"] == "refused":
        about = problem["ctx"]
        if about["key"]:
            key, value = about["key"], about["value"]
            dotted = _dotted((*path, key), where)
        return ConfigError(dotted, _shown(key, value), about["reason"], about["remedy"])
    keys = owner_of(path).model_fields
    if problem["type"] == "extra_forbidden":
        remedy = _other_key(key, keys)
        return ConfigError(dotted, _shown(key, value), "is not a key that is known here", remedy)
    if problem["type"] == "missing":
        remedy = f'add "{key}": {_example(keys[key])}'
        return ConfigError(dotted, ABSENT, "is required", remedy)
    reason = _REASONS.get(problem["type"]) or problem["msg"].replace("Input should", "must", 1)
    remedy = (
        f"write for example {_example(keys[key])}"
        if key in keys
        else "see `tiering config --schema`"
    )
    return ConfigError(dotted, _shown(key, value), reason, remedy)


def _example(field: FieldInfo) -> str:
    """An example of the field's value in JSON, and the first sentence of what it is."""
    sentence = (field.description or "").split(". ")[0].rstrip(".")
    return f"{json.dumps((field.examples or [None])[0])} ({sentence})"


def _other_key(key: str, known: Mapping[str, Any]) -> str:
    if key in _FOREIGN:
        return _FOREIGN[key]
    if near := difflib.get_close_matches(key, known, n=1):
        return f"write {near[0]} if that is meant, or leave it out"
    return f"leave it out, or write one of {', '.join(known)}"


def nearest(wrong: str, known: Sequence[str]) -> str:
    """The way out for a name that is not one of those known: the nearest of them, or all."""
    if near := difflib.get_close_matches(wrong, known, n=1):
        return f"write {near[0]!r} if that is meant"
    listed = ", ".join(map(repr, known[:_NAMES_MAX]))
    return f"write one of {listed}" + (", ..." if len(known) > _NAMES_MAX else "")


def without_secrets(key: str, value: object) -> object:
    """`value` as it may be shown, with what sounds like a secret hidden at any depth."""
    match value:
        case str() if _is_secret(key, value):
            return "(hidden)"
        case Mapping():
            return {name: without_secrets(str(name), each) for name, each in value.items()}
        case list() | tuple():
            return [without_secrets(key, each) for each in value]
        case _:
            return value


def _is_secret(key: str, text: str) -> bool:
    return bool(_SECRET.search(key) or _URL_LOGIN.search(text))


def _dotted(path: Sequence[int | str], where: str) -> str:
    text = where
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w.\[\]-]{1,80}", part, re.ASCII):
            text += f".{part}"
        else:
            text += f"[{_cut(part)}]"
    return text.removeprefix(".") or "configuration"


def _cut(text: str) -> str:
    if len(text) <= _TEXT_MAX:
        return ascii(text)
    return f"{text[:_TEXT_MAX]!a}... {len(text)} characters"


def _shown(key: str, value: object) -> object:
    """`value` itself where it can be shown, else something whose repr can."""
    match value:
        case None | bool() | float() | Shown():
            return value
        case int():
            long = value.bit_length() > 128
            return Shown(f"a number of {value.bit_length()} bits") if long else value
        case str() if _is_secret(key, value):
            return Shown("hidden")
        case str():
            return value if len(value) <= _TEXT_MAX else Shown(_cut(value))
        case Mapping():
            return Shown("an object")
        case list() | tuple():
            return Shown("a list")
        case _:
            return Shown(f"a {type(value).__name__}")


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        found[key] = _Twice(value) if key in found else value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _refuse_twice(value: object, where: str) -> None:
    if isinstance(value, list):
        for at, entry in enumerate(value):
            _refuse_twice(entry, _dotted((at,), where))
    elif isinstance(value, dict):
        for key, entry in value.items():
            path = _dotted((key,), where)
            if isinstance(entry, _Twice):
                raise ConfigError(
                    path,
                    _shown(key, entry.value),
                    "is in the same object twice",
                    "keep one of the two",
                )
            _refuse_twice(entry, path)
