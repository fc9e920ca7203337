"""Settings as plain data: what each key means, and what is refused before anything starts.

Owns the names, defaults, limits and cross-field rules of every setting. The models are frozen,
refuse unknown keys and convert nothing: "64" is not 64 and true is not 1. Whatever is wrong comes
out as one ConfigError, from `parse` and from the constructors alike. Reads no file, no clock and
no environment; whether a directory can be written is for the tier that opens it.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from tiering.config.problems import ABSENT, as_object, config_error, load_json, refused
from tiering.errors import ConfigError
from tiering.layout import DTYPE_BYTES, KVLayout, RowLayout

EXTRA_CONFIG = "kv_connector_extra_config"
_BYTES_MAX = (1 << 63) - 1
_TOKENS_MAX = 1 << 24
_LAYERS_MAX = 1 << 16
_DAY_SECONDS = 86400.0


class _Settings(BaseModel):
    """Base of all settings: frozen, strict, and with ConfigError as the one thing raised."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise config_error(error, partial(_owner_of, type(self), data), where="") from None

    # Marks the constructor as pydantic's own, so that a model nested in another is validated
    # in place and its problems keep their path, instead of going through the line above.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


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


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise refused("is not a known dtype", f"write one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _listed(value: object) -> object:
    """JSON has lists, a frozen model has tuples: the one conversion there is."""
    return tuple(value) if isinstance(value, list) else value


Text = Annotated[str, AfterValidator(_encodable)]
Directory = Annotated[Text, AfterValidator(_absolute)]
Locality = Literal["LOCAL", "REMOTE"]


class FsTierConfig(_Settings):
    """A directory of a file system as a secondary tier."""

    # Written out in JSON, where it says which tier is meant; the class says it in Python.
    model_config = ConfigDict(json_schema_extra={"required": ["type", "root_dir"]})

    type: Literal["fs"] = Field(default="fs", description="Kind of tier.", examples=["fs"])
    root_dir: Directory = Field(
        description="Directory that chunks are kept under, as an absolute path. It is made if "
        "missing, in a directory that exists; engines with the same model and layout share what "
        "is in it.",
        examples=["/mnt/kv_cache"],
    )
    enable_kv_events: bool = Field(
        default=False,
        description="Publish an event for each chunk stored here (medium STORAGE). Accepted, and "
        "without effect: this version publishes no events yet.",
        examples=[True],
    )
    locality: Locality | None = Field(
        default=None,
        description="Whether the storage is LOCAL to this server or REMOTE, as its events will "
        "say it; like them, without effect in this version.",
        examples=["LOCAL"],
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


# The kinds of secondary tier, by `type`. A new kind is a line here and a name in the union below.
TIER_TYPES: Mapping[str, type[_Settings]] = {"fs": FsTierConfig}


def _tier(entry: object) -> object:
    """An object as the kind of tier that its `type` names, before any other key is looked at."""
    if not isinstance(entry, Mapping):
        return entry
    known = ", ".join(map(repr, TIER_TYPES))
    kind = entry.get("type", ABSENT)
    if kind is ABSENT:
        raise refused(
            "is required: it says which kind of tier this is", f"add one of {known}", "type", kind
        )
    if not isinstance(kind, str) or kind not in TIER_TYPES:
        raise refused("is not a kind of tier", f"write one of {known}", "type", kind)
    return TIER_TYPES[kind].model_validate(dict(entry))


TierConfig = Annotated[FsTierConfig, BeforeValidator(_tier)]


class EngineConfig(_Settings):
    """What every engine needs to know, under vLLM or in a program of its own."""

    cpu_bytes_to_use: int = Field(
        gt=0,
        le=_BYTES_MAX,
        description="Bytes of host memory for the host tier, in total over all workers. The "
        "engine never takes more.",
        examples=[10737418240],
    )
    secondary_tiers: Annotated[tuple[TierConfig, ...], BeforeValidator(_listed)] = Field(
        default=(),
        description="Tiers below the host tier, asked in this order.",
        examples=[[{"type": "fs", "root_dir": "/mnt/kv_cache"}]],
    )
    eviction_policy: Literal["lru"] = Field(
        default="lru",
        description="Which chunks make room in a full host tier: lru, the least recently used.",
        examples=["lru"],
    )
    load_deadline_seconds: float = Field(
        default=30.0,
        gt=0,
        le=_DAY_SECONDS,
        allow_inf_nan=False,
        description="Seconds that a load from a secondary tier may take. After that it is a "
        "miss, and the tokens are computed.",
        examples=[5.0],
    )

    @model_validator(mode="after")
    def _roots_differ(self) -> Self:
        seen: dict[str, int] = {}
        for at, tier in enumerate(self.secondary_tiers):
            first = seen.setdefault("/" + os.path.normpath(tier.root_dir).lstrip("/"), at)
            if first != at:
                raise refused(
                    f"is the directory of secondary_tiers[{first}] as well",
                    "give each tier a directory of its own, or leave one of the two out",
                    f"secondary_tiers[{at}].root_dir",
                    tier.root_dir,
                )
        return self


class ConnectorConfig(EngineConfig):
    """vLLM's `kv_connector_extra_config`."""

    block_size: int | None = Field(
        default=None,
        ge=1,
        le=_TOKENS_MAX,
        description="Tokens in a chunk, the unit that is stored and found: a multiple of vLLM's "
        "own block size. Left out, blocks_per_chunk decides.",
        examples=[64],
    )
    blocks_per_chunk: int | None = Field(
        default=None,
        ge=1,
        le=_TOKENS_MAX,
        description="Blocks of vLLM's in a chunk: the other way to say block_size. Left out "
        "with block_size left out too, it is 1.",
        examples=[4],
    )
    offload_prompt_only: bool = Field(
        default=True,
        description="Store only what was computed for prompts (true), or what was generated "
        "too (false).",
        examples=[False],
    )

    @model_validator(mode="after")
    def _one_chunk_size(self) -> Self:
        if self.block_size is not None and self.blocks_per_chunk is not None:
            raise refused(
                f"block_size = {self.block_size} is given too, and both say how large a chunk is",
                "leave out one of the two",
                "blocks_per_chunk",
                self.blocks_per_chunk,
            )
        return self

    def blocks_in_chunk(self, tokens_per_block: int) -> int:
        """Blocks of `tokens_per_block` tokens in a chunk; ConfigError if they do not fill it."""
        if tokens_per_block < 1:
            raise ValueError(f"tokens_per_block must be at least 1, not {tokens_per_block}")
        if self.block_size is None:
            return self.blocks_per_chunk or 1
        blocks, rest = divmod(self.block_size, tokens_per_block)
        if rest:
            near = max(1, round(self.block_size / tokens_per_block)) * tokens_per_block
            raise ConfigError(
                f"{EXTRA_CONFIG}.block_size",
                self.block_size,
                f"is not a multiple of the {tokens_per_block} tokens in a block of the model's "
                "KV cache",
                f"write {near}",
            )
        return blocks


class LayoutKeys(_Settings):
    """The keys of a KVLayout where it is written as an object."""

    layers: int = Field(
        ge=1, le=_LAYERS_MAX, description="Layers that have a KV cache.", examples=[32]
    )
    kv_heads: int = Field(ge=1, le=_TOKENS_MAX, description="KV heads in a layer.", examples=[8])
    head_dim: int = Field(ge=1, le=_TOKENS_MAX, description="Values in a head.", examples=[128])
    block_tokens: int = Field(ge=1, le=_TOKENS_MAX, description="Tokens in a block.", examples=[16])
    dtype: Annotated[str, AfterValidator(_known_dtype)] = Field(
        default="bfloat16", description="Type of the values.", examples=["float16"]
    )
    blocks_per_chunk: int = Field(
        default=1,
        ge=1,
        le=_TOKENS_MAX,
        description="Blocks in a chunk, the unit that is stored and found.",
        examples=[4],
    )


def _layout(entry: object) -> object:
    if not isinstance(entry, Mapping):
        return entry
    return KVLayout(**LayoutKeys.model_validate(dict(entry)).model_dump())


class StoreConfig(EngineConfig):
    """The settings of a TieredStore: an engine whose owner is a Python program."""

    layout: Annotated[KVLayout, BeforeValidator(_layout, json_schema_input_type=LayoutKeys)] = (
        Field(
            description="Shape of the KV cache, which gives the bytes of a chunk.",
            examples=[{"layers": 32, "kv_heads": 8, "head_dim": 128, "block_tokens": 16}],
        )
    )
    model: Text = Field(
        default="model",
        min_length=1,
        description="Name of the model. Chunks are found again only under the same name.",
        examples=["meta-llama/Llama-3-8B"],
    )
    revision: Text = Field(
        default="",
        description="Revision of the model. Chunks of another revision are never found.",
        examples=["main"],
    )
    weights_fingerprint: Text = Field(
        default="",
        description="Whatever identifies the weights, such as a digest of them. Chunks of other "
        "weights are never found.",
        examples=["sha256:9f86d081"],
    )

    @model_validator(mode="after")
    def _holds_a_chunk(self) -> Self:
        need = RowLayout(self.layout.chunk_bytes).row_bytes
        if need > self.cpu_bytes_to_use:
            raise refused(
                f"is less than one chunk of {need} bytes",
                f"write at least {need}, or make chunks smaller in layout",
                "cpu_bytes_to_use",
                self.cpu_bytes_to_use,
            )
        return self


def _owner_of(
    model_class: type[_Settings], data: Mapping[str, Any], path: Sequence[int | str]
) -> type[_Settings]:
    """The model that has, or lacks, the key at the end of `path` in `data`."""
    match path:
        case ("secondary_tiers", int(at), _):
            return TIER_TYPES[data["secondary_tiers"][at]["type"]]
        case ("layout", _):
            return LayoutKeys
        case _:
            return model_class


Settings = TypeVar("Settings", bound=_Settings)


def parse(model_class: type[Settings], data: object, where: str = "") -> Settings:
    """`data`, a mapping or the text of a JSON object, as settings; ConfigError if it cannot be.

    `where` is what comes before the keys in that error's path, such as
    `kv_connector_extra_config`. The error never holds a secret.
    """
    given = as_object(load_json(data, where) if isinstance(data, bytes | str) else data, where)
    try:
        return model_class.model_validate(given)
    except ValidationError as error:
        raise config_error(error, partial(_owner_of, model_class, given), where) from None


class Setting(NamedTuple):
    """One value in effect: its dotted path, and whether it was set or is the default."""

    path: str
    value: object
    origin: Literal["set", "default"]


def effective(model: BaseModel, prefix: str = "") -> list[Setting]:
    """Every value of `model` and of what is nested in it, in the order of declaration."""
    settings: list[Setting] = []
    for name in type(model).model_fields:
        path, value = prefix + name, getattr(model, name)
        if isinstance(value, KVLayout):
            settings += _layout_settings(value, path)
        elif isinstance(value, tuple) and value:
            for at, entry in enumerate(value):
                settings += effective(entry, f"{path}[{at}].")
        else:
            was_set = name in model.model_fields_set
            settings.append(Setting(path, value, "set" if was_set else "default"))
    return settings


def _layout_settings(layout: KVLayout, path: str) -> list[Setting]:
    """A dataclass does not remember what it was given: what equals its default counts as that."""
    settings: list[Setting] = []
    for field in fields(layout):
        value = getattr(layout, field.name)
        was_set = field.default is MISSING or value != field.default
        settings.append(Setting(f"{path}.{field.name}", value, "set" if was_set else "default"))
    return settings
