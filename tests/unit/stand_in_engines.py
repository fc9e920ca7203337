"""HTTP servers on 127.0.0.1 that stand in for engines: they record what they were sent.

Each answers with its name, in one piece or, if a stream was asked for, in three of which a test may
hold the second one back. `standing_in` starts some, `proxied` a proxy before them.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from tiering.clock import Clock
from tiering.proxy.engines import Engine, Lineup
from tiering.proxy.server import Patience, serving
from tiering.testing.clocks import ManualClock
from tiering.testing.ports import free_port

DEADLINE_SECONDS = 60.0
PIECES = (b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n")


@dataclass
class Seen:
    """A request as it came, the names of its headers in small letters. `is_gone`: set when who
    asked has gone before the end."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.raw)
        return found

    @property
    def params(self) -> dict[str, Any] | None:
        return self.body.get("kv_transfer_params")

    def role(self, name: str) -> dict[str, Any]:
        """REQUIRES: it has this role and no other."""
        assert self.params is not None
        assert list(self.params) == [name]
        found: dict[str, Any] = self.params[name]
        return found


class StandIn:
    """Used as a context. `seen`: all requests but those for /health."""

    def __init__(self, name: str, peer_port: int) -> None:
        self.name = name
        self.peer_port = peer_port
        self.seen: list[Seen] = []
        self.is_well = True
        self.probes = 0
        # A status, a body and headers instead of an answer.
        self.fail_with: tuple[int, bytes, dict[str, str]] | None = None
        # Cleared: it reads a request and says nothing.
        self.answers = asyncio.Event()
        self.answers.set()
        # All of an answer but its first piece waits for it. `breaks`: of a stream no more comes,
        # the connection ends.
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.breaks = False
        self.port = free_port()
        self._runner: web.AppRunner | None = None
        self._arrived = asyncio.Event()

    @property
    def engine(self) -> Engine:
        return Engine.parse("--engine", self.text)

    @property
    def text(self) -> str:
        """As the command is told of it."""
        return f"http://127.0.0.1:{self.port}=127.0.0.1:{self.peer_port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Always at its own port."""
        application = web.Application(client_max_size=1 << 26)
        application.router.add_get("/health", self._health)
        application.router.add_route("*", "/{rest:.*}", self._handle)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def arrived(self, count: int = 1) -> Seen:
        """Wait until `count` requests have come in all; the last of them."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(self.seen) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.seen[count - 1]

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.probes += 1
        return web.Response(status=200 if self.is_well else 503)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path_qs
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(request.method, path, headers, await request.read())
        self.seen.append(seen)
        self._arrived.set()
        try:
            await self.answers.wait()
            if self.fail_with is not None:
                status, body, headers = self.fail_with
                return web.Response(status=status, body=body, headers=headers)
            if seen.raw.startswith(b"{") and seen.body.get("stream"):
                return await self._stream(request)
            return await self._answer(request)
        except asyncio.CancelledError:
            seen.is_gone.set()
            raise

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.dumps({"from": self.name, "choices": [{"text": self.name}]}).encode()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(body)
        await response.prepare(request)
        await response.write(body[:1])
        await self.goes_on.wait()
        await response.write(body[1:])
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(PIECES[0])
        await self.goes_on.wait()
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
            return response
        for piece in PIECES[1:]:
            await response.write(piece)
        return response


class Client:
    """Of the proxy at `url`."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(
        self,
        body: Mapping[str, Any] | bytes,
        path: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """The status and what the JSON of the answer says."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | dict(headers or {})
        async with self.session.post(
            self.url + path, data=io.BytesIO(raw), headers=given
        ) as response:
            return response.status, json.loads(await response.read())

    async def health(self) -> tuple[int, list[str]]:
        async with self.session.get(self.url + "/health") as response:
            usable: list[str] = (await response.json())["usable"]
            return response.status, usable


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what nothing tells of."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def standing_in(*names: str) -> AsyncIterator[list[StandIn]]:
    """Engines of these names."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(StandIn(name, 5710 + at))
            for at, name in enumerate(names)
        ]


@asynccontextmanager
async def proxied(
    *servers: StandIn,
    prefillers: tuple[StandIn, ...] = (),
    patience: Patience | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[Client]:
    """A proxy before these. Asks for health once, unless `patience` says otherwise, and leaves
    whoever has refused alone for good, unless `clock` goes on."""
    lineup = Lineup(
        tuple(each.engine for each in servers), tuple(each.engine for each in prefillers)
    )
    patience = patience or Patience(probe_seconds=1000.0)
    async with (
        serving(lineup, "127.0.0.1", 0, patience, clock or ManualClock()) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_SECONDS)) as session,
    ):
        yield Client(url, session)
