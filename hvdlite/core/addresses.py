"""The addresses of this host, found by routes: the kernel's source address towards a host is the one to use."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import Final

_ANY_PORT: Final = 9  # of a datagram that is never sent: only the route is wanted


def route_to(host: str) -> str | None:
    """Return the source address that the kernel uses towards a host, or None when there is no route.

    Raises:
        OSError: when the name cannot be resolved.
    """
    for family, kind, protocol, _, address in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    return None


def routes_to(hosts: Iterable[str]) -> list[str]:
    """Return the source addresses towards some hosts, the most frequent one first; hosts without a route are left out."""
    routes = []
    for host in hosts:
        with contextlib.suppress(OSError):
            routes.append(route_to(host))
    return sorted({route for route in routes if route}, key=lambda route: (-routes.count(route), route))


def loopback() -> str:
    """Return the address at which processes of this host reach each other: 127.0.0.1, or ::1; "" when there is none."""
    return next((host for host in ("127.0.0.1", "::1") if route_to(host)), "")
