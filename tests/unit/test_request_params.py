"""A request's `kv_transfer_params`: what they limit, and that no value of them can do harm."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.config import ConnectorConfig, parse
from tiering_connectors.vllm import params
from tiering_connectors.vllm.params import RequestLimits, TierKind, kinds_of

LOCAL, REMOTE, UNSAID = (TierKind("STORAGE", where) for where in ("LOCAL", "REMOTE", None))
TIERS = (LOCAL, REMOTE, UNSAID)


@pytest.fixture(autouse=True)
def _no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params, "_warnings", params._Warnings())


def limits(**given: Any) -> RequestLimits:
    return RequestLimits.of(given, TIERS)


@pytest.mark.parametrize("given", [None, {}, {"max_offload_tokens": None, "kv_load_tiers": None}])
def test_nothing_given_limits_nothing(
    given: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert RequestLimits.of(given, TIERS) == RequestLimits(None, None, None)
    assert caplog.records == []


@pytest.mark.parametrize("given", ["x", "max_load_tokens", [1, "x"], 7])
def test_what_is_no_object_limits_nothing(given: object) -> None:
    assert RequestLimits.of(given, TIERS) == RequestLimits()


def test_keys_of_others_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    given = {"remote_decoder": {"kv_request_id": "1"}, "do_remote_prefill": True, "x": [object()]}
    assert RequestLimits.of(given, TIERS) == RequestLimits()
    assert caplog.records == []


def test_tokens_are_whole_numbers() -> None:
    assert limits(max_offload_tokens=0, max_load_tokens=1024) == RequestLimits(0, 1024, None)


@pytest.mark.parametrize("key", ["max_offload_tokens", "max_load_tokens"])
@pytest.mark.parametrize("value", [-1, True, False, 1.0, "16", [16], {"n": 1}])
def test_what_is_no_number_of_tokens_is_no_cap_and_told(
    key: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert RequestLimits.of({key: value}, TIERS) == RequestLimits()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"kv_transfer_params.{key} = {value!r}: must be a whole number" in record.getMessage()


@pytest.mark.parametrize(
    ("matchers", "tiers"),
    [
        ([], set()),
        ([{}], {0, 1, 2}),
        ([{"medium": "STORAGE"}], {0, 1, 2}),
        ([{"medium": "CPU"}], set()),
        # A tier that does not say where it is fits either.
        ([{"medium": "storage", "locality": "local"}], {0, 2}),
        ([{"locality": "Remote"}], {1, 2}),
        ([{"medium": "CPU", "locality": "LOCAL"}, {"locality": "REMOTE"}], {1, 2}),
        ([{"medium": None, "locality": None}], {0, 1, 2}),
        ([{"medium": "STORAGE", "more": 1}], {0, 1, 2}),
    ],
)
def test_tiers_are_chosen_by_medium_and_locality(
    matchers: list[dict[str, Any]], tiers: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert limits(kv_load_tiers=matchers).load_tiers == tiers
    assert caplog.records == []


@pytest.mark.parametrize(
    ("value", "tiers", "warnings"),
    [
        ("CPU", None, 1),
        ({"medium": "CPU"}, None, 1),
        (True, None, 1),
        (["CPU"], None, 1),
        ([{"medium": "GPU"}], None, 1),
        ([{"medium": 3}], None, 1),
        ([{"locality": ""}], None, 1),
        # What can be meant counts, the rest is skipped.
        ([{"medium": "TAPE"}, {"locality": "LOCAL"}], {0, 2}, 1),
        ([3, {"medium": "CPU"}, None], set(), 2),
    ],
)
def test_what_is_no_tier_is_skipped_and_all_of_it_is_no_filter(
    value: object, tiers: set[int] | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert RequestLimits.of({"kv_load_tiers": value}, TIERS).load_tiers == tiers
    assert len(caplog.records) == warnings
    assert all("kv_transfer_params.kv_load_tiers = " in r.getMessage() for r in caplog.records)


def test_a_client_that_goes_on_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(1000):
        limits(max_load_tokens=-1)
    limits(max_offload_tokens="x" * 10_000)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 11
    assert messages[-2].endswith("(512 so far)")
    assert all(len(message) < 200 for message in messages)


def test_the_kinds_of_tiers_come_from_the_configuration() -> None:
    entries = [
        {"type": "fs", "root_dir": "/mnt/a", "locality": "LOCAL"},
        {"type": "Own", "module_path": "a.module", "locality": "REMOTE"},
        {"type": "fs", "root_dir": "/mnt/b"},
    ]
    config = parse(ConnectorConfig, {"cpu_bytes_to_use": 1, "secondary_tiers": entries})
    assert kinds_of(config) == [LOCAL, REMOTE, UNSAID]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
matchers = st.lists(
    st.dictionaries(
        st.sampled_from(["medium", "locality"]), json_values | st.sampled_from(["CPU", "LOCAL"])
    )
)


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["max_offload_tokens", "max_load_tokens", "kv_load_tiers"]),
        json_values | matchers,
    )
)
def test_whatever_comes_is_limits(given: dict[str, Any]) -> None:
    found = RequestLimits.of(json.loads(json.dumps(given)), TIERS)
    assert all(cap is None or cap >= 0 for cap in (found.max_load_tokens, found.max_offload_tokens))
    assert found.load_tiers is None or found.load_tiers <= {0, 1, 2}
