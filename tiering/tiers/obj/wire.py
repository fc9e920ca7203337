"""Requests to one bucket over aiohttp: signed, timed, counted, and with bodies that are not joined.

Requests do not go through aiobotocore's client, which takes 2 ms of CPU for each and holds up the
loop for 40 to 200 ms to read a page of a listing; the signatures are botocore's. What is sent is
not copied here, though asyncio keeps a copy of what a socket does not take at once before Python
3.12. What comes is copied once, from what aiohttp received, as it takes no buffers of others.
A connection whose request did not end well is cut off, or it would go on to send from the buffers.
Used from one loop. Raises StoreError and its kinds only.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp.connector import Connection
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies
from yarl import URL

from tiering.config.obj import BucketConfig
from tiering.tiers.obj.credentials import Keys
from tiering.tiers.obj.dialect import Answer
from tiering.tiers.obj.store import LengthError, NotNowError, StoreError

# The first goes out in one piece with the head, for which the two are joined.
_FIRST_PART_BYTES = 16 << 10
_PART_BYTES = 1 << 20
_RECEIVED_BYTES = 1 << 20
# Of what is kept of an answer: a page of 1,000 of the longest names is half of that.
_BODY_BYTES_MAX = 8 << 20
_KEPT_SECONDS = 12.0
# It writes the session token into its log.
_SIGNER_LOG = "botocore.auth"


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """Leaves the body out of the signature, so that it is not read twice."""

    def payload(self, request: AWSRequest) -> str:
        del request
        return "UNSIGNED-PAYLOAD"


class _Sent:
    """The buffers of a body, in parts, from the start again for each connection it is sent over.
    `limit` is put off by what is taken."""

    def __init__(self, body: Sequence[memoryview], seconds: float, limit: asyncio.Timeout) -> None:
        self._body = body
        self._seconds = seconds
        self._limit: asyncio.Timeout | None = limit

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        now = asyncio.get_running_loop().time
        part_bytes = _FIRST_PART_BYTES
        for view in self._body:
            rest = view.cast("B")
            while rest:
                if self._limit is None:
                    return
                self._limit.reschedule(now() + self._seconds)
                yield rest[:part_bytes]
                rest, part_bytes = rest[part_bytes:], _PART_BYTES
        if self._limit is not None:
            # From here on aiohttp waits no longer than that for the answer.
            self._limit.reschedule(None)

    def end(self) -> None:
        """Touch no buffer any more."""
        self._limit = None


class _Connector(aiohttp.TCPConnector):
    """Tells who asks for a connection by which transport it is, in the list that `_HELD` is."""

    async def connect(self, *given: Any, **named: Any) -> Connection:
        connection = await super().connect(*given, **named)
        if connection.transport is not None:
            _HELD.get().append(connection.transport)
        return connection


_HELD: ContextVar[list[asyncio.Transport]] = ContextVar("_HELD")


class Wire:
    """Connections to the store, as many as there are requests, each kept for a while when idle."""

    def __init__(self, config: BucketConfig, region: str) -> None:
        self._base = config.base_url
        self.region = region
        self._read_seconds = config.read_timeout_seconds
        self._proxy = get_environ_proxies(self._base).get(config.scheme)
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self.requests = dict.fromkeys(("get", "put", "list", "delete", "multipart"), 0)

    async def open(self) -> None:
        """Reads certificates; StoreError where `ca_bundle` cannot be."""
        logging.getLogger(_SIGNER_LOG).setLevel(logging.INFO)
        context: ssl.SSLContext | bool = True
        if self._config.scheme == "https":
            context = await asyncio.to_thread(_tls, self._config.ca_bundle)
        timeout = aiohttp.ClientTimeout(
            total=None,
            # With the name's resolution and TLS. Nothing waits for a connection of another's.
            connect=self._config.connect_timeout_seconds,
            sock_read=self._read_seconds,
        )
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, ssl=context, keepalive_timeout=_KEPT_SECONDS),
            timeout=timeout,
            headers={"Accept-Encoding": "identity", "User-Agent": "kv-tiering"},
            skip_auto_headers=("Content-Type", "Accept"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_RECEIVED_BYTES,
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def exchange(
        self,
        keys: Keys,
        method: str,
        name: str = "",
        query: Sequence[tuple[str, str]] = (),
        *,
        headers: Mapping[str, str] | None = None,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] | None = None,
        count_as: str = "",
    ) -> Answer:
        """Send one request and return what came. `into`: where the body of status 200 goes, which
        is as long as they are together or a LengthError; else it is kept."""
        if self._session is None:
            raise StoreError("the object store is closed")
        url = self._url(name, query)
        self.requests[count_as or method.lower()] += 1
        length = sum(view.nbytes for view in body)
        signed = self._signed(keys, method, url, headers or {})
        if method in ("PUT", "POST"):
            signed["Content-Length"] = str(length)
        try:
            async with asyncio.timeout(None) as limit, _held() as transports:
                sent = _Sent(body, self._read_seconds, limit)
                try:
                    response = await self._session.request(
                        method,
                        URL(url, encoded=True),
                        headers=signed,
                        data=sent if length else None,
                        allow_redirects=False,
                        proxy=self._proxy,
                    )
                    try:
                        answer = await _received(response, into)
                    except BaseException:
                        response.close()
                        raise
                finally:
                    sent.end()
                if any(transport.get_write_buffer_size() for transport in transports):
                    # Answered before all was sent, and the rest is not to be.
                    response.close()
                    _cut_off(transports)
                else:
                    response.release()
                return answer
        except (aiohttp.ClientError, OSError) as error:
            raise _failed(f"{method} {name}".rstrip(), self._config, error) from error

    def _url(self, name: str, query: Sequence[tuple[str, str]]) -> str:
        told = "&".join(f"{key}={quote(value, safe='-_.~')}" for key, value in sorted(query))
        return f"{self._base}{quote(name, safe='/-_.~')}" + (f"?{told}" if told else "")

    def _signed(
        self, keys: Keys, method: str, url: str, headers: Mapping[str, str]
    ) -> dict[str, str]:
        request = AWSRequest(method=method, url=url, headers=dict(headers))
        _Signer(keys, "s3", self.region).add_auth(request)
        return dict(request.headers.items())


@asynccontextmanager
async def _held() -> AsyncIterator[list[asyncio.Transport]]:
    """The transports of the connections that are asked for meanwhile; cut off if that fails."""
    transports: list[asyncio.Transport] = []
    before = _HELD.set(transports)
    try:
        yield transports
    except BaseException:
        _cut_off(transports)
        raise
    finally:
        _HELD.reset(before)


def _cut_off(transports: Sequence[asyncio.Transport]) -> None:
    """Closing would wait until a store that takes nothing has taken the rest."""
    for transport in transports:
        transport.abort()


def _tls(ca_bundle: str) -> ssl.SSLContext:
    """Trusts what the system trusts, what botocore brings along, and `ca_bundle`."""
    context = ssl.create_default_context()
    context.load_verify_locations(get_cert_path(True))
    if ca_bundle:
        try:
            context.load_verify_locations(ca_bundle)
        except OSError as error:
            told = error.strerror or str(error)
            raise StoreError(f"ca_bundle {ca_bundle} cannot be read: {told}") from error
    return context


async def _received(response: aiohttp.ClientResponse, into: Sequence[memoryview] | None) -> Answer:
    headers = {name.lower(): value for name, value in response.headers.items()}
    if into is not None and response.status == 200:
        await _fill(response, into)
        return Answer(response.status, headers)
    parts: list[bytes] = []
    left = _BODY_BYTES_MAX
    async for part in _parts(response.content):
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise StoreError(f"an answer is longer than {_BODY_BYTES_MAX} bytes")
    return Answer(response.status, headers, b"".join(parts))


async def _parts(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """As they were received, not joined. aiohttp's own `iter_chunks` never ends with the second
    body that is empty."""
    while not content.at_eof():
        part, _ = await content.readchunk()
        if part:
            yield part


async def _fill(response: aiohttp.ClientResponse, into: Sequence[memoryview]) -> None:
    """The body into the buffers; LengthError where it does not fit them exactly."""
    want = sum(view.nbytes for view in into)
    if response.content_length not in (None, want):
        raise LengthError(f"an object is {response.content_length} bytes long, not {want}")
    views = iter([view.cast("B") for view in into])
    view, at, got = memoryview(b""), 0, 0
    try:
        async for part in _parts(response.content):
            got += len(part)
            if got > want:
                break
            rest = memoryview(part)
            while rest:
                if at == len(view):
                    view, at = next(views), 0
                fits = min(len(rest), len(view) - at)
                view[at : at + fits] = rest[:fits]
                rest, at = rest[fits:], at + fits
    except aiohttp.ClientPayloadError as error:
        raise LengthError(f"the body of an object ended after {got} of {want} bytes") from error
    if got != want:
        raise LengthError(f"the body of an object has {got} bytes, not {want}")


def _failed(asked: str, config: BucketConfig, error: Exception) -> StoreError:
    """What a failure of the connection means. The text of the library's may hold all of a header,
    so only its kind is told."""
    where = f"{asked}: {config.endpoint}"
    match error:
        case aiohttp.ClientConnectorCertificateError():
            reason = error.certificate_error
            told = getattr(reason, "verify_message", "") or type(reason).__name__
            return StoreError(f"{where} has a certificate that is not accepted: {told}")
        case aiohttp.ConnectionTimeoutError():
            seconds = config.connect_timeout_seconds
            return NotNowError(f"{where} takes no connection within {seconds:g} s")
        case TimeoutError():
            return NotNowError(f"{where} moved no byte for {config.read_timeout_seconds:g} s")
        case aiohttp.ClientConnectorError():
            reason_text = error.os_error.strerror or type(error.os_error).__name__
            return NotNowError(f"{where} cannot be reached: {reason_text}")
        case _:
            return NotNowError(f"{where} ended the connection ({type(error).__name__})")
