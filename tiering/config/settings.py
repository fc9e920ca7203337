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
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from tiering.config.anytier import StoringTierSettings, TierSettings
from tiering.config.fields import BYTES_MAX, DAY_SECONDS, EXTRA_CONFIG, Settings, Text, listed
from tiering.config.obj import ObjTierConfig, told_secret
from tiering.config.pressure import PressureConfig
from tiering.config.problems import (
    as_object,
    config_error,
    load_json,
    nearest,
    refused,
    without_secrets,
)
from tiering.config.tiers import TierConfig, UserTierConfig, owner_in_tier
from tiering.errors import ConfigError
from tiering.layout import DTYPE_BYTES, KVLayout, RowLayout
from tiering.policy.registry import place_of, policy_names

_TOKENS_MAX = 1 << 24
_KERNEL_BYTES_MAX = 1 << 30
_LAYERS_MAX = 1 << 16
_KEYS_MAX = 1 << 30

SpecName = Literal["CPUOffloadingSpec", "TieringOffloadingSpec", "TieredOffloadingSpec"]


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPE_BYTES:
        raise refused("is not a known dtype", f"write one of {', '.join(DTYPE_BYTES)}")
    return dtype


class EngineConfig(Settings):
    """What every engine needs to know, under vLLM or in a program of its own."""

    cpu_bytes_to_use: int = Field(
        gt=0,
        le=BYTES_MAX,
        description="Bytes of host memory for the host tier, in total over all workers. The "
        "engine never takes more.",
        examples=[10737418240],
    )
    secondary_tiers: Annotated[tuple[TierConfig, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="Tiers below the host tier, asked in this order.",
        examples=[[{"type": "fs", "root_dir": "/mnt/kv_cache"}]],
    )
    eviction_policy: Text = Field(
        default="lru",
        min_length=1,
        description="Which chunks make room in a full host tier: lru, the least recently used; "
        "arc, which keeps what is used again and again from what is used once; a name given to "
        "register_policy; or the class of your own in cache_policy_module_path.",
        examples=["arc"],
    )
    cache_policy_module_path: Text | None = Field(
        default=None,
        min_length=1,
        description="Import path of the module that has the class eviction_policy, a subclass of "
        "tiering.policy.base.EvictionPolicy. A built-in or registered name goes before it.",
        examples=["my_package.my_module"],
    )
    store_threshold: int = Field(
        default=0,
        ge=0,
        le=_KEYS_MAX,
        description="Requests that must have asked for a chunk before it is stored, the one that "
        "stores it included. 0 and 1 store it the first time.",
        examples=[2],
    )
    max_tracker_size: int = Field(
        default=64000,
        ge=1,
        le=_KEYS_MAX,
        description="Chunks of which store_threshold keeps count; beyond that those not asked "
        "for longest are forgotten.",
        examples=[1000000],
    )
    backpressure: PressureConfig | None = Field(
        default=None,
        description="Give tiers less to write while they are slow, each by its own measure; {} "
        "is the defaults. A tier's own backpressure goes before it, key by key.",
        examples=[{"high_water_s": 0.05}],
    )
    load_deadline_seconds: float = Field(
        default=30.0,
        gt=0,
        le=DAY_SECONDS,
        allow_inf_nan=False,
        description="Seconds that a load from a secondary tier may take. After that it is a "
        "miss, and the tokens are computed.",
        examples=[5.0],
    )

    @classmethod
    def owner_of(cls, data: Mapping[str, Any], path: Sequence[int | str]) -> type[Settings]:
        match path:
            case ("backpressure", _):
                return PressureConfig
            case ("secondary_tiers", int(at), *rest) if rest:
                return owner_in_tier(data["secondary_tiers"][at], rest)
            case _:
                return cls

    @model_validator(mode="after")
    def _roots_differ(self) -> Self:
        seen: dict[str, int] = {}
        for at, tier in enumerate(self.secondary_tiers):
            for root in tier.roots:
                place = "/" + os.path.normpath(root).lstrip("/")
                if place in seen:
                    where = f"secondary_tiers[{seen[place]}] as well"
                    raise refused(
                        "is named twice" if seen[place] == at else f"is the directory of {where}",
                        "give each tier a directory of its own, or leave one of the two out",
                        f"secondary_tiers[{at}].root_dir",
                        root,
                    )
                seen[place] = at
        return self

    @model_validator(mode="after")
    def _policy_is_known(self) -> Self:
        name = self.eviction_policy
        if self.cache_policy_module_path is None and place_of(name) is None:
            raise refused(
                "is not the name of a policy",
                f"{nearest(name, policy_names())}; a class of your own needs "
                "cache_policy_module_path, too",
                "eviction_policy",
                name,
            )
        return self

    @model_validator(mode="after")
    def _watermarks_fit(self) -> Self:
        for at, tier in enumerate(self.secondary_tiers):
            pressure = self.pressure_on(tier)
            if pressure is None:
                continue
            high, low = pressure.watermarks(tier.locality)
            if low > high:
                is_own = tier.backpressure and tier.backpressure.low_water_s is not None
                place = f"secondary_tiers[{at}]."
                raise refused(
                    f"is above high_water_s, which is {high:g} for {place[:-1]}",
                    "write at most that, or leave it out",
                    f"{place if is_own else ''}backpressure.low_water_s",
                    low,
                )
        return self

    def pressure_on(self, tier: TierSettings) -> PressureConfig | None:
        """When `tier` is spared; None for never."""
        if not isinstance(tier, StoringTierSettings):
            return None
        own = tier.backpressure
        return self.backpressure if own is None else own.over(self.backpressure)


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

    self_describing_kv_events: bool = Field(
        default=False,
        description="Let KV events carry the blocks, tokens and parents of chunks, which a "
        "router needs to use them. Without it they are placeholders.",
        examples=[True],
    )
    loop: Literal["auto", "thread", "process"] = Field(
        default="auto",
        description="Where the secondary tiers' I/O is driven from: a thread of the process that "
        "vLLM's scheduler is in, or a process beside it, which is started again if it dies. auto "
        "is a process if there is a bucket among the tiers, else a thread.",
        examples=["process"],
    )
    kernel_below_bytes: int = Field(
        default=28 << 10,
        ge=0,
        le=_KERNEL_BYTES_MAX,
        description="On a CUDA device: loads of smaller fragments than this, on average, are made "
        "by a kernel instead of the copy engines. 0 uses none.",
        examples=[16384],
    )
    canonical_layout: bool = Field(
        default=False,
        description="Store chunks in a layout that other parallelism can read, which is not "
        "offered: only false is accepted.",
        examples=[False],
    )
    spec_name: SpecName | None = Field(
        default=None,
        description="What vLLM's OffloadingConnector loads. TieredConnector needs none; it takes "
        "vLLM's two names, so that a configuration for those can be used as it is.",
        examples=["TieringOffloadingSpec"],
    )
    spec_module_path: Text | None = Field(
        default=None,
        min_length=1,
        description="Where vLLM's OffloadingConnector finds spec_name; TieredConnector does not "
        "use it.",
        examples=["tiering_connectors.vllm.offloading.spec"],
    )

    @model_validator(mode="after")
    def _can_be_had(self) -> Self:
        if self.canonical_layout:
            raise refused(
                "is not offered: chunks are stored as each rank holds them, and engines of "
                "another parallelism keep theirs apart",
                "leave it out",
                "canonical_layout",
                True,
            )
        if self.spec_name == "CPUOffloadingSpec" and self.secondary_tiers:
            raise refused(
                "has host memory only, but there are secondary_tiers",
                'write "TieringOffloadingSpec", or leave it out',
                "spec_name",
                self.spec_name,
            )
        return self

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

    @property
    def loop_in_process(self) -> bool:
        """Whether the tiers' loop has a process of its own. Without tiers it has nothing to do,
        wherever it is; a bucket's client is mostly Python (docs/decisions/0010)."""
        if self.loop == "auto":
            return any(isinstance(tier, ObjTierConfig) for tier in self.secondary_tiers)
        return self.loop == "process" and bool(self.secondary_tiers)

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


class LayoutKeys(Settings):
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

    @classmethod
    def owner_of(cls, data: Mapping[str, Any], path: Sequence[int | str]) -> type[Settings]:
        match path:
            case ("layout", _):
                return LayoutKeys
            case _:
                return super().owner_of(data, path)

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


Model = TypeVar("Model", bound=Settings)


def parse(model_class: type[Model], data: object, where: str = "") -> Model:
    """`data`, a mapping or the text of a JSON object, as settings; ConfigError if it cannot be.

    `where` is what comes before the keys in that error's path, such as
    `kv_connector_extra_config`. The error never holds a secret.
    """
    given = as_object(load_json(data, where) if isinstance(data, bytes | str) else data, where)
    try:
        return model_class.model_validate(given)
    except ValidationError as error:
        raise config_error(error, partial(model_class.owner_of, given), where) from None


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
        elif isinstance(value, BaseModel):
            settings += effective(value, f"{path}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for at, entry in enumerate(value):
                settings += effective(entry, f"{path}[{at}].")
        else:
            was_set = name in model.model_fields_set
            shown = told_secret(value) if isinstance(value, SecretStr) else value
            settings.append(Setting(path, shown, "set" if was_set else "default"))
    if isinstance(model, UserTierConfig):
        own = model.own_keys.items()
        settings += [Setting(prefix + key, without_secrets(key, each), "set") for key, each in own]
    return settings


def _layout_settings(layout: KVLayout, path: str) -> list[Setting]:
    """A dataclass does not remember what it was given: what equals its default counts as that."""
    settings: list[Setting] = []
    for field in fields(layout):
        value = getattr(layout, field.name)
        was_set = field.default is MISSING or value != field.default
        settings.append(Setting(f"{path}.{field.name}", value, "set" if was_set else "default"))
    return settings
