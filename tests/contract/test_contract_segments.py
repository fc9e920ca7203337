"""The segment tier owes what every tier owes. The raw helpers know the table's and the frame's
bytes as they are written down, not our code."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import xxhash

from tiering.clock import MonotonicClock, UnixClock
from tiering.testing.contract import TierContract
from tiering.testing.examples import CHUNK_BYTES, example_namespace
from tiering.tiers.base import Tier
from tiering.tiers.disk import diskio
from tiering.tiers.disk.iopool import IoPool
from tiering.tiers.segments.tier import SegmentTier
from tiering_kernels.chunkio import ENGINES, ChunkIo, EngineUnavailable
from tiering_kernels.engines import open_engine

NAMESPACE = example_namespace()
SLOT_BYTES = 4096 + CHUNK_BYTES
SLOTS_PER_SEGMENT = 40


def tagged(tag: bytes, value: bytes) -> bytes:
    return struct.pack(">II", len(tag), len(value)) + tag + value


DIGEST = hashlib.sha256(tagged(b"namespace", NAMESPACE.digest) + tagged(b"rank", b"0")).digest()


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> diskio.Direct:
    return diskio.probe(tmp_path_factory.mktemp("probe"), "auto", "auto", MonotonicClock())


class SegmentContract(TierContract):
    shareable = False

    @pytest.fixture(autouse=True)
    def one_probe(self, monkeypatch: pytest.MonkeyPatch, direct: diskio.Direct) -> None:
        """Syncing the disk at each of hundreds of opens would take minutes."""
        monkeypatch.setattr(diskio, "probe", lambda *args: direct)

    def engine(self) -> ChunkIo:
        raise NotImplementedError

    def make_tier(self, where: Path) -> Tier:
        where.mkdir(exist_ok=True)
        return SegmentTier(
            where / "kv",
            NAMESPACE,
            CHUNK_BYTES,
            max_bytes=4 * SLOTS_PER_SEGMENT * (SLOT_BYTES + 168),
            io=self.engine(),
            pool=IoPool("contract", 3, 3),
            clock=UnixClock(),
        )

    def directory(self, where: Path) -> Path:
        short = NAMESPACE.digest.hex()[:12]
        return where / "kv" / f"org_model_{short}_r0.segments"

    def place_of(self, where: Path, key: bytes) -> tuple[Path, int] | None:
        table = (self.directory(where) / "table").read_bytes()
        per_segment = int.from_bytes(table[32:40], "big")
        for slot, at in enumerate(range(4096, len(table), 160)):
            length = int.from_bytes(table[at + 20 : at + 24], "big")
            if length and table[at + 24 : at + 24 + length] == key:
                segment, place = divmod(slot, per_segment)
                return self.directory(where) / f"segment-{segment:05d}.kv", place * SLOT_BYTES
        return None

    def raw_get(self, where: Path, key: bytes) -> bytes | None:
        place = self.place_of(where, key)
        if place is None:
            return None
        path, offset = place
        return path.read_bytes()[offset + 4096 : offset + SLOT_BYTES]

    def raw_put(self, where: Path, key: bytes, payload: bytes) -> None:
        """Into the third slot of a segment of four, beside a table made for that."""
        directory = self.directory(where)
        directory.mkdir(parents=True)
        sizes = struct.pack(">IIQQQ", 1, 160, len(payload), SLOT_BYTES, 4)
        fields = b"KVTSLOTS" + sizes + DIGEST
        header = (fields + xxhash.xxh3_64_digest(fields)).ljust(4096, b"\0")
        record = struct.pack(">qII128s8x", 1_700_000_000_000_000, 2, len(key), key)
        check = xxhash.xxh3_64_digest(record, xxhash.xxh3_64_intdigest(header))
        (directory / "table").write_bytes(header + bytes(320) + check + record + bytes(160))
        frame = b"KVTCHUNK" + struct.pack(">IIQ", 1, len(key), len(payload)) + DIGEST + key
        covered = frame.ljust(4080, b"\0")
        frame = covered + xxhash.xxh3_128_digest(covered + payload) + payload
        content = bytes(2 * SLOT_BYTES) + frame + bytes(SLOT_BYTES)
        (directory / "segment-00000.kv").write_bytes(content)

    def raw_damage(self, where: Path, key: bytes) -> None:
        place = self.place_of(where, key)
        assert place is not None
        path, offset = place
        with path.open("r+b") as file:
            file.seek(offset + 4096 + 1234)
            (byte,) = file.read(1)
            file.seek(offset + 4096 + 1234)
            file.write(bytes([byte ^ 1]))


def _engine(name: str) -> ChunkIo:
    try:
        return open_engine(name)  # type: ignore[arg-type]
    except EngineUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
class TestPortable(SegmentContract):
    def engine(self) -> ChunkIo:
        return _engine("portable")


@pytest.mark.slow
class TestThreads(SegmentContract):
    def engine(self) -> ChunkIo:
        return _engine("threads")


class TestUring(SegmentContract):
    def engine(self) -> ChunkIo:
        return _engine("uring")


def test_every_engine_is_tried() -> None:
    tried = {f"Test{engine.capitalize()}" for engine in ENGINES}
    assert tried <= set(globals())
