"""The kinds of secondary tier and their keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from tiering.config.anytier import StoringTierSettings
from tiering.config.fields import BYTES_MAX, Roots, Settings, Text
from tiering.config.obj import ObjTierConfig
from tiering.config.p2p import P2pTierConfig
from tiering.config.problems import ABSENT, nearest, refused, without_secrets

_EXAMPLE = '{"type": "fs", "root_dir": "/mnt/kv_cache"}'


class FsTierConfig(StoringTierSettings):
    """A directory of a file system as a secondary tier."""

    # Written out in JSON, where it says which tier is meant; the class says it in Python.
    model_config = ConfigDict(json_schema_extra={"required": ["type", "root_dir"]})

    type: Literal["fs"] = Field(default="fs", description="Kind of tier.", examples=["fs"])
    root_dir: Roots = Field(
        description="Directory that chunks are kept under, as an absolute path, or a list of "
        "them, over which chunks are spread: one that fails costs only its share. It is made if "
        "missing, in a directory that exists; with layout files, engines with the same model and "
        "layout share what is in it.",
        examples=["/mnt/kv_cache"],
    )
    layout: Literal["files", "segments"] = Field(
        default="files",
        description="How chunks lie there: files, one for each chunk, which processes and hosts "
        "may share, or segments, large files of fixed slots for one engine alone, which is faster "
        "and needs max_bytes.",
        examples=["segments"],
    )
    max_bytes: int | None = Field(
        default=None,
        gt=0,
        le=BYTES_MAX,
        description="Bytes of disk that everything under root_dir may take, over all of several "
        "roots, all models and all engines that share it. Left out, min_free_bytes is the bound.",
        examples=[1099511627776],
    )
    min_free_bytes: int | None = Field(
        default=None,
        ge=0,
        le=BYTES_MAX,
        description="Bytes to leave free on the file system, whoever uses the rest. Left out, "
        "5 percent of it, at most 20 GiB.",
        examples=[107374182400],
    )
    high_watermark: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of what the two bounds allow above which the least recently used "
        "chunks are evicted.",
        examples=[0.95],
    )
    low_watermark: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share down to which they then are. Left out, high_watermark: each new chunk "
        "takes the place, and the file, of one old one.",
        examples=[0.9],
    )
    durability: Literal["none", "close", "batch"] = Field(
        default="none",
        description="What is safe from a power cut: none, nothing in particular (a chunk that "
        "suffered is a miss), close, what was stored before the engine ended, batch, each chunk "
        "once it counts as stored. None is needed against a killed process.",
        examples=["close"],
    )
    read_path: Literal["auto", "direct", "buffered"] = Field(
        default="auto",
        description="Read around the page cache (direct) or through it (buffered); auto tries "
        "both at start.",
        examples=["buffered"],
    )
    write_path: Literal["auto", "direct", "buffered"] = Field(
        default="auto",
        description="The same for writing.",
        examples=["direct"],
    )
    io_engine: Literal["auto", "uring", "threads", "portable"] = Field(
        default="auto",
        description="What moves the bytes: io_uring, native code in threads, or plain Python; "
        "auto takes the first of these that works here.",
        examples=["threads"],
    )
    n_read_threads: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Threads that read first. With nothing to read they write.",
        examples=[32],
    )
    n_write_threads: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Threads that write first. With nothing to write they read.",
        examples=[16],
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.layout == "segments" and self.max_bytes is None:
            raise refused(
                "is needed for layout segments, whose files are made beforehand",
                "write how many bytes of disk they may take",
                "max_bytes",
                ABSENT,
            )
        if self.low_watermark is not None and self.low_watermark > self.high_watermark:
            raise refused(
                f"is above high_watermark = {self.high_watermark}",
                "write at most that",
                "low_watermark",
                self.low_watermark,
            )
        return self

    @property
    def roots(self) -> tuple[str, ...]:
        """The one directory, or each of several."""
        return (self.root_dir,) if isinstance(self.root_dir, str) else self.root_dir


class UserTierConfig(StoringTierSettings):
    """A tier of the user's own. Keys that are not named here are handed to its constructor."""

    model_config = ConfigDict(extra="allow", title="A tier of your own")

    type: Text = Field(min_length=1, description="Name of its class.", examples=["MyTier"])
    module_path: Text = Field(
        min_length=1,
        description="Import path of the module that the class is in.",
        examples=["my_package.my_module"],
    )

    if TYPE_CHECKING:

        def __init__(self, *, type: str, module_path: str, **keys: Any) -> None: ...

    @property
    def own_keys(self) -> dict[str, Any]:
        """What its constructor is given, besides the namespace and the size of a chunk."""
        return dict(self.model_extra or {})

    @model_serializer(mode="wrap")
    def _without_secrets(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told: dict[str, Any] = handler(self)
        return told | {key: without_secrets(key, told[key]) for key in self.own_keys}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            is_own = name is not None and name in self.own_keys
            yield name, without_secrets(str(name), value) if is_own else value


# The kinds of secondary tier, by `type`. A new kind is a line here and a name in the union below.
TIER_TYPES: Mapping[str, type[Settings]] = {
    "fs": FsTierConfig,
    "obj": ObjTierConfig,
    "p2p": P2pTierConfig,
}

# Those of vLLM that are not among them: why, and what to do instead.
_NOT_HERE = {
    "example": (
        "shows authors of tiers how vLLM's are written, and there is none here",
        f"write {_EXAMPLE}",
    ),
    "kvcr": (
        "needs a package that this engine does not drive",
        "write a tier of your own around it and name its module in module_path",
    ),
}


def tier_class(entry: Mapping[str, Any]) -> type[Settings]:
    """The model of an entry of `secondary_tiers`; a problem to raise where there is none."""
    known = list(TIER_TYPES)
    kind = entry.get("type", ABSENT)
    if kind is ABSENT:
        listed = ", ".join(map(repr, known))
        raise refused(
            "is required: it says which kind of tier this is", f"add one of {listed}", "type", kind
        )
    if isinstance(kind, str) and kind in TIER_TYPES:
        return TIER_TYPES[kind]
    if "module_path" in entry:
        return UserTierConfig
    if isinstance(kind, str) and kind in _NOT_HERE:
        raise refused(*_NOT_HERE[kind], "type", kind)
    remedy = nearest(kind if isinstance(kind, str) else "", known)
    raise refused(
        "is not a kind of tier",
        f"{remedy}; a class of your own needs module_path, too",
        "type",
        kind,
    )


def owner_in_tier(entry: Mapping[str, Any], path: Sequence[int | str]) -> type[Settings]:
    """The model that has, or lacks, the key at the end of `path` in an entry."""
    return tier_class(entry).owner_of(entry, path)


def _tier(entry: object) -> object:
    """An object as the kind of tier that its `type` names, before any other key is looked at."""
    if isinstance(entry, Settings):
        return entry
    if not isinstance(entry, Mapping):
        raise refused("must be an object", f"write for example {_EXAMPLE}")
    return tier_class(entry).model_validate(dict(entry))


TierConfig = Annotated[
    FsTierConfig | ObjTierConfig | P2pTierConfig | UserTierConfig, BeforeValidator(_tier)
]
