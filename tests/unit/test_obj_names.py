"""Objects are called by key, and nothing outside the prefix can be meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.keys import KEY_BYTES_MAX, by_group
from tiering.testing.examples import key_number
from tiering.tiers.disk.paths import why_not_a_key
from tiering.tiers.obj.names import ObjNames

NAMES = ObjNames("kv/prod", "model_0123456789ab", 3)


def test_a_chunk_lies_below_its_namespace_and_rank() -> None:
    key = bytes.fromhex("abcdef0123") + (7).to_bytes(4, "big")
    assert NAMES.chunk(key) == "kv/prod/model_0123456789ab_r3/abc/de_g7/abcdef0123.bin"
    assert NAMES.config == "kv/prod/model_0123456789ab/config.json"
    assert NAMES.lease == "kv/prod/model_0123456789ab/lease.json"


def test_without_a_prefix_names_begin_with_the_namespace() -> None:
    names = ObjNames("", "model_0123456789ab", 0)
    assert names.chunk(key_number(1)).startswith("model_0123456789ab_r0/")
    assert names.config == "model_0123456789ab/config.json"


@given(key=st.binary(min_size=5, max_size=KEY_BYTES_MAX))
def test_a_name_says_its_key(key: bytes) -> None:
    name = NAMES.chunk(key)
    assert NAMES.key_of(name) == key
    assert ".." not in name
    assert name.startswith(NAMES.chunks)


@given(key=st.binary(max_size=200))
def test_what_is_no_key_has_no_name(key: bytes) -> None:
    if why_not_a_key(key):
        with pytest.raises(ValueError, match="a key has"):
            NAMES.chunk(key)
    else:
        assert NAMES.chunk(key)


@pytest.mark.parametrize(
    "name",
    [
        NAMES.config,
        NAMES.chunks,
        "kv/prod/model_0123456789ab_r4/abc/de_g7/abcdef0123.bin",
        "kv/prod/model_0123456789ab_r3/abc/de_g7/abcdef0124/more.bin",
        "kv/prod/model_0123456789ab_r3/abd/de_g7/abcdef0123.bin",
        "kv/prod/model_0123456789ab_r3/abc/de_g07/abcdef0123.bin",
        "kv/prod/model_0123456789ab_r3/abc/de_g7/ABCDEF0123.bin",
        "kv/prod/model_0123456789ab_r3/abc/de_g7/abcdef0123.tmp",
        "kv/prod/model_0123456789ab_r3/abcdef0123.bin",
    ],
)
def test_what_no_chunk_is_called_is_no_chunk(name: str) -> None:
    assert NAMES.key_of(name) is None


@pytest.mark.parametrize("prefix", ["/kv", "kv/", "kv//prod", "..", "kv/../..", "./kv"])
def test_a_prefix_cannot_climb(prefix: str) -> None:
    with pytest.raises(ValueError, match="a prefix has no"):
        ObjNames(prefix, "model_0123456789ab", 0)


def test_chains_are_the_groups_in_order() -> None:
    keys = [key_number(i, group=i % 2) for i in range(6)]
    assert by_group(keys) == [keys[::2], keys[1::2]]
