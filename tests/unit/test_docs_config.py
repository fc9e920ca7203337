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
    ConnectorConfig,
    EngineConfig,
    FsTierConfig,
    StoreConfig,
    parse,
)
from tiering.layout import DTYPE_BYTES, KVLayout

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
FENCES = re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ROWS = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE)
KINDS: dict[str, type[EngineConfig] | type[FsTierConfig]] = {
    "connector": ConnectorConfig,
    "fs": FsTierConfig,
    "store": StoreConfig,
}
EXAMPLES = [(kind, text) for language, kind, text in FENCES if language == "json"]


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_an_example_is_valid(kind: str, text: str) -> None:
    if kind == "whole":
        parse(ConnectorConfig, json.loads(text)[EXTRA_CONFIG], EXTRA_CONFIG)
    else:
        parse(KINDS[kind], text)


def test_every_key_has_an_example() -> None:
    shown: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for kind, text in EXAMPLES:
        if kind != "whole":
            shown[kind] |= json.loads(text).keys()
    in_store = set(StoreConfig.model_fields) - set(ConnectorConfig.model_fields)
    assert shown["connector"] == set(ConnectorConfig.model_fields)
    assert shown["fs"] == set(FsTierConfig.model_fields)
    assert shown["store"] >= in_store


@pytest.mark.parametrize("model_class", [ConnectorConfig, FsTierConfig, StoreConfig])
def test_every_key_is_in_a_table_with_its_default(model_class: type[BaseModel]) -> None:
    # In words, because what the default stands for says more than null does.
    in_words = {
        "block_size": "one block",
        "locality": "unspecified",
        "blocks_per_chunk": "`1`",
        "max_bytes": "no bound",
        "min_free_bytes": "5 %, at most 20 GiB",
        "low_watermark": "`high_watermark`",
    }
    for name, field in model_class.model_fields.items():
        default = "required" if field.is_required() or name == "type" else written(field.default)
        assert (name, in_words.get(name, default)) in ROWS


def test_the_layout_is_in_a_table() -> None:
    for field in fields(KVLayout):
        default = "required" if field.default is MISSING else written(field.default)
        assert (field.name, default) in ROWS
    assert all(f"`{dtype}`" in PAGE for dtype in DTYPE_BYTES)


def test_the_python_example_runs() -> None:
    (code,) = [text for language, _, text in FENCES if language == "python"]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["config"].cpu_bytes_to_use == 10 << 30


def test_the_error_on_the_page_is_the_one_that_comes() -> None:
    (text,) = [text for language, _, text in FENCES if language == "text"]
    tier = {"type": "fs", "root_dir": "kv_cache"}
    with pytest.raises(Exception, match="root_dir") as caught:
        parse(ConnectorConfig, {"cpu_bytes_to_use": 1, "secondary_tiers": [tier]}, EXTRA_CONFIG)
    assert str(caught.value) == text.strip()


def written(default: object) -> str:
    return f"`{json.dumps(default)}`"
