"""One engine's half of an exchange between peers: core, shell and tier of peers over a real region.

For tests, in this process or in one of its own that can be stopped and killed: `python peer_half.py
TRANSPORT PORT OTHER` binds PORT, and computes, keeps, evicts, and loads from the engine at port
OTHER until it is told to end.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt

from peer_engine import QUICK
from tiering.clock import MonotonicClock
from tiering.engine import Engine
from tiering.events import NoEvents
from tiering.layout import RowLayout
from tiering.peers.addresses import Address
from tiering.peers.agreement import Introduction
from tiering.peers.control import new_engine_id
from tiering.peers.transports.base import Served, Space, Transport
from tiering.peers.transports.shm import ShmTransport
from tiering.peers.transports.tcp import TcpTransport
from tiering.policy.lru import LruPolicy
from tiering.portal import LoopPortal
from tiering.residency.core import Residency
from tiering.testing.children import Child, stay
from tiering.testing.examples import key_number
from tiering.testing.peerrequests import PeerRequests
from tiering.tiers.host import Region, region_name
from tiering.tiers.peers.source import PeerSource
from tiering.tiers.peers.tier import PeerLimits, PeersTier

CHUNK_BYTES = 128 << 10
CHUNKS = 40
CHAIN_CHUNKS = 8
CHAINS = 12
LOAD_SECONDS = 3.0
LIMITS = PeerLimits(unbound_store_seconds=1.5, wait_seconds=1.0)
QUIET_SECONDS = 1.0
TURN_SECONDS = 0.005


def page_of(key: bytes) -> npt.NDArray[np.uint8]:
    bits = np.random.SFC64(int.from_bytes(key[:8], "big"))
    return np.frombuffer(np.random.Generator(bits).bytes(CHUNK_BYTES), np.uint8)


def chain(engine: int, number: int) -> list[bytes]:
    """A prefix that engine `engine` computes."""
    first = 10_000 * engine + CHAIN_CHUNKS * number
    return [key_number(first + at) for at in range(CHAIN_CHUNKS)]


class Half:
    """Made by `half`. `number` is the engine's: which chains it computes."""

    def __init__(self, region: Region, transport: str, number: int, port: int) -> None:
        geometry = region.geometry
        self.number = number
        self.rows = region.rows_view()
        self.core = Residency(
            geometry.rows,
            1,
            LruPolicy(geometry.rows),
            MonotonicClock(),
            LOAD_SECONDS,
            peers=[0],
            generations=region.generations(),
        )
        self.descriptor = region.descriptor()
        served = Served(
            self.rows,
            region.generations(),
            Space(self.descriptor, geometry.header_bytes, self.rows.size),
            Space(self.descriptor, geometry.generations_offset, 8 * geometry.rows),
        )
        loopback = Address("127.0.0.1", 0)
        made: Transport = TcpTransport(served, loopback, quiet_seconds_max=QUIET_SECONDS)
        if transport == "shm":
            made = ShmTransport(served, quiet_seconds_max=QUIET_SECONDS)

        def me() -> Introduction:
            rows, row_bytes = self.rows.shape
            return Introduction(new_engine_id(), 0, bytes(32), {}, "0", rows, row_bytes)

        self.tier = PeersTier(
            Address("127.0.0.1", port),
            me,
            [made],
            CHUNK_BYTES,
            limits=LIMITS,
            patience=QUICK,
        )
        self.portal = LoopPortal([self.tier], region.row, self.pump)
        self._engine = Engine(self.core, self.portal, NoEvents())
        self._requests = PeerRequests(self.core, self.pump, lambda: TURN_SECONDS)

    def pump(self) -> None:
        self._engine.pump()

    async def store(self, keys: Sequence[bytes], kept_for: str = "") -> None:
        """Compute `keys`, as far as there is room, and keep them for a decoder."""
        with self._requests.opened("store") as owner:
            places = self.core.reserve(owner, keys, 0)
            left = list(places.slots)
            try:
                for index in places.indices:
                    self.rows[left[0]] = page_of(keys[index])
                    self.core.filled([left.pop(0)])
                    self.pump()
                    await asyncio.sleep(TURN_SECONDS)
                if kept_for:
                    self.core.peers.keep(kept_for, keys)
            finally:
                self.core.unfilled(left)

    async def load(self, keys: Sequence[bytes], whom: PeerSource) -> int:
        """As many leading `keys` as can be had, all of them right; how many."""
        with self._requests.opened("load") as owner:
            slots = await self._requests.hold(owner, keys, whom)
            for key, slot in zip(keys, slots, strict=False):
                if not np.array_equal(self.rows[slot], page_of(key)):
                    raise AssertionError(f"wrong bytes of {key.hex()}")
            return len(slots)

    @property
    def left_over(self) -> list[str]:
        """What is, while nobody asks for anything and no peer is there."""
        slots, stats = self.core.index.slots, self.tier.stats()
        found = {
            "steps": self.core.steps_out,
            "requests": len(self.core._holds),
            "kept": len(self.core.peers._kept),
            "pins": int(slots.load_pins.sum() + slots.write_pins.sum()),
            "busy slots": len(slots) - slots.free - slots.evictable,
            "visits": len(self.tier._serving._visits),
            **{name: stats[name] for name in ("now_guests", "now_links", "now_peers")},
            "kept chunks": stats["now_kept_chunks"],
        }
        return [f"{count} {name}" for name, count in found.items() if count]


@asynccontextmanager
async def half(transport: str, number: int, port: int = 0) -> AsyncIterator[Half]:
    layout = RowLayout(CHUNK_BYTES)
    name = region_name(secrets.token_hex(8))
    with Region.open(name, layout, CHUNKS * layout.row_bytes) as region:
        region.unlink()
        made = Half(region, transport, number, port)
        async with made.portal:
            yield made
            await made.portal.finish(1.0)
        made.pump()
        made.rows = np.empty((0, 0), np.uint8)
        os.close(made.descriptor)


class OtherHalf(Child):
    """Another one, in a process of its own, within `with`."""

    def __init__(self, transport: str, other: int, port: int) -> None:
        super().__init__(__file__, transport, port, other)


async def _work(me: Half, other: int) -> None:
    """What an engine does all day."""
    chance = random.Random()
    while True:
        keys = chain(me.number, chance.randrange(CHAINS))
        await me.store(keys, chance.choice(("", f"r{chance.randrange(4)}")))
        whom = PeerSource("127.0.0.1", other, f"q{chance.randrange(100)}")
        await me.load(chain(0, chance.randrange(CHAINS)), whom)


async def _main(transport: str, port: int, other: int) -> None:
    async with half(transport, 1, port) as me, asyncio.TaskGroup() as group:
        working = [group.create_task(_work(me, other)) for _ in range(2)]
        await stay(port=me.tier.address.port)
        for task in working:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
