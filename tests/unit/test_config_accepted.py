"""Settings that are accepted: what they mean, how they add up, and that they stay as given."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tiering.config import (
    ConnectorConfig,
    FsTierConfig,
    PressureConfig,
    StoreConfig,
    UserTierConfig,
    effective,
    parse,
    settings,
)
from tiering.config.given import as_given
from tiering.errors import ConfigError

GIB = 1 << 30
FS = {"type": "fs", "root_dir": "/mnt/kv"}
BUCKET = {"type": "obj", "store_config": {"bucket": "kv", "endpoint_override": "host:1"}}
LAYOUT = {"layers": 2, "kv_heads": 1, "head_dim": 64, "block_tokens": 16}


def connector(**keys: object) -> dict[str, object]:
    return {"cpu_bytes_to_use": GIB, **keys}


def tier(**keys: object) -> dict[str, object]:
    return connector(secondary_tiers=[{**FS, **keys}])


@pytest.mark.parametrize(
    ("keys", "tokens_per_block", "blocks"),
    [
        ({}, 16, 1),
        ({"blocks_per_chunk": 4}, 16, 4),
        ({"block_size": 64}, 16, 4),
        ({"block_size": 16}, 16, 1),
    ],
)
def test_the_blocks_in_a_chunk(keys: dict[str, Any], tokens_per_block: int, blocks: int) -> None:
    config = ConnectorConfig(cpu_bytes_to_use=GIB, **keys)
    assert config.blocks_in_chunk(tokens_per_block) == blocks


@pytest.mark.parametrize(
    ("block_size", "tokens_per_block", "near"), [(60, 16, 64), (8, 16, 16), (33, 16, 32)]
)
def test_a_chunk_of_part_of_a_block_is_refused(
    block_size: int, tokens_per_block: int, near: int
) -> None:
    config = ConnectorConfig(cpu_bytes_to_use=GIB, block_size=block_size)
    with pytest.raises(ConfigError) as caught:
        config.blocks_in_chunk(tokens_per_block)
    assert caught.value.path == "kv_connector_extra_config.block_size"
    assert caught.value.value == block_size
    assert f"{tokens_per_block} tokens" in caught.value.reason
    assert caught.value.remedy == f"write {near}"
    fixed = ConnectorConfig(cpu_bytes_to_use=GIB, block_size=near)
    assert fixed.blocks_in_chunk(tokens_per_block) == near // tokens_per_block


def test_groups_of_other_block_sizes_have_chunks_of_as_many_tokens_or_of_as_many_blocks() -> None:
    by_tokens = ConnectorConfig(cpu_bytes_to_use=GIB, block_size=96)
    assert [by_tokens.blocks_in_chunk(tokens) for tokens in (16, 32, 96)] == [6, 3, 1]
    with pytest.raises(ConfigError, match="not a multiple of the 64 tokens"):
        by_tokens.blocks_in_chunk(64)
    by_blocks = ConnectorConfig(cpu_bytes_to_use=GIB, blocks_per_chunk=2)
    assert [by_blocks.blocks_in_chunk(tokens) for tokens in (16, 32, 96)] == [2, 2, 2]


def test_a_configuration_for_vllms_own_specs_is_taken_as_it_is() -> None:
    for name in ("CPUOffloadingSpec", "TieringOffloadingSpec", "TieredOffloadingSpec"):
        assert parse(ConnectorConfig, connector(spec_name=name)).spec_name == name
    entries = {"spec_name": "TieringOffloadingSpec", "spec_module_path": "vllm.x", **tier()}
    assert parse(ConnectorConfig, entries).spec_module_path == "vllm.x"


@pytest.mark.parametrize(
    ("loop", "tiers", "in_process"),
    [
        ("auto", [FS], False),
        ("auto", [FS, BUCKET], True),
        ("thread", [BUCKET], False),
        ("process", [FS], True),
        ("process", [], False),
        ("auto", [], False),
    ],
)
def test_where_the_loop_is(loop: str, tiers: list[object], in_process: bool) -> None:
    data = connector(loop=loop, secondary_tiers=tiers)
    assert parse(ConnectorConfig, data).loop_in_process is in_process


def test_pressure_is_off_unless_it_is_configured() -> None:
    assert pressures_on(tier()) == [None]
    for keys in ({"backpressure": {}}, {"secondary_tiers": [{**FS, "backpressure": {}}]}):
        assert pressures_on({**tier(), **keys}) == [PressureConfig()]


def test_a_tiers_pressure_goes_before_the_engines_key_by_key() -> None:
    entries = [
        {**FS, "backpressure": {"low_water_s": 0.3, "alpha": 0.5}},
        {**FS, "root_dir": "/mnt/b"},
    ]
    engines = {"high_water_s": 0.4, "low_water_s": 0.1, "cooldown_s": 7.0}
    first, second = pressures_on(connector(secondary_tiers=entries, backpressure=engines))
    assert first is not None
    assert first.watermarks("LOCAL") == (0.4, 0.3)
    assert (first.alpha, first.cooldown_s) == (0.5, 7.0)
    assert second == PressureConfig(**engines)


def test_the_watermarks_of_pressure_depend_on_where_the_tier_is() -> None:
    assert PressureConfig().watermarks(None) == PressureConfig().watermarks("LOCAL")
    assert PressureConfig().watermarks("LOCAL") == pytest.approx((0.01, 0.002))
    assert PressureConfig().watermarks("REMOTE") == pytest.approx((0.05, 0.01))
    assert PressureConfig(high_water_s=1.0).watermarks("REMOTE") == pytest.approx((1.0, 0.2))


def test_vllms_own_classes_of_pressure_may_be_named_in_full() -> None:
    where = "vllm.v1.kv_offload.tiering.backpressure."
    keys = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}
    in_full = {key: where + name for key, name in keys.items()}
    assert parse(PressureConfig, in_full) == parse(PressureConfig, keys)


def pressures_on(data: dict[str, object]) -> list[PressureConfig | None]:
    config = parse(ConnectorConfig, data)
    return [config.pressure_on(tier) for tier in config.secondary_tiers]


def test_no_tokens_in_a_block_is_the_callers_fault() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        ConnectorConfig(cpu_bytes_to_use=GIB).blocks_in_chunk(0)


def test_every_value_in_effect_says_where_it_comes_from() -> None:
    data = {"layout": LAYOUT, "cpu_bytes_to_use": GIB, "secondary_tiers": [FS]}
    told = {path: (value, origin) for path, value, origin in effective(parse(StoreConfig, data))}
    assert told["cpu_bytes_to_use"] == (GIB, "set")
    assert told["eviction_policy"] == ("lru", "default")
    assert told["secondary_tiers[0].root_dir"] == ("/mnt/kv", "set")
    assert told["secondary_tiers[0].n_read_threads"] == (16, "default")
    assert told["layout.layers"] == (2, "set")
    assert told["layout.dtype"] == ("bfloat16", "default")
    assert "layout" not in told
    assert told["backpressure"] == (None, "default")
    pressed = effective(parse(ConnectorConfig, tier(backpressure={"alpha": 0.5})))
    assert ("secondary_tiers[0].backpressure.alpha", 0.5, "set") in pressed
    assert ("secondary_tiers[0].backpressure.cooldown_s", 1.0, "default") in pressed
    no_tiers = effective(parse(ConnectorConfig, connector(secondary_tiers=[])))
    assert ("secondary_tiers", (), "set") in no_tiers


def test_every_key_is_described_with_an_example_that_is_valid() -> None:
    for model_class, needed in (
        (ConnectorConfig, connector()),
        (StoreConfig, {"cpu_bytes_to_use": GIB, "layout": LAYOUT}),
        (FsTierConfig, {**FS, "max_bytes": GIB}),
        (UserTierConfig, {"type": "Mine", "module_path": "m"}),
        (PressureConfig, {}),
        (settings.LayoutKeys, LAYOUT),
    ):
        for name, field in model_class.model_fields.items():
            assert field.description, name
            assert field.examples, name
            parse(model_class, {**needed, name: field.examples[0]})


directories = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).map(
    lambda text: "/" + text
)
several = st.lists(
    directories, min_size=1, max_size=3, unique_by=lambda path: os.path.normpath(path).lstrip("/")
)
pressures = st.fixed_dictionaries(
    {},
    optional={
        "policy_cls": st.sampled_from(["ThrottledDropPolicy", "DropStorePolicy"]),
        "high_water_s": st.floats(1, 9),
        "low_water_s": st.floats(0, 1),
        "alpha": st.floats(0, 1, exclude_min=True),
        "warmup_completions": st.integers(0, 100),
        "decay_half_life_s": st.floats(0.1, 99),
        "cooldown_s": st.floats(0, 99),
    },
).filter(lambda keys: "high_water_s" in keys or "low_water_s" not in keys)
fs_tiers = st.fixed_dictionaries(
    {"type": st.just("fs"), "root_dir": directories | several},
    optional={
        "n_read_threads": st.integers(1, 1024),
        "n_write_threads": st.integers(1, 1024),
        "enable_kv_events": st.booleans(),
        "locality": st.sampled_from(["LOCAL", "REMOTE", None]),
        "max_bytes": st.integers(1, 1 << 62) | st.none(),
        "min_free_bytes": st.integers(0, 1 << 62) | st.none(),
        "durability": st.sampled_from(["none", "close", "batch"]),
        "read_path": st.sampled_from(["auto", "direct", "buffered"]),
        "io_engine": st.sampled_from(["auto", "uring", "threads", "portable"]),
        "backpressure": pressures,
    },
)
user_tiers = st.fixed_dictionaries(
    {"type": st.just("Mine"), "module_path": st.just("my_package"), "size": st.integers()},
    optional={
        "locality": st.sampled_from(["LOCAL", "REMOTE", None]),
        "nested": st.dictionaries(st.sampled_from("ab"), st.integers() | st.none()),
        "backpressure": pressures,
    },
)
connector_configs = st.fixed_dictionaries(
    {"cpu_bytes_to_use": st.integers(1, (1 << 63) - 1)},
    optional={
        "secondary_tiers": st.lists(fs_tiers, max_size=1) | st.lists(user_tiers, max_size=2),
        "eviction_policy": st.sampled_from(["lru", "arc"]),
        "cache_policy_module_path": st.sampled_from([None, "my_package.my_module"]),
        "store_threshold": st.integers(0, 9),
        "max_tracker_size": st.integers(1, 1 << 30),
        "self_describing_kv_events": st.booleans(),
        "kernel_below_bytes": st.integers(0, 1 << 30),
        "canonical_layout": st.just(False),
        "loop": st.sampled_from(["auto", "thread", "process"]),
        "spec_name": st.sampled_from([None, "TieringOffloadingSpec", "TieredOffloadingSpec"]),
        "spec_module_path": st.sampled_from([None, "my_package.my_module"]),
        "load_deadline_seconds": st.floats(0, 86400, exclude_min=True),
        "blocks_per_chunk": st.integers(1, 1 << 24),
        "offload_prompt_only": st.booleans(),
    },
)


@pytest.mark.slow
@hypothesis_settings(deadline=None)
@given(connector_configs)
def test_what_is_accepted_stays_as_it_was_given(data: dict[str, object]) -> None:
    config = parse(ConnectorConfig, data)
    assert config == parse(ConnectorConfig, json.dumps(data))
    given_again = json.loads(config.model_dump_json(exclude_unset=True))
    assert given_again == data
    whole = config.model_dump(mode="json")
    assert parse(ConnectorConfig, whole) == config
    assert parse(ConnectorConfig, json.dumps(as_given(config))) == config
    assert len({path for path, _, _ in effective(config)}) == len(effective(config))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
models = (ConnectorConfig, FsTierConfig, UserTierConfig, PressureConfig)
names = st.sampled_from([name for model in models for name in model.model_fields]) | st.text()
objects = st.dictionaries(names, json_values | st.lists(st.dictionaries(names, json_values)))


@pytest.mark.slow
@hypothesis_settings(deadline=None)
@given(objects)
def test_whatever_is_given_is_settings_or_a_config_error(data: dict[str, object]) -> None:
    for model_class in (ConnectorConfig, StoreConfig):
        with contextlib.suppress(ConfigError):
            assert isinstance(parse(model_class, data), model_class)
