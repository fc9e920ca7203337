"""docs/configuration.md: its examples are valid, and its tables have every key and default."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tiering.config import (
    EXTRA_CONFIG,
    BucketConfig,
    ConnectorConfig,
    EngineConfig,
    FsTierConfig,
    ObjTierConfig,
    P2pTierConfig,
    PressureConfig,
    StoreConfig,
    UserTierConfig,
    parse,
)
from tiering.errors import ConfigError
from tiering.layout import DTYPE_BYTES, KVLayout
from tiering.policy import registry
from tiering_connectors.vllm.params import RequestLimits, TierKind

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
FENCES = re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ROWS = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE)
KINDS: dict[str, type[BaseModel]] = {
    "connector": ConnectorConfig,
    "fs": FsTierConfig,
    "obj": ObjTierConfig,
    "p2p": P2pTierConfig,
    "bucket": BucketConfig,
    "user": UserTierConfig,
    "pressure": PressureConfig,
    "store": StoreConfig,
}
SECTION = PAGE.split("### From vLLM's guide to here")[1].split("\n## ")[0]
VLLMS = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", SECTION, re.M))
# What vLLM 0.32 knows under kv_connector_extra_config, in a tier of it, and in a request.
VLLMS_KEYS = re.findall(
    r"\w+",
    """
    spec_name spec_module_path cpu_bytes_to_use block_size blocks_per_chunk eviction_policy
    cache_policy_module_path store_threshold max_tracker_size secondary_tiers offload_prompt_only
    self_describing_kv_events canonical_layout backpressure type module_path root_dir
    n_read_threads n_write_threads enable_kv_events locality store_config prefix io_threads host
    port backends num_threads unbound_store_timeout_s max_offload_tokens max_load_tokens
    kv_load_tiers cpu_bytes_to_use_per_rank
    """,
)
EXAMPLES = [(kind, text) for language, kind, text in FENCES if language == "json"]


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_an_example_is_valid(kind: str, text: str) -> None:
    if kind == "whole":
        parse(ConnectorConfig, json.loads(text)[EXTRA_CONFIG], EXTRA_CONFIG)
    elif kind == "request":
        found = RequestLimits.of(json.loads(text), [TierKind("STORAGE", "LOCAL")])
        assert None not in (found.max_load_tokens, found.max_offload_tokens, found.load_tiers)
    else:
        parse(KINDS[kind], text)


def test_every_key_has_an_example() -> None:
    shown: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for kind, text in EXAMPLES:
        if kind in shown:
            shown[kind] |= json.loads(text).keys()
    in_store = set(StoreConfig.model_fields) - set(ConnectorConfig.model_fields)
    assert shown["connector"] == set(ConnectorConfig.model_fields)
    assert shown["fs"] == set(FsTierConfig.model_fields)
    assert shown["obj"] == set(ObjTierConfig.model_fields)
    assert shown["p2p"] == set(P2pTierConfig.model_fields)
    assert shown["bucket"] == set(BucketConfig.model_fields)
    assert shown["user"] == set(UserTierConfig.model_fields) | {"path"}
    assert shown["pressure"] == set(PressureConfig.model_fields)
    assert shown["store"] >= in_store


@pytest.mark.parametrize("model_class", KINDS.values())
def test_every_key_is_in_a_table_with_its_default(model_class: type[BaseModel]) -> None:
    # In words, because what the default stands for says more than null does.
    in_words = {
        "block_size": "one block",
        "locality": "unspecified",
        "event_medium": "`STORAGE`",
        "blocks_per_chunk": "`1`",
        "max_bytes": "no bound",
        "min_free_bytes": "5 %, at most 20 GiB",
        "low_watermark": "`high_watermark`",
        "cache_policy_module_path": "none",
        "spec_name": "none",
        "spec_module_path": "none",
        "host": "`VLLM_P2P_SIDE_CHANNEL_HOST`, else `localhost`",
        "port": "`VLLM_P2P_SIDE_CHANNEL_PORT`, else `5710`",
        "advertised_host": "`host`",
        "auth": "none",
        "access_key": "AWS's chain",
        "secret_key": "AWS's chain",
        "session_token": "AWS's chain",
        "high_water_s": "0.01, REMOTE 0.05",
        "low_water_s": "a fifth of `high_water_s`",
        "backpressure": "off" if issubclass(model_class, EngineConfig) else "the engine's",
    }
    for name, field in model_class.model_fields.items():
        default = "required" if field.is_required() or name == "type" else None
        told = in_words.get(name) or default or written(field.default)
        assert (name, told) in ROWS


def test_the_layout_is_in_a_table() -> None:
    for field in fields(KVLayout):
        default = "required" if field.default is MISSING else written(field.default)
        assert (field.name, default) in ROWS
    assert all(f"`{dtype}`" in PAGE for dtype in DTYPE_BYTES)


def test_the_python_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PLACES", dict(registry._PLACES))
    codes = [text for language, _, text in FENCES if language == "python"]
    names: dict[str, Any] = {}
    for code in codes:
        exec(code, names)
    assert names["config"].cpu_bytes_to_use == 10 << 30
    assert "my_policy" in registry.policy_names()


def test_every_key_of_vllms_is_told_and_is_as_it_is_told() -> None:
    assert sorted(VLLMS) == sorted(VLLMS_KEYS)
    models = (ConnectorConfig, FsTierConfig, ObjTierConfig, P2pTierConfig, UserTierConfig)
    ours = {name for model in models for name in model.model_fields}
    ours |= {field.name for field in fields(RequestLimits)} | {"kv_load_tiers"}
    for key, told in VLLMS.items():
        assert (key in ours) == (not re.match("with `|refused", told)), key
    for kind in re.findall(r"`(\w+)`", VLLMS["type"])[3:]:
        entries = [{"type": kind, "store_config": {}, "prefix": "", "host": "", "port": 1}]
        with pytest.raises(ConfigError, match=rf"^secondary_tiers\[0\].type = '{kind}'"):
            parse(ConnectorConfig, {"cpu_bytes_to_use": 1, "secondary_tiers": entries})


def test_the_error_on_the_page_is_the_one_that_comes() -> None:
    text, *_ = [text for language, _, text in FENCES if language == "text"]
    tier = {"type": "fs", "root_dir": "kv_cache"}
    with pytest.raises(Exception, match="root_dir") as caught:
        parse(ConnectorConfig, {"cpu_bytes_to_use": 1, "secondary_tiers": [tier]}, EXTRA_CONFIG)
    assert str(caught.value) == text.strip()


def written(default: object) -> str:
    return f"`{json.dumps(default)}`"
