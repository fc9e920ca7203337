"""What names of hosts stand for, as the system says. Everything here blocks: not for the loop."""

from __future__ import annotations

import ipaddress
import socket


def resolved(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of `host`, IPv4 first, since a host may have IPv6 and be without a route for
    it. OSError where it has none."""
    try:
        places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of it is longer than a name's may be
        raise OSError(f"{host} is no name of a host") from error
    found = {
        (family, str(place[0]))
        for family, _, _, _, place in places
        if family in (socket.AF_INET, socket.AF_INET6)
    }
    if not found:
        raise OSError(f"{host} has no IPv4 or IPv6 address")
    return sorted(found, key=lambda each: (each[0] != socket.AF_INET, each[1]))


def is_loopback(host: str) -> bool:
    """Whether only this host can reach `host`: every address that it has is loopback."""
    try:
        places = [place for _, place in resolved(host)]
    except OSError:
        return False
    return all(ipaddress.ip_address(place.partition("%")[0]).is_loopback for place in places)
