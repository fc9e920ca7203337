"""What must be equal for two engines' bytes to be interchangeable, and the names that follow.

Owns the list of everything that changes a chunk's bytes, its digest, and the directory name made
of both. Pure values. Every field goes into the digest, so adding one here is all it takes to
keep old chunks from being read as new ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from dataclasses import dataclass

from tiering.keys import tagged

FORMAT_VERSION = 1
"""Of the chunk frame and the on-disk layout; see docs/format.md."""

MODEL_CHARS_MAX = 100
_DIGEST_HEX_CHARS = 12

RANDOM_HASH_SEED = "random"
"""In place of a digest of the hash seed where another one is drawn at each start."""


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Names all that changes bytes. Sizes in bytes, lengths in tokens or blocks as named.

    `layout` is free text that describes how a share's pages lie in memory; an engine that cannot
    tell must give something that no other layout gives. `groups` has one descriptor for each KV
    cache group, in group order. `weights_fingerprint` is '' where nobody took one. `hash_seed`
    names what the first block hash starts from, where that can differ between engines: chunks
    under other hashes are of no use, though their bytes would be right.
    """

    model: str
    revision: str
    weights_fingerprint: str = ""
    kv_dtype: str
    layout: str
    backend: str
    platform: str
    isa: str
    engine: str
    tokens_per_block: int
    blocks_per_chunk: int
    groups: tuple[str, ...]
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    share_bytes: int
    ranks: int
    hash_algorithm: str
    hash_seed: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> bytes:
        """32 bytes over every field, injectively: a field's type is fixed by its name."""
        fields = [(f.name, _encoded(getattr(self, f.name))) for f in dataclasses.fields(self)]
        return hashlib.sha256(tagged(fields)).digest()

    def digest_of_rank(self, rank: int) -> bytes:
        """32 bytes that name one rank's chunks: another rank's bytes are not interchangeable."""
        return hashlib.sha256(tagged([("namespace", self.digest), ("rank", b"%d" % rank)])).digest()

    @property
    def directory(self) -> str:
        """One path component, `<model>_<12 hex digits>`, whatever the model's name contains."""
        return f"{_safe(self.model)}_{self.digest.hex()[:_DIGEST_HEX_CHARS]}"

    def describe(self) -> dict[str, object]:
        """Every field and the full digest, as JSON has them: what config.json holds."""
        fields = dataclasses.asdict(self)
        return {**fields, "groups": list(self.groups), "digest": self.digest.hex()}


def _encoded(value: str | int | tuple[str, ...]) -> bytes:
    match value:
        case str():
            return value.encode()
        case int():
            return b"%d" % value
        case tuple():
            return tagged([("", item.encode()) for item in value])


def _safe(model: str) -> str:
    """`model` in [A-Za-z0-9._-], bounded, and never starting with a dot."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", model)[:MODEL_CHARS_MAX]
    return re.sub(r"^\.+", lambda dots: "_" * len(dots.group()), name)
