"""What this process has sent to other hosts over TCP, and how long that took, as the kernel counts it.

Linux keeps for each connection the bytes that the other end has acknowledged, and the time in which some were on their way.
So the rate of a link is known whatever library sends, without touching its path; a connection on which
nothing is sent because a rank is late counts no time.
"""

from __future__ import annotations

import ctypes
import heapq
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Final

from hvdlite.core.ledger import MOST_CONNECTIONS, Traffic

SHARE: Final = 0.001
"""Of a core, at most, that `TcpTraffic.read` uses."""
_BYTES: Final = struct.Struct("=QQ")  # of linux/tcp.h, struct tcp_info: tcpi_bytes_acked, tcpi_bytes_received
_BYTES_AT: Final = 120
_TIMES: Final = struct.Struct("=QQ")  # microseconds: tcpi_busy_time, tcpi_rwnd_limited
_TIMES_AT: Final = 168
_INFO_BYTES: Final = 256
_ESTABLISHED: Final = 1
_ADDRESS_BYTES: Final = 128  # sockaddr_storage


class TcpTraffic:
    """Reads the connections of this process.

    The descriptors are other libraries': Python's sockets would set modes of them. No call blocks, so the GIL is kept.
    """

    def __init__(self) -> None:
        self._library = ctypes.PyDLL(None)
        self._rest = 0.0  # no reading before
        self._last: tuple[Traffic, ...] = ()

    def read(self) -> tuple[Traffic, ...]:
        """Return the connections with other hosts that carried most; what was last read if reading takes long here."""
        if time.monotonic() >= self._rest and sys.platform.startswith("linux"):
            begun = time.thread_time()
            found = self._connections()
            self._last = tuple(heapq.nlargest(MOST_CONNECTIONS, found, key=lambda each: each.sent + each.received))
            self._rest = time.monotonic() + (time.thread_time() - begun) / SHARE
        return self._last

    def _connections(self) -> Iterator[Traffic]:
        try:
            descriptors = list(map(int, os.listdir("/proc/self/fd")))
        except OSError:
            return
        info, length = ctypes.create_string_buffer(_INFO_BYTES), ctypes.c_uint()
        for descriptor in descriptors:
            length.value = _INFO_BYTES
            if (self._library.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length))
                    or length.value < _TIMES_AT + _TIMES.size or info.raw[0] != _ESTABLISHED):
                continue
            local, remote = self._address("getsockname", descriptor), self._address("getpeername", descriptor)
            if local[0] == remote[0]:  # on this host, or not known
                continue
            sent, received = _BYTES.unpack_from(info, _BYTES_AT)
            busy, refused = _TIMES.unpack_from(info, _TIMES_AT)
            yield Traffic(_text(*local), _text(*remote), sent, received, (busy - refused) * 1e-6)

    def _address(self, call: str, descriptor: int) -> tuple[str, int]:
        address, length = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint(_ADDRESS_BYTES)
        if getattr(self._library, call)(descriptor, address, ctypes.byref(length)):
            return "", 0
        family, port = struct.unpack_from("=H", address)[0], struct.unpack_from("!H", address, 2)[0]
        if family == socket.AF_INET:
            return str(ipaddress.IPv4Address(address.raw[4:8])), port
        host = ipaddress.IPv6Address(address.raw[8:24])
        return str(host.ipv4_mapped or host), port


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
