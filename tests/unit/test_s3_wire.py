"""Wire against servers of a few lines: connections that are kept, end early, or go by a proxy."""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from s3_servers import self_signed, server_context
from scripted_s3 import ScriptedS3
from tiering.config import BucketConfig
from tiering.errors import ConfigError
from tiering.tiers.obj import wire as wires
from tiering.tiers.obj.answering import Answering
from tiering.tiers.obj.connection import Connection
from tiering.tiers.obj.credentials import Keys
from tiering.tiers.obj.s3 import S3Store
from tiering.tiers.obj.store import NotNowError, StoreError
from tiering.tiers.obj.wire import Wire

MIB = 1 << 20
KEYS = Keys("a", "b", None)
FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
Served = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(serve: Served) -> AsyncIterator[int]:
    """The port on which each connection is `serve`'s."""
    over: list[asyncio.StreamWriter] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over.append(writer)
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in over:
            writer.transport.abort()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def wire_to(endpoint: str, **keys: str) -> AsyncIterator[Wire]:
    given = BucketConfig(
        bucket="bucket", endpoint_override=endpoint, read_timeout_seconds=5.0, **keys
    )
    found = Wire(given, "us-east-1")
    await found.open()
    try:
        yield found
    finally:
        await found.close()


async def taken(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The first line of a request, and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    _, _, behind = head.lower().partition("content-length: ")
    length = int(behind.partition("\r\n")[0] or 0)
    return head.partition("\r\n")[0], await reader.readexactly(length)


async def test_a_kept_connection_that_ends_unasked_is_given_up_for_another() -> None:
    asked: list[str] = []
    connections = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        asked.append((await taken(reader))[0])
        writer.write(FINE)
        # The next one is read, and the connection ended.
        await taken(reader)

    async with serving(once) as port, wire_to(f"http://127.0.0.1:{port}") as wire:
        for name in ("a", "b"):
            answer = await wire.exchange(KEYS, "PUT", name, body=[memoryview(b"body")])
            assert answer.status == 200
    assert asked == ["PUT /bucket/a HTTP/1.1", "PUT /bucket/b HTTP/1.1"]
    assert connections == 2


async def test_a_new_connection_that_ends_is_not_tried_again() -> None:
    connections = 0

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await taken(reader)

    async with serving(never) as port, wire_to(f"http://127.0.0.1:{port}") as wire:
        with pytest.raises(NotNowError, match="ended the connection"):
            await wire.exchange(KEYS, "GET", "a")
    assert connections == 1


async def test_what_may_not_be_done_twice_goes_over_a_new_connection() -> None:
    connections = 0

    async def always(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await taken(reader)
            writer.write(FINE)

    async with serving(always) as port, wire_to(f"http://127.0.0.1:{port}") as wire:
        for method in ("GET", "PUT", "DELETE", "POST"):
            await wire.exchange(KEYS, method, "a", count_as="get")
    assert connections == 2


async def test_an_answer_before_all_is_sent_ends_the_connection_and_the_sending() -> None:
    async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(FINE.replace(b"200 OK", b"503 Slow Down"))
        await asyncio.sleep(60)

    body = bytearray(32 * MIB)
    async with serving(refusing) as port, wire_to(f"http://127.0.0.1:{port}") as wire:
        with memoryview(body) as view:
            answer = await wire.exchange(KEYS, "PUT", "a", body=[view])
        assert answer.status == 503
        # Nothing has a part of it any more.
        body.clear()
        assert wire._idle == []


async def test_a_body_of_many_parts_arrives_as_it_is() -> None:
    found: list[bytes] = []

    async def keeping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            found.append((await taken(reader))[1])
            writer.write(FINE)

    parts = [bytes([at]) * size for at, size in enumerate((1, 0, 4096, 9 * MIB + 1, 7))]
    parts += [b"part"] * 1100
    async with serving(keeping) as port, wire_to(f"http://127.0.0.1:{port}") as wire:
        for _ in range(2):
            await wire.exchange(KEYS, "PUT", "a", body=[memoryview(part) for part in parts])
        assert len(wire._idle) == 1
    assert found == [b"".join(parts)] * 2


async def test_a_connection_that_has_ended_before_its_first_request_is_lost() -> None:
    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with serving(hangs_up) as port:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        while connection.is_free:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0)
        with pytest.raises(ConnectionResetError):
            await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", (), Answering(None), 5.0)
        with pytest.raises(ConnectionResetError):
            await connection.start_tls(ssl.create_default_context(), "127.0.0.1", 5.0)


@pytest.mark.parametrize("over_tls", [False, True])
def test_a_programs_loop_may_be_uvloops(over_tls: bool, tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")
    body = memoryview(bytes(range(256)) * (16 << 10))
    certificate, key = self_signed(tmp_path)

    async def there_and_back(wire: Wire) -> bytearray:
        found = bytearray(len(body))
        await wire.exchange(KEYS, "PUT", "a", body=[body])
        await wire.exchange(KEYS, "GET", "a", into=[memoryview(found)])
        return found

    async def main() -> None:
        bundle = str(certificate) if over_tls else ""
        async with wire_to(server.endpoint, ca_bundle=bundle) as wire:
            found = await asyncio.gather(*(there_and_back(wire) for _ in range(3)))
        assert all(each == body for each in found)

    with ScriptedS3(tls=server_context(certificate, key) if over_tls else None) as server:
        uvloop.run(main())


async def test_an_idle_connection_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wires, "_KEPT_SECONDS", 0.05)
    ended = asyncio.Event()

    async def until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await taken(reader)
        writer.write(FINE)
        assert await reader.read() == b""
        ended.set()

    async with serving(until_end) as port, wire_to(f"http://127.0.0.1:{port}") as wire:
        await wire.exchange(KEYS, "GET", "a")
        async with asyncio.timeout(60):
            await ended.wait()


async def test_an_address_that_does_not_answer_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def always(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked.append((await taken(reader))[0])
            writer.write(FINE)

    async def both(host: str, port: int) -> list[str]:
        assert (host, port) == ("store.test", served)
        return ["127.0.0.2", "127.0.0.1"]

    async with serving(always) as served, wire_to(f"http://store.test:{served}") as wire:
        monkeypatch.setattr(wires, "_addresses", both)
        await wire.exchange(KEYS, "GET", "a")
        assert wire._last_address == "127.0.0.1"
    assert len(asked) == 1


async def test_a_bucket_is_in_the_name_of_the_host_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ours(host: str, port: int) -> list[str]:
        assert (host, port) == ("bucket.store.test", server.port)
        return ["127.0.0.1"]

    monkeypatch.setattr(wires, "_addresses", ours)
    with ScriptedS3() as server:
        endpoint = f"http://store.test:{server.port}"
        async with wire_to(endpoint, addressing="virtual") as wire:
            await wire.exchange(KEYS, "PUT", "a/b c", body=[memoryview(b"body")])
            assert (await wire.exchange(KEYS, "GET", "a/b c")).body == b"body"
    assert server.objects == {"a/b c": b"body"}
    assert server.asked[0].headers["host"] == f"bucket.store.test:{server.port}"


async def test_no_line_of_a_request_becomes_two() -> None:
    async with wire_to("http://127.0.0.1:1") as wire:
        with pytest.raises(StoreError, match="a line break"):
            await wire.exchange(Keys("a", "b", "token\r\nX: y"), "GET", "a")


@pytest.fixture
def no_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is named that no proxy is used for."""
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")


@pytest.mark.usefixtures("no_exceptions")
@pytest.mark.parametrize(
    ("proxy", "wrong"),
    [
        ("socks5://127.0.0.1:1080", "none for HTTP"),
        ("http://127.0.0.1:port", "none for HTTP"),
        ("http://[::1", "none for HTTP"),
        ("http://", "none for HTTP"),
        ("http://me:hushhush@127.0.0.1:1", "proxy 127.0.0.1 of the environment: Connection ref"),
        ("127.0.0.1:1", "proxy 127.0.0.1 of the environment: Connection refused"),
        ("http://a..b:1", "proxy a..b of the environment: a..b is no name"),
    ],
)
async def test_a_proxy_that_cannot_be_used_is_told_and_its_login_is_not(
    proxy: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(StoreError) as caught:
        async with wire_to("http://127.0.0.1:1") as wire:
            await wire.exchange(KEYS, "GET", "a")
    assert wrong in str(caught.value)
    assert "hushhush" not in str(caught.value)
    given = {"bucket": "bucket", "access_key": "a", "secret_key": "hushhush"}
    store = S3Store(BucketConfig(endpoint_override="127.0.0.1:1", **given))
    with pytest.raises(ConfigError) as refused:
        await store.open()
    assert wrong in refused.value.reason
    assert refused.value.path == "store_config.endpoint_override"


@pytest.mark.usefixtures("no_exceptions")
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_of_the_environment_is_used(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[str] = []

    async def passing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        up, down = await asyncio.open_connection("127.0.0.1", server.port)
        if head.startswith("CONNECT"):
            # As small proxies say it, which does not mean that the tunnel is at its end.
            writer.write(b"HTTP/1.0 200 Connection established\r\n\r\n")
        else:
            down.write(head.replace(f"http://127.0.0.1:{server.port}", "", 1).encode())

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(MIB):
                target.write(data)
            target.close()

        await asyncio.gather(copy(reader, down), copy(up, writer))

    certificate, key = self_signed(tmp_path)
    tls = server_context(certificate, key) if scheme == "https" else None
    with ScriptedS3(tls=tls) as server:
        server.objects["a"] = bytes(3 * MIB)
        bundle = str(certificate) if tls else ""
        async with serving(passing) as port:
            monkeypatch.setenv(f"{scheme}_proxy", f"http://me:se%20cret@127.0.0.1:{port}")
            async with wire_to(server.endpoint, ca_bundle=bundle) as wire:
                into = [memoryview(bytearray(b"x" * 3 * MIB))]
                answer = await wire.exchange(KEYS, "GET", "a", into=into)
                assert (answer.status, into[0]) == (200, bytes(3 * MIB))
                await wire.exchange(KEYS, "PUT", "b", body=into)
    assert server.objects["b"] == bytes(3 * MIB)
    assert len(heads) == 1
    assert f"Proxy-Authorization: Basic {b64encode(b'me:se cret').decode()}\r\n" in heads[0]
    begins = {"http": "GET http://127", "https": f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\n"}
    assert heads[0].startswith(begins[scheme])
    # What is signed for the store is not the proxy's to see.
    assert ("Authorization: AWS4" in heads[0]) == (scheme == "http")
