"""Keys of the tier of peers: what is refused, and what the environment says in their place."""

from __future__ import annotations

from typing import Any

import pytest

from tiering.config import ConnectorConfig, P2pTierConfig, parse
from tiering.errors import ConfigError
from tiering.peers.addresses import Address


def tier(**keys: Any) -> P2pTierConfig:
    given = {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "p2p", **keys}]}
    (found,) = parse(ConnectorConfig, given).secondary_tiers
    assert isinstance(found, P2pTierConfig)
    return found


def bound(environment: dict[str, str], rank: int = 0, **keys: Any) -> Address:
    return tier(**keys).bound("secondary_tiers[0]", rank, environment)


def test_what_is_left_out_is_the_environments_or_vllms_default() -> None:
    told = {"VLLM_P2P_SIDE_CHANNEL_HOST": "10.0.0.7", "VLLM_P2P_SIDE_CHANNEL_PORT": "6000"}
    assert bound({}) == Address("localhost", 5710)
    assert bound(told) == Address("10.0.0.7", 6000)
    assert bound(told, host="kv.example", port=7000) == Address("kv.example", 7000)
    assert bound({name: "" for name in told}) == Address("localhost", 5710)


def test_each_replica_has_a_port() -> None:
    assert bound({}, rank=3).port == 5713
    assert bound({}, rank=3, port=6000).port == 6003


@pytest.mark.parametrize(
    ("keys", "key", "reason"),
    [
        ({"host": "[::1]"}, "host", "is no host"),
        ({"host": ""}, "host", "is no host"),
        ({"advertised_host": "a b"}, "advertised_host", "is no host"),
        ({"port": 0}, "port", "1"),
        ({"port": 65536}, "port", "65535"),
        ({"auth": ""}, "auth", "must not be empty"),
        ({"auth": "peers.key"}, "auth", "is not an absolute path"),
        ({"transport": "udp"}, "transport", "'tcp'"),
        ({"backends": []}, "backends", ""),
        ({"unbound_store_timeout_s": 0}, "unbound_store_timeout_s", "0"),
        ({"enable_kv_events": True}, "enable_kv_events", "is not a key that is known here"),
        ({"backpressure": {}}, "backpressure", "is not a key that is known here"),
        ({"prot": 5710}, "prot", "write port if"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tier(**keys)
    assert caught.value.path == f"secondary_tiers[0].{key}"
    assert reason in str(caught.value)


@pytest.mark.parametrize("port", ["x", "0", "70000", "-1", "٣"])
def test_a_port_of_the_environment_is_looked_at(port: str) -> None:
    with pytest.raises(ConfigError, match=r"^VLLM_P2P_SIDE_CHANNEL_PORT = .*is no port"):
        bound({"VLLM_P2P_SIDE_CHANNEL_PORT": port})


def test_a_host_of_the_environment_is_looked_at() -> None:
    with pytest.raises(ConfigError, match=r"^VLLM_P2P_SIDE_CHANNEL_HOST = 'a b': is no host"):
        bound({"VLLM_P2P_SIDE_CHANNEL_HOST": "a b"})


def test_a_rank_beyond_the_last_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no port for data-parallel rank 9"):
        bound({}, rank=9, port=65530)


def test_backpressure_of_the_engine_is_not_for_peers() -> None:
    given = {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "p2p"}], "backpressure": {}}
    config = parse(ConnectorConfig, given)
    assert config.pressure_on(config.secondary_tiers[0]) is None
