"""An engine as far as the control plane can tell, for tests of it: in this process, or in one of
its own that can be stopped and killed (`python peer_engine.py PORT [DIALS]`)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from peer_frames import KEY, introduction, keys
from tiering.peers.addresses import Address
from tiering.peers.calls import Guest
from tiering.peers.control import ControlPlane
from tiering.peers.messages import Fetch, Lookup, Reference, keys_of
from tiering.peers.rounds import Round
from tiering.peers.session import Patience
from tiering.testing.children import Child, stay

QUICK = Patience(
    handshake_seconds_max=1.5,
    heartbeat_seconds=0.2,
    silence_seconds_max=1.0,
    answer_seconds_max=2.0,
)
HANG_SECONDS = 30.0
PATIENT = dataclasses.replace(
    QUICK,
    handshake_seconds_max=HANG_SECONDS,
    silence_seconds_max=HANG_SECONDS,
    answer_seconds_max=HANG_SECONDS,
)
"""Where nobody is gone: on a busy machine anybody may be silent for a second."""
LOOPBACK = Address("127.0.0.1", 0)


class Shelf:
    """A Source with a chunk under every key whose last byte is even, in the slot of that byte.
    While `is_held`, fetches wait for `answer`."""

    def __init__(self) -> None:
        self.is_held = False
        self.guests: list[Guest] = []
        self.pinned: dict[tuple[bytes, Round], list[Reference | None]] = {}
        self.waiting: list[tuple[Guest, Round, Fetch]] = []
        self.told: list[tuple[Any, ...]] = []

    def greeted(self, guest: Guest) -> None:
        self.guests.append(guest)
        self.told.append(("greeted",))

    def wanted(self, guest: Guest, of: Round, question: Lookup | Fetch) -> None:
        if isinstance(question, Lookup):
            guest.hits(of, bytes(key[-1] % 2 == 0 for key in keys_of(question)))
        elif self.is_held:
            self.waiting.append((guest, of, question))
        else:
            self.answer(guest, of, question)

    def answer(self, guest: Guest, of: Round, question: Fetch) -> bool:
        found = [
            None if key[-1] % 2 else Reference(key[-1], 1 + key[-1]) for key in keys_of(question)
        ]
        self.pinned[guest.session_id, of] = found
        is_told = guest.places(of, found)
        if not is_told:
            del self.pinned[guest.session_id, of]
        return is_told

    def released(self, guest: Guest, of: Round, success: bool | None) -> None:
        self.pinned.pop((guest.session_id, of), None)
        self.told.append(("released", of, success))

    def request_over(self, guest: Guest, kv_request_id: str) -> None:
        self.told.append(("request over", kv_request_id))

    def over(self, guest: Guest, reason: str) -> None:
        self.guests.remove(guest)
        self.told.append(("over", reason))


async def until(is_so: Callable[[], object]) -> None:
    """Wait for what nothing tells of."""
    async with asyncio.timeout(HANG_SECONDS):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def engine(number: int = 1, **options: Any) -> AsyncIterator[tuple[ControlPlane, Shelf]]:
    """An open control plane and what it serves. `options` are those of ControlPlane, and of
    `introduction` under `me`."""
    shelf = Shelf()
    me = introduction(number, **options.pop("me", {}))
    options = {"at": LOOPBACK, "key": KEY, "patience": PATIENT, **options}
    control = ControlPlane(me, shelf, **options)
    async with asyncio.timeout(HANG_SECONDS), control:
        yield control, shelf


class Engine(Child):
    """One in a process of its own, within `with`."""

    def __init__(self, port: int = 0, dials: int | None = None) -> None:
        """Binds `port`. With `dials` it fetches two chunks from there, and then keeps them."""
        super().__init__(__file__, port, *([] if dials is None else [dials]))
        self.at = Address("127.0.0.1", self.told["port"])


async def _main(port: int, dials: int | None) -> None:
    number = os.getpid() % 250 + 3
    at = Address("127.0.0.1", port)
    async with ControlPlane(introduction(number), Shelf(), at, KEY, patience=PATIENT) as control:
        if dials is not None:
            peer = await control.peer(Address("127.0.0.1", dials))
            await peer.fetch("r", keys(2))
        await stay(port=control.address.port)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None))
