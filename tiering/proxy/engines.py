"""The engines that the proxy is told of, and what each is for. Pure.

An engine is written URL=HOST:PORT: its HTTP API, and the address that its tier of peers is bound
to. Whatever cannot be used is a ConfigError with the option and the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tiering.errors import ConfigError
from tiering.peers.addresses import Address, advertised

_EXAMPLE = "write for example http://127.0.0.1:8001=127.0.0.1:5710"


@dataclass(frozen=True, slots=True)
class Engine:
    """`url` is without a path and without a slash at its end; `peer` is what others dial."""

    url: str
    peer: Address

    @classmethod
    def parse(cls, option: str, text: str) -> Engine:
        """Of URL=HOST:PORT; ConfigError under `option` where it is none."""
        url, equals, peer = text.rpartition("=")
        if "@" in url:
            # Without the text, which has a password in it.
            raise ConfigError(
                option,
                f"...@{url.rpartition('@')[2]}{equals}{peer}",
                "has a user or a password",
                "leave it out: the headers of a client are passed on, Authorization too",
            )
        if not equals:
            raise ConfigError(option, text, "is not URL=HOST:PORT", _EXAMPLE)
        _check_url(option, text, url)
        try:
            address = advertised("host", Address.parse("host", peer), None)
        except ConfigError as error:
            raise ConfigError(option, text, f"{peer} {error.reason}", error.remedy) from error
        if not address.port:
            raise ConfigError(option, text, "has port 0, which nobody can dial", _EXAMPLE)
        return cls(url.rstrip("/"), address)

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class Lineup:
    """With `prefillers`, each prompt is computed by one of them and answered by one of `servers`,
    the decoders; without, `servers` have chunks from one another."""

    servers: tuple[Engine, ...]
    prefillers: tuple[Engine, ...] = ()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.prefillers + self.servers

    @classmethod
    def parse(cls, prefill: Sequence[str], decode: Sequence[str], engine: Sequence[str]) -> Lineup:
        """Of what --prefill, --decode and --engine have; ConfigError where they do not fit."""
        if engine and (prefill or decode):
            raise ConfigError(
                "--engine",
                " ".join(engine),
                "cannot be beside --prefill and --decode",
                "give those two, or --engine alone",
            )
        if not engine and not (prefill and decode):
            missing = "--prefill" if decode else "--decode" if prefill else "--engine"
            raise ConfigError(
                missing, None, "is missing", "give --prefill and --decode, or --engine alone"
            )
        given = [
            (option, Engine.parse(option, text))
            for option, texts in (
                ("--prefill", prefill),
                ("--decode", decode),
                ("--engine", engine),
            )
            for text in texts
        ]
        _check_once(given)
        prefillers = tuple(each for option, each in given if option == "--prefill")
        return cls(tuple(each for option, each in given if option != "--prefill"), prefillers)


def _check_url(option: str, text: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(option, text, f"has no usable URL: {error}", _EXAMPLE) from error
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ConfigError(option, text, "has no URL of http or https before the =", _EXAMPLE)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(
            option, text, "has a URL with a path", "write it up to the port, without /v1"
        )


def _check_once(given: Sequence[tuple[str, Engine]]) -> None:
    seen: set[str | Address] = set()
    for option, engine in given:
        for each in (engine.url, engine.peer):
            if each in seen:
                raise ConfigError(
                    option,
                    str(each),
                    "is there twice",
                    "give each engine once, with an address for peers of its own",
                )
            seen.add(each)
