"""Where everything of an fs tier lies under its root: pure path arithmetic.

    <root>/<namespace>/config.json
    <root>/<namespace>/catalogue.sqlite3       what chunks hold, for KV events
    <root>/<namespace>/tmp_r<rank>/            chunks that are being written
    <root>/<namespace>/quarantine_r<rank>/     damaged chunks, kept for whoever looks into it
    <root>/<namespace>_r<rank>/<hhh>/<hh>_g<group>/<hash_hex>.bin
    <root>/.manifest/                          sizes and recency, rebuilt from the files

Keys become hex digits and the namespace's directory is one safe component, so nothing given
from outside can name a place above the root.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tiering.keys import GROUP_BYTES, KEY_BYTES_MAX, chunk_key, split_key

CONFIG_NAME = "config.json"
CHUNK_SUFFIX = ".bin"
TEMP_SUFFIX = ".tmp"
STAGING_NAME = "tmp_r"
QUARANTINE_NAME = "quarantine_r"
MANIFEST_NAME = ".manifest"
CATALOGUE_NAME = "catalogue.sqlite3"

_DIRECTORY = re.compile(r"(?P<namespace>(?P<model>.*)_(?P<digest>[0-9a-f]{12}))(_r(?P<rank>\d+))?")
_SHARD = re.compile(r"[0-9a-f]{2,3}")
_GROUP = re.compile(r"(?P<prefix>[0-9a-f]{0,2})_g(?P<group>\d{1,10})")


@dataclass(frozen=True)
class FsPaths:
    """The paths of one rank of one namespace under `root` (absolute)."""

    root: Path
    namespace: str
    rank: int

    @cached_property
    def config_dir(self) -> Path:
        return self.root / self.namespace

    @cached_property
    def rank_dir(self) -> Path:
        return self.root / f"{self.namespace}_r{self.rank}"

    @cached_property
    def staging(self) -> Path:
        # Not in the rank directory, which then has its 4,096 shards and nothing else.
        return self.config_dir / f"{STAGING_NAME}{self.rank}"

    @property
    def quarantine(self) -> Path:
        return self.config_dir / f"{QUARANTINE_NAME}{self.rank}"

    @property
    def manifest_dir(self) -> Path:
        return self.root / MANIFEST_NAME

    def chunk(self, key: bytes) -> str:
        """The file of `key`; ValueError where `key` cannot be one."""
        return f"{self._above_chunks}{place_of(key)}"

    def chunks(self, keys: Sequence[bytes]) -> list[str]:
        """The files of `keys`. Asked for each batch, so made without Path's cost."""
        above = self._above_chunks
        return [above + place_of(key) for key in keys]

    @cached_property
    def _above_chunks(self) -> str:
        return f"{self.rank_dir}/"

    def condemned(self, key: bytes) -> Path:
        """Where `key`'s file goes when its bytes are wrong; shortened to fit a file name."""
        block_hash, group = split_key(key)
        return self.quarantine / f"{block_hash.hex()[:64]}_g{group}{CHUNK_SUFFIX}"


def place_of(key: bytes) -> str:
    """Where the file of `key` lies below its rank directory; ValueError where it cannot be one."""
    if not GROUP_BYTES < len(key) <= KEY_BYTES_MAX:
        split_key(key)  # which says what is wrong
    digits, group = key[:-GROUP_BYTES].hex(), int.from_bytes(key[-GROUP_BYTES:], "big")
    return f"{digits[:3]}/{digits[3:5]}_g{group}/{digits}{CHUNK_SUFFIX}"


def why_not_a_key(key: bytes) -> str:
    """Why `key` can have no file and no object; "" where it can."""
    try:
        place_of(key)
    except ValueError as error:
        return str(error)
    return ""


def is_shard(name: str) -> bool:
    """Whether a rank directory's child `name` holds chunks."""
    return _SHARD.fullmatch(name) is not None


def key_of(shard: str, group_dir: str, file: str) -> bytes | None:
    """The key stored at `<shard>/<group_dir>/<file>`, None where this is no chunk's place."""
    digits, found = file.removesuffix(CHUNK_SUFFIX), _GROUP.fullmatch(group_dir)
    if found is None or not file.endswith(CHUNK_SUFFIX) or not re.fullmatch("[0-9a-f]+", digits):
        return None
    if len(digits) % 2 or (digits[:3], digits[3:5]) != (shard, found["prefix"]):
        return None
    group = int(found["group"])
    key_bytes = len(digits) // 2 + 4
    if key_bytes > KEY_BYTES_MAX or group >= 1 << 32 or str(group) != found["group"]:
        return None
    return chunk_key(bytes.fromhex(digits), group)


@dataclass(frozen=True, slots=True)
class NamespaceName:
    """What a directory directly under a root says about itself."""

    namespace: str
    model: str
    digest: str
    rank: int | None


def parse_directory(name: str) -> NamespaceName | None:
    """What `<root>/<name>` holds: a namespace's config (rank None), a rank's chunks, or neither."""
    found = _DIRECTORY.fullmatch(name)
    if found is None:
        return None
    rank = None if found["rank"] is None else int(found["rank"])
    return NamespaceName(found["namespace"], found["model"], found["digest"], rank)
