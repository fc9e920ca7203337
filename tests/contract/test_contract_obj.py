"""The object tier owes what every tier owes. The raw helpers know docs/format.md, not our code."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import xxhash

from memory_store import Bucket, MemoryStore
from tiering.testing.contract import TierContract
from tiering.testing.examples import CHUNK_BYTES, example_namespace
from tiering.tiers.base import Tier
from tiering.tiers.obj.parts import ObjLimits
from tiering.tiers.obj.store import ObjectStore
from tiering.tiers.obj.tier import ObjTier

NAMESPACE = example_namespace()


def tagged(tag: bytes, value: bytes) -> bytes:
    return struct.pack(">II", len(tag), len(value)) + tag + value


class ObjContract(TierContract):
    """`objects_of` are the bucket's by name."""

    def make_store(self, where: Path) -> ObjectStore:
        raise NotImplementedError

    def get_object(self, where: Path, name: str) -> bytes | None:
        raise NotImplementedError

    def put_object(self, where: Path, name: str, content: bytes) -> None:
        raise NotImplementedError

    def make_tier(self, where: Path) -> Tier:
        limits = ObjLimits(requests_max=8)
        return ObjTier(
            "obj:bucket", self.make_store(where), "kv", NAMESPACE, CHUNK_BYTES, limits=limits
        )

    def name_of(self, key: bytes) -> str:
        digits, group = key[:-4].hex(), int.from_bytes(key[-4:], "big")
        short = NAMESPACE.digest.hex()[:12]
        return f"kv/org_model_{short}_r0/{digits[:3]}/{digits[3:5]}_g{group}/{digits}.bin"

    def raw_get(self, where: Path, key: bytes) -> bytes | None:
        content = self.get_object(where, self.name_of(key))
        return None if content is None else content[4096:]

    def raw_put(self, where: Path, key: bytes, payload: bytes) -> None:
        digest = hashlib.sha256(
            tagged(b"namespace", NAMESPACE.digest) + tagged(b"rank", b"0")
        ).digest()
        fields = b"KVTCHUNK" + struct.pack(">IIQ", 1, len(key), len(payload)) + digest + key
        covered = fields.ljust(4080, b"\0")
        content = covered + xxhash.xxh3_128_digest(covered + payload) + payload
        self.put_object(where, self.name_of(key), content)

    def raw_damage(self, where: Path, key: bytes) -> None:
        content = bytearray(self.get_object(where, self.name_of(key)) or b"")
        content[4096 + 1234] ^= 1
        self.put_object(where, self.name_of(key), bytes(content))


class TestMemoryStore(ObjContract):
    @pytest.fixture(autouse=True)
    def _buckets(self) -> None:
        self.buckets: dict[Path, Bucket] = {}

    def bucket(self, where: Path) -> Bucket:
        return self.buckets.setdefault(where, Bucket())

    def make_store(self, where: Path) -> ObjectStore:
        return MemoryStore(self.bucket(where))

    def get_object(self, where: Path, name: str) -> bytes | None:
        return self.bucket(where).objects.get(name)

    def put_object(self, where: Path, name: str, content: bytes) -> None:
        self.bucket(where).objects[name] = content
        self.bucket(where).modified[name] = 0.0
