"""What `S3Store.open` says when the bucket cannot be used: its own cause and way out, no secret."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from s3_servers import Served, aws_chain_of_files, rclone, self_signed, server_context
from scripted_s3 import Fault, ScriptedS3, slow_down
from tiering.config import BucketConfig
from tiering.errors import ConfigError
from tiering.testing.ports import free_port
from tiering.tiers.obj.s3 import S3Store

WHERE = "secondary_tiers[0].store_config"
SECRET = "hushhush-4711"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with rclone(tmp_path_factory.mktemp("plain")) as served:
        yield served


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with rclone(tmp_path_factory.mktemp("tls"), tls=True) as served:
        yield served


async def fails(caplog: pytest.LogCaptureFixture, given: dict[str, Any]) -> ConfigError:
    """The error, which is one line, and which nothing secret is told with."""
    caplog.set_level(logging.DEBUG)
    config = BucketConfig(**given)
    store = S3Store(config, where=WHERE, prefix="kv")
    with pytest.raises(ConfigError) as caught:
        await store.open()
    error = caught.value
    assert "\n" not in str(error)
    hidden = [config.secret_key, config.session_token]
    for text in (str(error), repr(error.__cause__), caplog.text):
        assert not any(secret.get_secret_value() in text for secret in hidden if secret)
    await store.close()
    return error


def is_about(error: ConfigError, key: str, reason: str, remedy: str) -> None:
    assert error.path == f"{WHERE}.{key}"
    assert reason in error.reason
    assert remedy in error.remedy


@pytest.mark.slow
async def test_a_bucket_that_can_be_used(plain: Served, tls: Served) -> None:
    for served in (plain, tls):
        store = S3Store(BucketConfig(**served.store_config()))  # type: ignore[arg-type]
        await store.open()
        counted = {verb: count for verb, count in store.requests().items() if count}
        assert counted == {"list": 1}
        await store.close()


@pytest.mark.parametrize(
    ("changed", "key", "reason", "remedy"),
    [
        ({"bucket": "none"}, "bucket", "no bucket at http://127.0.0.1", "make it"),
        ({"access_key": "nobody"}, "access_key", "not known to the store", "correct it"),
        ({"secret_key": SECRET}, "secret_key", "not the one that belongs", "correct it"),
    ],
)
async def test_a_real_store_that_refuses(
    plain: Served,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, str],
    key: str,
    reason: str,
    remedy: str,
) -> None:
    error = await fails(caplog, plain.store_config() | changed)
    is_about(error, key, reason, remedy)


async def test_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    given = {"bucket": "b", "access_key": "a", "secret_key": SECRET}
    port = free_port()
    error = await fails(caplog, given | {"endpoint_override": f"127.0.0.1:{port}"})
    is_about(error, "endpoint_override", "cannot be reached", f"http://127.0.0.1:{port} is its")
    assert error.value == f"127.0.0.1:{port}"
    error = await fails(caplog, given | {"endpoint_override": "s3.invalid"})
    is_about(error, "endpoint_override", "cannot resolve", "http://s3.invalid is its address")


async def test_a_bucket_in_front_of_a_host_that_cannot_be_resolved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"bucket": "b", "endpoint_override": "s3.invalid", "addressing": "virtual"}
    error = await fails(caplog, given | {"access_key": "a", "secret_key": SECRET})
    is_about(error, "addressing", "cannot resolve b.s3.invalid", 'write "path"')


@pytest.mark.slow
async def test_a_store_that_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Connections are taken by the kernel, and by nobody else."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as deaf:
        for scheme in ("http", "https"):
            given = {
                "bucket": "b",
                "endpoint_override": f"{scheme}://127.0.0.1:{deaf.getsockname()[1]}",
                "access_key": "a",
                "secret_key": SECRET,
                "connect_timeout_seconds": 0.5,
                "read_timeout_seconds": 0.5,
            }
            error = await fails(caplog, given)
            is_about(error, "endpoint_override", "gives no answer", "check that the store is up")


@pytest.mark.slow
async def test_tls_and_plain_http_mixed_up(
    plain: Served, tls: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick = {"connect_timeout_seconds": 2.0, "read_timeout_seconds": 2.0}
    with ExitStack() as stack:
        scripted = stack.enter_context(ScriptedS3())
        context = server_context(*self_signed(tmp_path))
        scripted_tls = stack.enter_context(ScriptedS3(tls=context))
        for endpoint in (plain.endpoint, scripted.endpoint):
            given = plain.store_config() | quick | {"endpoint_override": f"s{endpoint}"}
            given["endpoint_override"] = endpoint.replace("http", "https")
            error = await fails(caplog, given)
            is_about(error, "scheme", "speaks plain HTTP", 'write "http"')
        for endpoint in (tls.endpoint, scripted_tls.endpoint):
            given = plain.store_config() | quick
            given["endpoint_override"] = endpoint.replace("https", "http")
            error = await fails(caplog, given)
            is_about(error, "scheme", "speaks TLS", 'write "https"')


@pytest.mark.slow
async def test_certificates(
    tls: Served,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, _ = self_signed(tmp_path, "other")
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    given = tls.store_config()
    for ca_bundle, reason, remedy in (
        ("", "self-signed certificate", "name a file"),
        (str(other), "does not vouch for 127.0.0.1", "this one is of another"),
        (str(junk), "cannot be read", "in PEM"),
        (str(tmp_path / "none"), "No such file", "in PEM"),
    ):
        error = await fails(caplog, given | {"ca_bundle": ca_bundle})
        is_about(error, "ca_bundle", reason, remedy)
        assert error.value == ca_bundle
    monkeypatch.setenv("AWS_CA_BUNDLE", str(junk))
    error = await fails(caplog, given | {"ca_bundle": ""})
    is_about(error, "ca_bundle", f"(AWS_CA_BUNDLE or its files) {junk} cannot be read", "in PEM")
    certificate = given.pop("ca_bundle")
    monkeypatch.setenv("AWS_CA_BUNDLE", certificate)
    store = S3Store(BucketConfig(**given), where=WHERE, prefix="kv")
    await store.open()
    await store.close()


SCRIPTED: list[tuple[Fault, str, str, str]] = [
    (
        Fault(status=301, code="PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-3"}),
        "region", "not where bucket bucket is", '"eu-west-3"',
    ),
    (
        Fault(status=400, code="AuthorizationHeaderMalformed",
              headers={"x-amz-bucket-region": "eu-west-3"}),
        "region", "signed for us-east-1", "endpoint must be of that region",
    ),
    (Fault(status=403, code="AccessDenied"), "bucket", "may not be listed", "s3:ListBucket"),
    (Fault(status=403, code="InvalidAccessKeyId"), "access_key", "not known", "correct it"),
    (Fault(status=403, code="SignatureDoesNotMatch"), "secret_key", "belongs", "correct it"),
    (Fault(status=400, code="ExpiredToken"), "session_token", "expired or wrong", "AWS's chain"),
    (Fault(status=403, code="RequestTimeTooSkewed"), "endpoint_override", "clocks", "NTP"),
    (Fault(status=404, code="NoSuchBucket"), "bucket", "no bucket at", "make it"),
    (Fault(status=500, code="InternalError"), "endpoint_override", "refuses to list", "is up"),
    (Fault(status=501, code="NotImplemented"), "endpoint_override", "refuses to list", "is up"),
    (Fault(status=200, code="Surprise"), "endpoint_override", "not as an S3 store", "its address"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "key", "reason", "remedy"), SCRIPTED)
async def test_a_scripted_refusal(
    caplog: pytest.LogCaptureFixture, fault: Fault, key: str, reason: str, remedy: str
) -> None:
    with ScriptedS3() as server:
        server.next(fault)
        server.clock_off_seconds = -3600.0
        error = await fails(caplog, store_config(server))
    is_about(error, key, reason, remedy)
    if fault.code == "RequestTimeTooSkewed":
        assert any(f"{seconds} s ahead of" in error.reason for seconds in range(3595, 3606))


async def test_a_store_that_asks_for_fewer_requests_can_be_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ScriptedS3() as server:
        server.next(slow_down())
        store = S3Store(BucketConfig(**store_config(server)))
        await store.open()
        assert "asks for fewer requests already at start" in caplog.text
        await store.close()


@pytest.mark.slow
async def test_no_credentials_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    aws_chain_of_files(tmp_path, monkeypatch)
    with ScriptedS3() as server:
        given = {"bucket": server.bucket, "endpoint_override": server.endpoint}
        error = await fails(caplog, given)
        is_about(error, "access_key", "no credentials either", "~/.aws")
        assert server.count().total() == 0
        monkeypatch.setenv("AWS_PROFILE", "unknown")
        error = await fails(caplog, given)
        is_about(error, "access_key", "ProfileNotFound", "AWS's chain")
        # Those that are found, and refused, are told by where they are from.
        monkeypatch.delenv("AWS_PROFILE")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fromtheenvironment")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        server.accepted = {"another"}
        error = await fails(caplog, given)
        is_about(error, "access_key", "they come from AWS's chain (env): 403 Inv", "correct it")


async def test_without_the_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(sys.modules):
        if name.startswith("tiering.tiers.obj.") and name.rpartition(".")[2] in (
            "credentials",
            "probe",
            "wire",
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiobotocore", None)
    for name in [name for name in sys.modules if name.startswith("aiobotocore.")]:
        monkeypatch.setitem(sys.modules, name, None)
    store = S3Store(BucketConfig(bucket="b", endpoint_override="h"), where=WHERE)
    with pytest.raises(ConfigError, match=r"aiobotocore.*; run pip install 'kv-tiering\[s3\]'"):
        await store.open()


async def test_a_start_that_is_cancelled_leaves_nothing_open() -> None:
    with ScriptedS3() as server:
        server.next(Fault(delay_seconds=30.0))
        store = S3Store(BucketConfig(**store_config(server)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await store.open()
        assert repr(store).endswith("closed>")


def store_config(server: ScriptedS3) -> dict[str, Any]:
    return {
        "bucket": server.bucket,
        "endpoint_override": server.endpoint,
        "access_key": "given",
        "secret_key": SECRET,
        "session_token": "tokenhush-4711",
    }


@pytest.mark.slow
def test_nothing_of_the_extra_is_loaded_before_a_store_is_opened() -> None:
    code = (
        "import sys, tiering.wiring, tiering.tiers.obj.s3\n"
        "print({'aiobotocore', 'aiohttp', 'botocore', 'yarl'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
