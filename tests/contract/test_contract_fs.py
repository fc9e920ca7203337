"""The fs tier owes what every tier owes. The raw helpers know docs/format.md, not our code."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import xxhash

from tiering.testing.contract import TierContract
from tiering.testing.examples import CHUNK_BYTES, example_namespace
from tiering.tiers.base import Tier
from tiering.tiers.files.tier import FsTier
from tiering_kernels.chunkio import Engine
from tiering_kernels.engines import open_engine

NAMESPACE = example_namespace()


def tagged(tag: bytes, value: bytes) -> bytes:
    return struct.pack(">II", len(tag), len(value)) + tag + value


class FilesContract(TierContract):
    engine: Engine

    def make_tier(self, where: Path) -> Tier:
        where.mkdir(exist_ok=True)
        return FsTier(
            where / "kv",
            NAMESPACE,
            CHUNK_BYTES,
            n_read_threads=3,
            n_write_threads=3,
            io=open_engine(self.engine),
        )

    def file_of(self, where: Path, key: bytes) -> Path:
        digits, group = key[:-4].hex(), int.from_bytes(key[-4:], "big")
        short = NAMESPACE.digest.hex()[:12]
        shard = where / "kv" / f"org_model_{short}_r0" / digits[:3]
        return shard / f"{digits[3:5]}_g{group}" / f"{digits}.bin"

    def raw_get(self, where: Path, key: bytes) -> bytes | None:
        file = self.file_of(where, key)
        return file.read_bytes()[4096:] if file.exists() else None

    def raw_put(self, where: Path, key: bytes, payload: bytes) -> None:
        digest = hashlib.sha256(
            tagged(b"namespace", NAMESPACE.digest) + tagged(b"rank", b"0")
        ).digest()
        fields = b"KVTCHUNK" + struct.pack(">IIQ", 1, len(key), len(payload)) + digest + key
        covered = fields.ljust(4080, b"\0")
        file = self.file_of(where, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(covered + xxhash.xxh3_128_digest(covered + payload) + payload)

    def raw_damage(self, where: Path, key: bytes) -> None:
        file = self.file_of(where, key)
        content = bytearray(file.read_bytes())
        content[4096 + 1234] ^= 1
        file.write_bytes(content)


class TestUring(FilesContract):
    engine = "uring"


@pytest.mark.slow
class TestThreads(FilesContract):
    engine = "threads"


@pytest.mark.slow
class TestPortable(FilesContract):
    engine = "portable"
