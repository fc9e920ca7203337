"""The door of a data plane where the system has no room for who comes."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tiering.peers.transports.doors import Door, Terms
from tiering.peers.transports.wire import Wire

HANG_SECONDS = 30.0
TURNS = 300


class Listening(socket.socket):
    """Counts how often somebody was looked for."""

    looked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.looked += 1
        return super().accept()


@contextmanager
def no_descriptor_free() -> Iterator[None]:
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 64, limits[1]))
    try:
        while True:
            try:
                held.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


def welcome(wire: Wire) -> object:
    raise AssertionError("nobody has proven anything")


async def test_who_comes_when_no_descriptor_is_free_waits_and_keeps_nobody_busy() -> None:
    listening = Listening(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    door = Door(listening, Terms(1, 64), HANG_SECONDS, welcome)  # type: ignore[arg-type]
    came = socket.socket()
    came.setblocking(False)
    try:
        with no_descriptor_free():
            came.connect_ex(listening.getsockname())
            while not listening.looked:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert listening.looked < TURNS // 10
        async with asyncio.timeout(HANG_SECONDS):
            greeting = await asyncio.get_running_loop().sock_recv(came, 64)
        assert greeting.startswith(b"KVPEER")
    finally:
        came.close()
        door.close()
