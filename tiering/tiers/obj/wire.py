"""Requests to one bucket: signed, timed, counted, each over a connection of its own for that time.

Neither aiobotocore's client nor aiohttp carries them: the one takes 2 ms of CPU for a request and
holds up the loop for 40 to 200 ms to read a page of a listing, the other half a millisecond, and
copies of all that it moves. Connections are kept for a while when idle. What fails is called by
what it means for the store. Used from one loop. Raises StoreError and its kinds only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, quote, unquote, urlsplit

from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from tiering.clock import UnixClock
from tiering.config.obj import BucketConfig
from tiering.tiers.obj.answering import Answering, NoHttpError
from tiering.tiers.obj.connection import Connection, StaleError, StalledError
from tiering.tiers.obj.credentials import Keys, of_aws
from tiering.tiers.obj.dialect import Answer
from tiering.tiers.obj.signing import Signer
from tiering.tiers.obj.store import NotNowError, StoreError

_KEPT_SECONDS = 12.0
_PORTS = {"http": 80, "https": 443}


class NoConnectionError(NotNowError):
    """Nothing could be asked; `__cause__` is why."""


class Wire:
    """Connections to the store, as many as there are requests, each kept for a while when idle."""

    def __init__(self, config: BucketConfig, region: str) -> None:
        """StoreError where the environment names a proxy that can be none."""
        self._base = config.base_url
        self.region = region
        self._config = config
        self._proxy = _proxy_of_environment(config)
        self._signer = Signer(region, UnixClock())
        self._tls: ssl.SSLContext | None = None
        self._last_address = ""
        self._idle: list[Connection] = []
        self._is_open = False
        self.requests = dict.fromkeys(("get", "put", "list", "delete", "multipart"), 0)

    async def open(self) -> None:
        """Reads certificates; StoreError where `ca_bundle` cannot be."""
        proxy_tls = self._proxy is not None and self._proxy.scheme == "https"
        if self._config.scheme == "https" or proxy_tls:
            self._tls = await asyncio.to_thread(_tls, self._config.ca_bundle)
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if idle:
            # They are told of their end in the loop's next turn.
            await asyncio.sleep(0)

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
        if not self._is_open:
            raise StoreError("the object store is closed")
        self.requests[count_as or method.lower()] += 1
        length = sum(view.nbytes for view in body) if method in ("PUT", "POST") else None
        told = "&".join(f"{key}={quote(value, safe='-_.~')}" for key, value in sorted(query))
        head = self._head(keys, method, name, told, headers or {}, length)
        asked = f"{method} {name}".rstrip()
        # A kept connection may have ended by the time it is used, and the store has seen nothing
        # then. What may be done twice is asked once more.
        for kept in (True, False) if method != "POST" else (False,):
            try:
                return await self._ask(asked, head, body, into, kept)
            except StaleError:
                continue
        raise NotNowError(f"{asked}: {self._config.endpoint} ended the connection")

    async def _ask(
        self,
        asked: str,
        head: bytes,
        body: Sequence[memoryview],
        into: Sequence[memoryview] | None,
        kept: bool,
    ) -> Answer:
        connection = self._taken() if kept else None
        where = f"{asked}: {self._config.endpoint}"
        if connection is None:
            connection = await self._connected(where)
        seconds = self._config.read_timeout_seconds
        try:
            return await connection.exchange(head, body, Answering(into), seconds)
        except StalledError:
            raise NotNowError(f"{where} moved no byte for {seconds:g} s") from None
        except NoHttpError as error:
            raise NotNowError(f"{where} {error}") from None
        except OSError as error:
            told = type(error).__name__
            raise NotNowError(f"{where} ended the connection ({told})") from error
        finally:
            self._give_back(connection)

    def _taken(self) -> Connection | None:
        """The one used last, which is the least likely to have been closed."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_free:
                return connection
        return None

    def _give_back(self, connection: Connection) -> None:
        if connection.is_free and self._is_open:
            self._idle = [each for each in self._idle if each.is_free]
            self._idle.append(connection)
            connection.rest(_KEPT_SECONDS)
        else:
            connection.close()

    async def _connected(self, where: str) -> Connection:
        """A new one, by way of a proxy where the environment names one."""
        seconds = self._config.connect_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                if self._proxy is None:
                    base = urlsplit(self._base)
                    return await self._opened(base)
                return await self._through(self._proxy)
        except TimeoutError as error:
            by_way = "" if self._proxy is None else f" by way of the proxy {self._proxy.hostname}"
            told = f"{where} takes no connection{by_way} within {seconds:g} s"
            raise NoConnectionError(told) from error
        except ssl.SSLCertVerificationError as error:
            told = f"{where} has a certificate that is not accepted: {error.verify_message}"
            raise StoreError(told) from error
        except (OSError, NoHttpError) as error:
            raise NoConnectionError(f"{where} cannot be reached: {_reason(error)}") from error

    async def _opened(self, to: SplitResult) -> Connection:
        """The address that took the last one is tried first, and each has a share of the time:
        asyncio's race between addresses leaves sockets open where it is cancelled."""
        host, port = to.hostname or "", to.port or _PORTS[to.scheme]
        is_tls = to.scheme == "https"
        addresses = await _addresses(host, port)
        addresses.sort(key=lambda each: each != self._last_address)
        loop = asyncio.get_running_loop()
        for number, address in enumerate(addresses, 1):
            try:
                async with asyncio.timeout(self._config.connect_timeout_seconds / len(addresses)):
                    _, connection = await loop.create_connection(
                        Connection,
                        address,
                        port,
                        ssl=self._tls if is_tls else None,
                        server_hostname=host if is_tls else None,
                    )
            except ssl.SSLError:
                raise
            except OSError:
                if number == len(addresses):
                    raise
            else:
                self._last_address = address
                return connection
        raise OSError(f"{host} has no address")

    async def _through(self, proxy: SplitResult) -> Connection:
        try:
            connection = await self._opened(proxy)
        except OSError as error:
            # Or the store would be blamed for its name or its certificate.
            told = f"the proxy {proxy.hostname} of the environment: {_reason(error)}"
            raise ConnectionError(told) from error
        if self._config.scheme == "http":
            return connection
        to = urlsplit(self._base)
        address = f"{to.hostname}:{to.port or _PORTS['https']}"
        head = f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{_proxy_header(proxy)}\r\n"
        seconds = self._config.connect_timeout_seconds
        try:
            answering = Answering(None, has_body=False)
            answer = await connection.exchange(head.encode(), (), answering, seconds)
            if answer.status != 200 or self._tls is None:
                raise NoHttpError(f"the proxy answers {answer.status}")
            await connection.start_tls(self._tls, to.hostname or "", seconds)
        except BaseException:
            connection.close()
            raise
        return connection

    def _head(
        self,
        keys: Keys,
        method: str,
        name: str,
        query: str,
        given: Mapping[str, str],
        length: int | None,
    ) -> bytes:
        """Signed. StoreError where a line of it would be two."""
        base = urlsplit(self._base)
        path = base.path + quote(name, safe="/-_.~")
        host = base.netloc.removesuffix(f":{_PORTS[base.scheme]}")
        headers = self._signer.headers(keys, method, host, path, query, given)
        headers |= {"Accept-Encoding": "identity", "User-Agent": "kv-tiering"}
        if length is not None:
            headers["Content-Length"] = str(length)
        target = f"{path}?{query}" if query else path
        extra = ""
        if self._proxy is not None and base.scheme == "http":
            target = f"{base.scheme}://{base.netloc}{target}"
            extra = _proxy_header(self._proxy)
        lines = [f"{method} {target} HTTP/1.1", *map(": ".join, headers.items())]
        if any("\r" in line or "\n" in line for line in lines):
            raise StoreError("a credential or the region has a line break in it; correct it")
        return ("\r\n".join(lines) + f"\r\n{extra}\r\n").encode()


async def _addresses(host: str, port: int) -> list[str]:
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError:
            raise OSError(f"{host} is no name that a host can have") from None
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _proxy_of_environment(config: BucketConfig) -> SplitResult | None:
    """As AWS's tools find it. It may have a login in it, and is not shown."""
    given = get_environ_proxies(config.base_url).get(config.scheme)
    if not given:
        return None
    try:
        found = urlsplit(given if "://" in given else f"http://{given}")
        is_one = found.scheme in _PORTS and bool(found.hostname) and found.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise StoreError(
            f"is to be reached by way of the proxy in {config.scheme}_proxy of the environment, "
            "which is none for HTTP, such as http://proxy.example:3128"
        )
    return found


def _proxy_header(proxy: SplitResult) -> str:
    """What says to a proxy who asks; empty where its address has no name."""
    if not proxy.username:
        return ""
    told = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return f"Proxy-Authorization: Basic {b64encode(told.encode()).decode()}\r\n"


def _tls(ca_bundle: str) -> ssl.SSLContext:
    """Trusts what the system trusts, what botocore brings along, and `ca_bundle`, or where that is
    empty the one that AWS's tools would."""
    context = ssl.create_default_context()
    context.load_verify_locations(get_cert_path(True))
    named = ca_bundle or of_aws("ca_bundle")
    if named:
        try:
            context.load_verify_locations(named)
        except OSError as error:
            told = error.strerror or str(error)
            whose = "ca_bundle" if ca_bundle else "AWS's ca_bundle (AWS_CA_BUNDLE or its files)"
            raise StoreError(f"{whose} {named} cannot be read: {told}") from error
    return context


def _reason(error: Exception) -> str:
    """In the system's words."""
    if isinstance(error, socket.gaierror | ssl.SSLError):
        return error.strerror or type(error).__name__
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
