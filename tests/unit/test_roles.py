"""What requests say of other engines: what is meant, what is refused, and where clients hear it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiering.errors import ConfigError
from tiering.peers.addresses import Address
from tiering_connectors.vllm.checking import check_settings, has_peers
from tiering_connectors.vllm.roles import NO_ROLES, RoleError, Roles

DECODER = {"kv_request_id": "7"}
PEER = {"kv_request_id": "7", "remote_host": "10.0.0.7", "remote_port": 5710}


def test_each_role_is_meant() -> None:
    assert Roles.of({"remote_decoder": DECODER}) == Roles(None, "7")
    prefiller = Roles.of({"remote_prefiller": PEER})
    source = Roles.of({"remote_kv_source": PEER})
    assert prefiller.whom is not None
    assert source.whom is not None
    assert (prefiller.whom.is_prefiller, source.whom.is_prefiller) == (True, False)
    assert prefiller.whom.address == source.whom.address == Address("10.0.0.7", 5710)
    assert (prefiller.whom.kv_request_id, prefiller.kept_as) == ("7", None)


def test_a_prefiller_may_have_a_source() -> None:
    both = Roles.of({"remote_decoder": {"kv_request_id": "8"}, "remote_kv_source": PEER})
    assert both.whom is not None
    assert (both.whom.kv_request_id, both.kept_as) == ("7", "8")


@pytest.mark.parametrize("params", [None, {}, {"max_load_tokens": 3}, {"remote_decoder": None}])
def test_without_a_role_there_is_none(params: dict[str, Any] | None) -> None:
    assert Roles.of(params) == NO_ROLES


@pytest.mark.parametrize(
    "roles",
    [
        {"remote_prefiller": PEER, "remote_decoder": DECODER},
        {"remote_prefiller": PEER, "remote_kv_source": PEER},
        {"remote_prefiller": PEER, "remote_kv_source": PEER, "remote_decoder": DECODER},
    ],
)
def test_what_contradicts_itself_is_refused(roles: dict[str, Any]) -> None:
    with pytest.raises(RoleError, match=r"^kv_transfer_params: remote_prefiller and .*leave out"):
        Roles.of(roles)


@pytest.mark.parametrize(
    ("role", "value", "told"),
    [
        ("remote_decoder", "7", "remote_decoder = '7': must be an object"),
        ("remote_decoder", {}, "remote_decoder.kv_request_id = None: must be text"),
        ("remote_decoder", {"kv_request_id": ""}, "must be text of 1 to 512 characters"),
        ("remote_decoder", {"kv_request_id": 7}, "kv_request_id = 7: must be text"),
        ("remote_prefiller", DECODER, "remote_prefiller.remote_host = None: must be text"),
        ("remote_prefiller", PEER | {"remote_port": "5710"}, "remote_port = '5710': must be"),
        ("remote_prefiller", PEER | {"remote_port": True}, "remote_port = True: must be"),
        ("remote_prefiller", PEER | {"remote_port": 0}, "remote_port = 0: must be"),
        ("remote_kv_source", PEER | {"remote_port": 70000}, "remote_port = 70000: is no port"),
        ("remote_kv_source", PEER | {"remote_host": "[::1]"}, "remote_host = '[::1]': is no host"),
        ("remote_kv_source", PEER | {"kv_request_id": "x" * 513}, "kv_request_id = 'xxx"),
        ("remote_decoder", {"kv_request_id": "r\ud800"}, "'r\\ud800': has half a character"),
    ],
)
def test_fields_that_cannot_be_meant_are_named(role: str, value: object, told: str) -> None:
    with pytest.raises(RoleError) as caught:
        Roles.of({role: value})
    assert told in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("params", ["x", "remote_decoder", [1, "x"], 7, ""])
def test_what_is_no_object_is_refused(params: object) -> None:
    with pytest.raises(RoleError, match=r"^kv_transfer_params = .*: must be an object$"):
        Roles.of(params)


def config(name: str | None, extra: object) -> SimpleNamespace:
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)


def test_only_engines_with_a_tier_of_peers_are_asked() -> None:
    peers = {"secondary_tiers": [{"type": "fs"}, {"type": "p2p"}]}
    assert has_peers(config("TieredConnector", peers))
    second = {"spec_name": "TieredOffloadingSpec", **peers}
    assert has_peers(config("OffloadingConnector", second))
    assert not has_peers(config("OffloadingConnector", peers)), "vLLM's own"
    assert not has_peers(config("TieredConnector", {"secondary_tiers": [{"type": "fs"}]}))
    assert not has_peers(config("TieredConnector", None))
    assert not has_peers(None)
    ours = {"kv_connector": "TieredConnector", "kv_connector_extra_config": peers}
    other = {"kv_connector": "NixlConnector"}
    assert has_peers(config("MultiConnector", {"connectors": [other, ours]}))
    assert not has_peers(config("MultiConnector", {"connectors": [other]}))


def test_settings_of_every_engine_are_checked_and_no_other() -> None:
    good, bad = {"cpu_bytes_to_use": 1 << 20}, {"cpu_bytes_to_use": "1g"}
    told = "kv_connector_extra_config.cpu_bytes_to_use = '1g': must be a whole number"
    check_settings(None)
    check_settings(config("TieredConnector", good))
    check_settings(config("OffloadingConnector", bad))
    check_settings(config("NixlConnector", None))
    with pytest.raises(ConfigError, match=f"^{told}"):
        check_settings(config("TieredConnector", bad))
    with pytest.raises(ConfigError, match=f"^{told}"):
        check_settings(config("OffloadingConnector", {"spec_name": "TieredOffloadingSpec", **bad}))
    children = [
        {"kv_connector": "TieredConnector", "kv_connector_extra_config": extra}
        for extra in (good, bad)
    ]
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config\.connectors\[1\]\.kv_"):
        check_settings(config("MultiConnector", {"connectors": children}))


def test_more_memory_than_there_can_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has 64 MiB of shared memory unless it is told otherwise."""
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_blocks=16384, f_frsize=4096))
    check_settings(config("TieredConnector", {"cpu_bytes_to_use": 128 << 20}))
    with pytest.raises(ConfigError, match=r"config\.cpu_bytes_to_use = .*--shm-size"):
        check_settings(config("TieredConnector", {"cpu_bytes_to_use": 10 << 30}))
