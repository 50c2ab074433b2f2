"""`hvdrun --metrics PORT`: the progress of a job's ranks for Prometheus, in its text format 0.0.4.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any, Final

from hvdlite.core.errors import LaunchError
from hvdlite.core.system_limits import explained
from hvdlite.diagnostics.slowness import Slowness
from hvdlite_runner.messages import Sample

OF_RANKS: Final[Mapping[str, tuple[str, str, Callable[[Sample], float]]]] = {
    "steps_total": ("counter", "training steps", lambda each: each.reading.steps),
    "samples_total": ("counter", "samples; steps if the script counts none", lambda each: each.reading.samples),
    "waits_seconds_total": ("counter", "waiting for collectives", lambda each: each.reading.blocked),
    "last_step_age_seconds": ("gauge", "since the last step", lambda each: each.reading.idle),
    "memory_bytes": ("gauge", "resident memory", lambda each: each.memory),
    "peak_memory_bytes": ("gauge", "the most resident memory so far", lambda each: each.reading.peak),
    "replica_checks_total": ("counter", "comparisons of replicas", lambda each: each.reading.replica_checks),
    "replica_mismatches_total": ("counter", "comparisons that found a difference",
                                 lambda each: each.reading.replica_mismatches)}
"""Of each rank, by name: the type, the help, and how it is read."""
_CLIENT_SECONDS: Final = 2.0
"""For a whole request: while one client is slow, no other gets an answer."""
_LONGEST: Final = 1 << 16  # bytes of a request


def metrics_text(world: int, ranks: Mapping[int, Sample], slowness: Slowness | None) -> str:
    """Return the metrics of a job, in Prometheus' text format."""
    lines = _family("world", "gauge", "number of the world; each change of an elastic job begins another", {"": world})
    lines += _family("ranks", "gauge", "ranks that run", {"": len(ranks)})
    for name, (kind, text, value) in OF_RANKS.items():
        lines += _family(name, kind, text, {f'{{rank="{rank}"}}': value(each) for rank, each in sorted(ranks.items())})
    lines += _family("slow_ratio", "gauge", "part of each step that this rank, or its link, is late; -1: all ranks", {} if (
        slowness is None) else {f'{{rank="{slowness.rank}",cause="{slowness.cause}"}}': slowness.share})
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, values: Mapping[str, float]) -> list[str]:
    return [f"# HELP hvdlite_{name} {text}", f"# TYPE hvdlite_{name} {kind}", *(
        f"hvdlite_{name}{labels} {'+Inf' if value == float('inf') else value}" for labels, value in values.items())]


class MetricsServer:
    """Answers GET /metrics, in a thread; one client after the other, so that clients cannot use up what the job needs.

    Args:
        address: a port, on the loopback interface only, or ADDRESS:PORT.

    Attributes:
        text: the answer.

    Raises:
        LaunchError: if nobody can listen there.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.text = metrics_text(0, {}, None)
        self._is_closed = False
        try:
            if not 0 <= int(port) < 1 << 16:
                raise ValueError(port)
            family, *_, where = socket.getaddrinfo(host.strip("[]") or "127.0.0.1", int(port), type=socket.SOCK_STREAM)[0]
            self._server = _Server(where[:2], family, self)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", "") or "this is not PORT or ADDRESS:PORT"
            raise LaunchError(f"--metrics {address}: {reason}; give another port") from None
        ip, number = self._server.socket.getsockname()[:2]
        self.url = f"http://{f'[{ip}]' if ':' in ip else ip}:{number}/metrics"
        self._thread = threading.Thread(target=self._serve, name="hvdrun-metrics", daemon=True)
        with explained("the thread of --metrics"):
            self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._is_closed = True
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_CLIENT_SECONDS / 2)
        self._server.server_close()

    def _serve(self) -> None:
        while not self._is_closed:
            self._server.handle_request()


class _Server(TCPServer):
    allow_reuse_address = True  # after a job that has just ended

    def __init__(self, where: Any, family: int, owner: MetricsServer) -> None:
        self.address_family, self.owner = family, owner
        super().__init__(where, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client has gone, or was too slow."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "hvdrun", ""

    def setup(self) -> None:
        """Read the whole head of the request, or raise `OSError` if it does not come in time."""
        super().setup()
        self._until = time.monotonic() + _CLIENT_SECONDS
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head and len(head) < _LONGEST:
            self._limit()
            if not (part := self.connection.recv(_LONGEST)):
                break
            head += part
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self._limit()

    def _limit(self) -> None:
        self.connection.settimeout(max(0.001, self._until - time.monotonic()))

    def do_GET(self) -> None:
        found = self.path.partition("?")[0] == "/metrics"
        self._answer(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND, self.server.owner.text if found else "see /metrics\n")

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def _answer(self, status: HTTPStatus, text: str) -> None:
        self.send_response(status)
        self.send_header("Allow", "GET")
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
