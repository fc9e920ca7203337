"""AWS's chain of credentials, where it fails, hangs or finds what is no use: files, programs and
services are none of ours, and whatever they raise is a StoreError, or at start a ConfigError."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from s3_servers import aws_chain_of_files
from scripted_s3 import Fault, ScriptedS3
from tiering.config import BucketConfig
from tiering.errors import ConfigError
from tiering.tiers.obj import probe
from tiering.tiers.obj.credentials import Wallet
from tiering.tiers.obj.s3 import S3Store
from tiering.tiers.obj.store import CredentialsError

# AWS's tools renew keys that end sooner than in a quarter of an hour, and use them meanwhile.
ADVISORY = timedelta(minutes=12)
NEVER = timedelta(days=1)
OVER = timedelta(days=-1)


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as found:
        found.objects["there"] = b"body"
        yield found


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A chain that has nothing but a configuration file, which is not there yet; the file."""
    config, _ = aws_chain_of_files(tmp_path, monkeypatch)
    return config


def program(aws: Path, text: str) -> None:
    """Have a program with `text`, for a shell, make the credentials."""
    path = aws.with_name("program")
    path.write_text(f"#!/bin/sh\ncd {aws.parent}\n{text}\n")
    path.chmod(0o700)
    aws.write_text(f"[default]\ncredential_process = {path}\n")


def printed(ends_in: timedelta, access_key: str = "made") -> str:
    ends = (datetime.now(UTC) + ends_in).isoformat()
    keys = {"AccessKeyId": access_key, "SecretAccessKey": "hushhush", "Expiration": ends}
    return f"echo '{json.dumps({'Version': 1} | keys)}'"


def workload(aws: Path, server: ScriptedS3, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a service make the credentials, at the store's address; the file that it asks for."""
    token = aws.with_name("token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/kv")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return token


def make_store(server: ScriptedS3) -> S3Store:
    return S3Store(BucketConfig(bucket=server.bucket, endpoint_override=server.endpoint))


async def get(store: S3Store) -> bytes:
    found = bytearray(4)
    assert await store.get("there", [memoryview(found)])
    return bytes(found)


async def why_not_opened(server: ScriptedS3) -> ConfigError:
    """In one line, about the key of the credentials."""
    with pytest.raises(ConfigError) as caught:
        await make_store(server).open()
    assert caught.value.path == "store_config.access_key"
    assert "\n" not in str(caught.value)
    assert "hushhush" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo no JSON", "JSONDecodeError"),
        (printed(OVER), "still expired"),
        ("echo hushhush >&2; exit 3", "CredentialRetrievalError from custom-process"),
    ],
)
async def test_a_program_that_makes_no_credentials(
    server: ScriptedS3, aws: Path, text: str, reason: str
) -> None:
    program(aws, text)
    error = await why_not_opened(server)
    assert "AWS's chain fails: " in error.reason
    assert reason in error.reason
    assert "~/.aws/credentials" in error.reason


@pytest.mark.slow
async def test_what_the_chain_needs_and_is_not_there(
    server: ScriptedS3, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.write_text("[default]\ncredential_process = /none/program\n")
    assert "No such file or directory: '/none/program'" in (await why_not_opened(server)).reason
    aws.unlink()
    token = workload(aws, server, monkeypatch)
    assert f"No such file or directory: '{token}'" in (await why_not_opened(server)).reason
    # A service that gives no role: this one knows of none.
    token.write_text("a token")
    assert "AssumeRoleWithWebIdentity" in (await why_not_opened(server)).reason


async def test_a_line_break_behind_a_key_is_named(
    server: ScriptedS3, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "found")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hushhush\n")
    error = await why_not_opened(server)
    assert "AWS's chain (env) has credentials with a blank or a line break" in error.reason


async def test_a_chain_that_hangs_is_not_the_stores_fault(
    server: ScriptedS3, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_SECONDS_MAX", 0.3)
    workload(aws, server, monkeypatch).write_text("a token")
    server.script = lambda asked: Fault(delay_seconds=30.0) if asked.verb == "multipart" else None
    error = await why_not_opened(server)
    assert "AWS's chain gives none within 0.3 s" in error.reason


async def test_a_chain_that_fails_while_a_store_is_used_fails_requests_only(
    server: ScriptedS3, aws: Path
) -> None:
    program(aws, printed(NEVER))
    store = make_store(server)
    await store.open()
    server.accepted = {"others"}
    for text, reason in ((printed(OVER), "still expired"), ("echo no JSON", "JSONDecodeError")):
        program(aws, text)
        with pytest.raises(CredentialsError, match=reason):
            await get(store)
    program(aws, printed(NEVER, "others"))
    assert await get(store) == b"body"
    await store.close()


async def test_while_one_request_renews_keys_the_others_go_on_with_them(
    server: ScriptedS3, aws: Path
) -> None:
    """The program runs twice while the store is opened, and hangs from then on."""
    waits = "while [ -e 2 ] && [ ! -e go ]; do touch waits; sleep 0.02; done"
    counts = "if [ -e 1 ]; then touch 2; fi; touch 1"
    program(aws, f"{waits}; {counts}; {printed(ADVISORY)}")
    store = make_store(server)
    await store.open()
    first = asyncio.create_task(get(store))
    while not aws.with_name("waits").exists():  # noqa: ASYNC110 (a program makes it)
        await asyncio.sleep(0.01)
    async with asyncio.timeout(60.0):
        assert await asyncio.gather(*(get(store) for _ in range(3))) == [b"body"] * 3
    assert not first.done()
    aws.with_name("go").touch()
    assert await first == b"body"
    await store.close()


@pytest.mark.parametrize(
    ("endpoint", "region"),
    [
        ("s3.eu-central-1.amazonaws.com", "eu-central-1"),
        ("s3-us-west-2.amazonaws.com", "us-west-2"),
        ("s3.dualstack.ap-southeast-2.amazonaws.com", "ap-southeast-2"),
        ("s3-fips.us-gov-west-1.amazonaws.com", "us-gov-west-1"),
        ("s3-fips.dualstack.us-east-2.amazonaws.com", "us-east-2"),
        ("bucket.vpce-1a2b3c4d-5e6f.s3.us-east-1.vpce.amazonaws.com", "us-east-1"),
        ("s3.cn-north-1.amazonaws.com.cn", "cn-north-1"),
        ("s3.amazonaws.com", "eu-south-2"),
        ("minio.s3.eu-central-1.example", "eu-south-2"),
    ],
)
def test_the_region_is_that_of_an_aws_endpoint_or_of_awss_environment(
    endpoint: str, region: str, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-south-2")
    found = BucketConfig(bucket="kv", endpoint_override=endpoint)
    assert Wallet(found).region() == region
    given = BucketConfig(bucket="kv", endpoint_override=endpoint, region="us-west-1")
    assert Wallet(given).region() == "us-west-1"


class Identities:
    """The services that AWS's tools ask for the keys of a workload or a host, at one address."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def keys(self) -> dict[str, str]:
        ends = (datetime.now(UTC) + NEVER).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = {"AccessKeyId": "lent", "SecretAccessKey": "hushhush", "Expiration": ends}
        return {**keys, "Token": "a-session", "SessionToken": "a-session", "Code": "Success"}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if length := re.search(r"content-length: (\d+)", head.lower()):
            await reader.readexactly(int(length[1]))
        method, path, _ = head.split(" ", 2)
        self.asked.append(f"{method} {path}")
        lent = "".join(f"<{name}>{text}</{name}>" for name, text in self.keys().items())
        answers = {
            "POST /": f"<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult>"
            f"<Credentials>{lent}</Credentials><AssumedRoleUser><Arn>a</Arn></AssumedRoleUser>"
            "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>",
            "GET /pod": json.dumps(self.keys()),
            "PUT /latest/api/token": "a-token",
            "GET /latest/meta-data/iam/security-credentials/": "a-role",
            "GET /latest/meta-data/iam/security-credentials/a-role": json.dumps(self.keys()),
        }
        body = answers.get(f"{method} {path}", "").encode()
        status = "200 OK" if body else "404 None"
        about = f"Content-Length: {len(body)}\r\nConnection: close\r\n"
        writer.write(f"HTTP/1.1 {status}\r\n{about}\r\n".encode() + body)
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["web identity", "pod identity", "instance"])
async def test_a_workload_or_a_host_lends_its_identity(
    kind: str, server: ScriptedS3, aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = Identities()
    served = await asyncio.start_server(identities.serve, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{served.sockets[0].getsockname()[1]}"
    if kind == "web identity":
        workload(aws, server, monkeypatch).write_text("a token")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", address)
    elif kind == "pod identity":
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{address}/pod")
    else:
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", address)
    server.accepted = {"lent"}
    store = make_store(server)
    await store.open()
    assert await get(store) == b"body"
    assert identities.asked
    assert all(asked.headers["x-amz-security-token"] == "a-session" for asked in server.asked)
    asked = len(identities.asked)
    assert await get(store) == b"body"
    assert len(identities.asked) == asked
    await store.close()
    served.close()
    await served.wait_closed()
