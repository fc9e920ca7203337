"""What differs between versions of vLLM, and the seed of its hashes, told without vLLM."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import ModuleType, SimpleNamespace

import pytest

from tiering_connectors.vllm import versions
from tiering_connectors.vllm.hashing import RANDOM, UNKNOWN, hash_seed_digest, hash_warning

TABLE = ([3, 5], [7])


def test_a_version_that_was_not_tested_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tiering"):
        assert not versions.warn_untested("0.32.0+cpu")
        assert not versions.warn_untested("0.29.1")
        assert versions.warn_untested("0.320.0")
        assert versions.warn_untested("0.3")
        assert not versions.warn_untested("0.320.0")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "0.29, 0.31, 0.32, this is 0.320.0" in told[0]


def test_block_tables_come_from_a_copy_or_on_demand() -> None:
    old = SimpleNamespace(block_ids={"a": TABLE})
    new = SimpleNamespace(get_block_ids={"a": TABLE}.get)
    for state in (old, new):
        assert versions.block_tables(state, "a") == TABLE
        assert versions.block_tables(state, "b") is None
    assert versions.block_tables(None, "a") is None


def test_what_older_versions_do_not_say() -> None:
    assert versions.tokens_per_hash(None, SimpleNamespace(hash_block_size=16)) == 16
    assert versions.is_host_resident(SimpleNamespace(host_resident=True))
    assert not versions.is_host_resident(SimpleNamespace())


@pytest.fixture
def hashes_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[str]], None]:
    """A vLLM that draws its seeds from what it is given."""

    def install(seeds: Iterator[str]) -> None:
        for name in ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.core"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        hashing = ModuleType("vllm.utils.hashing")
        hashing.__dict__["get_hash_fn_by_name"] = lambda name: (
            lambda seed: f"{name} {seed}".encode()
        )
        utils = ModuleType("vllm.v1.core.kv_cache_utils")
        utils.__dict__["resolve_none_hash_seed"] = lambda hash_of: next(seeds)
        for module in (hashing, utils):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def test_equal_seeds_have_equal_digests(
    hashes_from: Callable[[Iterator[str]], None],
) -> None:
    digests = []
    for seed in ("7", "7", "8"):
        hashes_from(iter([seed] * 2))
        digests.append(hash_seed_digest("sha256"))
    assert digests[0] == digests[1] != digests[2]
    assert [len(digest) for digest in digests] == [64] * 3
    hashes_from(iter(["7"] * 2))
    assert hash_seed_digest("sha256_cbor") != digests[0]


def test_a_seed_that_is_drawn_is_random_and_warned_of(
    hashes_from: Callable[[Iterator[str]], None],
) -> None:
    hashes_from(map(str, count()))
    digest = hash_seed_digest("xxhash")
    assert digest == RANDOM
    told = hash_warning("xxhash", digest, ["fs:/mnt/kv"])
    assert told is not None
    assert "xxhash without PYTHONHASHSEED" in told
    assert "fs:/mnt/kv" in told
    assert hash_warning("xxhash", digest, []) is None, "the host tier alone is not hurt"
    assert hash_warning("xxhash", "ab" * 32, ["fs:/mnt/kv"]) is None


def test_a_vllm_with_another_rule_is_unknown(
    hashes_from: Callable[[Iterator[str]], None],
) -> None:
    hashes_from(iter([]))
    assert hash_seed_digest("sha256") == UNKNOWN
    assert hash_warning("sha256", UNKNOWN, ["fs:/mnt/kv"]) is None
