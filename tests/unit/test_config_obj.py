"""Keys of the object tier: normalised, or refused with the cause; secrets are shown nowhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiering.cli import main
from tiering.config import BucketConfig, ConnectorConfig, ObjTierConfig, effective, parse
from tiering.errors import ConfigError

STORE = {"bucket": "kv", "endpoint_override": "s3.example:9000"}
SECRETS = {"access_key": "AKIASHOWNNOT", "secret_key": "hushhush", "session_token": "tokenshownnot"}


def connector(tier: dict[str, object]) -> dict[str, object]:
    return {"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "obj", **tier}]}


def bucket(**keys: Any) -> BucketConfig:
    return BucketConfig(**{**STORE, **keys})


@pytest.mark.parametrize(
    ("keys", "base_url"),
    [
        ({}, "http://s3.example:9000/kv/"),
        ({"scheme": "https"}, "https://s3.example:9000/kv/"),
        ({"endpoint_override": "http://s3.example:9000/"}, "http://s3.example:9000/kv/"),
        ({"endpoint_override": "HTTPS://s3.example//"}, "https://s3.example/kv/"),
        ({"endpoint_override": "https://h", "scheme": "https"}, "https://h/kv/"),
        ({"endpoint_override": "::1"}, "http://[::1]/kv/"),
        ({"endpoint_override": "[::1]"}, "http://[::1]/kv/"),
        ({"endpoint_override": "http://[2001:db8::7]:9000"}, "http://[2001:db8::7]:9000/kv/"),
        ({"endpoint_override": "127.0.0.1:09000"}, "http://127.0.0.1:9000/kv/"),
        ({"bucket": "with.dots"}, "http://s3.example:9000/with.dots/"),
        ({"addressing": "virtual"}, "http://kv.s3.example:9000/"),
        (
            {"endpoint_override": "https://s3.eu-west-1.amazonaws.com"},
            "https://kv.s3.eu-west-1.amazonaws.com/",
        ),
        (
            {"endpoint_override": "https://s3.eu-west-1.amazonaws.com", "bucket": "with.dots"},
            "https://s3.eu-west-1.amazonaws.com/with.dots/",
        ),
        (
            {"endpoint_override": "https://s3.eu-west-1.amazonaws.com", "addressing": "path"},
            "https://s3.eu-west-1.amazonaws.com/kv/",
        ),
        ({"endpoint_override": "minio_1.my-net:9000"}, "http://minio_1.my-net:9000/kv/"),
        (
            {"endpoint_override": "https://s3.us-east-1.amazonaws.com", "bucket": "b" * 64},
            f"https://s3.us-east-1.amazonaws.com/{'b' * 64}/",
        ),
        (
            {"endpoint_override": "https://s3.us-east-1.amazonaws.com", "bucket": "Capitals"},
            "https://s3.us-east-1.amazonaws.com/Capitals/",
        ),
    ],
)
def test_an_endpoint_is_understood_however_it_is_written(
    keys: dict[str, Any], base_url: str
) -> None:
    assert bucket(**keys).base_url == base_url


REFUSED = {
    "a scheme of another kind": (
        {"endpoint_override": "s3://kv"}, "endpoint_override", "neither http nor https", "host",
    ),
    "two schemes": (
        {"endpoint_override": "https://h", "scheme": "http"},
        "endpoint_override", "scheme says http", "leave out one",
    ),
    "a path": (
        {"endpoint_override": "h/kv"}, "endpoint_override", "more than a host", "bucket has a key",
    ),
    "a query": ({"endpoint_override": "h?a=b"}, "endpoint_override", "more than", "host and port"),
    "a login": (
        {"endpoint_override": "me:hushhush@h"}, "endpoint_override", "a login", "access_key",
    ),
    "no text": ({"endpoint_override": "h\ud800"}, "endpoint_override", "valid string", "s3.eu"),
    "no endpoint": ({"endpoint_override": ""}, "endpoint_override", "no host", "minio.example"),
    "a bracket too few": ({"endpoint_override": "[::1"}, "endpoint_override", "IPv6", "[::1]:9000"),
    "no address": ({"endpoint_override": "[h]:1"}, "endpoint_override", "IPv6", "[::1]:9000"),
    "two dots": (
        {"endpoint_override": "minio..example"}, "endpoint_override", "is no host", "minio.example",
    ),
    "a label too long": (
        {"endpoint_override": "h" * 64 + ".example"}, "endpoint_override", "is no host", "alone",
    ),
    "no port": ({"endpoint_override": "h:"}, "endpoint_override", "no port", "host and port"),
    "a name as port": ({"endpoint_override": "h:s3"}, "endpoint_override", "65535", "host and"),
    "port 0": ({"endpoint_override": "h:0"}, "endpoint_override", "65535", "host and port"),
    "no bucket": ({"bucket": ""}, "bucket", "empty", "kv-cache"),
    "a slash in the bucket": ({"bucket": "a/b"}, "bucket", "slash", "prefix"),
    "dots alone": ({"bucket": ".."}, "bucket", "no name that a bucket", "without the endpoint"),
    "an endpoint as bucket": ({"bucket": "s3:a"}, "bucket", "no name that a bucket", "the name"),
    "a region with blanks": ({"region": "eu central"}, "region", "no name of a region", "us-east"),
    "half of the credentials": (
        {"access_key": "AKIASHOWNNOT"}, "secret_key", "is missing", "leave out access_key",
    ),
    "the other half": ({"secret_key": "hushhush"}, "access_key", "is missing", "AWS's chain"),
    "a token alone": ({"session_token": "hushhush"}, "access_key", "is missing", "AWS's chain"),
    "a line break in a secret": (
        {"access_key": "AKIASHOWNNOT", "secret_key": "hushhush\n"},
        "secret_key", "line breaks", "copy it again",
    ),
    "a number as secret": (
        {"access_key": "AKIASHOWNNOT", "secret_key": 4711471147},
        "secret_key", "must be text", "in quotes",
    ),
    "a certificate for nothing": (
        {"ca_bundle": "/etc/ca.pem"}, "ca_bundle", "nothing is checked", '"https"',
    ),
    "a relative file": (
        {"ca_bundle": "ca.pem", "scheme": "https"}, "ca_bundle", "absolute path", "/etc/ssl",
    ),
    "a bucket in front of an address": (
        {"endpoint_override": "127.0.0.1", "addressing": "virtual"},
        "addressing", "is an address", '"path"',
    ),
    "a bucket too long for a name of a host": (
        {"bucket": "b" * 64, "addressing": "virtual"},
        "addressing", "no host can have a name", '"path"',
    ),
    "dots that no certificate covers": (
        {"bucket": "a.b", "scheme": "https", "addressing": "virtual"},
        "addressing", "no certificate", '"auto"',
    ),
    "misspelled": ({"bukket": "kv"}, "bukket", "not a key", "write bucket"),
    "no time": ({"read_timeout_seconds": 0.0}, "read_timeout_seconds", "greater than 0", "10.0"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "key", "reason", "remedy"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_with_a_store_is_told_in_one_line(
    keys: dict[str, object], key: str, reason: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(ConnectorConfig, connector({"store_config": {**STORE, **keys}}))
    error = caught.value
    assert error.path == f"secondary_tiers[0].store_config.{key}"
    assert reason in error.reason
    assert remedy in error.remedy
    assert "\n" not in str(error)
    assert not any(secret in str(error) for secret in ("hushhush", "AKIASHOWNNOT", "4711"))


@pytest.mark.parametrize(
    ("prefix", "kept"),
    [("", ""), ("/", ""), ("kv", "kv"), ("/team/kv/", "team/kv"), ("ü/b c", "ü/b c")],
)
def test_a_prefix_has_no_slashes_around_it(prefix: str, kept: str) -> None:
    config = parse(ConnectorConfig, connector({"store_config": STORE, "prefix": prefix}))
    (tier,) = config.secondary_tiers
    assert isinstance(tier, ObjTierConfig)
    assert (tier.prefix, tier.roots) == (kept, ())


@pytest.mark.parametrize("prefix", ["..", "a/../b", "a//b", "./a", "a\tb", "a" * 513])
def test_a_prefix_that_stores_read_differently_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.prefix = "):
        parse(ConnectorConfig, connector({"store_config": STORE, "prefix": prefix}))


def test_a_tier_without_a_store_is_told_how_one_is_written() -> None:
    with pytest.raises(ConfigError, match=r"store_config = \(absent\): is required; add \"store_"):
        parse(ConnectorConfig, connector({}))
    with pytest.raises(ConfigError, match=r"store_config\.bucket = \(absent\): is required"):
        parse(ConnectorConfig, connector({"store_config": {"endpoint_override": "h"}}))


@pytest.mark.parametrize(
    ("keys", "path", "told"),
    [
        ({"store_config": {"bucket": "kv"}}, "store_config.endpoint_override", "is required"),
        ({"store_config": {**STORE, "regoin": "r"}}, "store_config.regoin", "write region if"),
        ({"store_config": STORE, "backpressure": {"alfa": 1}}, "backpressure.alfa", "write alpha"),
    ],
)
def test_a_program_that_makes_a_tier_is_told_of_its_nested_keys(
    keys: dict[str, Any], path: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        ObjTierConfig(**keys)
    assert caught.value.path == path


def test_secrets_are_shown_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    given = connector({"store_config": {**STORE, **SECRETS}})
    config = parse(ConnectorConfig, given)
    main(["config", json.dumps(given)])
    main(["config", "--json", json.dumps(given)])
    shown = [repr(config), str(config), config.model_dump_json(), str(config.model_dump())]
    shown += [str(effective(config)), capsys.readouterr().out]
    for text in shown:
        assert "kv" in text
        assert not any(secret in text for secret in SECRETS.values())
    assert '"(hidden)"' in shown[-1]
    (tier,) = config.secondary_tiers
    assert isinstance(tier, ObjTierConfig)
    assert tier.store_config.secret_key.get_secret_value() == "hushhush"
    assert hash(config) == hash(parse(ConnectorConfig, given))
