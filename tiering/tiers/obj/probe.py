"""One LIST at start, and what it means when it fails: a ConfigError for each cause a user can mend.

Owns the words. It asks for one name under the prefix, so it also shows that the credentials may
list; that they may write shows with the first chunk, and is counted. It ends within seconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable
from contextlib import suppress

from tiering.clock import Clock
from tiering.config.obj import BucketConfig
from tiering.config.problems import ABSENT, Shown
from tiering.errors import ConfigError
from tiering.tiers.obj import dialect
from tiering.tiers.obj.credentials import Keys, NoCredentials, Wallet
from tiering.tiers.obj.dialect import Answer
from tiering.tiers.obj.store import CredentialsError, StoreError
from tiering.tiers.obj.wire import Wire

log = logging.getLogger("tiering")

_SECONDS_MAX = 10.0
_HELLO_SECONDS = 2.0
_ELSEWHERE = frozenset(
    {"", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
    | {"PermanentRedirect", "TemporaryRedirect"}
)


async def opened(
    config: BucketConfig, where: str, prefix: str, clock: Clock
) -> tuple[Wallet, Wire]:
    """What a store works with, once the bucket has answered; ConfigError where it did not."""
    cause = _Cause(config, where, clock)
    wallet = Wallet(config)
    try:
        wire = Wire(config, wallet.region())
    except StoreError as error:
        way_out = f"correct the variable, or name {config.host} in no_proxy"
        raise cause.of("endpoint_override", str(error), way_out) from None
    try:
        await _open(wire, cause)
        await _list(wallet, wire, prefix, cause)
    except BaseException:
        await wire.close()
        raise
    return wallet, wire


async def _open(wire: Wire, cause: _Cause) -> None:
    try:
        await wire.open()
    except StoreError as error:
        raise cause.of("ca_bundle", str(error), "name a file with certificates in PEM") from None


async def _list(wallet: Wallet, wire: Wire, prefix: str, cause: _Cause) -> None:
    query = dialect.list_query(prefix, token=None, after="", limit=1)

    async def ask(keys: Keys) -> Answer:
        async with asyncio.timeout(_SECONDS_MAX):
            return await wire.exchange(keys, "GET", query=query, count_as="list")

    try:
        keys = await _in_time(wallet.keys())
        answer = await ask(keys)
        if answer.is_stale and not cause.are_given:
            # Without others, what the store said of these tells more.
            with suppress(CredentialsError):
                answer = await ask(await _in_time(wallet.renewed(keys)))
    except TimeoutError:
        raise await cause.of_silence(f"does not answer within {_SECONDS_MAX:g} s") from None
    except CredentialsError as error:
        raise cause.no_credentials(error, wallet) from None
    except StoreError as error:
        raise await cause.of_failure(error) from None
    if answer.status == 200:
        try:
            dialect.listing(answer.body)
        except StoreError:
            raise cause.unreachable("answers, but not as an S3 store does") from None
    else:
        cause.of_answer(answer, wire.region, wallet)


async def _in_time(reading: Awaitable[Keys]) -> Keys:
    """CredentialsError also where AWS's chain, and not the store, takes too long."""
    try:
        async with asyncio.timeout(_SECONDS_MAX):
            return await reading
    except TimeoutError:
        raise CredentialsError(f"AWS's chain gives none within {_SECONDS_MAX:g} s") from None


class _Cause:
    """Makes the errors. `value` of a key is shown as it was given, and a secret never."""

    def __init__(self, config: BucketConfig, where: str, clock: Clock) -> None:
        self._config = config
        self._where = where
        self._clock = clock
        self.are_given = bool(config.access_key.get_secret_value())

    def of(self, key: str, reason: str, remedy: str) -> ConfigError:
        value = getattr(self._config, key)
        if key in ("access_key", "secret_key", "session_token"):
            value = Shown("hidden") if self.are_given else ABSENT
        return ConfigError(f"{self._where}.{key}", value, reason, remedy)

    def unreachable(self, reason: str) -> ConfigError:
        remedy = f"check that the store is up and that {self._config.endpoint} is its address"
        return self.of("endpoint_override", reason, remedy)

    def no_credentials(self, error: CredentialsError, wallet: Wallet) -> ConfigError:
        if isinstance(error, NoCredentials):
            reason = "is left out, and AWS's chain has no credentials either"
            remedy = (
                "write access_key and secret_key, or provide credentials where AWS's tools find "
                "them: in the environment, in ~/.aws or as the identity of this host or workload"
            )
            return self.of("access_key", reason, remedy)
        return self.of("access_key", f"is left out: {error}", f"mend {wallet.origin}")

    async def of_failure(self, error: StoreError) -> ConfigError:
        """No answer came at all."""
        cause = error.__cause__
        if isinstance(cause, ssl.SSLCertVerificationError):
            return self._bad_certificate(cause)
        if isinstance(cause, socket.gaierror) and self._config.addressing == "virtual":
            name = f"{self._config.bucket}.{self._config.host}"
            return self.of(
                "addressing",
                f"puts the bucket in front of the host, and this machine cannot resolve {name}",
                'write "path", or have the name resolved to the store',
            )
        if isinstance(cause, socket.gaierror):
            return self.unreachable("is a name that this machine cannot resolve")
        if isinstance(cause, ConnectionRefusedError):
            return self.unreachable(f"cannot be reached: {error}")
        return await self.of_silence(f"gives no answer: {error}")

    async def of_silence(self, reason: str) -> ConfigError:
        """Something is there: perhaps it speaks TLS, or does not."""
        host, port = self._config.host.strip("[]"), self._port()
        if self._config.scheme == "http" and await _speaks(host, port, tls=True):
            return self._speaks_tls()
        if self._config.scheme == "https" and await _speaks(host, port, tls=False):
            return self.of(
                "scheme",
                f"is wrong: port {port} of {self._config.host} speaks plain HTTP",
                'write "http", or the port that speaks TLS',
            )
        return self.unreachable(reason)

    def of_answer(self, answer: Answer, region: str, wallet: Wallet) -> None:
        """It refused. A store that asks for fewer requests is one that can be used."""
        fault = answer.fault
        told = dialect.shown(f"{answer.status} {fault.code}: {fault.message}", wallet.secrets)
        told = told.rstrip(": ")
        whose = "" if self.are_given else f"; they come from {wallet.origin}"
        config = self._config
        if self._config.scheme == "http" and answer.status == 400 and b"HTTPS" in answer.body:
            raise self._speaks_tls()
        match fault.code:
            case _ if answer.status in (429, 503) or fault.code in dialect.THROTTLED:
                log.warning(
                    "%s asks for fewer requests already at start: %s", config.endpoint, told
                )
                return None
            case code if code in _ELSEWHERE and answer.region not in ("", region):
                raise self.of(
                    "region",
                    f"is not where bucket {config.bucket} is, which is signed for {region}: {told}",
                    f'write "{answer.region}"; the endpoint must be of that region, too',
                )
            case "RequestTimeTooSkewed":
                raise self._skewed(answer)
            case "NoSuchBucket":
                raise self.of(
                    "bucket", f"is no bucket at {config.endpoint}", "make it, or correct its name"
                )
            case "InvalidAccessKeyId":
                raise self.of(
                    "access_key", f"is not known to the store{whose}: {told}", "correct it"
                )
            case "SignatureDoesNotMatch":
                raise self.of(
                    "secret_key",
                    f"is not the one that belongs to access_key{whose}: {told}",
                    "correct it",
                )
            case code if code in dialect.STALE:
                raise self.of(
                    "session_token",
                    f"is expired or wrong{whose}: {told}",
                    "get new credentials, or leave all three out for AWS's chain",
                )
            case _ if answer.status in (401, 403):
                raise self.of(
                    "bucket",
                    f"may not be listed with these credentials{whose}: {told}",
                    "allow s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject on it",
                )
            case _ if answer.status == 404:
                raise self.of("bucket", f"is not there: {told}", "make it, or correct its name")
            case _:
                raise self.unreachable(f"refuses to list the bucket: {told}")

    def _bad_certificate(self, error: ssl.SSLCertVerificationError) -> ConfigError:
        told = getattr(error, "verify_message", "") or str(error)
        remedy = "name a file with the certificate of the authority that signed it, in PEM"
        if self._config.ca_bundle:
            remedy = f"{remedy}; this one is of another"
        return self.of("ca_bundle", f"does not vouch for {self._config.host}: {told}", remedy)

    def _speaks_tls(self) -> ConfigError:
        return self.of(
            "scheme",
            f"is wrong: port {self._port()} of {self._config.host} speaks TLS",
            'write "https", or the port that speaks plain HTTP',
        )

    def _skewed(self, answer: Answer) -> ConfigError:
        theirs = answer.date()
        how_far = "too far"
        if theirs is not None:
            off = round(self._clock.now() - theirs)
            how_far = f"{abs(off)} s {'ahead of' if off > 0 else 'behind'} the store's"
        return self.of(
            "endpoint_override",
            f"refuses requests because the clocks differ: this machine's is {how_far}",
            "set the clock, for instance with NTP",
        )

    def _port(self) -> int:
        _, _, port = self._config.endpoint_override.removeprefix(self._config.host).rpartition(":")
        return int(port) if port else {"http": 80, "https": 443}[self._config.scheme]


async def _speaks(host: str, port: int, tls: bool) -> bool:
    """Whether something there speaks TLS, or plain HTTP."""
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(_HELLO_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                if tls:
                    return True
                writer.write(
                    f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                )
                return (await reader.read(5)).startswith(b"HTTP/")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
