"""What every object of a tier is called: pure functions, the fs tier's places under a prefix.

    <prefix>/<namespace>/config.json
    <prefix>/<namespace>/lease.json              who may delete for max_bytes
    <prefix>/<namespace>/used/<engine>.msgpack   what an engine has used, for who deletes
    <prefix>/<namespace>_r<rank>/<hhh>/<hh>_g<group>/<hash_hex>.bin

Keys become hex digits and the namespace is one safe component, so nothing given from outside can
name an object outside the prefix. The digits come early in a name: stores spread load by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tiering.tiers.disk.paths import CONFIG_NAME, key_of, place_of

LEASE_NAME = "lease.json"


def above(prefix: str) -> str:
    """What all names under `prefix` begin with."""
    return f"{prefix}/" if prefix else ""


@dataclass(frozen=True)
class ObjNames:
    """The names of one rank of one namespace; `prefix` is "" or like `kv/prod`."""

    prefix: str
    namespace: str
    rank: int

    def __post_init__(self) -> None:
        if self.prefix and not {"", ".", ".."}.isdisjoint(self.prefix.split("/")):
            raise ValueError(f"a prefix has no empty, . or .. parts: {self.prefix!r}")

    @cached_property
    def config(self) -> str:
        return f"{self._base}{self.namespace}/{CONFIG_NAME}"

    @cached_property
    def lease(self) -> str:
        return f"{self._base}{self.namespace}/{LEASE_NAME}"

    @cached_property
    def use_notes(self) -> str:
        """What the names of all notes of uses begin with, and of nothing else."""
        return f"{self._base}{self.namespace}/used/"

    def use_note(self, engine: str) -> str:
        """That of one engine; `engine` is hex digits."""
        return f"{self.use_notes}{engine}.msgpack"

    @cached_property
    def chunks(self) -> str:
        """What the names of all chunks begin with, and of nothing else."""
        return f"{self._base}{self.namespace}_r{self.rank}/"

    @property
    def _base(self) -> str:
        return above(self.prefix)

    def chunk(self, key: bytes) -> str:
        """The object of `key`; ValueError where `key` cannot be one."""
        return self.chunks + place_of(key)

    def key_of(self, name: str) -> bytes | None:
        """The key whose object is called `name`, None where that is no chunk's name."""
        if not name.startswith(self.chunks):
            return None
        parts = name[len(self.chunks) :].split("/")
        return key_of(*parts) if len(parts) == 3 else None
