"""The keys of `backpressure`: how slow a tier's writes must be for it to be given fewer of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tiering.config.fields import DAY_SECONDS, Locality, Settings
from tiering.config.problems import refused

_VLLMS_MODULE = "vllm.v1.kv_offload.tiering.backpressure."
_HIGH_WATER_LOCAL_S = 0.01
_HIGH_WATER_REMOTE_S = 0.05
_LOW_WATER_PART = 5


def _built_in(name: object) -> object:
    """vLLM's own classes may be named by their full path; what stands for them here is built in."""
    if not isinstance(name, str):
        return name
    short = name.removeprefix(_VLLMS_MODULE)
    if "." in short:
        raise refused(
            "is a class of your own, but tiers are measured and spared by what is built in",
            "leave it out, or write a tier of your own that answers REFUSED",
        )
    return short


class PressureConfig(Settings):
    """From when on a tier is spared, and how. Seconds are per MiB that it takes to store."""

    backpressure_cls: Annotated[Literal["EMABackpressureDetector"], BeforeValidator(_built_in)] = (
        Field(
            default="EMABackpressureDetector",
            description="What measures: a moving average of the seconds that a stored MiB takes.",
            examples=["EMABackpressureDetector"],
        )
    )
    policy_cls: Annotated[
        Literal["ThrottledDropPolicy", "DropStorePolicy"], BeforeValidator(_built_in)
    ] = Field(
        default="ThrottledDropPolicy",
        description="What is refused under pressure: DropStorePolicy, everything, or "
        "ThrottledDropPolicy, the more the further the average is above high_water_s, all of it "
        "from three times that on.",
        examples=["DropStorePolicy"],
    )
    high_water_s: float | None = Field(
        default=None,
        gt=0,
        le=DAY_SECONDS,
        allow_inf_nan=False,
        description="Seconds per MiB above which the tier is under pressure. Left out, 0.01, and "
        "0.05 for a tier whose locality is REMOTE.",
        examples=[0.02],
    )
    low_water_s: float | None = Field(
        default=None,
        ge=0,
        le=DAY_SECONDS,
        allow_inf_nan=False,
        description="Seconds per MiB below which it no longer is. Left out, a fifth of "
        "high_water_s.",
        examples=[0.004],
    )
    alpha: float = Field(
        default=0.15,
        gt=0,
        le=1,
        description="Weight of the latest write in the average.",
        examples=[0.3],
    )
    warmup_completions: int = Field(
        default=10,
        ge=0,
        le=1 << 20,
        description="Writes that only start the average.",
        examples=[20],
    )
    decay_half_life_s: float = Field(
        default=2.0,
        gt=0,
        le=DAY_SECONDS,
        allow_inf_nan=False,
        description="Seconds without a write after which the average counts half, so that a "
        "spared tier is tried again.",
        examples=[5.0],
    )
    cooldown_s: float = Field(
        default=1.0,
        ge=0,
        le=DAY_SECONDS,
        allow_inf_nan=False,
        description="Seconds after the pressure in which every other write is still refused.",
        examples=[2.0],
    )

    def over(self, other: PressureConfig | None) -> PressureConfig:
        """What is given here, and else what is given in `other`."""
        given = [] if other is None else [other]
        keys: dict[str, object] = {}
        for config in (*given, self):
            keys |= config.model_dump(exclude_unset=True, exclude_none=True)
        return PressureConfig.model_validate(keys)

    def watermarks(self, locality: Locality | None) -> tuple[float, float]:
        """High and low, in seconds per MiB, for a tier of that locality."""
        usual = _HIGH_WATER_REMOTE_S if locality == "REMOTE" else _HIGH_WATER_LOCAL_S
        high = usual if self.high_water_s is None else self.high_water_s
        return high, high / _LOW_WATER_PART if self.low_water_s is None else self.low_water_s
