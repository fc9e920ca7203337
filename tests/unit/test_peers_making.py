"""From settings to a tier of peers: what moves the chunks, and what there is no tier for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from process_scene import make_region
from tiering.config import EngineConfig, P2pTierConfig
from tiering.errors import ConfigError
from tiering.namespace import RANDOM_HASH_SEED
from tiering.peers.transports.base import Space
from tiering.testing.examples import CHUNK_BYTES, example_namespace
from tiering.testing.ports import free_port
from tiering.tiers.host import Region
from tiering.tiers.peers import making
from tiering.tiers.peers.making import build_peers
from tiering.tiers.peers.tier import PeersTier
from tiering.wiring import build_tiers


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    with make_region(tmp_path) as made:
        yield made


def built(region: Region, hash_seed: str = "", replica: int = 0, **keys: Any) -> PeersTier:
    namespace = example_namespace(hash_seed=hash_seed)
    where = "secondary_tiers[0]"
    return build_peers(P2pTierConfig(**keys), namespace, region, replica, where, 5.0, {})


def names(tier: PeersTier) -> list[str]:
    return [transport.name for transport in tier._transports]


def test_one_hosts_memory_comes_before_the_network(region: Region) -> None:
    assert names(built(region)) == ["shm", "tcp"]
    assert names(built(region, transport="tcp")) == ["tcp"]
    assert names(built(region, transport="shm")) == ["shm"]
    assert names(built(region, transport="nixl")) == ["nixl"]


@pytest.mark.parametrize(
    ("has_device", "is_installed", "expected"),
    [
        (True, True, ["shm", "nixl", "tcp"]),
        (True, False, ["shm", "tcp"]),
        (False, True, ["shm", "tcp"]),
    ],
)
def test_nixl_is_taken_where_there_is_rdma(
    region: Region,
    monkeypatch: pytest.MonkeyPatch,
    has_device: bool,
    is_installed: bool,
    expected: list[str],
) -> None:
    monkeypatch.setattr(making, "has_infiniband", lambda: has_device)
    monkeypatch.setattr(making, "find_spec", lambda name: object() if is_installed else None)
    assert names(built(region)) == expected


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is installed, it cannot be imported."""
    monkeypatch.setitem(sys.modules, "nixl._api", None)


@pytest.mark.usefixtures("without_nixl")
async def test_nixl_that_was_asked_for_and_cannot_be_had_is_an_error(region: Region) -> None:
    told = (
        r"^secondary_tiers\[0\]\.transport = 'nixl': NIXL cannot be imported: .*; "
        r"run pip install 'kv-tiering\[nixl\]', or set transport: tcp$"
    )
    with pytest.raises(ConfigError, match=told):
        await built(region, transport="nixl", port=free_port()).open()


async def test_memory_that_cannot_be_shared_is_an_error(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = dataclasses.replace(making.served_from(region), rows_space=Space(-1, 0, 0))
    monkeypatch.setattr(making, "served_from", lambda region: nowhere)
    told = r"^secondary_tiers\[0\]\.transport = 'shm': cannot be served .*; set transport: tcp$"
    with pytest.raises(ConfigError, match=told):
        await built(region, transport="shm", port=free_port()).open()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
@pytest.mark.parametrize("backends", [["POSIX"], ["UXC"]])
async def test_backends_that_do_not_move_host_memory_are_an_error(
    region: Region, backends: list[str]
) -> None:
    told = (
        rf"^secondary_tiers\[0\]\.backends = \['{backends[0]}'\]: NIXL cannot use them here: .*; "
        r"name others that move host memory, such as UCX, or set transport: tcp$"
    )
    with pytest.raises(ConfigError, match=told):
        await built(region, transport="nixl", backends=backends, port=free_port()).open()


@pytest.mark.usefixtures("without_nixl")
async def test_what_nobody_asked_for_by_name_is_left_out_where_it_cannot_be_had(
    region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(making, "has_infiniband", lambda: True)
    monkeypatch.setattr(making, "find_spec", lambda name: object())
    tier = built(region, port=free_port())
    assert names(tier) == ["shm", "nixl", "tcp"]
    await tier.open()
    await tier.close()
    (warning,) = caplog.messages
    assert warning.startswith(f"{tier.name}: no chunks over nixl: NIXL cannot be imported: ")


def test_each_replica_is_at_a_port_of_its_own(region: Region) -> None:
    assert built(region, replica=2).name == "p2p:localhost:5712"


def test_with_random_hashes_there_are_no_peers(region: Region) -> None:
    with pytest.raises(ConfigError, match=r"^PYTHONHASHSEED = '': .* set it to the same number"):
        built(region, hash_seed=RANDOM_HASH_SEED)


def test_without_a_host_tier_of_ones_own_there_is_nothing_to_serve() -> None:
    config = EngineConfig(cpu_bytes_to_use=1, secondary_tiers=(P2pTierConfig(),))
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.type = 'p2p': needs an engine"):
        build_tiers(config, example_namespace(), CHUNK_BYTES)


def test_without_zeromq_the_extra_is_named(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.wiring.find_spec", lambda name: None)
    config = EngineConfig(cpu_bytes_to_use=1, secondary_tiers=(P2pTierConfig(),))
    with pytest.raises(ConfigError, match=r"pyzmq; run pip install 'kv-tiering\[p2p\]'"):
        build_tiers(config, example_namespace(), CHUNK_BYTES, region)
