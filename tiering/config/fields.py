"""What all settings have in common: strict frozen models, and the types of values.

Owns how a model refuses: whatever is wrong comes out as one ConfigError, from `parse` and from
the constructors alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Tag,
    ValidationError,
)

from tiering.config.problems import config_error, refused

EXTRA_CONFIG = "kv_connector_extra_config"
BYTES_MAX = (1 << 63) - 1
DAY_SECONDS = 86400.0


class Settings(BaseModel):
    """Base of all settings: frozen, strict, and with ConfigError as the one thing raised."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            owner_of = partial(type(self).owner_of, data)
            raise config_error(error, owner_of, where="") from None

    # Marks the constructor as pydantic's own, so that a model nested in another is validated
    # in place and its problems keep their path, instead of going through the line above.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def owner_of(cls, data: Mapping[str, Any], path: Sequence[int | str]) -> type[Settings]:
        """The model that has, or lacks, the key at the end of `path` in `data`."""
        del data, path
        return cls


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refused("holds characters that are no text", "write plain Unicode text") from None
    return text


def _absolute(path: str) -> str:
    if path.startswith("~"):
        raise refused(
            "'~' is not expanded", "write the directory from the root, such as /home/me/kv_cache"
        )
    if not path.startswith("/"):
        raise refused(
            "is not an absolute path, so it would depend on where the server is started",
            "write the directory from the root, such as /mnt/kv_cache",
        )
    if "\0" in path:
        raise refused("holds a zero byte", "write a plain path, such as /mnt/kv_cache")
    return path


def absolute_file(example: str) -> Callable[[str], str]:
    """A validator: the path of a file from the root; an empty one is as good as none."""

    def check(path: str) -> str:
        if path and (not path.startswith("/") or "\0" in path):
            raise refused(
                "is not an absolute path, so it would depend on where the server is started",
                f"write the file from the root, such as {example}",
            )
        return path

    return check


def listed(value: object) -> object:
    """JSON has lists, a frozen model has tuples: the one conversion there is."""
    return tuple(value) if isinstance(value, list) else value


Text = Annotated[str, AfterValidator(_encodable)]
Directory = Annotated[Text, AfterValidator(_absolute)]
Locality = Literal["LOCAL", "REMOTE"]
EventMedium = Literal["STORAGE", "FS", "OBJ"]


def _roots(value: object) -> object:
    """One directory as it is, a list of them as a tuple: each is looked at by itself."""
    if isinstance(value, list | tuple):
        if not value:
            raise refused("is empty", "name a directory, or several")
        return tuple(value)
    return value


def _root_kind(value: object) -> str:
    return "<several>" if isinstance(value, tuple) else "<one>"


Roots = Annotated[
    Annotated[Directory, Tag("<one>")] | Annotated[tuple[Directory, ...], Tag("<several>")],
    Discriminator(_root_kind),
    BeforeValidator(_roots),
]
