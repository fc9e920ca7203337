"""S3Store against a server that fails as it is told: each failure is one kind of StoreError."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from s3_servers import aws_chain_of_files, self_signed, server_context
from scripted_s3 import Asked, Fault, ScriptedS3, slow_down
from tiering.config import BucketConfig
from tiering.tiers.obj.credentials import Keys
from tiering.tiers.obj.s3 import S3Store
from tiering.tiers.obj.store import (
    CredentialsError,
    LengthError,
    NotNowError,
    StoreError,
    ThrottledError,
)
from tiering.tiers.obj.wire import Wire

KIB, MIB = 1 << 10, 1 << 20
BODY = bytes(range(256)) * 1024


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as found:
        found.objects["there"] = BODY
        yield found
        found.let_go()


def config(server: ScriptedS3, **keys: Any) -> BucketConfig:
    given = {
        "bucket": server.bucket,
        "endpoint_override": server.endpoint,
        "access_key": "given",
        "secret_key": "hushhush",
        "session_token": "tokenhush",
    }
    return BucketConfig(**given | keys)


@asynccontextmanager
async def opened(server: ScriptedS3, **keys: Any) -> AsyncIterator[S3Store]:
    found = S3Store(config(server, **keys), single_put_bytes=8 * MIB)
    await found.open()
    try:
        yield found
    finally:
        await found.close()


@pytest.fixture
async def store(server: ScriptedS3) -> AsyncIterator[S3Store]:
    async with opened(server) as found:
        yield found


async def get(store: S3Store, name: str = "there", length: int = len(BODY)) -> bytes | None:
    found = bytearray(length)
    return bytes(found) if await store.get(name, [memoryview(found)]) else None


@pytest.mark.parametrize(
    ("fault", "kind", "seconds"),
    [
        (slow_down(), ThrottledError, None),
        (slow_down("7"), ThrottledError, 7.0),
        (slow_down("0.5"), ThrottledError, 0.5),
        (slow_down("soon"), ThrottledError, None),
        (slow_down("-3"), ThrottledError, 0.0),
        (slow_down("inf"), ThrottledError, None),
        (Fault(status=503, code="ServiceUnavailable"), ThrottledError, None),
        (Fault(status=429, headers={"Retry-After": "2"}), ThrottledError, 2.0),
        (Fault(status=400, code="RequestLimitExceeded"), ThrottledError, None),
        (Fault(status=500, code="InternalError"), NotNowError, None),
        (Fault(status=502, headers={"Retry-After": "3"}), NotNowError, 3.0),
        (Fault(status=400, code="RequestTimeout"), NotNowError, None),
        (Fault(status=409, code="OperationAborted"), NotNowError, None),
        (Fault(status=403, code="AccessDenied"), StoreError, None),
        (Fault(status=501, code="NotImplemented"), StoreError, None),
        (Fault(status=404, code="NoSuchBucket"), StoreError, None),
        (Fault(status=301, code="PermanentRedirect"), StoreError, None),
        (Fault(reset=True), NotNowError, None),
        (Fault(stall_after=0, status=500), NotNowError, None),
    ],
)
async def test_an_answer_is_one_kind_of_error(
    server: ScriptedS3, fault: Fault, kind: type[StoreError], seconds: float | None
) -> None:
    stalls = fault.stall_after is not None
    async with opened(server, read_timeout_seconds=0.5 if stalls else 30.0) as store:
        operations: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
            ("get", lambda: get(store)),
            ("put", lambda: store.put("new", [memoryview(BODY)])),
            ("list", lambda: store.page("")),
            ("delete", lambda: store.delete(["there"])),
            ("delete", lambda: store.delete(["there", "other"])),
        ]
        # A store that knows no deletion of many is asked for one after the other.
        for verb, operation in operations[: 4 if fault.status == 501 else 5]:
            # A kept connection that was reset is given up for a new one, once.
            server.next(*[fault] * (2 if fault.reset else 1), verb=verb)
            with pytest.raises(kind) as caught:
                await operation()
            assert type(caught.value) is kind
            assert getattr(caught.value, "retry_after_seconds", None) == seconds
            told = str(caught.value)
            assert fault.reset or fault.stall_after is not None or str(fault.status) in told
            server.let_go()
        assert await get(store) == BODY


async def test_a_date_to_wait_for_counts_from_the_stores_clock(
    server: ScriptedS3, store: S3Store
) -> None:
    until = formatdate(1_700_000_090, usegmt=True)
    stamps = {"Retry-After": until, "Date": formatdate(1_700_000_000, usegmt=True)}
    server.next(Fault(status=503, headers=stamps))
    with pytest.raises(ThrottledError) as caught:
        await get(store)
    assert caught.value.retry_after_seconds == 90.0


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault(truncate_after=0), "ended after"),
        (Fault(truncate_after=100 * KIB), "ended after"),
        (Fault(length_off=1), "262145 bytes long, not 262144"),
        (Fault(length_off=-1), "262143 bytes long, not 262144"),
    ],
)
async def test_a_body_of_another_length_is_an_error(
    server: ScriptedS3, store: S3Store, fault: Fault, told: str
) -> None:
    server.next(fault, verb="get")
    with pytest.raises(LengthError, match=told):
        await get(store)
    assert await get(store) == BODY


async def test_a_body_that_stalls_is_given_up(server: ScriptedS3) -> None:
    async with opened(server, read_timeout_seconds=0.5) as store:
        server.next(Fault(stall_after=64 * KIB), verb="get")
        with pytest.raises(NotNowError, match=r"moved no byte for 0\.5 s"):
            await get(store)


@pytest.mark.slow
@pytest.mark.parametrize("over_tls", [False, True])
async def test_a_store_that_takes_no_bytes_is_given_up(over_tls: bool, tmp_path: Path) -> None:
    """And nothing has the buffers any more, or it would go on to send the rest."""
    over = asyncio.Event()

    async def take_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    certificate, key = self_signed(tmp_path)
    context = server_context(certificate, key) if over_tls else None
    deaf = await asyncio.start_server(take_nothing, "127.0.0.1", 0, limit=KIB, ssl=context)
    port = deaf.sockets[0].getsockname()[1]
    given = BucketConfig(
        bucket="bucket",
        endpoint_override=f"{'https' if over_tls else 'http'}://127.0.0.1:{port}",
        ca_bundle=str(certificate) if over_tls else "",
        read_timeout_seconds=0.5,
    )
    wire = Wire(given, "us-east-1")
    await wire.open()
    body = bytearray(16 * MIB)
    with memoryview(body) as view, pytest.raises(NotNowError, match=r"moved no byte for 0\.5 s"):
        await wire.exchange(Keys("a", "b", None), "PUT", "large", body=[view])
    body.clear()
    assert wire._idle == []
    await wire.close()
    over.set()
    deaf.close()
    await asyncio.sleep(0.05)


async def test_a_cancelled_request_touches_no_buffer_any_more(
    server: ScriptedS3, store: S3Store
) -> None:
    found = bytearray(len(BODY))
    server.next(Fault(stall_after=64 * KIB), verb="get")
    getting = asyncio.ensure_future(store.get("there", [memoryview(found)]))
    # It comes in its own time, and nothing else says that it came.
    while found[64 * KIB - 1] == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    found[:] = bytes(len(found))
    server.let_go()
    await asyncio.sleep(0.2)
    assert found == bytes(len(found))

    body = bytearray(b"a" * 4 * MIB)
    server.next(Fault(delay_seconds=60.0), verb="put")
    putting = asyncio.ensure_future(store.put("cancelled", [memoryview(body)]))
    await asyncio.sleep(0.05)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    body[:] = b"b" * len(body)
    await asyncio.sleep(0.4)
    assert all(asked.body == b"a" * len(body) for asked in server.asked if asked.verb == "put")


@pytest.mark.slow
@pytest.mark.parametrize("failing", [1, 2, 3, 4])
async def test_parts_are_given_up_when_one_fails(
    server: ScriptedS3, store: S3Store, failing: int
) -> None:
    """The start, one of the parts, or the end."""
    verbs = {1: ["multipart"], 2: ["put"], 3: ["put", "put"], 4: ["multipart", "multipart"]}
    for verb in verbs[failing][1:]:
        server.next(Fault(), verb=verb)
    server.next(Fault(status=500, code="InternalError"), verb=verbs[failing][0])
    with pytest.raises(NotNowError):
        await store.put("parts", [memoryview(bytes(20 * MIB))])
    assert server.uploads == 0
    assert "parts" not in server.objects
    assert server.count()["delete"] == (failing != 1)


async def test_an_end_of_parts_that_is_an_error_with_status_200_is_one(
    server: ScriptedS3, store: S3Store
) -> None:
    server.next(Fault(), verb="multipart")
    server.next(Fault(status=200, code="InternalError"), verb="multipart")
    with pytest.raises(NotNowError, match="InternalError"):
        await store.put("parts", [memoryview(bytes(9 * MIB))])
    assert server.uploads == 0


async def test_where_many_cannot_be_deleted_at_once_they_are_one_by_one(
    server: ScriptedS3, store: S3Store
) -> None:
    server.knows_delete_objects = False
    server.objects |= {"a": b"", "b": b"", "c": b""}
    assert await store.delete(["a", "none"]) == []
    server.next(Fault(status=403, code="AccessDenied"), verb="delete")
    assert await store.delete(["b", "c", "none"]) == ["b"]
    assert set(server.objects) == {"there", "b"}
    assert store.requests()["delete"] == 1 + 2 + 3
    server.next(Fault(), slow_down(), verb="delete")
    assert await store.delete(["b", "there", "c"]) == ["there", "c"]
    with pytest.raises(ValueError, match="1001 names"):
        await store.delete(["x"] * 1001)


async def test_checksums_are_sent_where_they_are_wanted_only(server: ScriptedS3) -> None:
    server.refuses_checksums = True
    for mode, refused in (("when_required", False), ("when_supported", True)):
        store = S3Store(config(server, request_checksums=mode))
        await store.open()
        told = pytest.raises(StoreError, match="501") if refused else nullcontext()
        with told:
            await store.put("new", [memoryview(b"123456789")])
        told = pytest.raises(StoreError, match="501") if refused else nullcontext()
        with told:
            await store.put_small("new", b"123456789")
        await store.close()
    # The checksum of the CRC's own test vector.
    assert server.asked[-1].headers["x-amz-checksum-crc32"] == "y/Q5Jg=="


async def test_given_credentials_are_not_renewed(server: ScriptedS3, store: S3Store) -> None:
    server.next(Fault(status=400, code="ExpiredToken"))
    with pytest.raises(CredentialsError, match="nothing renews"):
        await get(store)
    assert server.count()["get"] == 1
    assert await get(store) == BODY


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A chain that has a file and nothing else; the file."""
    _, credentials = aws_chain_of_files(tmp_path, monkeypatch)
    write_keys(credentials, "first")
    return credentials


def write_keys(path: Path, access_key: str) -> None:
    keys = f"aws_access_key_id = {access_key}\naws_secret_access_key = hushhush\n"
    path.write_text(f"[default]\n{keys}")


async def test_credentials_that_were_rotated_are_read_once_for_all_who_wait(
    server: ScriptedS3, aws: Path
) -> None:
    server.accepted = {"first"}
    store = S3Store(config(server, access_key="", secret_key="", session_token=""))
    await store.open()
    try:
        server.accepted = {"second"}
        write_keys(aws, "second")
        found = await asyncio.gather(*(get(store) for _ in range(8)))
        assert found == [BODY] * 8
        assert store._wallet is not None
        assert store._wallet._readings == 2
        assert server.count()["get"] <= 16
        assert await get(store) == BODY

        # Nobody has others yet: each request fails after one look, and the first with others goes.
        server.accepted = {"third"}
        before = server.count()["get"]
        for _ in range(2):
            with pytest.raises(CredentialsError, match="no others yet"):
                await get(store)
        assert server.count()["get"] == before + 2
        write_keys(aws, "third")
        assert await get(store) == BODY
        aws.unlink()
        server.accepted = set()
        with pytest.raises(CredentialsError, match="no credentials"):
            await get(store)
    finally:
        await store.close()


async def test_a_secret_is_in_no_message_and_no_log(
    server: ScriptedS3, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("botocore", "aiobotocore", "aiohttp", "tiering"):
        caplog.set_level(logging.DEBUG, name)
    store = S3Store(config(server))
    await store.open()
    assert await get(store) == BODY

    def echo(asked: Asked) -> Fault:
        """As a store that repeats what it was sent."""
        return Fault(status=403, code="AccessDenied", message="you sent hushhush, tokenhush")

    server.script = echo
    with pytest.raises(StoreError, match=r"you sent \(hidden\), \(hidden\)") as caught:
        await get(store)
    await store.close()
    for text in (caplog.text, repr(store), str(caught.value), repr(store._wallet.__dict__)):
        assert "hushhush" not in text
        assert "tokenhush" not in text


async def test_a_closed_store_says_so(store: S3Store) -> None:
    await store.close()
    with pytest.raises(StoreError, match="not open"):
        await get(store)


async def test_requests_are_counted_by_verb(server: ScriptedS3, store: S3Store) -> None:
    await get(store)
    await get(store, "none")
    await store.put("a", [memoryview(b"")])
    await store.put_small("a", b"x", if_absent=True)
    await store.page("")
    await store.delete(["a"])
    counted = {verb: count for verb, count in store.requests().items() if count}
    assert counted == dict(server.count()) == {"get": 2, "put": 2, "list": 2, "delete": 1}
