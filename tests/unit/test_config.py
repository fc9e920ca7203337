"""Settings that are refused: with the key, its value, the reason and the way out, in one line."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import pytest
from pydantic import BeforeValidator, ValidationError, model_validator

from tiering.config import (
    ConnectorConfig,
    EngineConfig,
    FsTierConfig,
    StoreConfig,
    fields,
    parse,
    tiers,
)
from tiering.errors import ConfigError
from tiering.layout import KVLayout

GIB = 1 << 30
FS = {"type": "fs", "root_dir": "/mnt/kv"}
LAYOUT = {"layers": 2, "kv_heads": 1, "head_dim": 64, "block_tokens": 16}
WHERE = "kv_connector_extra_config"


def connector(**keys: object) -> dict[str, object]:
    return {"cpu_bytes_to_use": GIB, **keys}


def tier(**keys: object) -> dict[str, object]:
    return connector(secondary_tiers=[{**FS, **keys}])


# What is given, then the path, the value as shown, and a part of the reason and of the way out.
BAD_CONNECTOR = {
    "required": ({}, "cpu_bytes_to_use", "(absent)", "required", "10737418240"),
    "text for a number": (
        connector(cpu_bytes_to_use="64"), "cpu_bytes_to_use", "'64'", "without quotes", "in total",
    ),
    "size with a unit": (
        connector(cpu_bytes_to_use="2g"), "cpu_bytes_to_use", "'2g'", "whole number", "Bytes of",
    ),
    "true for a number": (
        connector(cpu_bytes_to_use=True), "cpu_bytes_to_use", "True", "whole number", "10737418240",
    ),
    "a fraction": (
        connector(cpu_bytes_to_use=1.0), "cpu_bytes_to_use", "1.0", "whole number", "10737418240",
    ),
    "nothing": (
        connector(cpu_bytes_to_use=0), "cpu_bytes_to_use", "0", "greater than 0", "10737418240",
    ),
    "negative": (
        connector(cpu_bytes_to_use=-1), "cpu_bytes_to_use", "-1", "greater than 0", "10737418240",
    ),
    "too large for any machine": (
        connector(cpu_bytes_to_use=1 << 63), "cpu_bytes_to_use", str(1 << 63), "less than", "1073",
    ),
    "too large to print": (
        connector(cpu_bytes_to_use=10**6000),
        "cpu_bytes_to_use", "(a number of 19932 bits)", "less than", "10737418240",
    ),
    "per rank": (
        connector(cpu_bytes_to_use_per_rank=GIB),
        "cpu_bytes_to_use_per_rank", str(GIB), "not a key", "the total over all workers",
    ),
    "misspelled": (
        connector(eviction_polcy="lru"),
        "eviction_polcy", "'lru'", "not a key", "write eviction_policy",
    ),
    "another spec": (
        connector(spec_name="SimpleSpec"),
        "spec_name", "'SimpleSpec'", "'TieringOffloadingSpec'", "TieringOffloadingSpec",
    ),
    "a spec without the tiers": (
        {**tier(), "spec_name": "CPUOffloadingSpec"},
        "spec_name", "'CPUOffloadingSpec'", "host memory only", "leave it out",
    ),
    "canonical layout": (
        connector(canonical_layout=True), "canonical_layout", "True", "not offered", "leave it out",
    ),
    "another loop": (
        connector(loop="fork"), "loop", "'fork'", "'auto', 'thread' or 'process'", '"process"',
    ),
    "events as text": (
        connector(self_describing_kv_events="yes"),
        "self_describing_kv_events", "'yes'", "true or false", "true",
    ),
    "a threshold below nothing": (
        connector(store_threshold=-1), "store_threshold", "-1", "equal to 0", "2",
    ),
    "a threshold as text": (
        connector(store_threshold="2"), "store_threshold", "'2'", "whole number", "2",
    ),
    "no tracker": (
        connector(max_tracker_size=0), "max_tracker_size", "0", "equal to 1", "1000000",
    ),
    "pressure of nothing": (
        connector(backpressure=True), "backpressure", "True", "an object", '"high_water_s"',
    ),
    "a measure of one's own": (
        connector(backpressure={"backpressure_cls": "my.Detector"}),
        "backpressure.backpressure_cls", "'my.Detector'", "of your own", "leave it out",
    ),
    "a policy of one's own": (
        tier(backpressure={"policy_cls": "my.Policy"}),
        "secondary_tiers[0].backpressure.policy_cls", "'my.Policy'", "of your own", "REFUSED",
    ),
    "another policy": (
        connector(backpressure={"policy_cls": "DropPolicy"}),
        "backpressure.policy_cls", "'DropPolicy'", "'DropStorePolicy'", '"DropStorePolicy"',
    ),
    "misspelled in pressure": (
        tier(backpressure={"high_water": 1.0}),
        "secondary_tiers[0].backpressure.high_water", "1.0", "not a key", "write high_water_s",
    ),
    "misspelled in the engine's pressure": (
        connector(backpressure={"cooldown": 1.0}),
        "backpressure.cooldown", "1.0", "not a key", "write cooldown_s",
    ),
    "no weight": (
        connector(backpressure={"alpha": 0}), "backpressure.alpha", "0", "greater than 0", "0.3",
    ),
    "watermarks of pressure the wrong way round": (
        tier(backpressure={"high_water_s": 0.1, "low_water_s": 0.2}),
        "secondary_tiers[0].backpressure.low_water_s", "0.2", "which is 0.1", "at most that",
    ),
    "a low watermark above the usual high one": (
        {**tier(), "backpressure": {"low_water_s": 0.02}},
        "backpressure.low_water_s", "0.02", "which is 0.01 for secondary_tiers[0]", "leave it out",
    ),
    "unheard of": (connector(zzz=None), "zzz", "None", "not a key", "write one of cpu_bytes"),
    "two lines": (connector(**{"a\nb": 1}), "['a\\nb']", "1", "not a key", "leave it out"),
    "policy": (
        connector(eviction_policy="lfu"), "eviction_policy", "'lfu'", "name of a policy", "'lru'",
    ),
    "policy of one's own without its module": (
        connector(eviction_policy="MyPolicy"),
        "eviction_policy", "'MyPolicy'", "name of a policy", "cache_policy_module_path",
    ),
    "module that is no text": (
        connector(cache_policy_module_path=3), "cache_policy_module_path", "3", "text", "my_pack",
    ),
    "deadline of nothing": (
        connector(load_deadline_seconds=0), "load_deadline_seconds", "0", "greater than 0", "5.0",
    ),
    "no deadline": (
        connector(load_deadline_seconds=float("inf")),
        "load_deadline_seconds", "inf", "finite", "5.0",
    ),
    "deadline as true": (
        connector(load_deadline_seconds=True), "load_deadline_seconds", "True", "a number", "5.0",
    ),
    "both chunk sizes": (
        connector(block_size=64, blocks_per_chunk=2),
        "blocks_per_chunk", "2", "block_size = 64", "leave out one of the two",
    ),
    "empty chunk": (connector(block_size=0), "block_size", "0", "greater than or equal to 1", "64"),
    "no blocks": (connector(blocks_per_chunk=0), "blocks_per_chunk", "0", "equal to 1", "4"),
    "yes": (
        connector(offload_prompt_only="yes"),
        "offload_prompt_only", "'yes'", "true or false", "false",
    ),
    "1 for true": (
        connector(offload_prompt_only=1), "offload_prompt_only", "1", "true or false", "false",
    ),
    "one tier, not a list": (
        connector(secondary_tiers=FS), "secondary_tiers", "(an object)", "a list", '[{"type"',
    ),
    "a tier by name": (
        connector(secondary_tiers=["fs"]), "secondary_tiers[0]", "'fs'", "an object", '{"type"',
    ),
    "tier without type": (
        connector(secondary_tiers=[{"root_dir": "/mnt/kv"}]),
        "secondary_tiers[0].type", "(absent)", "required", "'fs'",
    ),
    "vLLM's example": (
        connector(secondary_tiers=[{"type": "example", "custom_param": 67}]),
        "secondary_tiers[0].type", "'example'", "authors of tiers", '"fs"',
    ),
    "kvcr": (
        connector(secondary_tiers=[{"type": "kvcr"}]),
        "secondary_tiers[0].type", "'kvcr'", "a package", "module_path",
    ),
    "tier of no type": (
        connector(secondary_tiers=[{"type": "disk"}]),
        "secondary_tiers[0].type", "'disk'", "not a kind of tier", "'fs'",
    ),
    "module of a tier that is no text": (
        connector(secondary_tiers=[{"type": "Mine", "module_path": 3}]),
        "secondary_tiers[0].module_path", "3", "text", "my_package",
    ),
    "locality of one's own tier": (
        connector(secondary_tiers=[{"type": "Mine", "module_path": "m", "locality": "HERE"}]),
        "secondary_tiers[0].locality", "'HERE'", "'LOCAL'", '"LOCAL"',
    ),
    "type that is no text": (
        connector(secondary_tiers=[{"type": ["fs"]}]),
        "secondary_tiers[0].type", "(a list)", "not a kind of tier", "'fs'",
    ),
    "tier without a directory": (
        connector(secondary_tiers=[{"type": "fs"}]),
        "secondary_tiers[0].root_dir", "(absent)", "required", "/mnt/kv_cache",
    ),
    "home": (
        tier(root_dir="~/kv"), "secondary_tiers[0].root_dir", "'~/kv'", "not expanded", "/home/me",
    ),
    "relative": (
        tier(root_dir="kv"), "secondary_tiers[0].root_dir", "'kv'", "not an absolute", "/mnt/kv",
    ),
    "empty path": (
        tier(root_dir=""), "secondary_tiers[0].root_dir", "''", "not an absolute", "/mnt/kv",
    ),
    "zero byte": (
        tier(root_dir="/a\0b"), "secondary_tiers[0].root_dir", r"'/a\x00b'", "zero byte", "/mnt/kv",
    ),
    "half a character": (
        tier(root_dir="/\ud800"), "secondary_tiers[0].root_dir", r"'/\ud800'", "no text", "Unicode",
    ),
    "long path": (
        tier(root_dir="a" * 5000),
        "secondary_tiers[0].root_dir", f"('{'a' * 80}'... 5000 characters)", "absolute", "/mnt/kv",
    ),
    "no threads": (
        tier(n_read_threads=0), "secondary_tiers[0].n_read_threads", "0", "equal to 1", "32",
    ),
    "too many threads": (
        tier(n_write_threads=1025), "secondary_tiers[0].n_write_threads", "1025", "1024", "16",
    ),
    "locality": (
        tier(locality="local"), "secondary_tiers[0].locality", "'local'", "'LOCAL'", '"LOCAL"',
    ),
    "misspelled in a tier": (
        tier(n_read_thread=4),
        "secondary_tiers[0].n_read_thread", "4", "not a key", "write n_read_threads",
    ),
    "one directory twice": (
        connector(secondary_tiers=[FS, {"type": "fs", "root_dir": "//mnt/x/..//kv/"}]),
        "secondary_tiers[1].root_dir", "'//mnt/x/..//kv/'", "secondary_tiers[0]", "of its own",
    ),
    "one directory twice in one tier": (
        tier(root_dir=["/mnt/a", "/mnt/a/"]),
        "secondary_tiers[0].root_dir", "'/mnt/a/'", "named twice", "of its own",
    ),
    "one of several directories": (
        tier(root_dir=["/mnt/a", "b"]),
        "secondary_tiers[0].root_dir[1]", "'b'", "not an absolute", "/mnt/kv",
    ),
    "no directory of several": (
        tier(root_dir=[]), "secondary_tiers[0].root_dir", "(a list)", "empty", "name a directory",
    ),
    "segments without a size": (
        tier(layout="segments"),
        "secondary_tiers[0].max_bytes", "(absent)", "needed for layout segments", "how many bytes",
    ),
    "watermarks the wrong way round": (
        tier(high_watermark=0.5, low_watermark=0.6),
        "secondary_tiers[0].low_watermark", "0.6", "above high_watermark = 0.5", "at most that",
    ),
    "a share over one": (
        tier(high_watermark=1.5), "secondary_tiers[0].high_watermark", "1.5", "equal to 1", "0.95",
    ),
}  # fmt: skip

BAD_STORE = {
    "no layout": ({"cpu_bytes_to_use": GIB}, "layout", "(absent)", "required", '"kv_heads": 8'),
    "layout as text": (
        {"cpu_bytes_to_use": GIB, "layout": "x"}, "layout", "'x'", "an object", '"kv_heads": 8',
    ),
    "a loop": (
        {"cpu_bytes_to_use": GIB, "layout": LAYOUT, "loop": "process"},
        "loop", "'process'", "not a key", "the program's own loop",
    ),
    "layer count as text": (
        {"cpu_bytes_to_use": GIB, "layout": {**LAYOUT, "layers": "2"}},
        "layout.layers", "'2'", "whole number", "32",
    ),
    "too many layers": (
        {"cpu_bytes_to_use": GIB, "layout": {**LAYOUT, "layers": 1 << 40}},
        "layout.layers", str(1 << 40), "less than or equal", "32",
    ),
    "dtype": (
        {"cpu_bytes_to_use": GIB, "layout": {**LAYOUT, "dtype": "int3"}},
        "layout.dtype", "'int3'", "not a known dtype", "bfloat16",
    ),
    "misspelled in the layout": (
        {"cpu_bytes_to_use": GIB, "layout": {**LAYOUT, "block_token": 1}},
        "layout.block_token", "1", "not a key", "write block_tokens",
    ),
    "less than one chunk": (
        {"cpu_bytes_to_use": 8191, "layout": LAYOUT},
        "cpu_bytes_to_use", "8191", "less than one chunk of 8192 bytes", "at least 8192",
    ),
    "no model": (
        {"cpu_bytes_to_use": GIB, "layout": LAYOUT, "model": ""},
        "model", "''", "must not be empty", "Llama",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_class", "data", "path", "shown", "reason", "remedy"),
    [
        pytest.param(model_class, *row, id=name)
        for model_class, table in ((ConnectorConfig, BAD_CONNECTOR), (StoreConfig, BAD_STORE))
        for name, row in table.items()
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    model_class: type[EngineConfig],
    data: dict[str, object],
    path: str,
    shown: str,
    reason: str,
    remedy: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(model_class, data, WHERE)
    error = caught.value
    assert error.path == (WHERE + path if path.startswith("[") else f"{WHERE}.{path}")
    assert repr(error.value) == shown
    assert reason in error.reason
    assert remedy in error.remedy
    assert str(error) == f"{error.path} = {shown}: {error.reason}; {error.remedy}"
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 600
    # Why it was found out is pydantic's business; it does not follow the user into the log.
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_the_first_problem_is_told_in_full_and_the_others_by_path() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(ConnectorConfig, {"cpu_byte_to_use": 1, "secondary_tiers": [{"type": "fs"}]})
    assert caught.value.path == "cpu_byte_to_use"
    others = "; and 2 more: cpu_bytes_to_use, secondary_tiers[0].root_dir"
    assert caught.value.remedy.endswith(others)


def test_the_list_of_other_problems_has_an_end() -> None:
    with pytest.raises(ConfigError, match=r"and 9 more: b, c, d, e, f, \.\.\.$"):
        parse(ConnectorConfig, connector(**dict.fromkeys("abcdefghij", 1)))


@pytest.mark.parametrize(
    "data",
    [
        tier(secret_key="hunter2"),
        tier(session_token="hunter2"),
        tier(Password="hunter2"),
        tier(store_config={"secret_key": "hunter2"}),
        tier(root_dir="s3://me:hunter2@bucket/kv"),
        connector(secondary_tiers={"access_key": "hunter2"}),
        connector(cpu_bytes_to_use=["hunter2"]),
        '{"cpu_bytes_to_use": 1, "secret_key": "a", "secret_key": "hunter2"}',
        '{"secret_key": "hunter2", ',
    ],
)
def test_no_secret_is_told(data: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(ConnectorConfig, data)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value.value)


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        ('{"a": ', "configuration", "Expecting value at line 1, column 7"),
        ("", "configuration", "Expecting value at line 1, column 1"),
        (b"\x80\xff\x00", "configuration", "not text in UTF-8"),
        ("[" * 100_000, "configuration", "nested too deeply"),
        ('{"cpu_bytes_to_use": NaN}', "configuration", "NaN is not a number"),
        ('{"cpu_bytes_to_use": ' + "9" * 5000 + "}", "configuration", "is not JSON"),
        ("[]", "configuration", "must be an object"),
        ("null", "configuration", "must be an object"),
        ('{"a": [{"b": 1, "b": 2}]}', "a[0].b", "in the same object twice"),
        ('{"cpu_bytes_to_use": 1, "cpu_bytes_to_use": 2}', "cpu_bytes_to_use", "twice"),
    ],
)
def test_a_text_that_is_no_json_object_is_told_apart(
    text: str | bytes, path: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(ConnectorConfig, text)
    assert caught.value.path == path
    assert reason in caught.value.reason


@pytest.mark.parametrize("data", [None, 3, [("cpu_bytes_to_use", 1)]])
def test_what_is_no_mapping_is_refused(data: object) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        parse(ConnectorConfig, data, WHERE)


def test_keys_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config\[1\]"):
        parse(ConnectorConfig, {"cpu_bytes_to_use": GIB, 1: 2}, WHERE)


def test_a_constructor_refuses_in_the_same_words() -> None:
    with pytest.raises(ConfigError, match=r"^root_dir = 'kv': is not an absolute path"):
        FsTierConfig(root_dir="kv")
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.root_dir = 5: must be text"):
        EngineConfig(cpu_bytes_to_use=1, secondary_tiers=({"type": "fs", "root_dir": 5},))  # type: ignore[arg-type]


def test_a_program_gives_objects() -> None:
    config = StoreConfig(
        layout=KVLayout(**LAYOUT),  # type: ignore[arg-type]
        cpu_bytes_to_use=GIB,
        secondary_tiers=(FsTierConfig(root_dir="/mnt/kv"),),
    )
    data = {"layout": LAYOUT, "cpu_bytes_to_use": GIB, "secondary_tiers": [FS]}
    assert config == parse(StoreConfig, data)
    assert config.layout.chunk_bytes == 8192


def test_settings_do_not_change() -> None:
    config = FsTierConfig(root_dir="/mnt/kv")
    with pytest.raises(ValidationError, match="frozen"):
        config.root_dir = "/mnt/other"
    assert hash(config) == hash(FsTierConfig(root_dir="/mnt/kv"))


def test_another_kind_of_tier_is_a_class_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class TapeTierConfig(tiers.StoringTierSettings):
        type: Literal["tape"] = "tape"
        reel: str

    AnyTier = Annotated[FsTierConfig | TapeTierConfig, BeforeValidator(tiers._tier)]

    class Engine(EngineConfig):
        secondary_tiers: Annotated[tuple[AnyTier, ...], BeforeValidator(fields.listed)]

        @model_validator(mode="after")
        def _roots_differ(self) -> Self:
            return self

    monkeypatch.setitem(tiers.TIER_TYPES, "tape", TapeTierConfig)  # type: ignore[arg-type]
    engine = parse(
        Engine, {"cpu_bytes_to_use": 1, "secondary_tiers": [FS, {"type": "tape", "reel": "kv"}]}
    )
    assert engine.secondary_tiers == (FsTierConfig(root_dir="/mnt/kv"), TapeTierConfig(reel="kv"))
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[1\]\.rel = .* write reel if"):
        parse(
            Engine,
            {
                "cpu_bytes_to_use": 1,
                "secondary_tiers": [FS, {"type": "tape", "reel": "kv", "rel": 1}],
            },
        )
