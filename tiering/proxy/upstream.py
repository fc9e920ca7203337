"""The HTTP client of the proxy: one request to one engine, and its answer piece by piece.

Owns what of a message's headers is passed on, and which of aiohttp's errors mean what: every
failure of an engine is an EngineError. A connection serves one request: an engine closes those that
idle, and a POST that meets that could not be sent again.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Self

import aiohttp
from yarl import URL

from tiering.errors import EngineError
from tiering.proxy.engines import Engine

Headers = Sequence[tuple[str, str]]

# Of one connection, or made anew for the next one; the last is for the proxy to decide.
_NOT_PASSED_ON = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("proxy-connection", "trailer", "transfer-encoding", "upgrade", "host", "expect"),
        *("content-length", "x-data-parallel-rank"),
    )
)
_HEAD_BYTES_MAX = 64 << 10


def passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that are between a client and an engine, and not between one of them and the proxy."""
    given = list(headers)
    named = {
        name.strip().lower()
        for header, value in given
        if header.lower() == "connection"
        for name in value.split(",")
    }
    return [
        (name, value)
        for name, value in given
        if name.lower() not in _NOT_PASSED_ON and name.lower() not in named
    ]


class Answer:
    """What an engine answers; inside of `Upstream.answer` only. `length`: of the body in bytes,
    where the engine says it beforehand."""

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse) -> None:
        self._engine = engine
        self._response = response
        self.status = response.status
        self.reason = response.reason
        self.headers = passed_on(response.headers.items())
        self.length = response.content_length

    async def piece(self) -> bytes:
        """What has come of the body since, still compressed if it was; nothing at its end.
        EngineError where it breaks off."""
        with _translated(self._engine):
            return await self._response.content.readany()

    async def read_to_end(self) -> None:
        """Wait for the body and drop it."""
        while await self.piece():
            pass


class Upstream:
    """Used as a context. `connect_seconds` for a connection, `silence_seconds` between two pieces
    of an answer, the first one included."""

    def __init__(self, connect_seconds: float, silence_seconds: float) -> None:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_seconds, sock_read=silence_seconds
        )
        self._session = aiohttp.ClientSession(
            # How many there are is for the server to bound.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=timeout,
            auto_decompress=False,
            # An engine's cookies are a client's.
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            max_line_size=_HEAD_BYTES_MAX,
            max_field_size=_HEAD_BYTES_MAX,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def answer(
        self, engine: Engine, method: str, path: str, headers: Headers = (), body: bytes = b""
    ) -> AsyncIterator[Answer]:
        """Ask; what has not come when the block ends is ended at the engine, too. `path` as it is
        in a request, with its query. EngineError where there is no answer."""
        url = URL(engine.url + path, encoded=True)
        # Sent piece by piece, which bytes are not.
        data = io.BytesIO(body) if body else None
        with _translated(engine):
            response = await self._session.request(
                method, url, headers=headers, data=data, allow_redirects=False
            )
        try:
            yield Answer(engine, response)
        finally:
            response.close()

    async def is_well(self, engine: Engine, seconds: float) -> bool:
        """Whether it says so within `seconds`."""
        try:
            async with asyncio.timeout(seconds), self.answer(engine, "GET", "/health") as answer:
                return answer.status == 200
        except (EngineError, TimeoutError):
            return False


@contextmanager
def _translated(engine: Engine) -> Iterator[None]:
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        told = error.os_error.strerror or str(error.os_error)
        raise EngineError(engine.url, f"cannot be reached: {told}", is_sent=False) from error
    except aiohttp.ConnectionTimeoutError as error:
        raise EngineError(engine.url, "cannot be reached in time", is_sent=False) from error
    except aiohttp.ServerTimeoutError as error:
        raise EngineError(engine.url, "says nothing any more", is_sent=True) from error
    except aiohttp.ClientError as error:
        told = str(error) or type(error).__name__
        raise EngineError(engine.url, f"broke off: {told}", is_sent=True) from error
