"""The launch information of a rank, exchanged over MPI: coordinates, the ranks of each host, rank 0's address, and the key.

With it a script runs under mpirun and mpiexec without hvdrun, on any number of hosts, and with any communicator that is
passed to `hvd.init`. Only bytes are transferred; nothing is pickled.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from typing import Any, Final

import numpy as np

from hvdlite.bootstrap.environments import LaunchInfo
from hvdlite.bootstrap.job_directory import agreed_prefix
from hvdlite.core.array import Array
from hvdlite.core.errors import LaunchError
from hvdlite.core.sockets import HeldPort
from hvdlite.core.world import World

KEY_BYTES: Final = 32
BASE: Final = (9).to_bytes(KEY_BYTES, "little")
"""The base point of X25519 (RFC 7748); `_P` and `_A24` are the curve's."""
_P: Final = 2**255 - 19
_A24: Final = 121665
TOKEN_BYTES: Final = 16
_ANYWHERE: Final = ("192.0.2.1", 9)  # from a block reserved for documentation; no packet is sent


def launch_info_over_mpi(mpi: Any, communicator: Any, coordinator: tuple[str, int] | None = None,
                         key: bytes = b"") -> LaunchInfo:
    """Return this rank's launch information; all ranks of the communicator call this.

    Args:
        mpi: the module `mpi4py.MPI`.
        communicator: owned by the result.
        coordinator: the address where rank 0 listens, if the user has set it.
        key: the job's, likewise.
    """
    rank, size = communicator.Get_rank(), communicator.Get_size()
    if size == 1:
        return LaunchInfo("MPI", World())
    local = communicator.Split_type(mpi.COMM_TYPE_SHARED, rank)
    cross = communicator.Split(local.Get_rank(), rank)
    world = World(rank, size, local.Get_rank(), local.Get_size(), cross.Get_rank(), cross.Get_size())
    directory = agreed_prefix("MPI", broadcast_bytes(local, secrets.token_bytes(TOKEN_BYTES)).hex())
    _check_directory(mpi, communicator, directory, broadcast_bytes(local, directory.encode()).decode())
    held = None
    key = _agreed_key(mpi, communicator, local, cross, key)
    if world.local_size < size and coordinator is None:
        names = [broadcast_bytes(communicator, socket.gethostname().encode(), each).decode() for each in range(size)]
        held = HeldPort() if rank == 0 else None
        own = f"{route_address(names)}:{held.port}" if held is not None else ""
        host, _, port = broadcast_bytes(communicator, own.encode()).decode().rpartition(":")
        coordinator = host, int(port)
    local.Free()
    cross.Free()
    return LaunchInfo("MPI", world, directory, coordinator, key, owns_directory=True, is_mpi=True, communicator=communicator,
                      held_port=held)


def _check_directory(mpi: Any, communicator: Any, own: str, first: str) -> None:
    """Check that the ranks of each host will look for each other in the same directory; all ranks call this.

    Raises:
        LaunchError: on all ranks.
    """
    all_agree = np.array([own == first], np.int64)
    communicator.Allreduce(mpi.IN_PLACE, all_agree, mpi.MIN)
    if not all_agree[0]:
        differs = f"this one in {os.path.dirname(own)}, the first one of its host in {os.path.dirname(first)}"
        raise LaunchError("the ranks of a host cannot meet: they must have the same TMPDIR, and be in the same container ("
                          f"{differs if own != first else 'those of this host agree'})")


def _agreed_key(mpi: Any, communicator: Any, local: Any, cross: Any, own: bytes) -> bytes:
    """Return the job's key: the user's, if all ranks have one, or a new one.

    A new key is sent inside a host as it is. To other hosts it is encrypted with secrets that the first rank of each host
    agrees on with rank 0 (X25519): who only listens to MPI's connections does not learn it. Who can change what MPI sends
    does, because MPI authenticates nothing.
    """
    has_key = np.array([bool(own)], np.int64)
    communicator.Allreduce(mpi.IN_PLACE, has_key, mpi.MIN)
    if has_key[0]:
        return own
    key = secrets.token_bytes(KEY_BYTES) if communicator.Get_rank() == 0 else b""
    if local.Get_rank() == 0 and cross.Get_size() > 1:
        key = _encrypted(cross, key)
    return broadcast_bytes(local, key)


def _encrypted(leaders: Any, key: bytes) -> bytes:
    """Send rank 0's key to the first ranks of the other hosts, encrypted; return it."""
    secret = secrets.token_bytes(KEY_BYTES)
    rank, size = leaders.Get_rank(), leaders.Get_size()
    public = np.empty((size, KEY_BYTES), np.uint8)
    leaders.Allgather(np.frombuffer(x25519(secret, BASE), np.uint8).copy(), public)

    def pad(other: int) -> Array:
        """Return what hides the key between rank 0 and the first rank of host `other`."""
        shared = x25519(secret, public[other if rank == 0 else 0].tobytes())
        if not any(shared):
            raise LaunchError("MPI has brought a public value that no process sends: the key of the job cannot be agreed on")
        both = public[0].tobytes() + public[other].tobytes()
        return np.frombuffer(hmac.digest(shared, b"hvdlite" + both, "sha256"), np.uint8)

    hidden = np.empty((size, KEY_BYTES), np.uint8)
    if rank == 0:
        for other in range(1, size):
            hidden[other] = np.frombuffer(key, np.uint8) ^ pad(other)
    mine = np.empty(KEY_BYTES, np.uint8)
    leaders.Scatter(hidden if rank == 0 else None, mine, 0)
    return key if rank == 0 else (mine ^ pad(rank)).tobytes()


def broadcast_bytes(communicator: Any, text: bytes, root: int = 0) -> bytes:
    """Return the root's bytes on every rank; the others' `text` is ignored."""
    length = np.array([len(text)], np.int64)
    communicator.Bcast(length, root)
    is_root = communicator.Get_rank() == root
    message = np.frombuffer(text, np.uint8).copy() if is_root else np.empty(int(length[0]), np.uint8)
    communicator.Bcast(message, root)
    return message.tobytes()


def lowest_rank(communicator: Any, rank: int) -> int:
    """Return the lowest job rank among a communicator's members, all of which call this; -1 for MPI's null communicator."""
    if not communicator:
        return -1
    ranks = np.empty(communicator.Get_size(), np.int64)
    communicator.Allgather(np.array([rank], np.int64), ranks)
    return int(ranks.min())


def route_address(names: list[str]) -> str:
    """Return the IP address from which this host reaches the hosts of other ranks; loopback if there is none.

    Args:
        names: the host names of all ranks.
    """
    for name in dict.fromkeys(name for name in names if name != socket.gethostname()):
        try:
            address = socket.gethostbyname(name)
        except (OSError, ValueError, TypeError):  # a label of 64 characters, or a null character, say
            continue
        if (own := source_address(address)) and not own.startswith("127."):
            return own
    return source_address(*_ANYWHERE) or "127.0.0.1"


def source_address(host: str, port: int = 9) -> str:
    """Return the IP address from which a packet to `host` would be sent, "" without a route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def x25519(scalar: bytes, point: bytes) -> bytes:
    """Return the product of a secret and a public value; with `BASE`, the public value of a secret (RFC 7748, section 5).

    Two processes agree so on a secret that somebody who only listens cannot know. Python's integers take a different time
    for different numbers, so a key is used once.
    """
    secret = int.from_bytes(scalar, "little") & ~7 & (2**255 - 1) | 2**254
    x_1 = int.from_bytes(point, "little") & (2**255 - 1)
    x_2, z_2, x_3, z_3, swapped = 1, 0, x_1, 1, 0
    for position in reversed(range(255)):
        bit = secret >> position & 1
        if swapped != bit:
            x_2, z_2, x_3, z_3 = x_3, z_3, x_2, z_2
        swapped = bit
        a, b, c, d = x_2 + z_2, x_2 - z_2, x_3 + z_3, x_3 - z_3
        aa, bb, da, cb = a * a % _P, b * b % _P, d * a % _P, c * b % _P
        e = aa - bb
        x_3, z_3 = (da + cb) ** 2 % _P, x_1 * (da - cb) ** 2 % _P
        x_2, z_2 = aa * bb % _P, e * (aa + _A24 * e) % _P
    if swapped:
        x_2, z_2 = x_3, z_3
    return (x_2 * pow(z_2, _P - 2, _P) % _P).to_bytes(KEY_BYTES, "little")
