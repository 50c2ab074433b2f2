"""Gloo's sockets: its listener, which stops accepting once all ranks of a group are connected, and how connections end.

Gloo accepts every connection, and keeps its descriptor for as long as the group exists, because a peer might announce itself
there later; without descriptors it aborts the process. It offers no way to stop listening. A socket filter does: the kernel
then drops what arrives for new connections, and those that exist go on. Every process may set a filter on its own sockets.

Nor does Gloo offer a way to end an operation that waits for another rank (`ProcessGroupGloo.abort` does not). It ends when
its connection does.

Where an operation has failed while another rank sends data for it, Gloo never takes the data (`Pair::prepareRead` finds no
buffer), so epoll reports them for ever, and Gloo's thread ends only when it has nothing to handle (`Loop::run`): the group's
destructor would wait for ever. Such a connection is removed from the thread's epoll.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

_SO_ATTACH_FILTER: Final = 26  # asm-generic/socket.h
_DROP_ALL: Final = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""One instruction of linux/filter.h: BPF_RET | BPF_K, with 0 bytes to keep."""
_COMPARED_BYTES: Final = {socket.AF_INET: 8, socket.AF_INET6: 24}
"""How much of a sockaddr_in is family, port and address; and of a sockaddr_in6."""
_ADDRESS_BYTES: Final = 128  # sockaddr_storage


def stop_accepting(published: bytes) -> bool:
    """Let the kernel drop all new connections to this process's Gloo listener; return whether it could be found.

    Args:
        published: the text with the listener's address (sockaddr_storage) that Gloo has published.
    """
    found = False
    for descriptor, address in listeners().items():
        if address in published:
            instructions = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
            program = struct.pack("@HP", 1, ctypes.addressof(instructions))
            found |= not ctypes.CDLL(None).setsockopt(descriptor, socket.SOL_SOCKET, _SO_ATTACH_FILTER, program,
                                                      len(program))
    return found


def end_connections(published: Iterable[bytes]) -> None:
    """End this process's connections to Gloo listeners and from its own one: operations that wait for other ranks fail.

    Args:
        published: the texts with the listeners' addresses.
    """
    texts = tuple(published)
    library = ctypes.CDLL(None)
    for descriptor in _sockets(listening=False):
        for ask in (library.getsockname, library.getpeername):
            address = _address(ask, descriptor)
            if address and any(address in text for text in texts):
                library.shutdown(descriptor, socket.SHUT_RDWR)


def handled_connections(published: bytes) -> list[tuple[int, int]]:
    """Return the connections of this process's Gloo listener that its thread handles: the thread's epoll, and the socket.

    Args:
        published: the text with the listener's address that Gloo has published.
    """
    found = []
    listening = {descriptor for descriptor, address in listeners().items() if address in published}
    for epoll in map(int, os.listdir("/proc/self/fdinfo") if listening else []):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            information = Path(f"/proc/self/fdinfo/{epoll}").read_text()
            watched = set(map(int, re.findall(r"^tfd:\s*(\d+)", information, re.MULTILINE)))
            if listening & watched:
                found += [(epoll, descriptor) for descriptor in watched.intersection(_sockets(listening=False))]
    return found


def stop_handling(connections: Iterable[tuple[int, int]]) -> None:
    """Let Gloo's thread handle some connections no more."""
    for epoll, descriptor in connections:
        with contextlib.suppress(OSError), select.epoll.fromfd(os.dup(epoll)) as copy:  # it is closed, or none is left
            copy.unregister(descriptor)


def listeners() -> dict[int, bytes]:
    """Return the descriptors of this process at which it listens for TCP, and the addresses as they are in memory."""
    library = ctypes.CDLL(None)
    found = {descriptor: _address(library.getsockname, descriptor) for descriptor in _sockets(listening=True)}
    return {descriptor: address for descriptor, address in found.items() if address}


def _sockets(*, listening: bool) -> Iterator[int]:
    """Iterate over this process's sockets that listen, or that do not.

    The descriptors are other libraries': Python's sockets would set modes of them.
    """
    if not sys.platform.startswith("linux") or not os.path.isdir("/proc/self/fd"):
        return
    library = ctypes.CDLL(None)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        listens, length = ctypes.c_int(0), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
        if not library.getsockopt(descriptor, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(listens),
                                  ctypes.byref(length)) and bool(listens.value) == listening:
            yield descriptor


def _address(ask: Any, descriptor: int) -> bytes:
    """Return an address of a socket as it is in memory; b"" if it is none of TCP's."""
    address, length = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint(_ADDRESS_BYTES)
    if ask(descriptor, address, ctypes.byref(length)):
        return b""
    (family,) = struct.unpack_from("=H", address)
    return address.raw[:_COMPARED_BYTES[family]] if family in _COMPARED_BYTES else b""
