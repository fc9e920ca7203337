"""Eviction policies by name: built in, registered, or a class of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiering
from tiering.config import EngineConfig
from tiering.errors import ConfigError
from tiering.policy import registry
from tiering.policy.arc import ArcPolicy
from tiering.policy.base import EvictionPolicy
from tiering.policy.lru import LruPolicy
from tiering.testing.clocks import ManualClock
from tiering.wiring import build_core

OWN = '''
from tiering.policy.arc import ArcPolicy
from tiering.policy.base import EvictionPolicy
from tiering.policy.lru import LruPolicy

class Newest(LruPolicy):
    """Gives up the most recent first, and remembers how many slots there are."""
    def __init__(self, capacity):
        super().__init__(capacity)
        self.capacity = capacity
    def pick(self, count, evictable):
        return super().pick(10**6, evictable)[::-1][:count]

class Unwritten(LruPolicy.__base__):
    def add(self, keys, access): ...

class Stranger:
    def __init__(self, capacity): ...

class CachePolicy:
    __module__ = "vllm.v1.kv_offload.cpu.policies.base"

class Vllms(CachePolicy):
    def insert(self, key, chunk): ...

class Refuses(LruPolicy):
    def __init__(self, capacity):
        raise RuntimeError("no room for it")

a_value = 3
'''


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"policies_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PLACES", dict(registry._PLACES))


def config(policy: str, module: str | None = None) -> EngineConfig:
    return EngineConfig(cpu_bytes_to_use=1, eviction_policy=policy, cache_policy_module_path=module)


def policy_of(policy: str, module: str | None = None) -> EvictionPolicy:
    return build_core(config(policy, module), 7, 0, ManualClock()).index._policy


def test_a_built_in_policy_is_named() -> None:
    assert type(policy_of("lru")) is LruPolicy
    assert type(policy_of("arc")) is ArcPolicy


def test_a_class_of_ones_own_decides(own_module: str) -> None:
    core = build_core(config("Newest", own_module), 2, 0, ManualClock())
    assert core.index._policy.capacity == 2  # type: ignore[attr-defined]
    for owner, key in (("1", b"a"), ("2", b"b"), ("3", b"c")):
        core.open(owner)
        core.filled(core.reserve(owner, [key], 0).slots)
    # Least recently used would have given up a.
    assert core.match([b"a"]).host == 1
    assert core.match([b"b"]).host == 0


def test_a_registered_name_needs_no_path(own_module: str) -> None:
    with pytest.raises(ConfigError, match=r"^eviction_policy = 'newest': is not the name"):
        config("newest")
    tiering.register_policy("newest", own_module, "Newest")
    assert type(policy_of("newest")).__name__ == "Newest"
    assert registry.policy_names() == ("lru", "arc", "newest")


def test_a_name_that_is_known_goes_before_the_path(own_module: str) -> None:
    tiering.register_policy("Newest", own_module, "Newest")
    assert type(policy_of("lru", "no.such.module")) is LruPolicy
    assert type(policy_of("Newest", "no.such.module")).__name__ == "Newest"


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_a_name_is_given_once(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is there already"):
        tiering.register_policy(name, "a.module", "AClass")


def test_a_wrong_name_is_told_the_nearest_or_all() -> None:
    with pytest.raises(ConfigError, match="write 'arc' if that is meant; a class of your own"):
        config("ark")
    with pytest.raises(ConfigError, match="write one of 'lru', 'arc'; a class of your own"):
        config("MyPolicy")


@pytest.mark.parametrize(
    ("policy", "module", "path", "reason", "remedy"),
    [
        ("P", "no_such_package.m", "cache_policy_module_path", "ModuleNotFoundError", "install"),
        ("P", "{own}_broken", "cache_policy_module_path", "ZeroDivisionError", "correct the path"),
        ("P", ".relative", "cache_policy_module_path", "cannot be imported", "correct the path"),
        ("Newst", "{own}", "eviction_policy", "is not there in the module", "'Newest'"),
        ("a_value", "{own}", "eviction_policy", "is no class in the module", "write one of 'Arc"),
        ("Stranger", "{own}", "eviction_policy", "is no subclass of EvictionPolicy", "add, order"),
        ("Vllms", "{own}", "eviction_policy", "is written for vLLM's own", "base.EvictionPolicy"),
        ("Unwritten", "{own}", "eviction_policy", "leaves out __init__, order, pick", "write a"),
        ("Refuses", "{own}", "eviction_policy", "RuntimeError: no room for it", "constructor"),
    ],
)
def test_what_cannot_be_a_policy_is_told_with_its_cause(
    own_module: str, policy: str, module: str, path: str, reason: str, remedy: str
) -> None:
    module = module.format(own=own_module)
    with pytest.raises(ConfigError) as caught:
        policy_of(policy, module)
    error = caught.value
    assert error.path == path
    assert error.value == (module if path == "cache_policy_module_path" else policy)
    assert reason in error.reason
    assert remedy in error.remedy
    assert "\n" not in str(error)


def test_a_registered_class_that_is_not_there_is_told_when_it_is_used(own_module: str) -> None:
    tiering.register_policy("mine", own_module, "Mine")
    with pytest.raises(ConfigError, match=r"^eviction_policy = 'Mine': is not there in the module"):
        policy_of("mine")
