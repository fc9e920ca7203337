"""The object tier's keys: which bucket, how it is reached, and as whom.

Owns what makes an endpoint, a bucket and a prefix fit together, and the addresses of objects. The
secrets are pydantic's SecretStr: no repr, dump, error or log has them.
"""

from __future__ import annotations

import builtins
import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    model_validator,
)

from tiering.config.anytier import StoringTierSettings
from tiering.config.fields import BYTES_MAX, Settings, Text, absolute_file
from tiering.config.problems import ABSENT, Shown, refused

_PREFIX_BYTES_MAX = 512
_SECONDS_MAX = 3600.0
# What AWS and S3-compatible stores take, the old names of some included.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_HOST = re.compile(
    r"(?=.{1,254}$)[A-Za-z0-9][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_-]{1,63})*(?<![_-])\.?"
)
_AWS_HOST = re.compile(r"\.amazonaws\.com(\.cn)?$")
_REGION = re.compile(r"[A-Za-z0-9_-]{0,64}")
_SECRETS = ("access_key", "secret_key", "session_token")
_HEADER_BREAKS = re.compile(r"[\x00-\x20\x7f-\uffff]")


def told_secret(secret: SecretStr) -> str:
    """What is shown in place of a secret: whether there is one."""
    return "(hidden)" if secret.get_secret_value() else ""


def is_one_word(credential: str) -> bool:
    """Whether it can be part of a request's header: no blanks, no line breaks, ASCII."""
    return not _HEADER_BREAKS.search(credential)


def _one_line(secret: SecretStr) -> SecretStr:
    if not is_one_word(secret.get_secret_value()):
        raise refused(
            "holds blanks, line breaks or other characters that no credential has",
            "copy it again, without what surrounds it",
        )
    return secret


Secret = Annotated[SecretStr, AfterValidator(_one_line), PlainSerializer(told_secret)]


def _region(name: str) -> str:
    if not _REGION.fullmatch(name):
        raise refused("is no name of a region", "write it as the store has it, such as us-east-1")
    return name


def _bucket(name: str) -> str:
    if "/" in name:
        raise refused(
            "holds a slash: a bucket is one name",
            "write what comes behind it as prefix of the tier",
        )
    if not _BUCKET.fullmatch(name) or ".." in name:
        raise refused(
            "is no name that a bucket can have: letters, digits, '-', '_' and '.'",
            "write the name alone, without the endpoint",
        )
    return name


def _prefix(prefix: str) -> str:
    """Without slashes around it."""
    parts = prefix.strip("/").split("/")
    if parts == [""]:
        return ""
    if any(part in ("", ".", "..") for part in parts):
        raise refused(
            "has a part that is empty, '.' or '..', which stores read differently",
            "write plain names with a slash between them, such as team/kv",
        )
    if any(ord(character) < 32 or character == "\x7f" for character in prefix):
        raise refused("holds control characters", "write plain names, such as team/kv")
    if (length := len("/".join(parts).encode())) > _PREFIX_BYTES_MAX:
        raise refused(
            f"is {length} bytes long, and {_PREFIX_BYTES_MAX} is the limit", "write a shorter one"
        )
    return "/".join(parts)


class BucketConfig(Settings):
    """A bucket of an S3-compatible store: `store_config` of a tier of type obj."""

    bucket: Annotated[Text, AfterValidator(_bucket)] = Field(
        min_length=1, description="Name of the bucket. It must exist.", examples=["kv-cache"]
    )
    endpoint_override: Text = Field(
        min_length=1,
        description="Host of the store, with its port where that is not the scheme's own. "
        "A scheme in front of it goes before the key scheme.",
        examples=["s3.eu-central-1.amazonaws.com"],
    )
    scheme: Literal["http", "https"] = Field(
        default="http", description="http or https.", examples=["https"]
    )
    access_key: Secret = Field(
        default=SecretStr(""),
        description="Access key id. Left out with secret_key, credentials come from where AWS's "
        "tools look for them: environment, files, workload or instance identity.",
        examples=["AKIAIOSFODNN7EXAMPLE"],
    )
    secret_key: Secret = Field(
        default=SecretStr(""),
        description="The secret that belongs to access_key. It is shown nowhere.",
        examples=["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"],
    )
    session_token: Secret = Field(
        default=SecretStr(""),
        description="Session token of temporary credentials. These end and cannot be renewed: "
        "better leave all three out.",
        examples=["IQoJb3JpZ2luX2VjEXAMPLE"],
    )
    region: Annotated[Text, AfterValidator(_region)] = Field(
        default="",
        description="Region that requests are signed for. Left out, that of AWS's environment or "
        "files, else us-east-1, which most other stores take.",
        examples=["eu-central-1"],
    )
    ca_bundle: Annotated[Text, AfterValidator(absolute_file("/etc/ssl/minio-ca.pem"))] = Field(
        default="",
        description="File with the certificates that the store's is checked against, as an "
        "absolute path, beside those of the system. For https. Left out, AWS_CA_BUNDLE names it, "
        "or AWS's files.",
        examples=["/etc/ssl/minio-ca.pem"],
    )
    addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto",
        description="Whether the bucket is in the path or in the name of the host; auto is "
        "virtual for AWS, unless the bucket has dots, and path for all others.",
        examples=["path"],
    )
    request_checksums: Literal["when_required", "when_supported"] = Field(
        default="when_required",
        description="Send a checksum with what is stored only where S3 demands one, or always, "
        "which some stores refuse. Chunks carry one of their own in any case.",
        examples=["when_supported"],
    )
    connect_timeout_seconds: float = Field(
        default=5.0,
        gt=0,
        le=_SECONDS_MAX,
        allow_inf_nan=False,
        description="Seconds that a connection may take.",
        examples=[2.0],
    )
    read_timeout_seconds: float = Field(
        default=15.0,
        gt=0,
        le=_SECONDS_MAX,
        allow_inf_nan=False,
        description="Seconds without a byte, in either direction, after which a request has "
        "failed.",
        examples=[10.0],
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_endpoint(cls, data: Any) -> Any:
        """The endpoint as scheme and host, however it was written. A secret that is no text is
        refused here, where it is not shown."""
        if not isinstance(data, dict):
            return data
        for key in _SECRETS:
            if not isinstance(data.get(key, ""), str | SecretStr):
                raise refused("must be text", "write it in quotes", key, Shown("hidden"))
        given = data.get("endpoint_override")
        if not isinstance(given, str) or given.encode(errors="ignore").decode() != given:
            return data  # of which the key's own type says what is wrong
        scheme, host = _split_endpoint(given, data.get("scheme"))
        return data | {"endpoint_override": host} | ({"scheme": scheme} if scheme else {})

    @model_validator(mode="after")
    def _whole_credentials(self) -> Self:
        access, secret, token = (
            bool(each.get_secret_value())
            for each in (self.access_key, self.secret_key, self.session_token)
        )
        if access != secret or (token and not access):
            missing = "secret_key" if access else "access_key"
            raise refused(
                "is missing, and the other half of the credentials is no use without it",
                "add it, or leave out access_key, secret_key and session_token for AWS's chain",
                missing,
                ABSENT,
            )
        return self

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.ca_bundle and self.scheme == "http":
            raise refused(
                "is given, but with http nothing is checked",
                'write "scheme": "https", or leave ca_bundle out',
                "ca_bundle",
                self.ca_bundle,
            )
        if self.addressing == "virtual":
            if _is_address(self.host):
                raise refused(
                    f"cannot be: {self.host} is an address, and no name can be in front of it",
                    'write "path", or a name as endpoint_override',
                    "addressing",
                    self.addressing,
                )
            if not _HOST.fullmatch(f"{self.bucket}.{self.host}"):
                raise refused(
                    "cannot be: no host can have a name that begins with this bucket's",
                    'write "path", or "auto"',
                    "addressing",
                    self.addressing,
                )
            if "." in self.bucket and self.scheme == "https":
                raise refused(
                    "cannot be: the bucket has dots, and no certificate covers such a host",
                    'write "path", or "auto"',
                    "addressing",
                    self.addressing,
                )
        return self

    @property
    def host(self) -> str:
        """Without the port; an IPv6 address in its brackets."""
        return re.sub(r":\d+$", "", self.endpoint_override)

    @property
    def endpoint(self) -> str:
        """Such as http://[::1]:9000."""
        return f"{self.scheme}://{self.endpoint_override}"

    @property
    def is_aws(self) -> bool:
        return bool(_AWS_HOST.search(self.host))

    @property
    def base_url(self) -> str:
        """Of the bucket, with a slash at its end."""
        fits = "." not in self.bucket and self.bucket.islower() and len(self.bucket) < 64
        wants_virtual = self.is_aws and fits
        if self.addressing == "virtual" or (self.addressing == "auto" and wants_virtual):
            return f"{self.scheme}://{self.bucket}.{self.endpoint_override}/"
        return f"{self.endpoint}/{quote(self.bucket)}/"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _split_endpoint(given: str, scheme: object) -> tuple[str | None, str]:
    """The scheme in `given`, if there is one, and host with port, an IPv6 address in brackets."""

    def wrong(reason: str, remedy: str, value: object = given) -> Exception:
        return refused(reason, remedy, "endpoint_override", value)

    example = "write host and port alone, such as minio.example:9000"
    found, separator, rest = given.strip().partition("://")
    found = found.lower()
    if not separator:
        found, rest = "", given.strip()
    elif found not in ("http", "https"):
        raise wrong("has a scheme that is neither http nor https", example)
    elif scheme not in (None, found):
        raise wrong(
            f"says {found}, but scheme says {scheme}", "leave out one of the two", Shown(found)
        )
    if "@" in rest:
        raise wrong("has a login in it", "write it as access_key and secret_key", Shown("hidden"))
    host, _, path = rest.partition("/")
    if path.strip("/") or "?" in rest or "#" in rest:
        raise wrong("has more than a host", f"{example}; the bucket has a key of its own")
    return found or None, _host_and_port(host, wrong, example)


def _host_and_port(host: str, wrong: Any, example: str) -> str:
    name, port = host, ""
    if host.startswith("["):
        name, closed, port = host.partition("]")
        name, port = f"{name}{closed}", port.removeprefix(":")
    elif host.count(":") == 1:
        name, _, port = host.partition(":")
    elif host.count(":") > 1:
        # Without brackets there is no telling a port from the end of the address.
        name = f"[{host}]"
    if name.startswith("["):
        try:
            ipaddress.IPv6Address(name.removeprefix("[").removesuffix("]"))
            if not name.endswith("]"):
                raise ValueError
        except ValueError:
            raise wrong("has no IPv6 address in its brackets", "such as [::1]:9000") from None
    elif not _HOST.fullmatch(name):
        raise wrong("is no host", example)
    if host.endswith(":") and not name.endswith("]"):
        raise wrong("has no port behind its colon", example)
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise wrong("has a port that is no number from 1 to 65535", example)
    return f"{name}:{int(port)}" if port else name


class ObjTierConfig(StoringTierSettings):
    """A bucket of an S3-compatible object store as a secondary tier."""

    # Written out in JSON, where it says which tier is meant; the class says it in Python.
    model_config = ConfigDict(json_schema_extra={"required": ["type", "store_config"]})

    type: Literal["obj"] = Field(default="obj", description="Kind of tier.", examples=["obj"])
    store_config: BucketConfig = Field(
        description="The bucket, how it is reached, and as whom.",
        examples=[{"bucket": "kv-cache", "endpoint_override": "minio.example:9000"}],
    )
    prefix: Annotated[Text, AfterValidator(_prefix)] = Field(
        default="",
        description="What the names of all objects begin with, without slashes around it. "
        "Engines with the same model and layout share what is under it.",
        examples=["team/kv"],
    )
    io_threads: int = Field(
        default=4,
        ge=1,
        le=1024,
        description="The most requests that are under way at once; fewer while the store asks "
        "for fewer. No threads here: the name is vLLM's.",
        examples=[16],
    )
    max_bytes: int | None = Field(
        default=None,
        gt=0,
        le=BYTES_MAX,
        description="Bytes that the chunks of this model and layout may take in the bucket, over "
        "all engines that share it; the least recently used are deleted. Left out, nothing is: "
        "that is for lifecycle rules of the bucket.",
        examples=[10995116277760],
    )

    @classmethod
    def owner_of(
        cls, data: Mapping[str, Any], path: Sequence[int | str]
    ) -> builtins.type[Settings]:
        is_nested = len(path) > 1 and path[0] == "store_config"
        return BucketConfig if is_nested else super().owner_of(data, path)
