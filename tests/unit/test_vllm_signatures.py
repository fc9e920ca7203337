"""The installed vLLM has all that the connector uses of it, as it uses it."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Any

import pytest

import vllm_signatures as signatures
from tiering_connectors.vllm.hashing import RANDOM, hash_seed_digest
from tiering_connectors.vllm.versions import is_tested

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM and torch say of themselves while they load
        import tiering_connectors.vllm.connector  # noqa: F401


def test_nothing_is_missing() -> None:
    assert signatures.problems() == []


def test_the_installed_version_is_one_that_is_tested() -> None:
    assert is_tested(version("vllm"))


class _Other:
    """In place of a class of vLLM's: without its fields, its methods with other parameters."""

    def build_connector_meta(self, output: object) -> None: ...

    def shutdown(self, deadline: float) -> None: ...


def test_what_is_missing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    base = f"{signatures.KV}.v1.base.KVConnectorBase_V1"
    request, blocks = "vllm.v1.request.Request", "vllm.gone.Gone"
    call = "vllm.v1.core.kv_cache_utils.resolve_none_hash_seed"
    stand_ins: dict[str, object] = {base: _Other, request: _Other, call: lambda other: None}
    found = signatures._found
    monkeypatch.setattr(signatures, "_found", lambda name: stand_ins.get(name) or found(name))
    monkeypatch.setitem(signatures.CLASSES, blocks, ())
    told = signatures.problems()
    own = signatures.CONNECTOR
    assert f"{request} has no block_hashes" in told
    assert f"{blocks} is not there" in told
    assert f"{call}(other) does not take (hash_fn)" in told
    assert f"{own}.build_connector_meta(scheduler_output): {base} has (output)" in told
    assert f"{own}.shutdown(): {base} has (deadline)" in told
    assert f"{own}.reset_cache: {base} has no such hook" in told


def test_a_hook_that_we_do_not_implement_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiering_connectors.vllm.connector import TieredConnector

    monkeypatch.setattr(TieredConnector, "__abstractmethods__", frozenset({"new_hook"}))
    (told,) = signatures.problems()
    assert "does not implement new_hook" in told


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_seed_is_the_one_that_vllm_will_use(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sets it after its connectors are made: by the same rule, so with the same outcome."""
    import hashlib

    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    utils: Any = kv_cache_utils
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    without = hash_seed_digest(algorithm)
    assert (without == RANDOM) == algorithm.startswith("xxhash")
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    seeded = hash_seed_digest(algorithm)
    assert seeded != without
    utils.init_none_hash(get_hash_fn_by_name(algorithm))
    assert seeded == hashlib.sha256(utils.NONE_HASH).hexdigest()
