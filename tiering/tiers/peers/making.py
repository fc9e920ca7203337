"""From settings to a tier of peers: its transports, whom it serves, and what it says of itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tiering.config import P2pTierConfig
from tiering.errors import ConfigError
from tiering.namespace import RANDOM_HASH_SEED, Namespace
from tiering.peers.addresses import Address, advertised
from tiering.peers.agreement import Introduction, described
from tiering.peers.auth import SharedKey
from tiering.peers.control import new_engine_id
from tiering.peers.transports.base import Served, Space, Transport
from tiering.peers.transports.nixl import NixlTransport, has_infiniband
from tiering.peers.transports.shm import ShmTransport
from tiering.peers.transports.tcp import TcpTransport
from tiering.tiers.host import Region
from tiering.tiers.hostfile import GENERATION_BYTES
from tiering.tiers.peers.tier import PeerLimits, PeersTier


def build_peers(
    config: P2pTierConfig,
    namespace: Namespace,
    region: Region,
    replica: int,
    where: str,
    wait_seconds: float,
    environment: Mapping[str, str] = os.environ,
) -> PeersTier:
    """Over all rows of `region`, not yet open. `where` is the tier's path in the configuration;
    `wait_seconds`: how long a prefiller is given. Reads the file of the shared key."""
    if namespace.hash_seed == RANDOM_HASH_SEED:
        raise ConfigError(
            "PYTHONHASHSEED",
            environment.get("PYTHONHASHSEED", ""),
            "leaves block hashes with a random seed, so that no peer would have a chunk of this "
            "engine's",
            "set it to the same number, such as 0, for all peers",
        )
    at = config.bound(where, replica, environment)
    told = advertised(f"{where}.advertised_host", at, config.advertised_host)
    key = SharedKey() if config.auth is None else SharedKey.read(f"{where}.auth", Path(config.auth))
    geometry = region.geometry
    digest, description = described(namespace)

    def introduction() -> Introduction:
        return Introduction(
            engine_id=new_engine_id(),
            incarnation=0,
            namespace=digest,
            description=description,
            hash_seed=namespace.hash_seed,
            rows=geometry.rows,
            row_bytes=geometry.row_bytes,
        )

    return PeersTier(
        at,
        introduction,
        _transports(config, served_from(region), at, told, where),
        geometry.row_bytes,
        key=key,
        allow_unauthenticated=config.allow_unauthenticated,
        where=f"{where}.host",
        rank=replica,
        limits=PeerLimits(
            peers_max=config.peers_max,
            guests_max=config.guests_max,
            unbound_store_seconds=config.unbound_store_timeout_s,
            wait_seconds=wait_seconds,
        ),
    )


def served_from(region: Region) -> Served:
    """All rows of `region`, for as long as it is mapped."""
    geometry, descriptor = region.geometry, region.lent_descriptor
    return Served(
        region.rows_view(),
        region.generations(),
        Space(descriptor, geometry.header_bytes, geometry.rows * geometry.row_bytes),
        Space(descriptor, geometry.generations_offset, geometry.rows * GENERATION_BYTES),
    )


def _transports(
    config: P2pTierConfig, served: Served, at: Address, told: Address, where: str
) -> Sequence[Transport]:
    """In order of preference: one host's memory is nearest, RDMA is nearer than sockets. `where`
    is the tier's path."""
    wanted = config.transport
    made: list[Transport] = []
    if wanted in ("auto", "shm"):
        made.append(ShmTransport(served, where=where))
    if wanted == "nixl" or (wanted == "auto" and has_infiniband() and find_spec("nixl")):
        threads = config.num_threads if config.backends == ("UCX",) else 0
        made.append(NixlTransport(served, config.backends, threads, where=where))
    if wanted in ("auto", "tcp"):
        here = Address(at.host, 0)
        made.append(TcpTransport(served, here, told.host, name=f"{where}.host"))
    return made
