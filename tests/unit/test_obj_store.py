"""A program's store over a bucket: made from its settings, and what goes wrong ends at its keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3_servers import ACCESS_KEY, SECRET_KEY, Served
from scripted_s3 import ScriptedS3
from tiering import BucketConfig, ConfigError, KVLayout, ObjTierConfig, StoreConfig, TieredStore
from tiering.clock import MonotonicClock
from tiering.config import ConnectorConfig, EngineConfig
from tiering.layout import RowLayout
from tiering.testing.examples import CHUNK_BYTES, example_namespace
from tiering.testing.memory import MemoryTier
from tiering.tiers.wrappers.guarded import GuardedTier
from tiering.tiers.wrappers.metered import MeteredTier
from tiering.wiring import build_catalogues, build_tiers

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=16, block_tokens=16)
ROW = RowLayout(LAYOUT.chunk_bytes).row_bytes
OBJECT_BYTES = 4096 + CHUNK_BYTES
CLOCK = MonotonicClock()


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as scripted:
        yield scripted


def bucket(endpoint: str = "127.0.0.1:1") -> BucketConfig:
    return BucketConfig(**Served(endpoint).store_config())


def store_of(server: ScriptedS3, **keys: object) -> TieredStore:
    tier = ObjTierConfig(store_config=bucket(server.endpoint), prefix="team/kv", **keys)
    bytes_of_host = 4096 + 16 * ROW
    return TieredStore(
        StoreConfig(layout=LAYOUT, cpu_bytes_to_use=bytes_of_host, secondary_tiers=(tier,))
    )


def engine(*tiers: ObjTierConfig) -> EngineConfig:
    return EngineConfig(cpu_bytes_to_use=1 << 20, secondary_tiers=tiers)


def pages(keys: list[bytes]) -> list[bytes]:
    """Every page stamped with its key."""
    return [(key * (LAYOUT.chunk_bytes // len(key) + 1))[: LAYOUT.chunk_bytes] for key in keys]


async def test_what_one_program_saves_another_loads(server: ScriptedS3) -> None:
    keys = LAYOUT.keys(list(range(6 * LAYOUT.chunk_tokens)))
    async with store_of(server) as store:
        await store.save(keys, pages(keys))
        await store.flush()
    before = server.count()
    async with store_of(server) as other:
        assert await other.match(keys) == 6
        async with other.load(keys) as loaded:
            assert [bytes(loaded.view(at)) for at in range(loaded.found)] == pages(keys)
        (counted,) = other.stats().tiers.values()
        assert counted["reads_hit"] == counted["requests_get"] - 1 == 6
    asked = server.count() - before
    assert asked["get"] == 7  # and config.json
    assert (asked["head"], asked["put"]) == (0, 0)
    assert asked["list"] == 2  # the probe, and the whole bucket


def test_tiers_are_named_by_bucket_and_prefix() -> None:
    tiers = build_tiers(
        engine(
            ObjTierConfig(store_config=bucket(), prefix="/team/kv/", backpressure={}),
            ObjTierConfig(store_config=bucket()),
        ),
        example_namespace(),
        CHUNK_BYTES,
    )
    assert [tier.name for tier in tiers] == ["obj:bucket/team/kv", "obj:bucket"]
    assert repr(tiers[0]).startswith("<MeteredTier <GuardedTier loads closed")
    assert "<PressureTier at ease: <ObjTier team/kv/" in repr(tiers[0])


def test_two_tiers_in_one_place_are_refused() -> None:
    tier = ObjTierConfig(store_config=bucket(), prefix="kv")
    with pytest.raises(ConfigError, match=r"obj:bucket/kv.*the name of 2"):
        build_tiers(engine(tier, tier), example_namespace(), CHUNK_BYTES)


def test_less_than_a_chunk_is_no_bound() -> None:
    def built(max_bytes: int) -> object:
        tier = ObjTierConfig(store_config=bucket(), max_bytes=max_bytes)
        return build_tiers(engine(tier), example_namespace(), CHUNK_BYTES)

    assert built(OBJECT_BYTES)
    with pytest.raises(ConfigError, match=f"one chunk of {OBJECT_BYTES} bytes") as refused:
        built(OBJECT_BYTES - 1)
    assert refused.value.path == "secondary_tiers[0].max_bytes"


def test_events_of_a_bucket_have_no_catalogue() -> None:
    tier = ObjTierConfig(store_config=bucket(), enable_kv_events=True)
    assert build_catalogues(engine(tier), example_namespace()) == {}


def test_the_guides_example_is_valid() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "object-store.md").read_text()
    (example,) = re.findall(r"^```json connector\n(.*?)^```", guide, re.M | re.S)
    config = ConnectorConfig.model_validate(json.loads(example))
    (tier,) = build_tiers(config, example_namespace(), CHUNK_BYTES)
    assert tier.name == "obj:kv-cache/team/kv"


async def test_the_guide_explains_every_count(server: ScriptedS3) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "object-store.md").read_text()
    section = guide.split("## Watching it")[1].split("\n## ")[0]
    told = set(re.findall(r"`(\w+)`", section))
    tier = ObjTierConfig(store_config=bucket(server.endpoint), max_bytes=1 << 20)
    (built,) = build_tiers(engine(tier), example_namespace(), CHUNK_BYTES)
    await built.open()
    counted = set(built.stats())
    await built.close()
    others = set(MeteredTier(GuardedTier(MemoryTier(), CLOCK), 1, CLOCK).stats())
    assert {name.removeprefix("now_") for name in counted - others} <= told


async def test_a_bucket_that_is_not_there_ends_the_start_at_its_key(server: ScriptedS3) -> None:
    tier = ObjTierConfig(
        store_config=BucketConfig(**Served(server.endpoint).store_config() | {"bucket": "another"})
    )
    (built,) = build_tiers(engine(tier), example_namespace(), CHUNK_BYTES)
    with pytest.raises(ConfigError) as refused:
        await built.open()
    assert refused.value.path == "secondary_tiers[0].store_config.bucket"
    assert not {ACCESS_KEY, SECRET_KEY} & set(str(refused.value).split())
    await built.close()
