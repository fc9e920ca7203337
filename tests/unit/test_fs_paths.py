"""Keys become paths and paths become keys, one to one; anything else is nobody's chunk."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.keys import chunk_key
from tiering.tiers.disk.paths import FsPaths, is_shard, key_of, parse_directory, place_of

PATHS = FsPaths(Path("/root"), "org_model_0123456789ab", 2)


@given(block_hash=st.binary(min_size=1, max_size=124), group=st.integers(0, (1 << 32) - 1))
def test_a_keys_place_tells_the_key(block_hash: bytes, group: int) -> None:
    key = chunk_key(block_hash, group)
    rank_dir, shard, group_dir, file = PATHS.chunk(key).rsplit("/", 3)
    assert rank_dir == "/root/org_model_0123456789ab_r2"
    assert is_shard(shard)
    assert key_of(shard, group_dir, file) == key
    assert len(file) <= 255
    assert PATHS.condemned(key).parent == PATHS.quarantine
    assert len(PATHS.condemned(key).name) <= 255


@pytest.mark.parametrize(
    "place",
    [
        "abc/de_g0/abcdef01.tmp",
        "abc/de_g0/abcdef0.bin",
        "abc/de_g0/ABCDEF01.bin",
        "abc/de_g0/.bin",
        "abd/de_g0/abcdef01.bin",
        "abc/df_g0/abcdef01.bin",
        "abc/de_g00/abcdef01.bin",
        "abc/de_g4294967296/abcdef01.bin",
        "abc/de/abcdef01.bin",
        f"abc/de_g0/abcde{'0' * 245}.bin",
    ],
)
def test_a_place_that_no_key_has_holds_no_chunk(place: str) -> None:
    assert key_of("abc", "de_g0", "abcdef01.bin") is not None
    assert key_of(*place.split("/")) is None


@pytest.mark.parametrize("name", ["tmp", "quarantine", "ABC", "abcd", "a", "..", ""])
def test_only_shards_are_shards(name: str) -> None:
    assert not is_shard(name)


def test_directories_say_what_they_are() -> None:
    ours = parse_directory("org_model_r1_0123456789ab_r12")
    assert ours is not None
    assert (ours.namespace, ours.model) == ("org_model_r1_0123456789ab", "org_model_r1")
    assert (ours.digest, ours.rank) == ("0123456789ab", 12)
    config = parse_directory("m_0123456789ab")
    assert config is not None
    assert config.rank is None
    for other in ("lost+found", "m_0123456789a", "m_0123456789ab_rx", "m_0123456789ab_r1.old"):
        assert parse_directory(other) is None


@pytest.mark.slow
def test_a_million_chunks_make_no_large_directory() -> None:
    """By their names alone, which is all that decides; hashes are as good as random."""
    chance = random.Random(7)
    above: Counter[str] = Counter()
    leaves: Counter[str] = Counter()
    for _ in range(1_000_000):
        leaf = place_of(chance.randbytes(32) + b"\0\0\0\0").rpartition("/")[0]
        if leaf not in leaves:
            above[leaf.partition("/")[0]] += 1
        leaves[leaf] += 1
    assert len(above) <= 4096
    assert max(above.values()) <= 4096
    assert max(leaves.values()) <= 4096
