"""The server of stall reports on rank 0: a Unix socket in the job's directory, for processes of the same user."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hvdlite.core.errors import HvdliteError
from hvdlite.core.launch_contract import REPORT_SOCKET
from hvdlite.core.sockets import RefusedConnections, check_same_user, short_socket_path
from hvdlite.core.system_limits import explained
from hvdlite.diagnostics.stall_inspector import ANSWER_SECONDS, Receiver
from hvdlite.diagnostics.stall_report import StallReport

TIMEOUT_SECONDS: Final = 3 * ANSWER_SECONDS
"""Seconds to wait for a report of the background thread, and for a client that does not read."""


class ReportServer:
    """A thread that sleeps until somebody asks.

    Args:
        directory: mode 0700.
        demand: orders a report.
    """

    def __init__(self, directory: str, demand: Callable[[Receiver], None]) -> None:
        self._path = str(Path(directory) / REPORT_SOCKET)
        self._demand = demand
        self._refused = RefusedConnections(self._path)
        Path(self._path).unlink(missing_ok=True)  # left by rank 0 of an earlier world, which has died
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_socket_path(self._path) as path:
            self._listener.bind(path)
        self._listener.listen(8)
        with explained("the thread that answers hvdrun --report"):
            threading.Thread(target=self._serve, name="hvdlite-reports", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.close_in_child()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._refused.log_rest()

    def close_in_child(self) -> None:
        """In a forked child: close the copy of the descriptor."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    check_same_user(connection)
                    connection.settimeout(TIMEOUT_SECONDS)
                    connection.sendall(self._report())
                except (OSError, HvdliteError) as error:
                    self._refused.note("this host", error)
                except queue.Empty:
                    self._refused.note("this host", TimeoutError("the background thread is busy"))

    def _report(self) -> bytes:
        made: queue.SimpleQueue[StallReport] = queue.SimpleQueue()
        self._demand(made.put)
        report = made.get(timeout=TIMEOUT_SECONDS)
        return json.dumps({"text": report.text(), "report": report.as_dict()}).encode()
