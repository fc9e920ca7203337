"""Peers of an engine whose tiers are in a process of their own, which may die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from process_scene import make_region, opened, until
from tiering.config import P2pTierConfig
from tiering.engine import Engine
from tiering.events import NoEvents
from tiering.policy.lru import LruPolicy
from tiering.residency.core import Residency
from tiering.testing.clocks import ManualClock
from tiering.testing.examples import CHUNK_BYTES, example_namespace, key_number, payload_of
from tiering.testing.ports import free_port
from tiering.tiers.base import Read
from tiering.tiers.peers.making import build_peers
from tiering.tiers.peers.source import PeerSource

KEYS = [key_number(at) for at in range(3)]


async def has_of(port: int, folder: Path, transport: str) -> list[bytes]:
    """What another engine gets of KEYS from the one at `port`."""
    folder.mkdir()
    region = make_region(folder)
    config = P2pTierConfig(host="127.0.0.1", port=free_port(), transport=transport)  # type: ignore[arg-type]
    tier = build_peers(config, example_namespace(), region, 0, "here", 5.0, {})
    await tier.open()
    try:
        peer = tier.at(PeerSource("127.0.0.1", port, "r").packed())
        assert await peer.contains(KEYS) == [Read.HIT] * 3
        rows = [memoryview(bytearray(CHUNK_BYTES)) for _ in KEYS]
        outcomes = await peer.read(KEYS, rows)
        return [
            bytes(row) if o is Read.HIT else None for row, o in zip(rows, outcomes, strict=True)
        ]
    finally:
        await tier.close()
        del peer
        region.close()


@pytest.mark.slow
async def test_peers_have_what_is_in_host_memory_also_from_the_next_process(
    tmp_path: Path,
) -> None:
    port = free_port()
    tier = {"type": "p2p", "host": "127.0.0.1", "port": port}
    with opened(tmp_path, tier) as scene:
        core = Residency(
            16,
            1,
            LruPolicy(16),
            ManualClock(),
            10.0,
            peers=[0],
            generations=scene.region.generations(),
        )
        engine = Engine(core, scene.portal, NoEvents())
        core.open("a")
        slots = core.reserve("a", KEYS, 0).slots
        for slot, key in zip(slots, KEYS, strict=True):
            scene.fill(slot, key)
        core.filled(slots)
        engine.pump()
        until(lambda: (engine.pump(), scene.portal.tiers[0].stats()["now_shown_chunks"] == 3)[1])
        payloads = [payload_of(key) for key in KEYS]
        assert await has_of(port, tmp_path / "tcp", "tcp") == payloads
        os.kill(scene.pid, signal.SIGKILL)
        until(lambda: (engine.pump(), scene.portal.restarts == 1)[1])
        until(lambda: (engine.pump(), scene.portal.tiers[0].stats()["now_shown_chunks"] == 3)[1])
        assert await has_of(port, tmp_path / "shm", "shm") == payloads
