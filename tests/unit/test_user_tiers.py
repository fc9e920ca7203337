"""Tiers of the user's own: named in the settings, made, guarded, and told what is wrong with them.

The one of docs/examples is the complete example; it owes what every tier owes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import xxhash

from tiering.config import ConnectorConfig, EngineConfig, UserTierConfig, effective, parse
from tiering.errors import ConfigError, TierError
from tiering.testing.contract import TierContract
from tiering.testing.examples import CHUNK_BYTES, example_namespace, key_number, stored
from tiering.testing.memory import MemoryTier
from tiering.tiers.base import Read, Tier
from tiering.tiers.wrappers.guarded import GuardedTier
from tiering.tiers.wrappers.pressure import PressureTier
from tiering.wiring import build_tiers

Wrapped = TypeVar("Wrapped", bound=Tier)

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NAMESPACE = example_namespace()
OWN = """
from tiering.errors import ConfigError
from tiering.testing.memory import MemoryTier
from tiering.tiers.base import Tier

class Kept(MemoryTier):
    def __init__(self, namespace, chunk_bytes, **keys):
        super().__init__(name=keys.pop("name", "kept"))
        self.namespace, self.chunk_bytes, self.keys = namespace, chunk_bytes, keys

class Picky(Kept):
    def __init__(self, namespace, chunk_bytes, *, bucket):
        if bucket == "no":
            raise ConfigError("bucket", bucket, "is not yours", "ask for it")
        raise OSError(f"no such bucket: {bucket}")

class Nameless(Kept):
    name = ""

class Silent(Kept):
    @property
    def name(self):
        raise RuntimeError("not yet")

class Half(Tier):
    async def open(self): ...

class SecondaryTierManager:
    __module__ = "vllm.v1.kv_offload.tiering.base"

class Vllms(SecondaryTierManager): ...
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"tiers_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def config(*entries: dict[str, object], **more: object) -> ConnectorConfig:
    return parse(ConnectorConfig, {"cpu_bytes_to_use": 1, "secondary_tiers": entries, **more})


def built(config: EngineConfig) -> list[Tier]:
    return build_tiers(config, NAMESPACE, CHUNK_BYTES)


def own(kind: str, module: str, **keys: object) -> dict[str, object]:
    return {"type": kind, "module_path": module, **keys}


def inside(tier: object, kind: type[Wrapped]) -> Wrapped:
    """The wrapper of that kind, however deep it is."""
    while not isinstance(tier, kind):
        tier = tier._inner  # type: ignore[attr-defined]
    return tier


@contextmanager
def database_of(where: Path) -> Iterator[sqlite3.Connection]:
    """What a test does there is one transaction."""
    with closing(sqlite3.connect(where / "kv.db")) as database, database:
        yield database


@pytest.mark.slow
class TestExampleTier(TierContract):
    """The example, as the settings make it."""

    @pytest.fixture(autouse=True)
    def _on_the_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(EXAMPLES)

    def make_tier(self, where: Path) -> Tier:
        where.mkdir(exist_ok=True)
        (tier,) = built(config(own("SqliteTier", "own_tier", path=str(where / "kv.db"))))
        return tier

    def raw_get(self, where: Path, key: bytes) -> bytes | None:
        with database_of(where) as database:
            found = database.execute("SELECT payload FROM chunks WHERE key = ?", (key,)).fetchall()
        return found[0][0] if found else None

    def raw_put(self, where: Path, key: bytes, payload: bytes) -> None:
        row = (NAMESPACE.digest, key, payload, xxhash.xxh3_128_digest(payload))
        with database_of(where) as database:
            database.execute("INSERT INTO chunks VALUES (?, ?, ?, ?)", row)

    def raw_damage(self, where: Path, key: bytes) -> None:
        payload = self.raw_get(where, key)
        assert payload is not None
        with database_of(where) as database:
            bad = bytes([payload[0] ^ 1]) + payload[1:]
            database.execute("UPDATE chunks SET payload = ? WHERE key = ?", (bad, key))

    async def test_another_models_chunks_are_not_seen(self, tmp_path: Path) -> None:
        entries = config(own("SqliteTier", "own_tier", path=str(tmp_path / "kv.db")))
        async with self.opened(tmp_path) as tier:
            await stored(tier, [key_number(1)])
        (other,) = build_tiers(entries, example_namespace(model="another"), CHUNK_BYTES)
        await other.open()
        assert await other.contains([key_number(1)]) == [Read.MISS]
        await other.close()


def test_it_is_made_with_the_namespace_the_size_and_its_own_keys(own_module: str) -> None:
    keys = {"name": "mine", "size": 3, "nested": {"a": [1, None]}, "root_dir": "relative"}
    handled = {"enable_kv_events": True, "locality": "REMOTE", "backpressure": {}}
    (tier,) = built(config(own("Kept", own_module, **keys, **handled)))
    assert tier.name == "mine"
    inner = inside(inside(tier, GuardedTier), PressureTier)._inner
    assert isinstance(inner, MemoryTier)
    assert vars(inner)["namespace"] == NAMESPACE
    assert vars(inner)["chunk_bytes"] == CHUNK_BYTES
    assert vars(inner)["keys"] == {"size": 3, "nested": {"a": [1, None]}, "root_dir": "relative"}


async def test_one_that_fails_is_left_alone_like_any_other(own_module: str) -> None:
    (tier,) = built(config(own("Kept", own_module)))
    await tier.open()
    inside(tier, MemoryTier).errors["contains"] = TierError("kept", None, "gone")
    for _ in range(20):
        try:
            await tier.contains([key_number(1)])
        except TierError:
            continue
    assert tier.stats()["trips"] == 1
    await tier.close()


def test_it_stands_beside_others_in_the_order_given(own_module: str) -> None:
    tiers = built(
        config(
            own("Kept", own_module, name="first"),
            {"type": "fs", "root_dir": "/mnt/kv"},
            own("Kept", own_module, name="last"),
        )
    )
    assert [tier.name for tier in tiers] == ["first", "fs:/mnt/kv", "last"]


@pytest.mark.parametrize(
    ("kind", "keys", "key", "reason"),
    [
        ("Picky", {"bucket": "b"}, "type", "cannot be made: OSError: no such bucket: b"),
        ("Picky", {}, "type", "missing 1 required keyword-only argument: 'bucket'"),
        ("Picky", {"bucket": "b", "x": 1}, "type", "unexpected keyword argument 'x'"),
        ("Nameless", {}, "type", "has an empty name"),
        ("Silent", {}, "type", "RuntimeError: not yet"),
        ("Half", {}, "type", "leaves out close, contains, delete, name, read, scan, stats, touch"),
        ("Vllms", {}, "type", "is written for vLLM's own contract; the one here is Tier"),
        ("Missing", {}, "type", "is not there in the module"),
    ],
)
def test_what_is_wrong_with_it_is_told_with_its_place(
    own_module: str, kind: str, keys: dict[str, object], key: str, reason: str
) -> None:
    entries = config({"type": "fs", "root_dir": "/mnt/kv"}, own(kind, own_module, **keys))
    with pytest.raises(ConfigError) as caught:
        built(entries)
    assert caught.value.path == f"secondary_tiers[1].{key}"
    assert caught.value.value == kind
    assert reason in caught.value.reason


def test_a_module_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\].module_path = 'no.such': cannot"):
        built(config(own("Kept", "no.such")))


def test_its_own_problem_with_a_key_is_told_as_its_own(own_module: str) -> None:
    with pytest.raises(ConfigError, match=r"^bucket = 'no': is not yours; ask for it$"):
        built(config(own("Picky", own_module, bucket="no")))


def test_two_of_one_name_are_refused(own_module: str) -> None:
    with pytest.raises(ConfigError, match=r"^secondary_tiers = 'kept': is the name of 2 of them"):
        built(config(own("Kept", own_module), own("Kept", own_module)))


def test_without_a_path_the_type_must_be_known() -> None:
    with pytest.raises(ConfigError) as caught:
        config({"type": "Kept"})
    assert caught.value.path == "secondary_tiers[0].type"
    assert caught.value.remedy == (
        "write one of 'fs', 'obj', 'p2p'; a class of your own needs module_path, too"
    )
    with pytest.raises(ConfigError, match="write 'fs' if that is meant"):
        config({"type": "ffs"})


def test_a_built_in_type_takes_no_path() -> None:
    with pytest.raises(ConfigError, match=r"module_path = 'a.module': .* this type is built in$"):
        config({"type": "fs", "root_dir": "/mnt/kv", "module_path": "a.module"})


def test_a_type_of_vllms_can_be_ones_own() -> None:
    (tier,) = config(own("kvcr", "a.module", host="kv")).secondary_tiers
    assert tier == UserTierConfig(type="kvcr", module_path="a.module", host="kv")


def test_its_secrets_are_shown_nowhere() -> None:
    keys = {"secret_key": "hunter2", "store": {"password": "hunter2"}, "urls": ["a://b:hunter2@c"]}
    given = config(own("Kept", "a.module", **keys, size=3))
    (tier,) = given.secondary_tiers
    assert isinstance(tier, UserTierConfig)
    assert tier.own_keys == {**keys, "size": 3}
    told = {path: value for path, value, _ in effective(given)}
    assert told["secondary_tiers[0].size"] == 3
    assert told["secondary_tiers[0].secret_key"] == "(hidden)"
    for shown in (repr(given), given.model_dump_json(), json.dumps(given.model_dump()), str(told)):
        assert "hunter2" not in shown
        assert "size" in shown
