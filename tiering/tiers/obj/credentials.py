"""Whom the object tier is to a store: given keys, or what AWS's chain finds, read anew on demand.

`Wallet` owns the keys in use. The chain is aiobotocore's: environment, files, web identity of a
workload, SSO, container and instance identity. Temporary keys renew themselves before they end; if
the store refuses keys all the same, the chain is read once for all who wait. Used from one loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, CredentialRetrievalError

from tiering.config.obj import BucketConfig, is_one_word
from tiering.tiers.obj.dialect import shown
from tiering.tiers.obj.store import CredentialsError

# Also of endpoints for FIPS, for IPv6 and of interfaces in a VPC.
_AWS_REGION = re.compile(
    r"\bs3(?:-fips)?[.-](?:dualstack\.)?((?:[a-z]+-)+\d+)(?:\.vpce)?\.amazonaws\.com"
)
DEFAULT_REGION = "us-east-1"
_WAY_OUT = (
    "write access_key and secret_key, or provide credentials where AWS's tools find them: "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, or an identity of the host"
)


class NoCredentials(CredentialsError):
    """The chain has none at all."""


@dataclass(frozen=True, slots=True)
class Keys:
    """As botocore's signers take them. `readings`: how often the chain had been read then."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(repr=False)
    readings: int = 0

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.secret_key, self.token or "")


class Wallet:
    """The keys to sign with, for as long as a store is open."""

    def __init__(self, config: BucketConfig) -> None:
        self._config = config
        self._given = _given(config)
        self._last = self._given
        self._found: AioCredentials | None = None
        self._readings = 0
        self._lock = asyncio.Lock()

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no message may have in it."""
        return () if self._last is None else self._last.secrets

    @property
    def origin(self) -> str:
        """Where the keys come from, in words."""
        if self._given is not None:
            return "the configuration"
        return "AWS's chain" if self._found is None else f"AWS's chain ({self._found.method})"

    def region(self) -> str:
        """The region to sign for: the configured one, or the endpoint's, or that of AWS's files."""
        if self._config.region:
            return self._config.region
        if found := _AWS_REGION.search(self._config.host):
            return found[1]
        return of_aws("region") or DEFAULT_REGION

    async def keys(self) -> Keys:
        """Those in use; CredentialsError where there are none."""
        if self._given is not None:
            return self._given
        async with self._lock:
            if self._found is None:
                self._found = await self._read()
            found = self._found
        # Without the lock: while one renews keys that are good for some minutes yet, which may
        # hang, the others go on with these.
        return await self._frozen(found)

    async def renewed(self, refused: Keys) -> Keys:
        """Other keys than `refused`, which a store did not accept, or those that the chain was read
        for meanwhile. CredentialsError where the chain has no others."""
        if self._given is not None:
            raise CredentialsError(
                "the store refuses the credentials in access_key, secret_key and session_token, "
                "which nothing renews; correct them, or leave them out for AWS's chain"
            )
        async with self._lock:
            if self._readings == refused.readings:
                self._found = None
                self._found = await self._read()
            assert self._found is not None
            keys = await self._frozen(self._found)
        if keys.secrets == refused.secrets and keys.access_key == refused.access_key:
            raise CredentialsError(
                f"the store refuses the credentials of {self.origin}, which has no others yet; "
                "they are looked for again with the next request"
            )
        return keys

    async def _read(self) -> AioCredentials:
        """With a session of its own: one keeps what it once read."""
        self._readings += 1
        with _chain_errors():
            found = await AioSession().get_credentials()
        if found is None:
            raise NoCredentials(f"AWS's chain has no credentials; {_WAY_OUT}")
        return found

    async def _frozen(self, found: AioCredentials) -> Keys:
        readings = self._readings
        try:
            with _chain_errors():
                frozen = await found.get_frozen_credentials()
        except CredentialsError:
            if self._found is found:
                self._found = None
            raise
        keys = Keys(frozen.access_key, frozen.secret_key, frozen.token, readings)
        if not all(map(is_one_word, (keys.access_key, keys.secret_key, keys.token or ""))):
            raise CredentialsError(
                f"AWS's chain ({found.method}) has credentials with a blank or a line break in "
                "them, perhaps at the end; correct them"
            )
        self._last = keys
        return keys


@contextmanager
def _chain_errors() -> Iterator[None]:
    """CredentialsError for whatever goes wrong within: the chain reads files, starts programs and
    asks services, and raises what each of these happens to."""
    try:
        yield
    except Exception as error:
        raise CredentialsError(f"AWS's chain fails: {_told(error)}; {_WAY_OUT}") from None


def of_aws(setting: str) -> str:
    """What AWS's environment or else its files say, empty where they say nothing. Reads files."""
    try:
        return str(AioSession().get_config_variable(setting) or "")
    except BotoCoreError:
        # Of files that given credentials do not need; the chain will say what is wrong.
        return ""


def _given(config: BucketConfig) -> Keys | None:
    access_key, secret_key, token = (
        secret.get_secret_value()
        for secret in (config.access_key, config.secret_key, config.session_token)
    )
    return Keys(access_key, secret_key, token or None) if access_key else None


def _told(error: Exception) -> str:
    """In one line, without what a program that makes credentials printed."""
    if isinstance(error, CredentialRetrievalError):
        return f"{type(error).__name__} from {error.kwargs.get('provider')}"
    return shown(f"{type(error).__name__}: {error}")
