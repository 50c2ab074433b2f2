"""A port that is chosen now, and at which another process listens later."""

from __future__ import annotations

import contextlib
import socket


class HeldPort:
    """A port of this host that the system gives to no program meanwhile.

    A socket is bound to it that does not listen; a program that sets SO_REUSEADDR, as rank 0 does, can listen there.

    Args:
        port: 0 for a free one.
        host: the address; "" for all.

    Raises:
        OSError: when another program has the port.
    """

    def __init__(self, port: int = 0, host: str = "") -> None:
        both = not host and socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if both or ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if both:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Let the port go, once nobody needs it any more, or somebody listens there; again is fine."""
        self._socket.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # there was no socket
            self._socket.close()
