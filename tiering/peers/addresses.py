"""Where peers are reached: hosts and ports, and which of them may be bound or told to others.

An address says where an engine is, never who it is: that is its engine id. Hosts are names, IPv4,
or IPv6 without brackets. Whatever cannot be used is a ConfigError with the key and the way out.
Pure; `names` asks the system what a name stands for.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from tiering.errors import ConfigError

PORT_MAX = 65535
HOST_CHARS_MAX = 255
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Port 0, to be bound, is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """As ZeroMQ wants it."""
        return f"tcp://{self}"

    @classmethod
    def parse(cls, key: str, text: str) -> Address:
        """Of HOST:PORT or [HOST]:PORT; ConfigError under `key` where it is neither."""
        host, _, port = text.rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        if not port.isascii() or not port.isdigit() or (":" in host and not is_bracketed):
            raise ConfigError(
                key, text, "is not HOST:PORT", "write for example 10.0.0.7:5710 or [fd00::7]:5710"
            )
        return address(key, host[1:-1] if is_bracketed else host, int(port))


def address(key: str, host: str, port: int, rank: int = 0) -> Address:
    """Where data-parallel rank `rank` is: the port plus the rank, a port of 0 staying as it is.
    ConfigError under `key`, which is the host's; the port's is beside it."""
    if not host or len(host) > HOST_CHARS_MAX or not (_is_literal(host) or _NAME.fullmatch(host)):
        raise ConfigError(
            key,
            host,
            "is no host",
            "write a name or an address, IPv6 without brackets",
        )
    beside = key.rpartition("host")[0] + "port"
    if not 0 <= port <= PORT_MAX:
        raise ConfigError(beside, port, "is no port", f"write one from 1 to {PORT_MAX}")
    if port and port + rank > PORT_MAX:
        raise ConfigError(
            beside,
            port,
            f"leaves no port for data-parallel rank {rank}, whose port is this one plus its rank",
            f"write at most {PORT_MAX - rank}",
        )
    return Address(host, port + rank if port else 0)


def advertised(key: str, bound: Address, host: str | None) -> Address:
    """What peers are told to dial: `host`, or else what is bound. ConfigError under `key` where
    that is all interfaces, which nobody can dial."""
    told = address(key, bound.host if host is None else host, bound.port)
    if _is_literal(told.host) and ipaddress.ip_address(told.host).is_unspecified:
        raise ConfigError(
            key,
            told.host,
            "is every address of this host and none that a peer could dial",
            "write the address by which peers reach this host",
        )
    return told


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
