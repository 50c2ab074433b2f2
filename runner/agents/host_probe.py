"""Measurements on a host: addresses, routes, reachable ports, bandwidth, limits.

Addresses are derived from routes, never from interface names (`core.addresses`).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from hvdlite.core.own_programs import module_command
from hvdlite.core.sockets import HeldPort, routes_to
from hvdlite.core.system_limits import OUT_OF_DESCRIPTORS, explained
from hvdlite_runner.agents.gpu_topology import gpu_topology
from hvdlite_runner.host.commands import cores

PROBE_SECONDS: Final = 3.0
"""Seconds that a port has to answer."""
CLIENT_SECONDS: Final = 30.0
"""Seconds after which a client has to end."""
_CLIENTS: Final = 64
_ROUND_TRIPS: Final = 200
_STREAM_SECONDS: Final = 0.5
_CHUNK: Final = bytes(1 << 18)
_BANDWIDTH_SECONDS: Final = 60.0
_SIOCGIFADDR: Final = 0x8915  # linux/sockios.h
_PROBE, _ECHO, _SINK = b"?", b"e", b"s"


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of every network interface, IPv4 first; only Linux has any."""
    found: dict[str, list[str]] = {}
    if not sys.platform.startswith("linux"):
        return found
    import fcntl  # does not exist on every system
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            found[name] = []
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name].append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # link-local addresses mean nothing without an interface
                found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def own_addresses(hosts: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return this host's addresses that the given hosts may reach: those of routes first, by frequency.

    Args:
        only: names of interfaces to choose from; empty for all.
    """
    known = interfaces()
    allowed = [address for name in only for address in known.get(name, [])]
    if only:
        return allowed
    ranked = routes_to(hosts)
    rest = [address for addresses in known.values() for address in addresses if address not in ranked]
    return [address for address in ranked + rest if not address.startswith("127.") and address != "::1"]


class ProbeServer:
    """Listens on a port of every address and answers probes and measurements, until it is closed.

    A client can make it echo and discard bytes, and nothing else: it is not asked who it is. There are few clients at a time
    (the oldest one gives way), each for a few seconds.

    Attributes:
        held: keeps the port for rank 0, also when this does not listen any more.
        store: keeps another port, for the store of `torch.distributed`.
    """

    def __init__(self, port: int = 0) -> None:
        both = socket.has_dualstack_ipv6()
        self.held, self.store = HeldPort(port), HeldPort()
        port = self.held.port
        self._listener = socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET,
                                              dualstack_ipv6=both)
        self.port = port
        self._clients: deque[socket.socket] = deque(maxlen=_CLIENTS)  # the last ones, of which some have ended
        with explained("the thread that answers other hosts"):
            threading.Thread(target=self._serve, name="hvdrun-probe-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS or not self._clients:
                    return  # closed
                self._end(self._clients.popleft())
                continue
            if len(self._clients) == _CLIENTS:
                self._end(self._clients[0])
            self._clients.append(connection)
            threading.Thread(target=self._answer, args=(connection,), name="hvdrun-probe", daemon=True).start()

    @staticmethod
    def _end(client: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has ended
            client.shutdown(socket.SHUT_RDWR)  # its thread closes it

    @staticmethod
    def _answer(connection: socket.socket) -> None:
        until = time.monotonic() + CLIENT_SECONDS
        with contextlib.suppress(OSError), connection:
            connection.settimeout(PROBE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mode = connection.recv(1)
            connection.sendall(_PROBE)
            if mode == _ECHO:
                while (piece := connection.recv(64)) and time.monotonic() < until:
                    connection.sendall(piece)
            elif mode == _SINK:
                while connection.recv(len(_CHUNK)) and time.monotonic() < until:
                    pass
                connection.sendall(_PROBE)  # everything has arrived


def probe(addresses: Sequence[str], port: int) -> dict[str, str]:
    """Try all addresses of a `ProbeServer` in parallel; return the problem of each address, "" for none."""
    def attempt(address: str) -> str:
        try:
            _connected(address, port, _PROBE).close()
        except TimeoutError:
            return "no answer (a firewall that drops packets?)"
        except OSError as error:
            return (error.strerror or str(error)).lower()
        return ""

    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return dict(zip(addresses, pool.map(attempt, addresses), strict=True))


def speed(addresses: Sequence[str], port: int) -> tuple[float, float]:
    """Return the median seconds of a one-byte round trip to a `ProbeServer`, and the bytes per second of one TCP connection.

    Raises:
        OSError: when no address answers.
    """
    problems = probe(addresses, port)
    reachable = [address for address, problem in problems.items() if not problem]
    if not reachable:
        raise OSError("; ".join(f"{address}: {problem}" for address, problem in problems.items()) or "it has no address")
    trips = []
    with _connected(reachable[0], port, _ECHO) as sock:
        for _ in range(_ROUND_TRIPS):
            begun = time.perf_counter()
            sock.sendall(b".")
            sock.recv(1)
            trips.append(time.perf_counter() - begun)
    with _connected(reachable[0], port, _SINK) as sock:
        begun, sent = time.perf_counter(), 0
        while time.perf_counter() - begun < _STREAM_SECONDS:
            sock.sendall(_CHUNK)
            sent += len(_CHUNK)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)
        return sorted(trips)[len(trips) // 2], sent / (time.perf_counter() - begun)


def _connected(address: str, port: int, mode: bytes) -> socket.socket:
    sock = socket.create_connection((address, port), PROBE_SECONDS)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(mode)
        if sock.recv(1) != _PROBE:
            raise OSError("another program answers at this port")
    except OSError:
        sock.close()
        raise
    return sock


def host_info(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return facts about this host's software and configuration: only strings, numbers, lists and dictionaries."""
    found: dict[str, Any] = {
        "hostname": socket.gethostname(), "python": platform.python_version(), "executable": sys.executable,
        "cores": cores(),
        "interfaces": {name: addresses for name, addresses in interfaces().items() if addresses},
        "ssh": _first_line(["ssh", "-V"]), "limits": limits(), "gpus": gpus(),
        "infiniband": sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else [],
        "launchers": {name: path for name in ("srun", "mpirun", "mpiexec", "jsrun", "torchrun")
                      if (path := shutil.which(name))},
    }
    found["build"], found["build_problem"] = _diagnosed(environ, "--json", {}, "it failed")
    found["topology"] = gpu_topology()
    found["bandwidth"], found["bandwidth_problem"] = [], ""
    if len(found["topology"].get("gpus", ())) > 1 and found["build"] and not found["build"]["planes"]["nccl"]["missing"]:
        found["bandwidth"], found["bandwidth_problem"] = gpu_bandwidths(environ)
    return found


def gpu_bandwidths(environ: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """Return the bandwidth between every two GPUs (see `hvdlite.planes.nccl.bandwidth`), and why it is not known."""
    try:  # a process of its own: CUDA may hang, and it keeps the contexts that it makes
        return _diagnosed(environ, "--bandwidth", [], "measuring the bandwidth between GPUs failed", _BANDWIDTH_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"measuring the bandwidth between GPUs took longer than {_BANDWIDTH_SECONDS:.0f} s"


def _diagnosed(environ: Mapping[str, str], option: str, nothing: Any, failure: str,
               timeout: float | None = None) -> tuple[Any, str]:
    """Return what `hvdlite.diagnose` prints, or `nothing` and why it fails."""
    asked = subprocess.run([*module_command("hvdlite.diagnose"), option], capture_output=True, text=True, check=False,
                           env=dict(environ), timeout=timeout)
    if asked.returncode:
        return nothing, (asked.stderr.strip().splitlines() or [failure])[-1]
    return json.loads(asked.stdout), ""


def limits() -> dict[str, int]:
    """Return limits that are often too small, in bytes or numbers; -1 for no limit."""
    named: dict[str, Callable[[], int]] = {
        "memlock": lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "files": lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "processes": lambda: resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "shm": lambda: shutil.disk_usage("/dev/shm").total, "shm_free": lambda: shutil.disk_usage("/dev/shm").free,
    }
    found = {}
    for name, ask in named.items():
        with contextlib.suppress(OSError, AttributeError):
            found[name] = ask()
    return found


def gpus() -> list[str]:
    """Return a line for each NVIDIA GPU: name, memory and driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = subprocess.run(["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"],
                           capture_output=True, text=True, check=False)
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def _first_line(command: Sequence[str]) -> str:
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return next(iter((asked.stdout + asked.stderr).splitlines()), "")
