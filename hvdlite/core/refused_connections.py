"""The log of connections that a listener refuses: nobody can fill it by connecting again and again."""

from __future__ import annotations

import logging

LOGGED_REFUSALS = 10
"""Peers and reasons that are logged by one listener; other refusals are only counted."""

_log = logging.getLogger("hvdlite.control")


class RefusedConnections:
    """Logs each reason once per peer, and counts the other refusals (docs/protocol.md#frames).

    Args:
        address: of the listener.
    """

    def __init__(self, address: object) -> None:
        self._address = address
        self._logged: set[tuple[str, str]] = set()  # peers and reasons
        self._rest = self._count = 0
        self._example = ""  # the peer and the reason of the refusal that says most
        self._is_cut_short = True  # that connection: it was only closed, or slow

    def __str__(self) -> str:
        """How many connections were refused, and why one of them; "" when none was."""
        if not self._count:
            return ""
        counted = "1 connection was refused," if self._count == 1 else f"{self._count} connections were refused, one of them"
        return f" {counted} from {self._example}"

    def note(self, peer: str, error: Exception) -> None:
        """A connection was refused."""
        refusal = peer, str(error)
        self._count += 1
        is_cut_short = isinstance(error, OSError | EOFError)
        if self._is_cut_short or not is_cut_short:
            self._example, self._is_cut_short = f"{peer}: {error}", is_cut_short
        if refusal in self._logged or len(self._logged) >= LOGGED_REFUSALS:
            self._rest += 1
            return
        self._logged.add(refusal)
        _log.warning("a connection from %s to %s was refused: %s", peer, self._address, error)

    def log_rest(self) -> None:
        """Nobody listens any more: log how many refusals were not logged."""
        rest, self._rest = self._rest, 0
        if rest:
            _log.warning("%d more connections to %s were refused", rest, self._address)
