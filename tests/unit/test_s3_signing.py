"""What a request is signed with: the same as botocore's signer makes of it."""

from collections.abc import Mapping

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest

from tiering.tiers.obj.credentials import Keys
from tiering.tiers.obj.signing import UNSIGNED, Signer

NOW = 1_790_000_000.0


class _Unsigned(S3SigV4Auth):  # type: ignore[misc]
    def payload(self, request: AWSRequest) -> str:
        del request
        return UNSIGNED


class Settable:
    def __init__(self) -> None:
        self.seconds = NOW

    def now(self) -> float:
        return self.seconds


def _by_botocore(
    keys: Keys, method: str, url: str, given: Mapping[str, str], stamp: str, region: str
) -> str:
    request = AWSRequest(method=method, url=url, headers=dict(given))
    signer = _Unsigned(keys, "s3", region)
    request.context["timestamp"] = stamp
    signer._modify_request_before_signing(request)
    canonical = signer.canonical_request(request)
    text = signer.string_to_sign(request, canonical)
    signer._inject_signature_to_request(request, signer.signature(text, request))
    return str(request.headers["Authorization"])


@pytest.mark.parametrize("token", [None, "a-token/with+signs=="])
@pytest.mark.parametrize(
    ("method", "host", "path", "query", "given"),
    [
        ("GET", "127.0.0.1:9000", "/bucket/a/b%20c/0f.bin", "", {}),
        ("PUT", "bucket.s3.eu-central-1.amazonaws.com", "/x", "", {"If-None-Match": "*"}),
        ("GET", "minio.example", "/bucket/", "list-type=2&prefix=a%2Fb%3D&start-after=a~", {}),
        (
            "POST",
            "h:1",
            "/b/",
            "delete=",
            {"Content-MD5": "Q==", "Content-Type": "application/xml"},
        ),
        ("PUT", "[::1]:80", "/b/%C3%A4", "partNumber=1&uploadId=x", {"x-amz-b": "  two   words "}),
    ],
)
def test_a_signature_is_botocores(
    method: str, host: str, path: str, query: str, given: dict[str, str], token: str | None
) -> None:
    keys = Keys("an access key", "a secret", token)
    found = Signer("eu-central-1", Settable()).headers(keys, method, host, path, query, given)
    # The scheme is what keeps botocore from leaving out a port.
    url = f"https://{host}{path}" + (f"?{query}" if query else "")
    stamp = found["X-Amz-Date"]
    assert stamp == "20260921T141320Z"
    assert found["Authorization"] == _by_botocore(
        keys, method, url, {**given, "Host": host}, stamp, "eu-central-1"
    )
    assert found.get("X-Amz-Security-Token") == token


def test_a_key_is_of_its_day_and_secret() -> None:
    clock = Settable()
    signer = Signer("r", clock)

    def signed(secret: str) -> str:
        found = signer.headers(Keys("a", secret, None), "GET", "h", "/", "", {})
        return found["Authorization"]

    def afresh(secret: str) -> str:
        found = Signer("r", clock).headers(Keys("a", secret, None), "GET", "h", "/", "", {})
        return found["Authorization"]

    for seconds, secret in ((0, "one"), (60, "one"), (60, "two"), (86_400, "two"), (0, "two")):
        clock.seconds = NOW + seconds
        assert signed(secret) == afresh(secret)
    assert "one" not in repr(signer)
