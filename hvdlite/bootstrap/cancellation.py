"""The end of a rendezvous from another thread: a world that is being built may be given up at any moment."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from hvdlite.core.errors import LaunchError


class Cancellation:
    """Ends a rendezvous from another thread, at once: shuts down the sockets on which it blocks.

    Attributes:
        reason: why the rendezvous was given up; "" as long as it was not.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def cancel(self, reason: str) -> None:
        """Give the rendezvous up; callable from any thread, again is fine."""
        with self._lock:
            self.reason = self.reason or reason
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # not connected any more
                    sock.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise `LaunchError` when the rendezvous was given up."""
        if self.reason:
            raise LaunchError(f"the ranks stopped meeting: {self.reason}")

    @contextlib.contextmanager
    def watch(self, sock: socket.socket) -> Iterator[None]:
        """Let `cancel` end what blocks on a socket inside this context: it looks like the end of the connection.

        Raises:
            LaunchError: when the rendezvous was given up before.
        """
        with self._lock:
            self.check()
            self._sockets.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(sock)
