"""How an engine opens under vLLM, the same behind both doors: its memory, its tiers, its end.

Owns the order in which halves start: workers build and map the host tier's region and say what they
keep there; then the scheduler's side joins it, removes its name and opens the tiers. Blocks, and
is for start and end only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tiering.config import EXTRA_CONFIG, ConnectorConfig
from tiering.errors import ConfigError
from tiering.layout import RowLayout
from tiering.namespace import Namespace
from tiering.portal import OwnLoopPortal, ThreadPortal, TierView
from tiering.process.portal import ProcessPortal
from tiering.residency.core import Residency
from tiering.tiers.host import Region, region_name
from tiering.wiring import build_core, build_tiers, peer_tiers
from tiering_connectors.vllm.hashing import hash_warning

log = logging.getLogger("tiering")

WORKERS_DEADLINE_SECONDS = 300.0
DRAIN_SECONDS = 2.0


def name_of_region(engine_id: str | None, door: str, extra_config: Mapping[str, Any]) -> str:
    """Of this engine, and of this connector among several that a MultiConnector has in it. `door`
    is the connector's kind; what it was given as `extra_config` may be anything."""
    own = orjson.dumps(
        dict(extra_config),
        option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS,
        default=repr,
    )
    return region_name(f"{engine_id} {door} {own.decode()}")


def open_region(
    name: str,
    row: RowLayout,
    config: ConnectorConfig,
    ranks: int,
    nodes: Collection[int] = (),
) -> Region:
    """A worker's: built by the first of the `ranks`, of memory of these `nodes`; ConfigError where
    no chunk fits."""
    try:
        return Region.open(
            name,
            row,
            config.cpu_bytes_to_use,
            deadline_seconds=WORKERS_DEADLINE_SECONDS,
            ranks=ranks,
            nodes=nodes,
        )
    except ConfigError as error:
        raise error.under(EXTRA_CONFIG) from None


def join_region(name: str) -> tuple[Region, list[bytes]]:
    """The scheduler's: what the workers have built, and what each said of it, in rank order."""
    region = Region.join(name, deadline_seconds=WORKERS_DEADLINE_SECONDS)
    digests = region.wait_announced(WORKERS_DEADLINE_SECONDS)
    # Every worker has it mapped: from here on it lives exactly as long as they do.
    region.unlink()
    return region, digests


@dataclass(frozen=True, slots=True)
class Opened:
    """The scheduler's side: the core over `slots` rows of the region, and the tiers below it."""

    core: Residency
    portal: OwnLoopPortal

    @classmethod
    def over(
        cls,
        region: Region,
        slots: int,
        namespace: Namespace,
        config: ConnectorConfig,
        surveyed: Collection[int] = (),
        replica: int = 0,
    ) -> Opened:
        """Open them; says what is wrong with the namespace's hashes, if anything is. `surveyed`:
        the tiers that are announced. `replica`: which data-parallel one this is."""
        portal = _portal(region, namespace, config, replica)
        portal.start()
        names = [tier.name for tier in portal.tiers]
        warning = hash_warning(namespace.hash_algorithm, namespace.hash_seed, names)
        if warning is not None:
            log.warning("%s", warning)
        core = build_core(
            config,
            slots,
            len(names),
            surveyed=surveyed,
            peers=peer_tiers(config),
            generations=region.generations(),
        )
        return cls(core, portal)

    @property
    def tiers(self) -> Sequence[TierView]:
        return self.portal.tiers

    def counters(self) -> dict[str, int]:
        """What is counted of the tiers' loop: PORTAL_COUNTERS."""
        return {"portal_restarts": self.portal.restarts}

    def describe_tiers(self) -> str:
        names = ", ".join(tier.name for tier in self.tiers) or "no other tier"
        in_process = isinstance(self.portal, ProcessPortal)
        return f"{names} (in a process of their own)" if in_process else names


def _portal(
    region: Region, namespace: Namespace, config: ConnectorConfig, replica: int
) -> OwnLoopPortal:
    if config.loop_in_process:
        return ProcessPortal(config, namespace, region, replica)
    tiers = build_tiers(config, namespace, region.geometry.row_bytes, region, replica)
    return ThreadPortal(tiers, region.row)


def close(portal: OwnLoopPortal | None, region: Region | None) -> None:
    """As far as vLLM gives time for it; nothing depends on its being called."""
    is_idle = portal is None or portal.close(DRAIN_SECONDS)
    if region is not None and is_idle:
        region.close()
