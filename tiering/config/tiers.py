"""The kinds of secondary tier and their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from tiering.config.fields import BYTES_MAX, Locality, Roots, Settings
from tiering.config.problems import ABSENT, refused


class FsTierConfig(Settings):
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
        """The one root, or each of several."""
        return (self.root_dir,) if isinstance(self.root_dir, str) else self.root_dir


# The kinds of secondary tier, by `type`. A new kind is a line here and a name in the union below.
TIER_TYPES: Mapping[str, type[Settings]] = {"fs": FsTierConfig}


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
