"""The object tier owes what every tier owes. The raw helpers know docs/format.md, not our code."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from memory_store import Bucket, MemoryStore
from s3_servers import BUCKET, Served, rclone
from scripted_s3 import ScriptedS3
from tiering.config import BucketConfig
from tiering.testing.contract import TierContract
from tiering.testing.examples import CHUNK_BYTES, example_namespace
from tiering.tiers.base import Tier
from tiering.tiers.obj.parts import ObjLimits
from tiering.tiers.obj.s3 import S3Store
from tiering.tiers.obj.store import ObjectStore
from tiering.tiers.obj.tier import ObjTier

NAMESPACE = example_namespace()


def tagged(tag: bytes, value: bytes) -> bytes:
    return struct.pack(">II", len(tag), len(value)) + tag + value


class ObjContract(TierContract):
    """The raw helpers are given a bucket's content by name; each place is a prefix of it."""

    def make_store(self, where: Path) -> ObjectStore:
        raise NotImplementedError

    def get_object(self, where: Path, name: str) -> bytes | None:
        raise NotImplementedError

    def put_object(self, where: Path, name: str, content: bytes) -> None:
        raise NotImplementedError

    def prefix_of(self, where: Path) -> str:
        return f"kv/{hashlib.sha256(str(where).encode()).hexdigest()[:12]}"

    def make_tier(self, where: Path) -> Tier:
        limits = ObjLimits(requests_max=8)
        store, prefix = self.make_store(where), self.prefix_of(where)
        return ObjTier(f"obj:{BUCKET}", store, prefix, NAMESPACE, CHUNK_BYTES, limits=limits)

    def name_of(self, where: Path, key: bytes) -> str:
        digits, group = key[:-4].hex(), int.from_bytes(key[-4:], "big")
        above = f"{self.prefix_of(where)}/org_model_{NAMESPACE.digest.hex()[:12]}_r0"
        return f"{above}/{digits[:3]}/{digits[3:5]}_g{group}/{digits}.bin"

    def raw_get(self, where: Path, key: bytes) -> bytes | None:
        content = self.get_object(where, self.name_of(where, key))
        return None if content is None else content[4096:]

    def raw_put(self, where: Path, key: bytes, payload: bytes) -> None:
        digest = hashlib.sha256(
            tagged(b"namespace", NAMESPACE.digest) + tagged(b"rank", b"0")
        ).digest()
        fields = b"KVTCHUNK" + struct.pack(">IIQ", 1, len(key), len(payload)) + digest + key
        covered = fields.ljust(4080, b"\0")
        content = covered + xxhash.xxh3_128_digest(covered + payload) + payload
        self.put_object(where, self.name_of(where, key), content)

    def raw_damage(self, where: Path, key: bytes) -> None:
        content = bytearray(self.get_object(where, self.name_of(where, key)) or b"")
        content[4096 + 1234] ^= 1
        self.put_object(where, self.name_of(where, key), bytes(content))


class TestMemoryStore(ObjContract):
    @pytest.fixture(autouse=True)
    def _bucket(self) -> None:
        self.bucket = Bucket()

    def make_store(self, where: Path) -> ObjectStore:
        return MemoryStore(self.bucket)

    def get_object(self, where: Path, name: str) -> bytes | None:
        return self.bucket.objects.get(name)

    def put_object(self, where: Path, name: str, content: bytes) -> None:
        self.bucket.objects[name] = content
        self.bucket.modified[name] = 0.0


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedS3]:
    with ScriptedS3() as server:
        yield server


@pytest.mark.slow
class TestScriptedS3(ObjContract):
    @pytest.fixture(autouse=True)
    def _server(self, scripted: ScriptedS3) -> None:
        self.server = scripted

    def make_store(self, where: Path) -> ObjectStore:
        return S3Store(BucketConfig(**Served(self.server.endpoint).store_config()))

    def get_object(self, where: Path, name: str) -> bytes | None:
        return self.server.objects.get(name)

    def put_object(self, where: Path, name: str, content: bytes) -> None:
        self.server.objects[name] = content


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.mark.slow
class TestRclone(ObjContract):
    """Objects are plain files there."""

    @pytest.fixture(autouse=True)
    def _server(self, served: Served) -> None:
        self.server = served

    def make_store(self, where: Path) -> ObjectStore:
        return S3Store(BucketConfig(**self.server.store_config()))

    def file_of(self, name: str) -> Path:
        assert self.server.root is not None
        return self.server.root / name

    def get_object(self, where: Path, name: str) -> bytes | None:
        file = self.file_of(name)
        return file.read_bytes() if file.exists() else None

    def put_object(self, where: Path, name: str, content: bytes) -> None:
        self.file_of(name).parent.mkdir(parents=True, exist_ok=True)
        self.file_of(name).write_bytes(content)
        # rclone looks at its directories anew after 100 ms.
        time.sleep(0.25)
