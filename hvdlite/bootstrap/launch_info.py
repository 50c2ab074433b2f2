"""The rank, size and job of this process: from its environment, over MPI, or from the `comm` that is passed to `init`.

Over MPI the ranks exchange their coordinates, the ranks of each host, rank 0's address, and the key. So a script runs under
mpirun and mpiexec without hvdrun, on any number of hosts, and with any communicator that is passed to `hvd.init`. Only bytes
are transferred; nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import hmac
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hvdlite.bootstrap.environments import MAKE_A_KEY, LaunchInfo, job_key, read_launch_info
from hvdlite.bootstrap.job_directory import agreed_prefix
from hvdlite.bootstrap.rendezvous import route_address
from hvdlite.core.array import Array
from hvdlite.core.config import Config
from hvdlite.core.errors import LaunchError, UnsupportedError
from hvdlite.core.launch_contract import SECRET
from hvdlite.core.sockets import HeldPort
from hvdlite.core.world import World
from hvdlite.planes import mpi

KEY_BYTES: Final = 32
BASE: Final = (9).to_bytes(KEY_BYTES, "little")
"""The base point of X25519 (RFC 7748); `_P` and `_A24` are the curve's."""
_P: Final = 2**255 - 19
_A24: Final = 121665
TOKEN_BYTES: Final = 16


def resolve_launch(comm: object, environ: Mapping[str, str], parent: int, config: Config) -> LaunchInfo:
    """Return this process's launch information.

    Args:
        comm: as for `api.init`.
        parent: as for `read_launch_info`.

    Raises:
        LaunchError: when rank or size cannot be determined.
        UnsupportedError: for an invalid `comm`, or one without this rank.
    """
    if hasattr(comm, "Get_group"):
        return _by_communicator(comm, job_key(environ))
    info = read_launch_info(environ, parent)
    if comm is None or comm == []:
        return _over_mpi(info, config)
    if not isinstance(comm, Sequence) or not all(isinstance(rank, int) for rank in comm):
        raise UnsupportedError(f"comm must be an mpi4py communicator or a list of ranks, not {comm!r}")
    return _by_ranks(info, list(comm))


def _by_communicator(comm: Any, key: bytes) -> LaunchInfo:
    module = mpi.load()
    if comm == module.COMM_NULL:
        raise UnsupportedError("comm is MPI's null communicator: this rank is not in it, and must not call init() with it")
    mpi.check_thread_level(module, comm)
    return launch_info_over_mpi(module, comm.Dup(), key=key)


def _over_mpi(info: LaunchInfo, config: Config) -> LaunchInfo:
    """Complete launch information over MPI, if needed and possible; an elastic job does without."""
    if info.world.epoch:
        return info
    needs_key = info.on_several_hosts and not (info.key and info.coordinator)
    across = info.on_several_hosts and config.cpu_operations == "auto"
    wanted = config.cpu_operations == "mpi" or (info.is_mpi and (across or config.cpu_operations == "hierarchical"))
    if info.world.size == 1 or not (wanted or needs_key or not info.knows_local_ranks):
        return info
    mismatch = mpi.world_mismatch(info.world.rank, info.world.size)
    if mismatch and (needs_key or not info.knows_local_ranks):
        raise LaunchError(f"{info.environment}: the ranks are on several hosts and need MPI to find each other, but "
                          f"{mismatch}. Or set {SECRET} and HVDLITE_COORDINATOR=host:port to the same on all ranks; "
                          f"{MAKE_A_KEY}")
    if mismatch:
        return dataclasses.replace(info, mpi_problem=mismatch)
    module = mpi.load()
    communicator = module.COMM_WORLD.Dup()
    mpi.check_thread_level(module, communicator)
    if info.is_mpi and not info.is_complete:
        return launch_info_over_mpi(module, communicator, info.coordinator, info.key)
    return dataclasses.replace(info, communicator=communicator)


def _by_ranks(info: LaunchInfo, ranks: list[int]) -> LaunchInfo:
    """Return this rank's launch information in a job of some ranks only."""
    world = info.world
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world.size)):
        raise UnsupportedError(f"comm={ranks} must contain ranks from 0..{world.size - 1}, each once")
    if world.rank not in ranks:
        raise UnsupportedError(f"comm={ranks} does not contain this rank, {world.rank}; call init() with a list that "
                               "contains it")
    if ranks == list(range(world.size)):
        return info
    if info.is_mpi and not mpi.world_mismatch(world.rank, world.size):
        module = mpi.load()
        everybody = module.COMM_WORLD
        some = everybody.Create_group(everybody.Get_group().Incl(ranks), ranks[0])
        mpi.check_thread_level(module, some)
        return launch_info_over_mpi(module, some, key=info.key)
    if info.on_several_hosts:
        raise UnsupportedError(f"comm={ranks} on several hosts needs MPI: start the job with mpirun, or call init() with "
                               "all ranks and use process sets")
    index = ranks.index(world.rank)
    return dataclasses.replace(info, world=World(index, len(ranks), index, len(ranks)),
                               job_directory=agreed_prefix(info.job_directory, repr(ranks)), owns_directory=True)


# --- over MPI -----------------------------------------------------------------------------------------------------------

def launch_info_over_mpi(module: Any, communicator: Any, coordinator: tuple[str, int] | None = None,
                         key: bytes = b"") -> LaunchInfo:
    """Return this rank's launch information; all ranks of the communicator call this.

    Args:
        module: `mpi4py.MPI`.
        communicator: owned by the result.
        coordinator: the address where rank 0 listens, if the user has set it.
        key: the job's, likewise.
    """
    rank, size = communicator.Get_rank(), communicator.Get_size()
    if size == 1:
        return LaunchInfo("MPI", World())
    local = communicator.Split_type(module.COMM_TYPE_SHARED, rank)
    cross = communicator.Split(local.Get_rank(), rank)
    world = World(rank, size, local.Get_rank(), local.Get_size(), cross.Get_rank(), cross.Get_size())
    directory = agreed_prefix("MPI", broadcast_bytes(local, secrets.token_bytes(TOKEN_BYTES)).hex())
    _check_directory(module, communicator, directory, broadcast_bytes(local, directory.encode()).decode())
    held = None
    key = _agreed_key(module, communicator, local, cross, key)
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


def _check_directory(module: Any, communicator: Any, own: str, first: str) -> None:
    """Check that the ranks of each host will look for each other in the same directory; all ranks call this.

    Raises:
        LaunchError: on all ranks.
    """
    all_agree = np.array([own == first], np.int64)
    communicator.Allreduce(module.IN_PLACE, all_agree, module.MIN)
    if not all_agree[0]:
        differs = f"this one in {os.path.dirname(own)}, the first one of its host in {os.path.dirname(first)}"
        raise LaunchError("the ranks of a host cannot meet: they must have the same TMPDIR, and be in the same container ("
                          f"{differs if own != first else 'those of this host agree'})")


def _agreed_key(module: Any, communicator: Any, local: Any, cross: Any, own: bytes) -> bytes:
    """Return the job's key: the user's, if all ranks have one, or a new one.

    A new key is sent inside a host as it is. To other hosts it is encrypted with secrets that the first rank of each host
    agrees on with rank 0 (X25519): who only listens to MPI's connections does not learn it. Who can change what MPI sends
    does, because MPI authenticates nothing.
    """
    has_key = np.array([bool(own)], np.int64)
    communicator.Allreduce(module.IN_PLACE, has_key, module.MIN)
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
