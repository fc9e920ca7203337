"""The HTTP server of the proxy: takes a client's request, asks engines, passes the answer on.

Owns the sockets, from `serving` on, and how a failure is told, in the format of OpenAI's API. Who
is asked, with what, is decided in `routing`. A client that goes away cancels its handler, and with
it what an engine was asked. Loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import orjson
from aiohttp import web

from tiering.clock import Clock, MonotonicClock
from tiering.errors import EngineError, TieringError
from tiering.proxy import roles
from tiering.proxy.engines import Engine, Lineup
from tiering.proxy.roles import Asked, Refusal
from tiering.proxy.routing import Prefilled, Router
from tiering.proxy.upstream import Answer, Headers, Upstream, passed_on

log = logging.getLogger("tiering")

BODY_BYTES_MAX = 32 << 20
REQUESTS_MAX = 1024
"""Under way at once; what comes beside them is refused."""

# Reading a longer one would hold up the streams of others.
_READ_AT_ONCE_BYTES = 64 << 10
_CLOSE_SECONDS = 5.0
_KINDS = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError"}


@dataclass(frozen=True, slots=True)
class Patience:
    """`prefill_seconds`: after them the one who answers computes the prompt, too.
    `silence_seconds`: of an engine within an answer. `probe_seconds`: from an answer how an engine
    is to the next question. `connect_seconds`: for a connection, and for that answer."""

    prefill_seconds: float = 60.0
    silence_seconds: float = 600.0
    probe_seconds: float = 2.0
    connect_seconds: float = 5.0


@asynccontextmanager
async def serving(
    lineup: Lineup,
    host: str,
    port: int,
    patience: Patience | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[str]:
    """Serve during the block; gives the URL, with its real port. TieringError where `host` and
    `port` cannot be bound."""
    patience = patience or Patience()
    router = Router(lineup, clock or MonotonicClock(), lambda: uuid.uuid4().hex)
    async with AsyncExitStack() as stack:
        upstream = Upstream(patience.connect_seconds, patience.silence_seconds)
        await stack.enter_async_context(upstream)
        proxy = _Proxy(router, upstream, patience)
        runner = web.AppRunner(
            proxy.application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_CLOSE_SECONDS,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            told = f"{host}:{port} cannot be bound: {error.strerror}; choose with --host and --port"
            raise TieringError(told) from error
        watching = asyncio.get_running_loop().create_task(proxy.watch())
        stack.push_async_callback(_ended, watching)
        bound = runner.addresses[0]
        yield f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class _Proxy:
    """The handlers."""

    def __init__(self, router: Router, upstream: Upstream, patience: Patience) -> None:
        self._router = router
        self._upstream = upstream
        self._patience = patience
        self._under_way = 0

    def application(self) -> web.Application:
        made = web.Application(
            client_max_size=BODY_BYTES_MAX, middlewares=[_as_openai_would, self._bounded]
        )
        made.router.add_get("/health", self._health)
        made.router.add_post("/v1/completions", self._generate)
        made.router.add_post("/v1/chat/completions", self._generate)
        made.router.add_route("*", "/v1/{rest:.+}", self._pass_on)
        return made

    async def watch(self) -> None:
        """Ask each engine how it is, again and again."""
        await asyncio.gather(*(self._watch(engine) for engine in self._router.lineup.engines))

    async def _watch(self, engine: Engine) -> None:
        while True:
            is_well = await self._upstream.is_well(engine, self._patience.connect_seconds)
            self._router.probed(engine, is_well)
            await asyncio.sleep(self._patience.probe_seconds)

    # Handlers

    async def _health(self, request: web.Request) -> web.StreamResponse:
        usable = [str(engine) for engine in self._router.usable()]
        body = {"status": "ok" if usable else "nobody answers", "usable": usable}
        return web.json_response(body, status=200 if usable else 503)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """A completion or a chat: with roles."""
        raw = await request.read()
        if len(raw) > _READ_AT_ONCE_BYTES:
            asked = await asyncio.to_thread(roles.read, raw)
        else:
            asked = roles.read(raw)
        if isinstance(asked, Refusal):
            return _refused(asked)
        prefilled = await self._prefill(request, asked)

        def body(server: Engine) -> bytes:
            role = self._router.to_answer(server, asked, prefilled)
            log.info("%s answered by %s, %s", request.path, server, role or "without a role")
            return asked.with_role(role)

        return await self._answered(request, body, asked)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Anything else: as it is, to one that answers."""
        raw = await request.read()
        if (refusal := roles.refusal_of_other(raw)) is not None:
            return _refused(refusal)
        return await self._answered(request, lambda server: raw)

    # What they do

    async def _prefill(self, request: web.Request, asked: Asked) -> Prefilled | None:
        """Have the prompt computed; None where nobody has, and whoever answers is to do it."""
        for prefiller in self._router.prefillers(asked):
            prefilled, role = self._router.to_prefill(prefiller, asked)
            log.info("%s prefilled by %s, %s", request.path, prefiller, role)
            try:
                status = await self._prefill_at(prefiller, request, asked.for_prefill(role))
            except TimeoutError:
                self._router.overdue(prefiller)
                _tell_unprefilled(prefiller, f"no answer in {self._patience.prefill_seconds:g} s")
                return None
            except EngineError as error:
                self._router.lost(prefiller)
                _tell_unprefilled(prefiller, error.reason)
                if error.is_sent:
                    return None
                continue
            self._router.answered(prefiller, status, asked.steps)
            if status == 200:
                return prefilled
            # If it is the request that is wrong, the one who answers says so.
            _tell_unprefilled(prefiller, f"status {status}")
            return None
        return None

    async def _prefill_at(self, prefiller: Engine, request: web.Request, body: bytes) -> int:
        path, headers = request.rel_url.raw_path_qs, _headers(request)
        async with (
            asyncio.timeout(self._patience.prefill_seconds),
            self._upstream.answer(prefiller, "POST", path, headers, body) as answer,
        ):
            await answer.read_to_end()
            return answer.status

    async def _answered(
        self,
        request: web.Request,
        body: Callable[[Engine], bytes],
        asked: Asked | None = None,
    ) -> web.StreamResponse:
        """By the first engine that can be reached, whatever its answer is."""
        failures: list[str] = []
        path, headers = request.rel_url.raw_path_qs, _headers(request)
        for server in self._router.servers():
            try:
                async with self._upstream.answer(
                    server, request.method, path, headers, body(server)
                ) as answer:
                    steps = asked.steps if asked is not None else ()
                    self._router.answered(server, answer.status, steps)
                    return await _relayed(request, answer)
            except EngineError as error:
                self._router.lost(server)
                log.warning("%s", error)
                failures.append(str(error))
                if error.is_sent:
                    return _refused(Refusal(502, str(error)))
        return _refused(Refusal(503, f"no engine can be reached: {'; '.join(failures)}"))

    @web.middleware
    async def _bounded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if self._under_way >= REQUESTS_MAX:
            return _refused(Refusal(429, f"{REQUESTS_MAX} requests are under way; try again"))
        self._under_way += 1
        try:
            return await handler(request)
        finally:
            self._under_way -= 1


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _as_openai_would(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """What the framework itself refuses, in the words of the API."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _refused(Refusal(413, f"the body is longer than {BODY_BYTES_MAX} bytes"))
    except web.HTTPException as error:
        return _refused(Refusal(error.status, f"{request.method} {request.path}: {error.reason}"))


async def _relayed(request: web.Request, answer: Answer) -> web.StreamResponse:
    """The answer, each piece when it comes. One that breaks off does so for the client, too."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    response.headers.extend(answer.headers)
    response.content_length = answer.length
    await response.prepare(request)
    while True:
        try:
            piece = await answer.piece()
        except EngineError as error:
            log.warning("%s", error)
            if request.transport is not None:
                request.transport.abort()
            return response
        if not piece:
            await response.write_eof()
            return response
        await response.write(piece)


def _headers(request: web.Request) -> Headers:
    # The body was unpacked when it was read.
    given = passed_on(request.headers.items())
    return [(name, value) for name, value in given if name.lower() != "content-encoding"]


def _refused(refusal: Refusal) -> web.Response:
    error = {
        "message": refusal.reason,
        "type": _KINDS.get(refusal.status, "InternalServerError"),
        "param": refusal.parameter,
        "code": refusal.status,
    }
    return web.Response(
        status=refusal.status,
        body=orjson.dumps({"error": error}),
        content_type="application/json",
    )


def _tell_unprefilled(prefiller: Engine, reason: str) -> None:
    log.warning("prefill at %s failed: %s; whoever answers computes the prompt", prefiller, reason)
